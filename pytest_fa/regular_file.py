"""Open a file that anybody may have put there: only a regular one, and without waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading.  Raises `OSError` for anything else, without waiting for a FIFO's writer.

    With `follow` = False, a symlink is an error, too.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
