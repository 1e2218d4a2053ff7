"""Replace what names a person or a machine in the results of a run, before they are packed.

Only results are changed: records, JUnit, benchmark and log files.  Source files are packed as they are.
"""

from __future__ import annotations

import getpass
import platform
import re
from pathlib import Path

SHORTEST_NAME = 4  # a shorter host or user name may be a part of other words
COMMON_NAMES = frozenset({"localhost", "root", "user", "ubuntu", "runner"})


def private_names(folder: Path) -> dict[str, str]:
    """Return what is replaced, and by what: the folder, the home folder, the host name and the user name."""
    names = {str(folder): ".", str(Path.home()): "~"}
    host = platform.node()
    for name, replacement in ((host, "HOST"), (host.partition(".")[0], "HOST"), (_user(), "USER")):
        if len(name) >= SHORTEST_NAME and name.casefold() not in COMMON_NAMES:
            names.setdefault(name, replacement)
    return {name: replacement for name, replacement in names.items() if name not in ("", "/")}


def without_private_names(content: bytes, names: dict[str, str]) -> bytes:
    """Return a text with each name replaced, the longest first; content that is not UTF-8 is returned unchanged.

    A name is replaced only where no letter, digit, `_` or `-` precedes or follows it.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return content
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", lambda _, name=name: names[name], text)  # type: ignore[misc]
    return text.encode()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
