"""Load a copy of a built library, which has its own state, so that its first call is still to come."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.variant import Variant


@contextmanager
def load_copy(variant: Variant, library: str) -> Iterator[Forward]:
    """Yield the callable of a copy of the library; the file is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield load_forward(variant, shutil.copy(library, str(Path(folder) / "fresh.so")))
