"""Messages between two processes: a length and that many bytes of JSON, on a stream socket.

The other side may be a process that runs a stranger's code, so each read has a deadline and a largest size.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time

from pytest_fa.errors import FaError

_LENGTH = struct.Struct("!Q")
MAX_MESSAGE_BYTES = 2**23  # 8 MiB; the largest results, with all samples, take less than one
MESSAGE_SECONDS = 30.0  # within which a message that has begun must be complete


class Garbage(FaError):
    """The other side sent something that is not a message."""


class Channel:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(MESSAGE_SECONDS)
        self._end = end
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """The file descriptor of this end."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end."""
        self._end.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def send(self, data: bytes, descriptor: int | None = None) -> None:
        """Send one message, and a copy of a descriptor with it.

        Raises `OSError` if the other side has closed its end or does not read.
        """
        message = _LENGTH.pack(len(data)) + data
        sent = 0 if descriptor is None else socket.send_fds(self._end, [message], [descriptor])
        self._end.sendall(memoryview(message)[sent:])

    def take_descriptor(self) -> int | None:
        """The descriptor that came with the last message, which the caller closes; None if none came."""
        return self._descriptors.pop() if self._descriptors else None

    def receive(self) -> bytes:
        """Wait for a message and return it.  Raises `EOFError` if the other side closes its end, and `Garbage`."""
        self.wait(None)
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, time.monotonic() + MESSAGE_SECONDS))
        if size > MAX_MESSAGE_BYTES:
            raise Garbage(f"a message of {size} bytes was announced; at most {MAX_MESSAGE_BYTES} are allowed")
        return self._read(size, time.monotonic() + MESSAGE_SECONDS)

    def wait(self, seconds: float | None, *others: int) -> bool:
        """Wait until a message begins, this end is closed, or one of `others` (descriptors) can be read.

        Returns False if `seconds` pass before that; None means no limit.
        """
        poll = select.poll()
        for descriptor in (self.fileno(), *others):
            poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))

    def _keep(self, descriptors: list[int]) -> None:
        """Keep the newest descriptor, so that a side that sends many of them cannot use up this process's."""
        for descriptor in descriptors:
            while self._descriptors:
                os.close(self._descriptors.pop())
            self._descriptors.append(descriptor)

    def _read(self, size: int, deadline: float) -> bytes:
        """Read exactly `size` bytes, in parts, so that an announced size alone takes no memory."""
        parts: list[bytes] = []
        missing = size
        while missing:
            if time.monotonic() > deadline or not self.wait(deadline - time.monotonic()):
                raise Garbage(f"a message stopped after {size - missing} of {size} bytes")
            part, descriptors, _, _ = socket.recv_fds(self._end, min(missing, 2**20), 1)
            self._keep(descriptors)
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
