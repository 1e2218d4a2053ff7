"""NVTX ranges, by which profilers find what belongs to a case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import nvtx

from pytest_fa.jobs import NVTX_DOMAIN


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """One start/end range (all threads, unlike push/pop) in our domain; never inside a timed loop."""
    domain = nvtx.get_domain(NVTX_DOMAIN)
    handle = domain.start_range(domain.get_event_attributes(message=name))
    try:
        yield
    finally:
        domain.end_range(handle)
