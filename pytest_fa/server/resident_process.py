"""The resident server: it has imported torch, opens no device, and forks a worker server for each run that asks.

It runs no code of a variant, and no process of its user may attach to it.  Only its own user may ask.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from pytest_fa.host.resident import ServerRequest, peer_of
from pytest_fa.host.scheduling import read_scheduling, restore_scheduling
from pytest_fa.processes import MARK, children_of, forbid_attaching
from pytest_fa.server.process import flush_output, serve

SLICE_SECONDS = 1.0  # how often it looks whether it has been idle for long enough
REQUEST_SECONDS = 5.0
QUIET_SECONDS = 60.0  # a server that was used later than this is not replaced for runs with another environment
MAX_REQUEST_BYTES = 2**24
MAX_WAITING = 64  # connections


def serve_runs(own_identity: str, lock: int, path: Path, idle_seconds: float) -> None:
    """Fork a worker server for each request, until none came for `idle_seconds` and none runs, or until told to end."""
    forbid_attaching()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the worker servers
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.suppress(KeyboardInterrupt):
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
        sys.stdout.write(f"serving runs of {sys.executable} at {path}; ends after {idle_seconds / 60:g} idle minutes\n")
        sys.stdout.flush()
        _accept_until_idle(listener, own_identity, lock, path, idle_seconds)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


class _Waiting:
    """Connections that have not sent their request.  They do not keep others waiting, and are few."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._connections: dict[int, tuple[socket.socket, float]] = {}  # by descriptor, with the deadline

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of all connections, which a forked worker server closes."""
        return tuple(self._connections)

    def add(self, connection: socket.socket) -> None:
        """Wait for the request of a new connection.  If there are too many, the oldest one is closed."""
        connection.settimeout(REQUEST_SECONDS)
        if len(self._connections) >= MAX_WAITING:
            self.take(next(iter(self._connections))).close()
        self._connections[connection.fileno()] = (connection, time.monotonic() + REQUEST_SECONDS)
        self._poll.register(connection, select.POLLIN)

    def take(self, descriptor: int) -> socket.socket:
        """Remove a connection, and return it."""
        self._poll.unregister(descriptor)
        return self._connections.pop(descriptor)[0]

    def close(self) -> None:
        """Close all connections."""
        for descriptor in self.descriptors:
            self.take(descriptor).close()

    def close_late(self) -> None:
        """Close those that have been silent for too long."""
        now = time.monotonic()
        for descriptor, (_, deadline) in list(self._connections.items()):
            if now > deadline:
                self.take(descriptor).close()


def _accept_until_idle(listener: socket.socket, own_identity: str, lock: int, path: Path, idle_seconds: float) -> None:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    last_use, last_fork = time.monotonic(), -QUIET_SECONDS
    with contextlib.closing(_Waiting(poll)) as waiting:
        while time.monotonic() - last_use < idle_seconds and path.exists():
            waiting.close_late()
            ready = {descriptor for descriptor, _ in poll.poll(SLICE_SECONDS * 1000)}
            for descriptor in ready & {*waiting.descriptors}:
                with waiting.take(descriptor) as connection:
                    may_be_replaced = time.monotonic() - last_fork > QUIET_SECONDS
                    own = (lock, listener.fileno(), *waiting.descriptors)
                    answer = _answer(connection, own_identity, own, may_be_replaced=may_be_replaced)
                    if answer == "ending":
                        connection.send(f"{idle_seconds / 60:g}".encode())
                        return
                last_fork = time.monotonic() if answer == "forked" else last_fork
                last_use = last_use if answer == "refused" else time.monotonic()
            if listener.fileno() in ready:  # last: it may close the oldest connection
                waiting.add(listener.accept()[0])
            if children_of(os.getpid()):
                last_use = time.monotonic()


def _answer(
    connection: socket.socket, own_identity: str, own_descriptors: tuple[int, ...], *, may_be_replaced: bool
) -> Literal["forked", "refused", "ending"]:
    """Answer one request: to fork a worker server, to end, or to end for one of another identity."""
    pid, uid = peer_of(connection)
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, 64, 3)
        if uid != os.getuid():
            return "refused"
        request, _, word = message.decode().partition(" ")
        if request == "end" and (not word or (may_be_replaced and word != own_identity)):
            return "ending"
        is_forked = False
        if request == "fork" and len(descriptors) == 3:  # noqa: PLR2004  # request, output, control socket
            is_forked = _fork_server(connection, pid, own_identity, descriptors, own_descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    except (OSError, ValueError, msgspec.MsgspecError) as problem:
        sys.stderr.write(f"a request was not answered: {problem}\n")
        return "refused"
    return "forked" if is_forked else "refused"


def _fork_server(
    connection: socket.socket, client: int, own_identity: str, descriptors: list[int], own_descriptors: tuple[int, ...]
) -> bool:
    """Fork a worker server that answers with its process id.  False if the run does not fit this server."""
    file, log, control = descriptors
    request = msgspec.json.decode(os.pread(file, MAX_REQUEST_BYTES, 0), type=ServerRequest)
    if request.identity != own_identity:
        connection.send(b"other")
        return False
    if os.fork() == 0:
        status = 1
        try:
            for descriptor in (*own_descriptors, file):
                os.close(descriptor)
            _become_worker_server(connection, client, request, log, control)
            status = 0
        finally:
            flush_output()
            os._exit(status)  # whatever happens, this process must not go on as a second resident server
    return True


def _become_worker_server(
    connection: socket.socket, client: int, request: ServerRequest, log: int, control: int
) -> None:
    """Take over what a child of the client would have, say so, and serve until the client closes its socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    _set_environment(request)
    os.chdir(request.folder)
    os.umask(request.umask)
    wanted = read_scheduling(client)
    if wanted is not None:
        restore_scheduling(os.getpid(), wanted)
    if wanted != read_scheduling(os.getpid()):
        connection.send(b"other")  # a priority or a limit that this process may not set
        return
    connection.send(str(os.getpid()).encode())
    connection.close()
    serve(socket.socket(fileno=control))


def _set_environment(request: ServerRequest) -> None:
    """Set the run's environment, and its mark where the kernel shows the environment that a process started with."""
    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_void_p
    address, mark = find(MARK.encode()), request.mark.encode()
    if address and len(os.environb[MARK.encode()]) == len(mark):
        ctypes.memmove(address, mark, len(mark))
    os.environ.clear()
    os.environb.update(dict(request.environment))
