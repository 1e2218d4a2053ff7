"""NVTX ranges, which let profilers select the kernels of one case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

NVTX_DOMAIN = "pytest-fa"  # the domain of every range of this package


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Open one start/end range in the package's domain.  It spans all threads, unlike a push/pop range.

    Ranges are never opened inside a timed loop.
    """
    import nvtx  # noqa: PLC0415  # only a process that calls kernels needs it

    domain = nvtx.get_domain(NVTX_DOMAIN)
    handle = domain.start_range(domain.get_event_attributes(message=name))
    try:
        yield
    finally:
        domain.end_range(handle)
