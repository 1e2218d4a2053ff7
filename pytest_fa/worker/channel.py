"""Messages between the client and a worker: a length and that many bytes of JSON, on a stream socket.

The other side may be a process that runs a stranger's code, so each read has a deadline and a largest size.
"""

from __future__ import annotations

import select
import socket
import struct
import time

from pytest_fa.errors import FaError

_LENGTH = struct.Struct("!Q")
MOST_MESSAGE_BYTES = 2**23  # 8 MiB; the largest results, with all samples, take less than one
MESSAGE_SECONDS = 30.0  # within which a message that has begun must be complete


class Garbage(FaError):
    """The other side sent something that is not a message."""


class Channel:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(MESSAGE_SECONDS)
        self._end = end

    def fileno(self) -> int:
        """The file descriptor of this end."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def send(self, data: bytes) -> None:
        """Send one message.  Raises `OSError` if the other side has closed its end or does not read."""
        self._end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> bytes:
        """Wait for a message and return it.  Raises `EOFError` if the other side closes its end, and `Garbage`."""
        self.wait(None)
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, time.monotonic() + MESSAGE_SECONDS))
        if size > MOST_MESSAGE_BYTES:
            raise Garbage(f"a message of {size} bytes was announced; at most {MOST_MESSAGE_BYTES} are allowed")
        return self._read(size, time.monotonic() + MESSAGE_SECONDS)

    def wait(self, seconds: float | None, *others: int) -> bool:
        """Wait until a message begins, this end is closed, or one of `others` (descriptors) can be read.

        Returns False if `seconds` pass before that; None means no limit.
        """
        poll = select.poll()
        for descriptor in (self.fileno(), *others):
            poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))

    def _read(self, size: int, deadline: float) -> bytes:
        """Read exactly `size` bytes, in parts, so that an announced size alone takes no memory."""
        parts: list[bytes] = []
        missing = size
        while missing:
            if time.monotonic() > deadline or not self.wait(deadline - time.monotonic()):
                raise Garbage(f"a message stopped after {size - missing} of {size} bytes")
            part = self._end.recv(min(missing, 2**20))
            if not part and (parts or size != _LENGTH.size):
                raise Garbage(f"the connection was closed after {size - missing} of {size} bytes of a message")
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def channel_pair() -> tuple[Channel, socket.socket]:
    """Return a channel, and the other end of its connection for another process."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(near), far
