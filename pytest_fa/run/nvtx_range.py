"""NVTX ranges, by which profilers find what belongs to a case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

NVTX_DOMAIN = "pytest-fa"  # of every range of this package


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """One start/end range (all threads, unlike push/pop) in our domain; never inside a timed loop."""
    import nvtx  # noqa: PLC0415  # only a process that calls kernels needs it

    domain = nvtx.get_domain(NVTX_DOMAIN)
    handle = domain.start_range(domain.get_event_attributes(message=name))
    try:
        yield
    finally:
        domain.end_range(handle)
