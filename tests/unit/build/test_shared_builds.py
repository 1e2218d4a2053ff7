"""Variants of one extension that differ only in their target share a build, and independent builds run side by side."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_fa.build import recipe
from pytest_fa.build.builder import ensure
from pytest_fa.build.cache import delete_builds
from pytest_fa.build.outcomes import BuildFailure, BuildReport
from pytest_fa.build.recipe import ParallelPlan
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.built import Build
from tests.factories import MANIFEST, WriteVariant

pytest.importorskip("torch")  # an extension is compiled as torch says

from pytest_fa.candidate.module import load_forward

# An extension without torch's headers compiles in a second.
SOURCE = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "answers.h"

#define TEXT(name) TEXT_(name)
#define TEXT_(name) #name
#define INIT(name) INIT_(name)
#define INIT_(name) PyInit_##name

static int calls = 0;
static PyObject* one(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER + 0 * ++calls); }
static PyObject* two(PyObject*, PyObject*) { return PyLong_FromLong(2 * ANSWER); }
static PyObject* count(PyObject*, PyObject*) { return PyLong_FromLong(calls); }
static PyMethodDef methods[] = {{"one", one, METH_VARARGS, ""},
                                {"two", two, METH_VARARGS, ""},
                                {"count", count, METH_VARARGS, ""},
                                {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, -1, methods};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""
EXTENSION = (
    MANIFEST
    + """\
entry: {kind: torch, sources: [answers.cpp], target: one}
supports: {device: [cpu]}
defines: {ANSWER: 21}
variants:
  first: {}
  second: {target: two}
  third: {target: count}
  other: {defines: {ANSWER: 50}}
