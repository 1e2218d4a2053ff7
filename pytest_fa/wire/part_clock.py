"""`PartClock`: how many seconds the parts of one process of paired timing take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_fa.records.paired import PARTS


class PartClock:
    """Adds up the seconds of each part, by the names of `PARTS`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to those of `part`."""
        if part not in PARTS:
            raise ValueError(f"{part!r} is no part of such a process; the parts are {', '.join(PARTS)}")
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
