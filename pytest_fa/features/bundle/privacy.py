"""Replace what names a person or a machine in the results of a run, before they are packed.

Only results are changed: records, JUnit, benchmark and log files.  Source files are packed as they are.
"""

from __future__ import annotations

import getpass
import json
import platform
import re
from pathlib import Path

SHORTEST_NAME = 4  # a shorter host or user name may be a part of other words
COMMON_NAMES = frozenset({"localhost", "root", "user", "ubuntu", "runner"})
HOST, USER = "HOST", "USER"
# The host in a JUnit file, and in a file of pytest-benchmark.
_HOST_FIELDS = (
    re.compile(r'(<testsuite\b[^<>]*?\shostname=")[^"]*'),
    re.compile(r'("machine_info":\s*\{(?:[^{}]|\{[^{}]*\})*?"node":\s*")(?:[^"\\]|\\.)*'),
)


def private_names(folder: Path) -> dict[str, str]:
    """Return what is replaced, and by what: the folder, the home folder, the host name and the user name."""
    names = {str(folder): ".", str(Path.home()): "~"}
    host = platform.node()
    for name, replacement in ((host, HOST), (host.partition(".")[0], HOST), (_user(), USER)):
        if len(name) >= SHORTEST_NAME and name.casefold() not in COMMON_NAMES:
            names.setdefault(name, replacement)
    return {name: replacement for name, replacement in names.items() if name not in ("", "/")}


def without_private_names(content: bytes, names: dict[str, str]) -> bytes:
    """Return a text with each name replaced, the longest first; content that is not UTF-8 is returned unchanged.

    A name is replaced only where no letter, digit, `_` or `-` precedes or follows it; `-` may be beside a user name, as
    in `pytest-of-NAME`.  A name is also replaced as JSON spells it in ASCII.  The host in JUnit and benchmark files is
    always replaced.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return content
    for field in _HOST_FIELDS:
        text = field.sub(rf"\g<1>{HOST}", text)
    spellings = {spelling: names[name] for name in names for spelling in (name, json.dumps(name)[1:-1])}
    for spelling in sorted(spellings, key=len, reverse=True):
        edge = r"\w" if spellings[spelling] == USER else r"[\w-]"
        pattern = rf"(?<!{edge}){re.escape(spelling)}(?!{edge})"
        text = re.sub(pattern, lambda _, spelling=spelling: spellings[spelling], text)  # type: ignore[misc]
    return text.encode()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
