"""The saved records of the variants of a run: which of them are stale, and the launches of their kernels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pytest_fa.records.built import stable_name
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import RecordFile, read_record_file
from pytest_fa.records.log import saved_name
from pytest_fa.records.record import Record
from pytest_fa.records.standing import HiddenTime, standing_results
from pytest_fa.records.timing import LaunchedKernel


class SavedRecords:
    """The saved records of some variants on every GPU.  They are read once; lines that are no records are skipped."""

    def __init__(self, folder: Path, variants: Iterable[str]) -> None:
        self._files = {
            variant: [read_record_file(path) for path in sorted(folder.glob(f"*/{saved_name(variant)}"))]
            for variant in dict.fromkeys(variants)
        }

    @property
    def incomplete(self) -> list[RecordFile]:
        """The files that cannot be read, or have lines that cannot be read."""
        return [file for files in self._files.values() for file in files if file.complaint]

    def of(self, variant: str, gpu: str | None) -> list[Record]:
        """Return the saved results of one variant on one GPU that stand."""
        files = (file for file in self._files[variant] if file.path.parent.name == gpu_folder(gpu))
        return list(standing_results(record for file in files for record in file.records).records)

    def hidden_times(self, variant: str) -> list[HiddenTime]:
        """Return the times of one variant, on every GPU, that do not count because its newest result is a failure."""
        return list(standing_results(record for file in self._files[variant] for record in file.records).hidden)

    def stale_variants(self, records: list[Record]) -> list[str]:
        """Return the variants whose saved records, of any GPU, have other machine code than the builds of `records`.

        A run without a GPU also compiles, so it can detect this as well.
        """
        current: dict[tuple[str, str], str] = {
            (record.variant, build.arch): build.code_identity
            for record in records
            for build in record.builds
            if build.code_identity
        }
        return [
            variant
            for variant, files in self._files.items()
            if any(current.get((variant, arch), identity) != identity for arch, identity in _code_identities(files))
        ]

    def launches(self) -> dict[tuple[str, str], LaunchedKernel]:
        """Return the launches of the variants' kernels, by variant and demangled kernel name.

        The names are those of `stable_name`, which do not change when a type is renamed.
        """
        launches: dict[tuple[str, str], LaunchedKernel] = {}
        for variant, files in self._files.items():
            for record in (record for file in files for record in file.records):
                names = {kernel.mangled: kernel.name for build in record.builds for kernel in build.kernels}
                for launch in record.speed.launches if record.speed else ():
                    launches[(variant, stable_name(names.get(launch.mangled, launch.mangled)))] = launch
        return launches


def _code_identities(files: list[RecordFile]) -> set[tuple[str, str]]:
    """Return the architecture and the code identity of every build whose code identity is known."""
    builds = (build for file in files for record in file.records for build in record.builds)
    return {(build.arch, build.code_identity) for build in builds if build.code_identity}
