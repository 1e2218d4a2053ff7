"""The storage of studies: a journal file, or a database that a URL names."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any, cast

import filelock

from pytest_fa.errors import UsageProblem
from pytest_fa.features.sweep.optional_optuna import JournalFileBackend, optuna
from pytest_fa.features.sweep.study_url import is_url, without_password

MAX_OPENINGS = 3  # of a database
REOPEN_SECONDS = 0.5
# Drivers that are installed with the library of their database.
PACKAGES = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary"}


def open_storage(place: str) -> optuna.storages.BaseStorage:
    """The storage of a database URL, or of a journal file, which is created.

    Raises `UsageProblem` if a database cannot be opened.
    """
    if is_url(place):
        return _open_database(place)
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    lock = cast("Any", _ReleasedWithProcess(f"{place}.lock"))
    journal = JournalFileBackend(place, lock_obj=lock)
    return optuna.storages.JournalStorage(journal)


def _open_database(url: str) -> optuna.storages.BaseStorage:
    """The storage of a database.  If several processes create its tables at once, all but one try again."""
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415  # a dependency of Optuna, only for a URL

    shown = without_password(url)
    if shown.endswith("://..."):  # another reason could have parts of the password
        reason = "it is no URL of a database; write special characters of the password in the form %40, which is @"
        raise UsageProblem(f"the study {shown!r} cannot be opened: {reason}")
    problem: Exception | None = None
    for _ in range(MAX_OPENINGS):
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=_engine_options(url))
        except ImportError as failure:
            raise UsageProblem(_driver_problem(shown, failure)) from None
        except (ValueError, optuna.exceptions.StorageInternalError, SQLAlchemyError) as failure:
            problem = failure
            time.sleep(REOPEN_SECONDS)
        else:
            weakref.finalize(storage, storage.engine.dispose)  # closes the connections
            return storage
    reason = str(problem).partition("\n")[0].replace(url, shown)
    raise UsageProblem(f"the study {shown!r} cannot be opened: {reason}") from None


def _engine_options(url: str) -> dict[str, Any]:
    """Replace a connection that the server has closed, and read text as text, whatever the database's encoding is."""
    from sqlalchemy import make_url  # noqa: PLC0415  # as above

    options: dict[str, Any] = {"pool_pre_ping": True}
    if make_url(url).get_driver_name() in PACKAGES:
        options["connect_args"] = {"client_encoding": "utf8"}
    return options


def _driver_problem(shown: str, failure: ImportError) -> str:
    """Say which package a database needs.  Optuna's own error has that of the driver as its cause."""
    cause = failure.__cause__ or failure.__context__ or failure
    package = getattr(cause, "name", None) or ("psycopg" if shown.startswith("postgresql") else "")
    if not package:
        return f"the study {shown!r} needs the driver of its database: {cause}"
    return f"the study {shown!r} needs the package {package}; type: pip install {PACKAGES.get(package, package)}"


def study_names(place: str) -> list[str]:
    """The names of the studies of an existing file or database.  Raises `UsageProblem` if there is none."""
    if not is_url(place) and not Path(place).is_file():
        raise UsageProblem(f"there is no study {place!r}; `pytest --fa-sweep=NAME` makes one in artifacts/sweeps/")
    storage = open_storage(place)
    if not (names := optuna.get_all_study_names(storage)):
        raise UsageProblem(f"{without_password(place)!r} has no study")
    return names


class _ReleasedWithProcess:
    """A lock of Optuna's journal that the operating system releases when its holder ends, also after a kill."""

    def __init__(self, path: str) -> None:
        self._lock = filelock.FileLock(path)

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._lock.acquire()
        return True

    def release(self) -> None:
        """Release it."""
        self._lock.release()
