"""`examine`: every probe in order, one line for each finding, and the exit status."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fa.features.doctor import folder_probes, python_probes
from pytest_fa.features.doctor.finding import Finding, Places, Probe, run_guarded


def _machine_probe(name: str) -> Probe:
    """A probe of the machine."""

    def probe(places: Places) -> Iterator[Finding]:
        from pytest_fa.features.doctor import machine_probes  # noqa: PLC0415  # msgspec may be missing

        chosen: Probe = getattr(machine_probes, name)
        return chosen(places)

    return probe


PROBES: dict[str, Probe] = {
    "python": python_probes.probe_python,
    "packages": python_probes.probe_packages,
    "pytest": python_probes.probe_plugins,
    "torch": python_probes.probe_torch,
    "constraints": python_probes.probe_constraints,
    "gpu": _machine_probe("probe_gpu"),
    "host compiler": _machine_probe("probe_host_compiler"),
    "nvcc": _machine_probe("probe_nvcc"),
    "disassemblers": _machine_probe("probe_disassemblers"),
    "nsight compute": _machine_probe("probe_nsight"),
    "compute-sanitizer": _machine_probe("probe_sanitizer"),
    "cache": folder_probes.probe_cache,
    "kernels": folder_probes.probe_kernels,
    "records": folder_probes.probe_records,
}


def examine(places: Places) -> Iterator[Finding]:
    """Every finding about this machine, as soon as its probe has ended."""
    for name, probe in PROBES.items():
        yield from run_guarded(name, probe, places)


def verdict_of(findings: list[Finding]) -> tuple[int, str]:
    """The exit status and the last line: 0 if a run can work, also without a GPU, else 1."""
    missing = [finding.name for finding in findings if finding.level == "missing"]
    if missing:
        return 1, f"no run can work here yet: see {', '.join(dict.fromkeys(missing))}"
    warned = {finding.name for finding in findings if finding.level == "warning"}
    if "gpu" in warned and not any(finding.name == "gpu" and finding.level == "ok" for finding in findings):
        return 0, "runs work here, without a GPU: only CPU kernels are run and timed"
    return 0, "runs work here" + (", with the limits of the warnings" if warned else "")
