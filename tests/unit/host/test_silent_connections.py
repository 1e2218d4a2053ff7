"""The resident server serves runs although processes of its user hold connections on which they say nothing."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fa.host import resident
from pytest_fa.server import resident_process
from pytest_fa.server.resident_process import MAX_WAITING, _accept_until_idle, _Waiting


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The socket of a resident server that runs in a thread of this process, without a worker to fork."""
    monkeypatch.setattr(resident_process, "children_of", lambda _: [])
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path = Path("s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, path.open("x", encoding="ascii") as lock:
        path.unlink()
        listener.bind(str(path))
        listener.listen(MAX_WAITING * 4)
        thread = threading.Thread(target=_accept_until_idle, args=(listener, "own", lock.fileno(), path, 60.0))
        thread.start()
        yield path
        path.unlink()
        thread.join()


def silent(path: Path) -> socket.socket:
    """A connection on which nothing is sent."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(path))
    return connection


def test_silent_connections_cost_no_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 129 silent connections, a request is answered within a minute; before, each of them cost 5 s."""
    monkeypatch.setattr(resident, "_ANSWER_SECONDS", 60.0)
    with contextlib.ExitStack() as held:
        for _ in range(2 * MAX_WAITING + 1):
            held.enter_context(silent(place))
        assert resident.end_resident(place) == "1"


def test_only_so_many_wait() -> None:
    """If too many connections are silent, the oldest one is closed; late ones are closed, too."""
    waiting = _Waiting(poll := select.poll())
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(MAX_WAITING + 1)]
    for near, _ in pairs:
        waiting.add(near)
    assert len(waiting.descriptors) == MAX_WAITING
    assert pairs[0][0].fileno() == -1
    assert all(near.fileno() >= 0 for near, _ in pairs[1:])
    os.write(pairs[1][1].fileno(), b"end")
    assert [descriptor for descriptor, _ in poll.poll(0)] == [pairs[1][0].fileno()]
    later = time.monotonic() + 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: later)
        waiting.close_late()
    assert waiting.descriptors == ()
    for near, far in pairs:
        assert near.fileno() == -1
        far.close()
