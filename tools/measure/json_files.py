"""The JSON files of a records folder that pages show, and how each is measured."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from kernels.auto.work import RUNGS
from pytest_fa.records.files import read_content
from pytest_fa.records.record import Environment, Source


class MeasuredFile(NamedTuple):
    """How a file is measured: the arguments of Python, the environment, and about how many seconds it takes.

    `{profiles}` stands for the records folder.  It depends on the files of the globs `sources`, and on the sources of
    `variants`.
    """

    arguments: tuple[str, ...]
    seconds: float
    sources: tuple[str, ...]
    variants: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


class FileOrigin(msgspec.Struct, frozen=True):
    """Where such a file comes from.  Older files have no source and no time."""

    environment: Environment
    source: Source | None = None
    measured_at: str = ""


FILES = {
    "ceilings.json": MeasuredFile(
        ("-m", "pytest_fa", "ceilings", "--profiles={profiles}"), 60, ("pytest_fa/features/ceilings/judge_side/*.py",)
    ),
    "noise.json": MeasuredFile(
        ("-m", "pytest_fa", "noise", "--profiles={profiles}"), 300, ("pytest_fa/features/gate/measure_noise.py",)
    ),
    "pipes.json": MeasuredFile(
        ("-m", "pytest", "-c", "tests/pytest.ini", "tests/device/test_pipes.py"),
        60,
        ("tests/device/test_pipes.py", "tests/device/pipes.cu"),
        environment=(("FA_SAVE_PIPES", "{profiles}"),),
    ),
    "unseen.json": MeasuredFile(
        ("-m", "kernels.auto.measure", "--unseen", "--profiles={profiles}"), 60, ("kernels/auto/*.py",), tuple(RUNGS)
    ),
}


def read_origin(path: Path) -> FileOrigin | None:
    """The origin of a file; None if there is no such file.  Raises `UnreadableRecords` if it cannot be read."""
    remedy = f"measure it again with `python {' '.join(FILES[path.name].arguments).format(profiles='profiles')}`"
    return read_content(path, lambda data: msgspec.json.decode(data, type=FileOrigin), remedy)


def is_of_commit(path: Path, source: Source) -> bool:
    """Whether a file was measured at the commit of these sources, from a clean tree.  This needs no repository.

    Raises `UnreadableRecords` if it cannot be read.
    """
    origin = read_origin(path)
    if origin is None or origin.source is None or source.commit is None:
        return False
    return (origin.source.commit, origin.source.dirty) == (source.commit, False)
