"""Records of Python variants hold the hashes of their sources, and a source that changes meanwhile is noticed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pytest_fa.build.unchanged import source_hashes
from pytest_fa.catalog.discover import BUILTIN_ROOT
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.sanitize.sanitized import Sanitized
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.wire.jobs import CaseResult
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant, options


@pytest.fixture
def mine(tmp_path: Path, write_variant: WriteVariant) -> Variant:
    """A Python variant in `kernels/mine`."""
    folder = write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    return variant


def made(factory: RecordFactory, variant: Variant) -> Record:
    """The record of a right result."""
    return factory.make("correct", variant, None, CaseResult(Outcome.OK, "", ()))


def test_a_record_has_the_hashes_of_its_sources(tmp_path: Path, mine: Variant) -> None:
    """The module and the manifest are there by their paths from the root folder, with the sha256 of their content."""
    sources = made(RecordFactory(options(tmp_path)), mine).sources
    assert sorted(sources) == ["kernels/mine/entry.py", "kernels/mine/variant.yaml"]
    assert sources["kernels/mine/entry.py"] == hashlib.sha256(PYTHON_SOURCE.encode()).hexdigest()


def test_other_variants_have_none(tmp_path: Path) -> None:
    """The variants of this package have the version of the package, and no hashes."""
    (sdpa, *_) = read_manifest(BUILTIN_ROOT / "sdpa" / "variant.yaml", BUILTIN_ROOT)
    assert source_hashes(sdpa, tmp_path) == {}


def test_a_source_that_changes_between_two_tests_is_noticed(tmp_path: Path, mine: Variant) -> None:
    """The later record has another code than the first one: its outcome is `build_changed`, and it names the file."""
    factory = RecordFactory(options(tmp_path))
    assert made(factory, mine).outcome == "ok"
    (Path(mine.folder) / "entry.py").write_text("forged = True\n", encoding="utf-8")
    record = made(factory, mine)
    assert record.outcome == "build_changed"
    assert record.message == "kernels/mine/entry.py has changed since the first test of mine; run it again"
    factory.forget_sources()  # as after a save with --fa-watch
    assert made(factory, mine).outcome == "ok"


def test_a_gate_of_another_source_has_no_verdict(tmp_path: Path, mine: Variant) -> None:
    """What a feature found belongs to the first code, so the later record does not have it."""
    factory, result = RecordFactory(options(tmp_path)), CaseResult(Outcome.OK, "", ())
    found = Sanitized("memcheck", "clean", "", "", 0.0, ())
    before = factory.make("sanitize", mine, None, result, tool="memcheck", added=found)
    (Path(mine.folder) / "entry.py").write_text("forged = True\n", encoding="utf-8")
    after = factory.make("sanitize", mine, None, result, tool="memcheck", added=found)
    assert (Sanitized.of(before), Sanitized.of(after), after.outcome) == (found, None, "build_changed")


def test_a_variant_may_write_new_files(tmp_path: Path, mine: Variant) -> None:
    """A variant that compiles itself for another dtype writes a library beside its source; it is not blamed."""
    factory = RecordFactory(options(tmp_path))
    assert made(factory, mine).outcome == "ok"
    (Path(mine.folder) / "compiled.so").write_bytes(b"")
    assert made(factory, mine).outcome == "ok"