"""
)
# It writes its arguments to a file, and becomes g++.
COMPILER = '#!/bin/sh\necho "$*" >> {log}\nexec g++ "$@"\n'


class Lab:
    """Four variants of one extension, of which three differ only in their target, and a compiler that keeps a list."""

    def __init__(self, folder: Path, write_variant: WriteVariant) -> None:
        self.cache, self._log = folder / "cache", folder / "compiled.txt"
        self._write, self._root = write_variant, folder / "kernels"
        self.write()

    def write(self, header: str = "\n") -> None:
        """Write the extension, with this text in its header."""
        self._write("answers", manifest=EXTENSION, **{"answers.cpp": SOURCE, "answers.h": header})

    @property
    def variants(self) -> list[Variant]:
        """The four variants."""
        return read_manifest(self._root / "answers" / "variant.yaml", self._root)

    def ensure(self, *, no_build: bool = False) -> BuildReport:
        """Run the builder for all of them."""
        return ensure([(variant, "host") for variant in self.variants], self.cache, no_build=no_build)

    @property
    def compilations(self) -> int:
        """How often the source was compiled since the last look."""
        lines = self._log.read_text(encoding="utf-8").splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return sum(" -c " in f" {line} " for line in lines)


@pytest.fixture
def lab(tmp_path: Path, write_variant: WriteVariant, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The extension with an empty cache."""
    compiler = tmp_path / "counting-g++"
    compiler.write_text(COMPILER.format(log=tmp_path / "compiled.txt"), encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return Lab(tmp_path, write_variant)


def builds_of(report: BuildReport) -> dict[str, Build]:
    """The builds by variant; fail if one is missing."""
    builds = {name: outcome for (name, _), outcome in report.outcomes.items() if isinstance(outcome, Build)}
    assert sorted(builds) == ["first", "other", "second", "third"], report.outcomes
    return builds


@pytest.mark.nightly
def test_variants_that_differ_only_in_their_target_are_compiled_once(lab: Lab) -> None:
    """Three variants share one compilation, a fourth with another definition has its own; each has a library."""
    report = lab.ensure()
    builds = builds_of(report)
    assert (lab.compilations, report.compiled, report.shared, report.failed) == (2, 2, 2, 0)
    assert re.match(r"builds: 2 compiled, 2 shared, 0 cached in ", report.title)
    assert builds["first"].files == builds["second"].files == builds["third"].files != builds["other"].files
    assert {name: build.shared_by for name, build in builds.items()} == {
        **dict.fromkeys(("first", "second", "third"), ("first", "second", "third")),
        "other": (),
    }
    assert len({(build.key, build.built_at) for build in builds.values()}) == 2
    libraries = [(variant, str(lab.cache / builds[variant.name].library)) for variant in lab.variants]
    functions: list[Callable[[], int]] = [load_forward(*each) for each in libraries]  # type: ignore[misc]
    assert [function() for function in functions] == [21, 42, 0, 50]  # in one process, each with variables of its own
    again = lab.ensure()
    assert (lab.compilations, again.compiled, again.shared, again.cached) == (0, 0, 0, 4)
    assert builds_of(again) == builds


@pytest.mark.nightly
def test_a_shared_build_is_removed_and_damaged_alone(lab: Lab) -> None:
    """If one variant's library is deleted or changed, only that one is compiled again; the others stay as they are."""
    builds = builds_of(lab.ensure())
    first, second, third, _ = lab.variants
    delete_builds(lab.cache, first, ("host",))
    (lab.cache / builds["second"].library).chmod(0o644)
    with (lab.cache / builds["second"].library).open("ab") as library:
        library.write(b"changed")
    lab.compilations  # noqa: B018  # from here on
    report = lab.ensure()
    assert (lab.compilations, report.compiled, report.shared, report.cached) == (1, 1, 1, 2)
    assert builds_of(report)[third.name] == builds["third"]
    again = builds_of(lab.ensure(no_build=True))
    assert again[first.name].files == again[second.name].files


@pytest.mark.nightly
def test_a_failed_compilation_names_every_variant_that_shares_it(lab: Lab) -> None:
    """A shared compilation that fails runs once, and its message has the names of all its variants."""
    lab.write("#error no answers\n")
    report = lab.ensure()
    failures = {name: outcome for (name, _), outcome in report.outcomes.items() if isinstance(outcome, BuildFailure)}
    assert (lab.compilations, report.failed, report.compiled, report.shared) == (2, 4, 0, 0)
    heads = {name: failure.message.splitlines()[0] for name, failure in failures.items()}
    assert heads["first"] == heads["second"] == heads["third"]
    assert heads["first"].endswith("error: #error no answers (first, second, third for host)")
    assert heads["other"].endswith("(other for host)")
    assert failures["first"].of_all == failures["third"].of_all != failures["other"].of_all


@pytest.mark.parametrize(
    ("most", "files", "builds", "plan"),
    [
        (16, 1, 3, ParallelPlan(16, 1, side_by_side=True)),  # three extensions of one file each: all at once
        (16, 20, 1, ParallelPlan(1, 16, side_by_side=True)),  # one extension of many files has all compilers
        (16, 20, 3, ParallelPlan(3, 5, side_by_side=True)),  # shared evenly
        (2, 20, 3, ParallelPlan(2, 1, side_by_side=False)),  # little memory: a compiler for each build that runs
        (1, 20, 3, ParallelPlan(1, 1, side_by_side=False)),
        (2, 1, 1, ParallelPlan(2, 1, side_by_side=True)),  # two cores and one build: both of its parts at once
        (3, 1, 2, ParallelPlan(3, 1, side_by_side=False)),
    ],
)
def test_builds_and_their_files_stay_within_the_memory_limit(
    monkeypatch: pytest.MonkeyPatch, lab: Lab, most: int, files: int, builds: int, plan: ParallelPlan
) -> None:
    """Independent extensions compile side by side; with the parts of each build, never more than fit into memory."""
    monkeypatch.setattr(recipe, "parallel_jobs", lambda: most)
    variant = lab.variants[0]
    entry = msgspec.structs.replace(variant.entry, sources=("answers.cpp",) * files)
    chosen = recipe.parallel_plan([msgspec.structs.replace(variant, entry=entry)] * builds)
    assert chosen == plan
    assert chosen.builds_at_once * chosen.files_at_once <= most
    assert builds * (1 + chosen.side_by_side) <= max(most, builds)


@pytest.mark.nightly
def test_a_file_that_an_extension_looked_for_makes_a_new_build(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that g++ would now find first is seen, also where ninja records no headers, and so is an edit there."""
    system, folder = tmp_path / "system", Path(lab.variants[0].folder)
    system.mkdir()
    (system / "deep.h").write_text('#if __has_include("deeper.def")\n#endif\n', encoding="utf-8")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(system))
    lab.write('#include <deep.h>\n#if __has_include("impl.txt")\n#endif\n')
    first = lab.variants[0]

    def reason() -> str:
        outcome = ensure([(first, "host")], lab.cache, no_build=True).outcomes["first", "host"]
        return outcome.reason if isinstance(outcome, BuildFailure) else ""

    assert ensure([(first, "host")], lab.cache).compiled == 1
    assert reason() == ""
    for path in (folder / "impl.txt", system / "deeper.def", folder / "Python.h", folder / "answers.h.gch"):
        path.touch()
        name = os.path.relpath(path, folder)
        assert f"changed since it was built: src/{name} (new)" in reason()
        path.unlink()
        assert reason() == ""
    (system / "deep.h").write_text("\n", encoding="utf-8")
    assert "changed since it was built: src/../../system/deep.h;" in reason()
