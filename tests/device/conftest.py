"""Fixtures that build a source for this machine's GPU, and Nsight Compute on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.build.target import native_arch
from pytest_fa.candidate.module import build_library
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import Tolerance, Variant
from pytest_fa.features.ncu.nsight import Nsight
from pytest_fa.host.client import Workers
from pytest_fa.judge.pipeline import run_case
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import WriteVariant
from tests.projects import new_project, project, resident_server

__all__ = ["new_project", "project", "resident_server"]

Built = tuple[Variant, str]
BuildSource = Callable[..., Built]

# Their times, counters, or what a kernel left in shared memory would change with other kernels on the GPU.
NEED_A_QUIET_GPU = frozenset(
    f"test_{name}" for name in ("bottleneck", "measure", "pipes", "poison_smem", "probes", "profile", "trust")
)
DENIED = ("not-installed", "permission", "unsupported-runtime", "busy")
CASE = parse_case("b1h8s512d64-fp16-seed0")

HEADER = '#include "fa_forward.h"\n'
MANIFEST = """\
step: a test's variant
because: a test needs one
expect: what the test asserts
supports: {dtype: [fp16, bf16], causal: [none, top_left, bottom_right], layout: [bhsd, bshd]}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder; those that need the GPU for themselves are skipped under pytest-xdist.

    NEED_A_QUIET_GPU lists whole files; single tests have the mark themselves.
    """
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        for marker in ("needs_gpu", "needs_nvcc", "alone"):
            item.add_marker(marker)
        if item.path.stem in NEED_A_QUIET_GPU:
            item.add_marker("quiet_gpu")
        if item.get_closest_marker("quiet_gpu") and "PYTEST_XDIST_WORKER" in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs the GPU for itself: run -m quiet_gpu without -n"))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build cache of all workers of pytest-xdist: the first that needs a build compiles it, and the others wait."""
    folder = tmp_path_factory.getbasetemp()
    cache = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "device-cache"
    cache.mkdir(exist_ok=True)
    return cache


@pytest.fixture
def build_source(write_variant: WriteVariant, shared_cache: Path, tmp_path: Path) -> BuildSource:
    """`build_source("name", source)`: build a source, which may include `fa/`; returns the variant and its library."""
    shutil.copytree(Path(__file__).parents[2] / "kernels" / "include", tmp_path / "kernels" / "include")

    def build(name: str, source: str, manifest: str = MANIFEST) -> Built:
        folder = write_variant(name, manifest=manifest, **{"kernel.cu": HEADER + source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant, str(build_library(variant, shared_cache))

    return build


@pytest.fixture
def build_rung(shared_cache: Path) -> Callable[[str], Built]:
    """`build_rung("ws_p2")`: build a variant of the repository for this GPU."""

    def build(name: str) -> Built:
        (variant,) = select_variants(discover((Path(__file__).parents[2] / "kernels",)), (name,))
        assert isinstance(variant, Variant), variant
        return variant, str(build_library(variant, shared_cache))

    return build


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One server and one judge for the tests of a module; each variant has a candidate's process of its own."""
    with Workers() as started:
        yield started


@pytest.fixture
def minimal(build_rung: Callable[[str], Built]) -> Built:
    """The build of `minimal`, the repository's first rung."""
    return build_rung("minimal")


@pytest.fixture(scope="session")
def profiler(tmp_path_factory: pytest.TempPathFactory) -> Nsight:
    """Nsight Compute on this GPU; skips if it is not installed or may not read counters."""
    gpu = find_gpu()
    assert gpu is not None  # the marker `needs_gpu` skips the test otherwise
    folder = tmp_path_factory.mktemp("ncu")
    nsight = Nsight(folder, folder, gpu.compute_capability, sudo=False)
    if nsight.trial.status in DENIED:
        pytest.skip(f"{nsight.trial.status}: {nsight.trial.message}")
    return nsight


def build_together(names: Iterable[str], cache: Path) -> dict[str, Built]:
    """The builds of variants of the repository for this GPU, compiled in one batch."""
    variants = discover((Path(__file__).parents[2] / "kernels",)).variants
    requests = [(variants[name], native_arch(variants[name])) for name in names]
    outcomes = ensure(requests, cache).outcomes
    builds: dict[str, Built] = {}
    for variant, arch in requests:
        outcome = outcomes[(variant.name, arch)]
        assert isinstance(outcome, Build), outcome
        builds[variant.name] = (variant, str(cache / outcome.library))
    return builds


def judged(
    built: Built, shape: str, policy: Tolerance = "same_precision", property_name: str | None = None
) -> CaseResult:
    """The result of one judged case, or of one property."""
    variant, library = built
    case = parse_case(f"{shape}-seed0")
    return run_case(
        CaseJob(variant, case, library, "cuda", policy, checks_output=True, time=False, property_name=property_name)
    )


def is_found_out(
    workers: Workers, built: Built, shapes: Iterable[str], repeats: int | None = 0, policy: Tolerance = "same_precision"
) -> bool:
    """Whether a result of a deliberately wrong kernel is wrong, or the device fails, on at least one shape.

    `repeats` calls must give the same bits; None is as many as a test of a user has.
    """
    variant, library = built
    cases = [parse_case(f"{shape}-seed0") for shape in shapes]
    job = CaseJob(variant, cases[0], library, "cuda", policy, checks_output=True, time=False, repeats=repeats)
    jobs = [msgspec.structs.replace(job, case=case) for case in cases]
    return any(workers.run(job).outcome in ("wrong", "device_error") for job in jobs)


def job_of(built: Built) -> CaseJob:
    """A job of one call, after one warm-up call."""
    variant, library = built
    return CaseJob(variant, CASE, library, "cuda", "same_precision", checks_output=False, time=False, warm_ups=1)
