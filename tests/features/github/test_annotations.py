"""GitHub's annotations: their place, their escapes and their number."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.discover import Catalog, discover
from pytest_fa.features.github.annotations import annotation_lines, command
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from tests.factories import CUDA_SOURCE, MANIFEST, PYTHON_MANIFEST, RECORD, WriteVariant


def failure(variant: str, message: str = "m", outcome: Outcome = Outcome.WRONG, case: str = "case") -> Record:
    """A failed record of a variant."""
    return msgspec.structs.replace(RECORD, id=f"{variant}-{case}", variant=variant, message=message, outcome=outcome)


@pytest.fixture
def catalog(tmp_path: Path, write_variant: WriteVariant) -> Catalog:
    """A CUDA variant, a Python variant and a broken one in the workspace `tmp_path`, and `noop` outside of it."""
    write_variant("a_kernel", **{"kernel.cu": CUDA_SOURCE})
    (tmp_path / "kernels" / "a_kernel" / "planted.yaml").write_text("variants: {a_race: {role: wrong}}\n")
    write_variant("script", manifest=PYTHON_MANIFEST, **{"entry.py": ""})
    write_variant("broken", manifest=MANIFEST + "no_key: 1\n")
    return discover((tmp_path / "kernels",))


@pytest.mark.parametrize(
    ("record", "place"),
    [
        (failure("a_kernel"), "file=kernels/a_kernel/kernel.cu,line=1,"),
        (failure("a_kernel@BLOCK=64"), "file=kernels/a_kernel/kernel.cu,line=1,"),
        (
            failure("a_kernel", "kernel.cu(12): error: x\nkernel.cu(13): error: y", Outcome.NOT_BUILT),
            "file=kernels/a_kernel/kernel.cu,line=12,",
        ),
        (
            failure("a_kernel", "other_kernel.cu(12): error", Outcome.NOT_BUILT),
            "file=kernels/a_kernel/kernel.cu,line=1,",
        ),
        (failure("a_kernel", "3 spills", Outcome.OVER_LIMIT), "file=kernels/a_kernel/variant.yaml,line=1,"),
        (failure("a_race", "3 spills", Outcome.OVER_LIMIT), "file=kernels/a_kernel/planted.yaml,line=1,"),
        (failure("a_race"), "file=kernels/a_kernel/kernel.cu,line=1,"),
        (failure("script", "KeyError: 1 (entry.py:7)", Outcome.FAILED), "file=kernels/script/entry.py,line=7,"),
        (failure("broken", "unknown key", Outcome.NOT_BUILT), "file=kernels/broken/variant.yaml,line=1,"),
        (failure("noop"), ""),
        (failure("unknown"), ""),
    ],
    ids=[
        "source",
        "define",
        "compiler",
        "other file",
        "limit",
        "planted limit",
        "planted",
        "python",
        "manifest",
        "outside",
        "unknown",
    ],
)
def test_it_is_at_the_source_or_the_manifest(tmp_path: Path, catalog: Catalog, record: Record, place: str) -> None:
    """The place is the variant's source with the line of the message, or its manifest, relative to the workspace."""
    (line,) = annotation_lines([record], catalog, tmp_path)
    assert line.startswith(f"::error {place}title={record.variant}%3A ")


def test_there_is_one_for_each_variant_and_fault(tmp_path: Path, catalog: Catalog) -> None:
    """Several failures of a variant with the same outcome are one annotation, which counts and names the others."""
    records = [failure("script", f"m{number}", case=str(number)) for number in range(9)]
    records += [
        failure("script", outcome=Outcome.HUNG),
        failure("a_kernel"),
        msgspec.structs.replace(RECORD, outcome=Outcome.OK),
    ]
    first, *others = annotation_lines(records, catalog, tmp_path)
    assert first.startswith("::error file=kernels/script/entry.py,line=1,title=script%3A wrong result::script-0: m0%0A")
    assert "and 8 more: script-1, script-2, script-3, script-4, script-5, ...%0Arerun: " in first
    assert [line.split("title=")[1].split("::")[0] for line in others] == ["script%3A hung", "a_kernel%3A wrong result"]


def test_a_gate_without_a_verdict_is_a_warning(tmp_path: Path, catalog: Catalog) -> None:
    """An inconclusive gate is a warning."""
    (line,) = annotation_lines([failure("script", outcome=Outcome.INCONCLUSIVE)], catalog, tmp_path)
    assert line.startswith("::warning file=")


@pytest.mark.parametrize(("count", "expected"), [(10, 10), (11, 10), (500, 10)])
def test_there_are_at_most_ten(tmp_path: Path, catalog: Catalog, count: int, expected: int) -> None:
    """GitHub shows ten annotations of a step, so the tenth counts the rest."""
    lines = annotation_lines([failure(f"v{number}") for number in range(count)], catalog, tmp_path)
    assert len(lines) == expected
    assert ("more faults" in lines[-1]) == (count > 10)
    assert count == 10 or f"title={count - 9} more faults" in lines[-1]


def test_no_text_ends_a_command(snapshot: SnapshotAssertion) -> None:
    """Line breaks, percent signs and the separators of properties are escaped, so that one command stays one line."""
    line = command("error", "a,b:c::d", "50 %\n::set-output name=a::b\r", {"file": "k,e:r\nnel.cu"})
    assert snapshot == line


def test_a_long_message_is_cut(tmp_path: Path, catalog: Catalog) -> None:
    """A message of a megabyte makes an annotation of at most a few thousand characters that still has the rerun."""
    (line,) = annotation_lines([failure("script", "%" * 2**20)], catalog, tmp_path)
    assert len(line) < 7000
    assert f"rerun: {RECORD.rerun_command}" in line
