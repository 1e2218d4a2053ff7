"""Arbitrary and changed record files: they are read, or refused with a sentence; nothing else ever happens.

FA_FUZZ_EXAMPLES sets the number of examples of each test.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from kernels.auto.costs import fitted
from pytest_fa.errors import FaError
from pytest_fa.features.bundle.bundle_manifest import builds_of, compilers_of, outcomes_of, problem_of_status
from pytest_fa.features.bundle.plausible import implausible
from pytest_fa.features.bundle.recompute import contradictions
from pytest_fa.features.compare.compare import compare
from pytest_fa.features.compare.comparison import comparison_text
from pytest_fa.features.compare.sides import Side
from pytest_fa.features.gate.noise import Noise, noise_path, read_noise
from pytest_fa.features.gate.noise_table import noise_rows
from pytest_fa.features.html.machine import PageFacts
from pytest_fa.features.html.render import html_report
from pytest_fa.records.ceilings import Ceilings, ceilings_path, read_ceilings
from pytest_fa.records.compact import compact_lines
from pytest_fa.records.files import read_record_file, try_to_read
from pytest_fa.records.log import read_records, save_records
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Record, to_builtins, to_json
from pytest_fa.records.saved import SavedRecords
from pytest_fa.records.text import printable, printable_struct
from pytest_fa.table.answer import RunFacts, answer_lines
from pytest_fa.table.failure import failure_text
from pytest_fa.table.layout import table_lines
from pytest_fa.table.rows import headline, make_groups, notes
from pytest_fa.table.static_tables import static_text
from tests.factories import RECORD, fuzz_settings
from tests.fuzz import any_json, as_json, changed_bytes, changed_json
from tools.docs import findings_block, pictures, shapes_block, variants_block

# A warning about the size of an example is no failure.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")

REPOSITORY = Path(__file__).parents[3]
VARIANT_COLUMNS = "variant,checks,device_us,call_us,tflops,ratios,mma,registers,spills,smem"
SHAPE_COLUMNS = "rates,ratios,kernel,sm_mhz,cold_and_hot,gigabytes,to_fastest"


@cache
def saved_lines() -> list[bytes]:
    """The shortest saved record of each kind and variant as a whole line, and two compact lines of each with its parts.

    The full record is there as well.
    """
    shortest: dict[tuple[str, str], Record] = {}
    for path in sorted((REPOSITORY / "profiles").glob("*/*.jsonl")):
        for record in sorted(read_records(path), key=lambda record: len(to_json(record)), reverse=True):
            shortest[(path.stem, record.kind)] = record
    compact = [line.rstrip() for record in shortest.values() for line in compact_lines([record, record])]
    return [*map(to_json, shortest.values()), to_json(RECORD), *compact]


@cache
def saved_values() -> list[Any]:
    """The JSON objects of `saved_lines`."""
    return [json.loads(line) for line in saved_lines()]


def lines() -> st.SearchStrategy[bytes]:
    """A line of a record file: one of `saved_lines`, a changed one, arbitrary JSON, or arbitrary bytes."""
    return st.one_of(
        st.deferred(lambda: changed_json(saved_values())).map(as_json),
        st.deferred(lambda: changed_json(saved_values())).map(as_json),
        st.deferred(lambda: changed_bytes(saved_lines())),
        st.deferred(lambda: st.sampled_from(saved_lines())),
        any_json().map(as_json),
        st.binary(max_size=100),
    )


# -- what reads record files ------------------------------------------------------------------------------------------


def use(folder: Path, records: list[Record]) -> None:
    """Make everything from the records of `folder`/x.jsonl that reports, bundles and a run make from saved records."""
    shapes = {record.case.shape_id for record in records if record.case}
    for shape in shapes:
        at_shape = f"profiles=. cases={shape} variants=x"
        assert_refusable(partial(variants_block.block, f"{at_shape} columns={VARIANT_COLUMNS} against=x", folder))
        assert_refusable(partial(shapes_block.block, f"{at_shape} columns={SHAPE_COLUMNS} against=x", folder))
        assert_refusable(partial(findings_block.block, f"of=bottlenecks {at_shape}", folder))
    if shapes:
        clocks = f"of=clocks profiles=. cases={','.join(shapes)} variants=x"
        assert_refusable(lambda: findings_block.block(clocks, folder))
    assert_refusable(lambda: findings_block.block("of=margins profiles=. variants=x", folder))
    assert_refusable(lambda: pictures.read_timed(folder))
    html_report(records, PageFacts("fuzz", folder.parent))
    assert_refusable(lambda: fitted(records))
    saved = SavedRecords(folder.parent, ["x"])
    saved.stale_variants(records)
    static_text(records, saved.launches(), 120)
    table_lines(make_groups(records), 120, every_row=False)
    answer_lines(records, RunFacts())
    notes(records)
    for record in records:
        headline(record)
        _ = record.outcome == "ok" or failure_text(record)
        assert all(isinstance(text, str) for text in (*contradictions(record, None, 0.008), *implausible(record)))
    facts = [builds_of(records), compilers_of(records), outcomes_of(records), problem_of_status(0, records)]
    yaml.safe_dump(msgspec.to_builtins(facts))
    side = Side("a", tuple(records))
    comparison_text(compare(side, side, lambda _: 0.008), with_all=True)


def assert_refusable(work: Callable[[], object]) -> None:
    """Do something that may be refused with one of this project's own errors, which is one line of text."""
    assert "\n" not in problem_of(work)


