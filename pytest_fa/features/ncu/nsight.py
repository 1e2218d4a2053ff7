"""Nsight Compute for one run: found once, tried once on an empty kernel, then started once for each job."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import msgspec

from pytest_fa.catalog.variant import Variant
from pytest_fa.features.ncu.bottleneck import bottleneck_of
from pytest_fa.features.ncu.ncu_program import NcuProgram, NcuTarget, profile
from pytest_fa.features.ncu.ncu_status import SENTENCES
from pytest_fa.features.ncu.nsight_report import DURATION, CountedKernel, NsightReport, NsightStatus
from pytest_fa.features.ncu.phases import busiest_lines, phase_samples
from pytest_fa.features.ncu.presets import GRID, Capability, Preset, preset
from pytest_fa.features.ncu.trial import TRIAL_RANGE
from pytest_fa.host.fork_server import child_environment
from pytest_fa.host.programs import find_program, version_of
from pytest_fa.records.built import Build
from pytest_fa.wire.jobs import CaseJob, encode

TRIAL = ("-m", "pytest_fa.features.ncu.trial")


class Nsight:
    """Nsight Compute for the first visible GPU.

    It writes its files to `folder`; records name them by paths relative to `root`.  The profiled processes use the
    build cache `cache`.
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
        """The program `ncu`; None if it is not installed."""
        program = find_program("ncu")
        if program is None:
            return None
        return NcuProgram(program, version_of(program), self._sudo, child_environment(self._cache))

    @functools.cached_property
    def trial(self) -> NsightReport:
        """The profile of one empty kernel, which shows whether counters can be read on this machine."""
        if self.tool is None:
            return _empty_report("not-installed")
        with tempfile.TemporaryDirectory() as scratch:
            target = NcuTarget(TRIAL, TRIAL_RANGE, Path(scratch) / "trial")
            report = profile(self.tool, target, "trial", Preset((DURATION, GRID)))
        if report.status == "ok" and not all(_is_plausible(kernel.counters) for kernel in report.kernels):
            message = "the counters of the empty kernel could not be read"
            report = msgspec.structs.replace(report, status="empty", message=message)
        return msgspec.structs.replace(report, report=None, table=None, log=None)

    def run(self, job: CaseJob, preset_name: str, build: Build | None) -> NsightReport:
        """Profile the call of one job and determine what bounds its kernels.

        If the trial failed, nothing is started and the trial's status is returned.
        """
        if self.tool is None or self.trial.status != "ok":
            return msgspec.structs.replace(self.trial, preset=preset_name, kernels=())
        stem = self.folder / f"{job.slug}.{preset_name}"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = stem.with_name(f"{stem.name}.job.json")
        path.write_bytes(msgspec.json.format(encode(job)) + b"\n")
        folders = (Path(job.variant.folder), Path(job.variant.root) / "include")
        sources = tuple(folder for folder in folders if folder.is_dir())
        target = NcuTarget(("-m", "pytest_fa.server", str(path)), job.slug, stem, sources)
        report = profile(self.tool, target, preset_name, preset(preset_name, self._capability))
        if report.status == "ok" and (foreign := foreign_kernels(report, build)):
            message = f"{SENTENCES['wrong-kernel']}: {', '.join(foreign)}"
            report = msgspec.structs.replace(report, status="wrong-kernel", message=message)
        kernels = tuple(_analysed(kernel, job.variant) for kernel in report.kernels)
        return self._with_relative_paths(msgspec.structs.replace(report, kernels=kernels, job=str(path)))

    def _with_relative_paths(self, report: NsightReport) -> NsightReport:
        """The report with paths relative to the root, which do not depend on the machine."""
        names = ("report", "table", "log", "job")
        return msgspec.structs.replace(report, **{name: self._relative(getattr(report, name)) for name in names})

    def _relative(self, path: str | None) -> str | None:
        if path is None or not Path(path).is_relative_to(self._root):
            return path
        return str(Path(path).relative_to(self._root))


def _analysed(kernel: CountedKernel, variant: Variant) -> CountedKernel:
    """The kernel with what bounds it and, if its source lines were sampled, the stall samples of each phase."""
    source = Path(variant.folder) / variant.entry.source
    phases = {}
    if kernel.lines and source.is_file():
        phases = phase_samples(kernel.lines, source.name, source.read_text(encoding="utf-8", errors="replace"))
    return msgspec.structs.replace(
        kernel, bottleneck=bottleneck_of(kernel), lines=busiest_lines(kernel.lines), phases=phases
    )


def foreign_kernels(report: NsightReport, build: Build | None) -> list[str]:
    """The kernels of a report that are not in the variant's build; none without a build: any kernel is allowed then."""
    if build is None or not build.kernels:
        return []
    built_names = {base_name(kernel.name) for kernel in build.kernels}
    return [name for kernel in report.kernels if (name := base_name(kernel.name)) not in built_names]


def base_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template arguments and parameters."""
    plain = name.replace("(anonymous namespace)", "anonymous").removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0].split("::")[-1]


def _is_plausible(counters: dict[str, float]) -> bool:
    """Whether these are counters of the empty kernel: a duration above zero, and one block."""
    return counters.get(DURATION, 0.0) > 0 and counters.get(GRID) == 1


def _empty_report(status: NsightStatus) -> NsightReport:
    return NsightReport(status, SENTENCES[status], "trial", "", 0.0, ())
