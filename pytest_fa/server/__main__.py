"""The worker program.

python -m pytest_fa.server JOB.json         run one job in this process and print its result as JSON
python -m pytest_fa.server --serve FD       import torch, then fork a worker for each request on the socket FD
python -m pytest_fa.server --resident LOCK SOCKET MINUTES IDENTITY   the resident server of `python -m pytest_fa serve`
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pytest_fa.processes import die_with_parent, forbid_attaching
from pytest_fa.records.outcome import Outcome
from pytest_fa.wire.jobs import ProfilerResult, encode, read_job


def main(arguments: list[str]) -> int:
    """Run one job file, or serve.  Returns 0 if the job's outcome is ok, 1 if it is not, 2 for wrong arguments."""
    match arguments:
        case ["--serve", descriptor]:
            _serve(socket.socket(fileno=int(descriptor)))
            return 0
        case ["--resident", lock, path, minutes, identity]:
            _reside(int(lock), Path(path), 60.0 * float(minutes), identity)
            return 0
        case [path] if not path.startswith("-"):
            return _run_file(Path(path))
        case _:
            sys.stderr.write((__doc__ or "") + "\n")
            return 2


def _serve(control: socket.socket) -> None:
    forbid_attaching()
    die_with_parent()  # while torch is imported; `serve` then waits for the end of the connection
    poll = select.poll()
    poll.register(control, select.POLLHUP)
    if poll.poll(0):
        return  # the client ended before the kernel was told to end this process with it
    with _without_collection():
        from pytest_fa.server.process import flush_output, serve  # noqa: PLC0415  # imports torch

    serve(control)
    flush_output()
    os._exit(0)  # taking torch down would take as long as half a second, and the client waits for the end


def _reside(lock: int, path: Path, idle_seconds: float, identity: str) -> None:
    forbid_attaching()
    with _without_collection():
        from pytest_fa.build.late_imports import LateImports  # noqa: PLC0415  # only the resident server needs these
        from pytest_fa.build.unchanged import hash_package  # noqa: PLC0415  # as above
        from pytest_fa.server.resident_process import serve_runs  # noqa: PLC0415  # imports torch

    hash_package()
    LateImports()  # its forks need not read the package again
    os.set_inheritable(lock, False)  # the parameter has no other name
    serve_runs(identity, lock, path, idle_seconds)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage during imports, nor later among what they made: it is little, and each search takes 0.1 s."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def _run_file(path: Path) -> int:
    from pytest_fa.server.process import run  # noqa: PLC0415  # imports torch

    try:
        job = read_job(path)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as problem:
        sys.stderr.write(f"{path}: {problem}\n")
        return 2
    with contextlib.redirect_stdout(sys.stderr):
        result = run(job)
    sys.stdout.write(encode(result).decode() + "\n")
    is_ok = result.profiler is not None if isinstance(result, ProfilerResult) else result.outcome == Outcome.OK
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
