"""The URL of a study in a database, and how it is shown: without its password."""

from __future__ import annotations

import re

SECRET = re.compile(r"passw|pwd|secret|token", re.IGNORECASE)  # in the name of a parameter of a URL


def is_url(place: str) -> bool:
    """Whether a study is a database and not a file."""
    return "://" in place


def without_password(place: str) -> str:
    """The place as it is shown and recorded: the URL of a database without its password.

    Of a URL that cannot be parsed, only the scheme is shown.
    """
    if not is_url(place):
        return place
    try:
        from sqlalchemy import make_url  # noqa: PLC0415  # a dependency of Optuna, only for a URL

        url = make_url(place)
        is_odd = "@" in f"{url.host}{url.database}"  # the end of a password that is not quoted
    except Exception:  # noqa: BLE001  # whatever is wrong with it, it is not shown
        is_odd = True
    if is_odd:
        return f"{place.partition('://')[0]}://..."
    secrets = [name for name in url.query if SECRET.search(name)]
    return url.difference_update_query(secrets).render_as_string(hide_password=True)
