"""The tests that need a GPU: those that need it for themselves are known by the names of their files."""

from __future__ import annotations

from pathlib import Path

from tests.device.conftest import NEED_A_QUIET_GPU


def test_every_name_is_that_of_a_file() -> None:
    """A file that is renamed would otherwise run beside others, and its times would be wrong."""
    folder = Path(__file__).parents[1] / "device"
    assert {path.stem for path in folder.glob("test_*.py")} > NEED_A_QUIET_GPU
