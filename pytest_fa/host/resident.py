"""The client's side of the resident server: `python -m pytest_fa serve` keeps torch imported between runs.

The resident server never runs a job.  For each run it forks a worker server, which does what the run's own worker
server would do, with the run's environment, folder, priority and limits.  A run whose interpreter, environment or
installed packages differ from those of the resident server starts a worker server of its own, as without one.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import select
import signal
import site
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pytest_fa.build.keys import PACKAGE, digest
from pytest_fa.errors import UsageProblem
from pytest_fa.processes import MARK

PLACE = "PYTEST_FA_SERVER"  # a socket to use instead of the user's own; `off` means no resident server
IDLE_MINUTES = 30.0
_ANSWER_SECONDS = 5.0  # the server forks within a few milliseconds, unless the machine is busy
_LOCK_SECONDS = 5.0  # within which a server that was asked to end has ended
_NAMESPACES = ("mnt", "net", "pid", "user")
_MAX_PATH_BYTES = 100  # of a socket's path; Linux allows 107

# Variables that a terminal, a desktop or a test sets anew.  Neither the interpreter nor torch reads them at its start.
_SESSION_VARIABLE = re.compile(
    "_|PWD|OLDPWD|SHLVL|TERM.*|COLORTERM|COLUMNS|LINES|WINDOWID|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|DBUS_.*|SSH_.*|GPG_.*|"
    "TMUX.*|STY|VTE_.*|GNOME_.*|KONSOLE_.*|KITTY_.*|ITERM_.*|VSCODE_.*|XDG_.*|PS1|PROMPT.*|EDITOR|VISUAL|PAGER|LESS.*|"
    "TMPDIR|FORCE_COLOR|NO_COLOR|PY_COLORS|CI|BUILD_NUMBER|GITHUB_.*|RUNNER_.*|PYTEST_.*|FA_.*"
)


class ServerRequest(msgspec.Struct, frozen=True):
    """What a run tells the resident server.  Texts of the environment are bytes, which JSON carries as base64."""

    identity: str
    environment: list[tuple[bytes, bytes]]
    folder: bytes
    umask: int
    mark: str


class ForkedServer:
    """A worker server that the resident server forked: this process is not its parent.  Used like a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Wait for its end.  Raises `subprocess.TimeoutExpired`."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(timeout * 1000):
            raise subprocess.TimeoutExpired("the worker server", timeout)


def fork_from_resident(log: int, control: int, environment: Mapping[str, str]) -> ForkedServer | str:
    """Ask the resident server for a worker server with this output, control socket and environment.

    Returns `other` if it was started with another interpreter, environment or package, and an empty text without one.
    """
    request = ServerRequest(
        identity=identity(environment),
        environment=[(os.fsencode(name), os.fsencode(value)) for name, value in environment.items()],
        folder=os.fsencode(Path.cwd()),
        umask=_umask(),
        mark=environment[MARK],
    )
    with contextlib.suppress(OSError), _connection(resident_path()) as connection, tempfile.TemporaryFile() as file:
        file.write(msgspec.json.encode(request))
        file.flush()
        socket.send_fds(connection, [b"fork"], [file.fileno(), log, control])
        answer = connection.recv(64).decode()
        return ForkedServer(int(answer)) if answer.isdigit() else answer
    return ""


def end_resident(path: Path, unless: str = "") -> str:
    """Ask the resident server to end, unless it has this identity.  Worker servers that it has forked go on.

    Returns how many idle minutes it was started with, and an empty text if none ends.
    """
    try:
        with _connection(path) as connection:
            connection.send(f"end {unless}".encode())
            return connection.recv(64).decode()
    except OSError:
        return ""


