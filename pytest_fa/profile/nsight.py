"""One run's profiler: found once, tried once on a kernel that does nothing, then one child for each job."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import msgspec

from pytest_fa.catalog.variant import Variant
from pytest_fa.profile.bottleneck import bottleneck_of
from pytest_fa.profile.ncu import NcuProgram, NcuTarget, profile
from pytest_fa.profile.ncu_status import SENTENCES
from pytest_fa.profile.phases import busiest_lines, phase_samples
from pytest_fa.profile.presets import GRID, Capability, Preset, preset
from pytest_fa.profile.programs import find_program, version_of
from pytest_fa.profile.trial import TRIAL_RANGE
from pytest_fa.records.built import Build
from pytest_fa.records.tool_results import DURATION, CountedKernel, NsightReport, NsightStatus
from pytest_fa.worker.client import child_environment
from pytest_fa.worker.jobs import CaseJob, encode

TRIAL = ("-m", "pytest_fa.profile.trial")


class Nsight:
    """Nsight Compute for the first visible GPU; its files lie in `folder`, named in records by paths from `root`.

    Its children find builds in `cache`.
    """

    def __init__(
        self, folder: Path, root: Path, capability: Capability, *, sudo: bool, cache: Path | None = None
    ) -> None:
        self.folder = folder
        self._root = root
        self._capability = capability
        self._sudo = sudo
        self._cache = cache

    @functools.cached_property
    def tool(self) -> NcuProgram | None:
        """The program; None where there is none."""
        program = find_program("ncu")
        if program is None:
            return None
        return NcuProgram(program, version_of(program), self._sudo, child_environment(self._cache))

    @functools.cached_property
    def trial(self) -> NsightReport:
        """What became of profiling one empty kernel: nothing is promised before a counter was read back."""
        if self.tool is None:
            return _nothing("not-installed")
        with tempfile.TemporaryDirectory() as scratch:
            target = NcuTarget(TRIAL, TRIAL_RANGE, Path(scratch) / "trial")
            found = profile(self.tool, target, "trial", Preset((DURATION, GRID)))
        if found.status == "ok" and not all(_reads_back(each.counters) for each in found.kernels):
            found = msgspec.structs.replace(found, status="empty", message="its counters cannot be read back")
        return msgspec.structs.replace(found, report=None, table=None, log=None)

    def run(self, job: CaseJob, preset_name: str, build: Build | None) -> NsightReport:
        """Profile one job's call and judge its kernels; the trial's status where that already failed."""
        if self.tool is None or self.trial.status != "ok":
            return msgspec.structs.replace(self.trial, preset=preset_name, kernels=())
        stem = self.folder / f"{job.slug}.{preset_name}"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = stem.with_name(f"{stem.name}.job.json")
        path.write_bytes(msgspec.json.format(encode(job)) + b"\n")
        folders = (Path(job.variant.folder), Path(job.variant.root) / "include")
        sources = tuple(folder for folder in folders if folder.is_dir())
        target = NcuTarget(("-m", "pytest_fa.worker", str(path)), job.slug, stem, sources)
        found = profile(self.tool, target, preset_name, preset(preset_name, self._capability))
        if found.status == "ok" and (strangers := foreign_kernels(found, build)):
            message = f"{SENTENCES['wrong-kernel']}: {', '.join(strangers)}"
            found = msgspec.structs.replace(found, status="wrong-kernel", message=message)
        judged = tuple(_explained(each, job.variant) for each in found.kernels)
        return self._with_paths(msgspec.structs.replace(found, kernels=judged, job=str(path)))

    def _with_paths(self, found: NsightReport) -> NsightReport:
        """Paths from the root, so that a record reads the same elsewhere."""
        names = ("report", "table", "log", "job")
        return msgspec.structs.replace(found, **{name: self._short(getattr(found, name)) for name in names})

    def _short(self, path: str | None) -> str | None:
        if path is None or not Path(path).is_relative_to(self._root):
            return path
        return str(Path(path).relative_to(self._root))


def _explained(kernel: CountedKernel, variant: Variant) -> CountedKernel:
    """The kernel with its verdict, and where its source was sampled with the samples by stage."""
    source = Path(variant.folder) / variant.entry.source
    phases = {}
    if kernel.lines and source.is_file():
        phases = phase_samples(kernel.lines, source.name, source.read_text(encoding="utf-8", errors="replace"))
    return msgspec.structs.replace(
        kernel, bottleneck=bottleneck_of(kernel), lines=busiest_lines(kernel.lines), phases=phases
    )


def foreign_kernels(found: NsightReport, build: Build | None) -> list[str]:
    """Kernels of a report that the variant's build does not hold; a Python entry may run whose it likes."""
    if build is None or not build.kernels:
        return []
    own = {base_name(each.name) for each in build.kernels}
    return [name for each in found.kernels if (name := base_name(each.name)) not in own]


def base_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template arguments and parameters."""
    plain = name.replace("(anonymous namespace)", "anonymous").removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0].split("::")[-1]


def _reads_back(counters: dict[str, float]) -> bool:
    """The trial's kernel took some time, and it was one block."""
    return counters.get(DURATION, 0.0) > 0 and counters.get(GRID) == 1


def _nothing(status: NsightStatus) -> NsightReport:
    return NsightReport(status, SENTENCES[status], "trial", "", 0.0, ())
