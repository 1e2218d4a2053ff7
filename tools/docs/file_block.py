"""`fa-file`: what a JSON file of a records folder says, such as `profiles/nvidia-h200/noise.json`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pytest_fa.features.gate.noise import read_noise
from pytest_fa.features.gate.noise_table import NoiseRow, noise_rows
from pytest_fa.records.origin import origin_of_file
from tools.docs.block import NOTHING, Shown, TableProblem, one_of, table, with_line
from tools.docs.pipes import Loop, Pipes, read_pipes


def block(words: str, root: Path) -> str:
    """The table of a file.  Raises `TableProblem` if it is not there, `UnreadableRecords` if it cannot be read."""
    path = Path(words)
    return one_of(path.name, FILES, "the file of fa-file")(root, path.parent)


def contents(words: str, _root: Path) -> Shown:
    """The file that the table shows.  Raises `TableProblem` if there is no such table."""
    path = Path(words)
    one_of(path.name, FILES, "the file of fa-file")
    return Shown(path.parent.as_posix(), files=(path.name,))


def _noise(root: Path, folder: Path) -> str:
    """How far the rounds of a gate vary: one row for each pair."""
    noise = read_noise(root / folder.parent, folder.name)
    if noise is None:
        raise TableProblem(f"there is no noise.json in {folder}; `python -m pytest_fa noise` makes one")
    rows = [["shape", "pair", "spread of rounds, %", "PASS or FAIL"]]
    by_pair: dict[tuple[str, str, str], list[NoiseRow]] = {}
    for row in noise_rows(noise):
        by_pair.setdefault((row.shape_id, row.candidate, row.baseline), []).append(row)
    for (shape, candidate, baseline), of_pair in by_pair.items():
        spread = 100 * max(row.process_sd for row in of_pair)
        decided, groups = (sum(counts) for counts in zip(*((row.decided, row.groups) for row in of_pair), strict=True))
        rows.append([f"`{shape}`", f"{candidate} / {baseline}", f"{spread:.2f}", f"{decided} of {groups}"])
    return with_line(table(rows), origin_of_file(noise.environment, noise.source, noise.measured_at))


def _pipes(root: Path, folder: Path) -> str:
    """How far matrix products and softmax overlap: one row for each loop."""
    pipes = read_pipes(root / folder.parent, folder.name)
    if pipes is None:
        raise TableProblem(f"there is no pipes.json in {folder}; tests/device/test_pipes.py writes one")
    heads = ["loop", "us", "TFLOP/s", "maxima per clock", "SM MHz", "W"]
    text = table([heads, *(_pipes_row(pipes, name, loop) for name, loop in pipes.loops.items())])
    return with_line(text, origin_of_file(pipes.environment, pipes.source, pipes.measured_at))


def _pipes_row(pipes: Pipes, name: str, loop: Loop) -> list[str]:
    clocks = [f"{loop.clocks.sm_mhz}", f"{loop.clocks.power_watts:.0f}"] if loop.clocks else [NOTHING, NOTHING]
    rates = [f"{of[name]:.0f}" if name in of else NOTHING for of in (pipes.tflops, pipes.per_clock)]
    return [name, f"{loop.median_us:.1f}", *rates, *clocks]


FILES: dict[str, Callable[[Path, Path], str]] = {"noise.json": _noise, "pipes.json": _pipes}