def replace_resident(environment: Mapping[str, str]) -> None:
    """Start the resident server anew, with this interpreter and environment, for the next run.

    A server that `PYTEST_FA_SERVER` names is left as it is.
    """
    path = resident_path()
    if path is None or os.environ.get(PLACE):
        return
    if minutes := end_resident(path, unless=identity(environment)):
        program = [sys.executable, "-P", "-m", "pytest_fa", "serve", "--idle-minutes", minutes]
        silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
        os.posix_spawn(sys.executable, program, os.environ, file_actions=silent, setsid=True)


def _connection(path: Path | None) -> socket.socket:
    """A connection to the resident server of this user.  Raises `OSError` if there is none."""
    if path is None:
        raise FileNotFoundError
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_ANSWER_SECONDS)
        connection.connect(str(path))
        if peer_of(connection)[1] != os.getuid():
            raise PermissionError
    except OSError:
        connection.close()
        raise
    return connection


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process id and the user id of the process at the other end of a connection."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def resident_pid() -> int | None:
    """The process id of this user's resident server; None if none runs."""
    with contextlib.suppress(OSError), _connection(resident_path()) as connection:
        return peer_of(connection)[0]
    return None


def resident_path() -> Path | None:
    """The socket of the resident server: that of `PYTEST_FA_SERVER`, else one in a folder of this user alone.

    None if the variable is `off`, or if that folder is not private.
    """
    place = os.environ.get(PLACE, "")
    if place == "off":
        return None
    if place:
        return Path(place)
    folder = Path(tempfile.gettempdir()) / f"pytest-fa-{os.getuid()}"
    return folder / "server.sock" if _is_private(folder) else None


def _is_private(folder: Path) -> bool:
    """Whether only this user may use a folder.  It is created if it is not there."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return False
    return state.st_uid == os.getuid() and stat.S_ISDIR(state.st_mode) and not state.st_mode & 0o077


def identity(environment: Mapping[str, str]) -> str:
    """What a process that has imported torch depends on: interpreter, environment, packages, CPUs and namespaces."""
    torch = importlib.util.find_spec("torch")
    return digest(
        [
            [os.path.realpath(sys.executable), sys.prefix, sys.version, str(PACKAGE)],
            sorted([name, value] for name, value in environment.items() if not _SESSION_VARIABLE.fullmatch(name)),
            [_state_of_file(path) for path in sorted(PACKAGE.rglob("*.py"))],
            [_state_of_file(Path(torch.origin))] if torch and torch.origin else [],
            [_state_of_file(Path(folder)) for folder in (*site.getsitepackages(), site.getusersitepackages())],
            sorted(os.sched_getaffinity(0)),
            [Path(f"/proc/self/ns/{name}").readlink().name for name in _NAMESPACES],
        ]
    )


def _state_of_file(path: Path) -> tuple[str, int, int]:
    try:
        state = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), state.st_mtime_ns, state.st_size


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def serve_command(environment: Mapping[str, str], idle_minutes: float) -> None:
    """Become the resident server of this user.  Raises `UsageProblem` if there is one already."""
    path = resident_path()
    if path is None:
        raise UsageProblem(f"serve: {PLACE} is off, or {tempfile.gettempdir()}/pytest-fa-{os.getuid()} is not private")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise UsageProblem(f"serve: {path} has more than {_MAX_PATH_BYTES} bytes; set {PLACE} to a shorter path")
    lock = _locked(path)
    program = [sys.executable, "-P", "-m", "pytest_fa.server", "--resident"]
    words = [str(lock), str(path), str(idle_minutes), identity(environment)]  # of the files that are now imported
    os.execve(sys.executable, [*program, *words], {**environment, MARK: "0" * 32})  # noqa: S606  # no shell is meant


def _locked(path: Path) -> int:
    """A descriptor that holds the lock of the socket `path` as long as the server runs."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + (_LOCK_SECONDS if not path.exists() else 0.0)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                reason = f"serve: a server already runs at {path}; `python -m pytest_fa serve --stop` ends it"
                raise UsageProblem(reason) from None
            time.sleep(0.05)
        else:
            os.set_inheritable(lock, True)  # the parameter has no other name
            return lock
