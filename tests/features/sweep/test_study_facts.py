"""A study is about exact files, options and versions; what changes during a sweep ends it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.sweep.plugin import SweepOptions
from pytest_fa.features.sweep.study_facts import changed_files, study_facts
from pytest_fa.features.sweep.sweep import SweepRun
from pytest_fa.session.refusals import ChangedMeanwhile
from pytest_fa.session.session import Session
from tests.factories import options

pytest.importorskip("optuna")

MANIFEST = """\
entry: {kind: torch, sources: [bind.cpp], target: forward, include: [../common]}
supports: {device: [cpu]}
defines: {M: 1}
sweep: {values: {M: [1, 2]}}
"""
FILES = ("kernels/tuned/bind.cpp", "kernels/include/common.h", "kernels/common/helper.h")


@pytest.fixture
def tuned(tmp_path: Path) -> Variant:
    """An extension with a header of its kernels folder, and one of an include folder."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("// as it was\n")
    manifest = tmp_path / "kernels" / "tuned" / "variant.yaml"
    manifest.write_text(MANIFEST)
    (parent,) = read_manifest(manifest, tmp_path / "kernels")
    return parent


def session_in(folder: Path, **changes: Any) -> Session:
    """A session of the kernels in `folder`, whose options have these changes."""
    chosen = options(folder, kernels=(folder / "kernels",), variants=("tuned",), cache=folder / "cache")
    chosen = dataclasses.replace(chosen, parts=(SweepOptions("tuned"),))
    return Session(dataclasses.replace(chosen, **changes))


@pytest.mark.parametrize("name", FILES)
def test_every_changed_file_is_seen(tmp_path: Path, tuned: Variant, name: str) -> None:
    """A change of a source, a common header or a header of an include folder makes other facts, and ends a trial."""
    session = session_in(tmp_path)
    facts = study_facts(session, tuned)
    run = SweepRun(session, tuned, facts, lambda _: None)
    assert [] == changed_files(facts, tuned)
    (tmp_path / name).write_text("// edited\n")
    assert facts != study_facts(session_in(tmp_path), tuned)
    with pytest.raises(ChangedMeanwhile, match=r"changed during the sweep; .* type: .*--fa-sweep=tuned"):
        run.bench.build({"M": 2})
    with pytest.raises(ChangedMeanwhile, match="changed during the sweep"):
        run.bench.check_unsearched({"M": 2})
    with pytest.raises(ChangedMeanwhile, match="changed during the sweep"):
        run.bench.gate({"M": 2})


@pytest.mark.parametrize("changes", [{"tolerance": "absolute"}, {"soak": 7}, {"suites": ("smoke",)}], ids=str)
def test_an_option_that_changes_the_verdict_makes_another_study(
    tmp_path: Path, tuned: Variant, changes: dict[str, Any]
) -> None:
    """What decides whether a configuration is right is one of the facts."""
    assert study_facts(session_in(tmp_path), tuned) != study_facts(session_in(tmp_path, **changes), tuned)


@pytest.mark.parametrize("name", ["driver", "torch", "pytest_fa", "gpu"])
def test_another_version_makes_another_study(tmp_path: Path, tuned: Variant, name: str) -> None:
    """What the machine runs is one of the facts."""
    session = session_in(tmp_path)
    before = study_facts(session, tuned)
    session.records.environment = msgspec.structs.replace(session.records.environment, **{name: "another"})
    assert {name} == {key for key, value in study_facts(session, tuned).items() if value != before[key]}
