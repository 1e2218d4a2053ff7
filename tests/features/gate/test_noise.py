"""The measured noise of a machine: a file with too few or impossible samples is refused with its reason."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from pytest_fa.features.gate.noise import Noise, noise_path, read_noise, write_noise
from pytest_fa.records.files import UnreadableRecords
from pytest_fa.records.paired import PairSamples
from tests.factories import RECORD

ROWS = ((0.01, 0.02), (0.03, 0.01))
PAIR = PairSamples("b1h2s64d64-fp16", "sdpa_flash", ROWS, ROWS)
NOISE = Noise((PAIR,), ("sdpa_math",), 2, 3.0, RECORD.environment, RECORD.source, RECORD.measured_at)
GPU = "NVIDIA H200"


def test_noise_is_read_back_equal(tmp_path: Path) -> None:
    """The saved noise of a GPU is read for this GPU; another GPU has none."""
    assert write_noise(NOISE, tmp_path) == noise_path(tmp_path, GPU)
    assert (read_noise(tmp_path, GPU), read_noise(tmp_path, "NVIDIA L4")) == (NOISE, None)


def with_pair(**changes: object) -> Noise:
    """The noise with another pair."""
    return msgspec.structs.replace(NOISE, pairs=(msgspec.structs.replace(PAIR, **changes),))


COUNTS = "the numbers of pairs, candidates and processes do not match"


@pytest.mark.parametrize(
    ("noise", "problem"),
    [
        (with_pair(blocks=ROWS[:1]), COUNTS),
        (with_pair(control=(*ROWS, ROWS[0])), COUNTS),
        (msgspec.structs.replace(NOISE, pairs=()), COUNTS),
        (msgspec.structs.replace(NOISE, candidates=()), COUNTS),
        (msgspec.structs.replace(NOISE, processes=3), COUNTS),
        (with_pair(blocks=((0.01,), (0.02,))), "a process has fewer than 2 blocks"),
        (with_pair(control=((), ())), "a process has fewer than 2 blocks"),
        (with_pair(baseline="sdpa_math"), "no pair has two different kernels"),
        (with_pair(blocks=((1e308, 0.0), ROWS[1])), "Expected `float` <= 100.0 - at `$.pairs[0].blocks[0][0]`"),
        (with_pair(blocks=((float("nan"), 0.0), ROWS[1])), "Expected `float`, got `null` - at `$.pairs[0].blocks"),
    ],
)
def test_impossible_samples_are_refused(tmp_path: Path, noise: Noise, problem: str) -> None:
    """A file without the samples of a standard deviation is refused with its path, the reason and what to do."""
    path = write_noise(noise, tmp_path)
    with pytest.raises(UnreadableRecords) as raised:
        read_noise(tmp_path, GPU)
    text = str(raised.value)
    assert text.startswith(f"{path} cannot be read: {problem}")
    assert text.endswith("; measure it again with `python -m pytest_fa noise`")


@pytest.mark.parametrize("content", ["{}", "[]", '{"pairs": 1}', '{"pairs": [1]}', "{", "[" * 100_000, "NaN", ""])
def test_a_malformed_file_is_refused(tmp_path: Path, content: str) -> None:
    """A file that does not hold noise is refused, not taken for a GPU without noise."""
    path = noise_path(tmp_path, None)
    path.parent.mkdir()
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UnreadableRecords, match=r"noise\.json cannot be read: "):
        read_noise(tmp_path, None)


def test_a_fifo_is_no_noise_file(tmp_path: Path) -> None:
    """A FIFO in place of the file is refused at once."""
    path = noise_path(tmp_path, None)
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(UnreadableRecords, match="it is a FIFO, not a regular file"):
        read_noise(tmp_path, None)
