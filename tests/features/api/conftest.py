"""A folder with two variants, which is the current folder, as a notebook's is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fa.features.api.kept_workers import close_workers
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant


@pytest.fixture
def folder(write_variant: WriteVariant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the correct variants `mine` and `other` in `kernels`."""
    for name in ("mine", "other"):
        write_variant(name, manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def _no_server_is_left() -> Iterator[None]:
    """End the worker servers after the tests of a module."""
    yield
    close_workers()