def problem_of(work: Callable[[], object]) -> str:
    """The message of the error that `work` raises; empty if it raises none."""
    try:
        work()
    except FaError as problem:
        return str(problem)
    return ""


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder for the files of all examples."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "gpu").mkdir()
        yield Path(name)


@pytest.mark.nightly
@fuzz_settings()
@given(content=st.lists(lines(), max_size=4).map(b"\n".join))
def test_every_line_is_a_record_or_named(folder: Path, content: bytes) -> None:
    """Each line that is not empty is a record or has a reason; everything that reads records uses or refuses them."""
    path = folder / "gpu" / "x.jsonl"
    path.write_bytes(content)
    file = read_record_file(path)
    numbers = [number for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    lines_of_parts = len(numbers) - len(file.records) - len(file.bad_lines)
    assert 0 <= lines_of_parts <= content.count(b'"part"')
    assert len(file.parts) <= lines_of_parts
    assert {bad.number for bad in file.bad_lines} <= set(numbers)
    problems = [bad.problem for bad in file.bad_lines]
    assert all(problem and "\n" not in problem and printable(problem) == problem for problem in problems)
    assert all(printable_struct(record) is record for record in file.records)
    assert bool(file.bad_lines) == bool(problem_of(lambda: read_records(path)))
    use(path.parent, list(file.records))


@fuzz_settings(50)
@given(content=st.lists(lines(), min_size=1, max_size=3).map(b"\n".join))
def test_saving_keeps_every_line_and_stays_in_its_folder(folder: Path, content: bytes) -> None:
    """Records from anywhere are saved inside the records folder; saving them keeps the lines that cannot be read.

    A line of an earlier schema is kept unless a record of the same kind and id replaces it.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "profiles" / "x.jsonl"
        path.parent.mkdir()
        path.write_bytes(content)
        file = read_record_file(path)
        target = Path(name) / "saved"
        paths = save_records(list(file.records), target)
        assert sorted(item.name for item in Path(name).iterdir()) == ["profiles", *(["saved"] if paths else [])]
        keys = {(record.kind, record.id, record.case is None and record.rerun_command) for record in file.records}
        assert sum(len(read_records(saved)) for saved in paths) >= len(keys)
        for saved in paths:
            replaced = {(record.kind, record.id) for record in read_records(saved)}
            lines_to_keep = [line for line in file.bad_lines if line.earlier_key[:2] not in replaced]
            bad = [content[line.start : line.start + line.length].rstrip(b"\n") + b"\n" for line in lines_to_keep]
            saved.write_bytes(b"".join(bad) + saved.read_bytes())
            save_records(list(read_record_file(saved).records), target)
            with saved.open("rb") as stream:
                written = list(stream)
            assert [line for line in bad if line not in written] == []


BLOCKS = tuple((0.01 * number, 0.02, -0.01) for number in range(12))
PAIR = PairSamples("b1h2s64d64-fp16", "sdpa_flash", BLOCKS, BLOCKS)
NOISE = to_builtins(Noise((PAIR,), ("sdpa_math",), 12, 3.0, RECORD.environment, RECORD.source, RECORD.measured_at))


@fuzz_settings(50)
@given(content=st.one_of(changed_json([NOISE]).map(as_json), changed_bytes([as_json(NOISE)]), any_json().map(as_json)))
def test_noise_is_used_or_refused(folder: Path, content: bytes) -> None:
    """Any noise.json gives a table and a standard deviation, or is refused with a sentence."""
    path = noise_path(folder, "gpu")
    path.write_bytes(content)
    noise, problem = try_to_read(lambda: read_noise(folder, "gpu"))
    assert "\n" not in problem
    if noise is None:
        assert problem
        return
    assert noise.process_sd >= 0
    noise_rows(noise)


CEILINGS = msgspec.json.decode((REPOSITORY / "profiles" / "nvidia-h200" / "ceilings.json").read_bytes())


@fuzz_settings(50)
@given(
    content=st.one_of(
        changed_json([CEILINGS]).map(as_json), changed_bytes([as_json(CEILINGS)]), any_json().map(as_json)
    )
)
def test_ceilings_are_used_or_refused(folder: Path, content: bytes) -> None:
    """Any ceilings.json gives a least time, or is refused with a sentence."""
    path = ceilings_path(folder, "gpu")
    path.write_bytes(content)
    ceilings, problem = try_to_read(lambda: read_ceilings(folder, "gpu"))
    assert "\n" not in problem
    if ceilings is None:
        assert problem
        return
    assert RECORD.case is not None
    assert ceilings.least_us(RECORD.case) >= 0
    assert max(ceilings.matmul_tflops.values()) * 1e3 / ceilings.copy_gb_per_s > 0


@pytest.mark.nightly
@fuzz_settings(5, slowness=50)
@given(records=st.lists(st.deferred(lambda: changed_json(saved_values())).map(as_json), min_size=1, max_size=6))
def test_pictures_are_drawn_or_refused(folder: Path, records: list[bytes]) -> None:
    """Pictures of changed records are drawn or refused with a sentence."""
    pytest.importorskip("matplotlib")
    path = folder / "gpu" / "x.jsonl"
    path.write_bytes(b"\n".join(records))
    readable = read_record_file(path).records
    path.write_bytes(b"".join(to_json(record) + b"\n" for record in readable))
    ceilings = msgspec.convert(CEILINGS, Ceilings)
    assert_refusable(lambda: pictures.draw(path.parent, ceilings))
