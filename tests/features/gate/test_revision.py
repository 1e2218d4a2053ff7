"""The variant at a revision as a baseline: what it is, when it is the same code, and each sentence if it is none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from pytest_fa.build.machine_code import host_code
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.features.bundle.completeness import notes
from pytest_fa.features.bundle.plausible import implausible
from pytest_fa.features.bundle.questions import commands_of
from pytest_fa.features.bundle.recompute import contradictions
from pytest_fa.features.bundle.replay import _compare_records
from pytest_fa.features.compare.compare import compare
from pytest_fa.features.compare.sides import Side
from pytest_fa.features.gate.bisect_status import BAD, GOOD, SKIP, status_for_bisect
from pytest_fa.features.gate.gate import decide_gate, gate_question
from pytest_fa.features.gate.gate_lines import gate_lines
from pytest_fa.features.gate.gated import Gate, GatedRevision
from pytest_fa.features.gate.intervals import PROCESS_SD
from pytest_fa.features.gate.opponents import Opponents, prepare_opponents
from pytest_fa.features.gate.pilot import NoVerdict
from pytest_fa.features.gate.plugin import GateOptions
from pytest_fa.features.gate.revision import compared, same_machine_code, variants_at
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record, to_json
from pytest_fa.session.session import Session
from tests.factories import CUDA_SOURCE, MANIFEST, PYTHON_MANIFEST, build, options
from tests.features.gate.revisions import commit, git, write_timed
from tests.projects import CASE

CUDA_MANIFEST = MANIFEST + "defines: {BLOCK: 64}\n"


class Repo(NamedTuple):
    """A repository whose kernels folder has the variant `mine`, and a cache."""

    top: Path
    cache: Path

    def write(self, name: str, text: str) -> None:
        """Write a file of the kernels folder."""
        path = self.top / "kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    @property
    def mine(self) -> Variant:
        """Today's variant."""
        return discover((self.top / "kernels",)).variants["mine"]

    def complaint(self, word: str = "HEAD") -> str:
        """The sentence about the variant at a revision."""
        with pytest.raises(UsageProblem) as caught:
            variants_at([self.mine], word, self.cache)
        return str(caught.value)

    def session(self, ratio: float = 1.2, word: str = "HEAD", **changes: object) -> Session:
        """A session that gates the variant against a revision."""
        parts = (GateOptions(ratio, f"git:{word}"),)
        run = options(self.top, variants=("mine",), cases=(CASE,), cache=self.cache, parts=parts, **changes)
        session = Session(run)
        prepare_opponents(session)
        session.builds.needed = {"mine": session.run_plan.catalog.variants["mine"]}
        return session

    def compared(self, word: str = "HEAD") -> GatedRevision:
        """Today's code beside that of a revision."""
        session = self.session(word=word)
        (at,) = Opponents.of(session.run_plan).revisions.values()
        return compared(session.builds.needed["mine"], at, session.builds, self.cache)

    def gated(self, ratio: float) -> Record:
        """The record of a gate on a machine that cannot run the variant."""
        session = self.session(ratio)
        variant = session.builds.needed["mine"]
        return decide_gate(session.runner, variant, gate_question(session.run_plan, variant, ratio), lambda _: None)


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A repository without a commit."""
    (tmp_path / "repo" / "kernels").mkdir(parents=True)
    return Repo(tmp_path / "repo", tmp_path / "cache")


@pytest.fixture
def python(repo: Repo) -> Repo:
    """A repository with a committed variant in Python."""
    write_timed(repo.top, 1)
    commit(repo.top, "one")
    return repo


@pytest.fixture
def cuda(repo: Repo) -> Repo:
    """A repository with a committed CUDA kernel that includes a header of the kernels folder."""
    repo.write("mine/kernel.cu", f'#include "block.h"\n{CUDA_SOURCE}')
    repo.write("mine/variant.yaml", CUDA_MANIFEST)
    repo.write("include/block.h", "#define GRID 1\n")
    commit(repo.top, "one")
    return repo


def test_the_variant_has_the_sources_of_the_commit(python: Repo) -> None:
    """The baseline is named by the commit, and its sources are those of the commit, outside of the working tree."""
    head = git(python.top, "rev-parse", "HEAD")
    write_timed(python.top, 2)
    at = variants_at([python.mine], "HEAD", python.cache)["mine"]
    assert (at.variant.name, at.revision.commit) == (f"mine@{head[:10]}", head)
    assert "MILLISECONDS = 1\n" in (Path(at.variant.folder) / "entry.py").read_text(encoding="utf-8")
    assert Path(at.variant.folder).is_relative_to(python.cache / "trees")
    assert git(python.top, "status", "--porcelain") == "M kernels/mine/entry.py"


def test_a_definition_is_that_of_the_candidate(cuda: Repo) -> None:
    """A candidate with a definition has a baseline with the same one; one that the commit lacks is named."""
    mine = msgspec.structs.replace(cuda.mine, name="mine@BLOCK=32", defines={"BLOCK": 32})
    (at,) = variants_at([mine], "HEAD", cuda.cache).values()
    assert (at.variant.name, at.variant.defines) == (f"mine@BLOCK=32@{at.revision.commit[:10]}", {"BLOCK": 32})
    with pytest.raises(UsageProblem, match="mine has no definition 'TILE'"):
        variants_at([msgspec.structs.replace(mine, name="mine@TILE=1")], "HEAD", cuda.cache)


def test_an_ablation_has_earlier_sources_but_is_no_baseline(cuda: Repo) -> None:
    """What compares code takes any variant from a commit; a gate refuses one that was an ablation there."""
    cuda.write("mine/variant.yaml", f"{CUDA_MANIFEST}role: ablation\nomits: softmax\nparent: plain\n")
    commit(cuda.top, "two")
    (at,) = variants_at([cuda.mine], "HEAD", cuda.cache).values()
    assert at.variant.omits == "softmax"
    cuda.write("mine/variant.yaml", CUDA_MANIFEST)
    with pytest.raises(UsageProblem) as caught:
        Opponents.of(cuda.session().run_plan)
    reason = "cannot be a baseline: role ablation, computes attention; choose another revision"
    assert str(caught.value) == f"--fa-gate-baseline=git:HEAD: mine at {at.revision.shown} {reason}"


def test_a_variant_that_the_commit_lacks_is_named(python: Repo) -> None:
    """A variant that was added later, and a kernels folder that was, give one sentence each."""
    head = git(python.top, "rev-parse", "HEAD")[:10]
    mine = msgspec.structs.replace(python.mine, name="later", folder=str(python.top / "kernels" / "later"))
    with pytest.raises(UsageProblem) as caught:
        variants_at([mine], "HEAD", python.cache)
    sentence = f"there is no variant 'later' at HEAD ({head}); choose a later revision"
    assert str(caught.value) == f"--fa-gate-baseline=git:HEAD: {sentence}"
    git(python.top, "mv", "kernels", "variants")
    commit(python.top, "moved")
    git(python.top, "mv", "variants", "kernels")
    head = git(python.top, "rev-parse", "HEAD")[:10]
    assert python.complaint() == f"--fa-gate-baseline=git:HEAD: commit {head} has no folder kernels/"


def test_a_manifest_that_is_refused_today_is_named(python: Repo) -> None:
    """A manifest that today's grammar refuses gives the reason, with the path in the commit."""
    python.write("mine/variant.yaml", PYTHON_MANIFEST + "colour: red\n")
    commit(python.top, "strange")
    python.write("mine/variant.yaml", PYTHON_MANIFEST)
    sentence = python.complaint()
    assert sentence.startswith("--fa-gate-baseline=git:HEAD: today's pytest-fa cannot use mine at HEAD (")
    assert "HEAD:kernels/mine/variant.yaml" in sentence
    assert "colour" in sentence
    assert str(python.cache) not in sentence


def test_a_source_that_is_not_in_the_folder_is_named(cuda: Repo) -> None:
    """A source behind a symlink that leads out of the kernels folder is missing, and the sentence says why."""
    (cuda.top / "kernel.cu").write_text(CUDA_SOURCE, encoding="utf-8")
    (cuda.top / "kernels" / "mine" / "kernel.cu").unlink()
    (cuda.top / "kernels" / "mine" / "kernel.cu").symlink_to("../../kernel.cu")
    commit(cuda.top, "a link")
    sentence = cuda.complaint()
    assert "entry.source is 'kernel.cu'; that file does not exist" in sentence
    assert "only kernels/ of the commit is taken; mine/kernel.cu is a symlink that leads out of the folder" in sentence


def test_code_of_the_working_tree_is_no_code_of_a_commit(python: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant in Python that imports a module of the repository would get today's: it is refused."""
    (python.top / "attend.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(python.top)
    source = (python.top / "kernels" / "mine" / "entry.py").read_text(encoding="utf-8")
    python.write("mine/entry.py", f"from attend import *\n{source}")
    commit(python.top, "a package")
    assert f"imports 'attend' from {python.top / 'attend.py'}, which would be today's" in python.complaint()
    python.write("mine/variant.yaml", PYTHON_MANIFEST.replace("entry:forward", "attend:forward"))
    python.write("mine/entry.py", source)
    commit(python.top, "a target")
    assert "imports 'attend' from" in python.complaint()


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda _: None, True),
        (lambda repo: (repo.top / "README").write_text("text", encoding="utf-8"), True),
        (lambda repo: write_timed(repo.top, 2), False),
        (lambda repo: repo.write("mine/table.json", "[1]"), False),
        (lambda repo: repo.write("other/helper.py", ""), False),
    ],
    ids=["nothing", "another folder", "its source", "its data", "a neighbour"],
)
def test_the_same_sources_are_told(python: Repo, change: Callable[[Repo], object], *, same: bool) -> None:
    """A variant in Python is the same only if the whole kernels folder is, of which it may read any file."""
    change(python)
    code = python.compared().code
    assert (code is not None) is same
    assert code is None or code.same == "sources"


@pytest.mark.parametrize("is_committed", [True, False])
def test_uncommitted_changes_are_told(python: Repo, *, is_committed: bool) -> None:
    """Changes of the gated sources are named in the result; those of other files are not."""
    (python.top / "notes.txt").write_text("text", encoding="utf-8")
    python.write("mine/table.json", "[1]")
    commit(python.top, "a table")
    write_timed(python.top, 2)
    python.write("mine/table.json", "[2]")
    if is_committed:
        commit(python.top, "two")
    python.write("mine/.entry.py.swp", "")
    (python.top / "notes.txt").write_text("more", encoding="utf-8")
    revision = python.compared()
    changed = () if is_committed else ("kernels/mine/entry.py", "kernels/mine/table.json")
    assert revision.uncommitted == changed
    gate = Gate(1.2, "PASS", "", 6, 0, 0, 0.0, None, 1.0, {}, (), revision=revision)
    changes = f"; the gated sources have uncommitted changes: {', '.join(changed)}"
    expected = f"  mine@{revision.commit[:10]} is git:HEAD, commit {revision.commit}{'' if is_committed else changes}"
    assert expected in gate_lines("mine", gate)


@pytest.mark.needs_nvcc
@pytest.mark.parametrize(
    ("name", "old", "new", "same"),
    [
        ("mine/kernel.cu", "__global__", "// a remark\n\n__global__", True),
        pytest.param("mine/kernel.cu", "<<<1, BLOCK", "<<<2, BLOCK", False, marks=pytest.mark.nightly),
        pytest.param(
            "include/block.h", "GRID 1", "GRID 1\n#undef BLOCK\n#define BLOCK 32", False, marks=pytest.mark.nightly
        ),
    ],
    ids=["a remark", "the grid", "a header"],
)
def test_the_same_machine_code_is_told(
    cuda: Repo, shared_cache: Path, name: str, old: str, new: str, *, same: bool
) -> None:
    """A remark changes no machine code; another grid does, although the device code is the same."""
    repo = cuda._replace(cache=shared_cache)
    path = repo.top / "kernels" / name
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    revision = repo.compared()
    assert (revision.code is not None, revision.uncommitted) == (same, (f"kernels/{name}",))
    if not same:
        return
    records = {ratio: repo.gated(ratio) for ratio in (1.2, 1.0, 0.9)}
    outcomes = {ratio: record.outcome for ratio, record in records.items()}
    assert outcomes == {1.2: Outcome.OK, 1.0: Outcome.INCONCLUSIVE, 0.9: Outcome.GATE_FAILED}
    passed = records[1.2]
    gate = Gate.of(passed)
    assert gate is not None
    head = git(repo.top, "rev-parse", "HEAD")
    reason = f"the same machine code as mine@{head[:10]}, so nothing was timed; without a GPU nothing was judged"
    assert (gate.reason, gate.pairs) == (reason, ())
    assert f"--fa-gate-baseline=git:{head}" in passed.rerun_command.split()
    require_verified_honestly(list(records.values()))


def require_verified_honestly(records: list[Record]) -> None:
    """Records on equal code can be read, verified and compared; each edit of the verdict or of the code is noticed."""
    for record in records:
        gate = Gate.of(record)
        assert gate is not None
        assert gate.revision is not None
        assert gate.revision.code is not None
        assert read_record(to_json(record)) == record
        assert contradictions(record, None, PROCESS_SD) + implausible(record) == []
        other = "FAIL" if gate.verdict == "PASS" else "PASS"
        code = msgspec.structs.replace(gate.revision.code, identity="0" * 16)
        revision = msgspec.structs.replace(gate.revision, commit="0" * 40)
        for edited in (
            msgspec.structs.replace(gate, verdict=other),
            msgspec.structs.replace(gate, revision=msgspec.structs.replace(gate.revision, code=code)),
            msgspec.structs.replace(gate, revision=msgspec.structs.replace(gate.revision, code=None)),
            msgspec.structs.replace(gate, revision=revision),
            msgspec.structs.replace(gate, processes=6),
        ):
            false = edited.to(record)
            assert contradictions(false, None, PROCESS_SD) + implausible(false) != []
        assert list(commands_of("fast", [record])) == []
        answer, reason = _compare_records(record, None)
        assert (answer, "a bundle has no history" in reason) == ("NOT COMPARABLE", True)
        assert any("whose sources are not in the bundle" in note for note in notes([record], {}))
    side = Side("a", tuple(records))
    rows = compare(side, side, lambda _: PROCESS_SD).rows
    assert {(row.shape_id, row.verdict) for row in rows} == {(f"gate < {ratio:g}", "same") for ratio in (1.2, 1.0, 0.9)}


@pytest.mark.needs_nvcc
def test_a_commit_that_does_not_build_has_no_verdict(cuda: Repo, shared_cache: Path) -> None:
    """If the revision's variant does not compile, the reason has the compiler's words and what is taken of a commit."""
    repo = cuda._replace(cache=shared_cache)
    good = (repo.top / "kernels" / "mine" / "kernel.cu").read_text(encoding="utf-8")
    repo.write("mine/kernel.cu", '#include "../../outside.h"\n' + good)
    commit(repo.top, "broken")
    repo.write("mine/kernel.cu", good)
    with pytest.raises(NoVerdict) as caught:
        repo.compared()
    assert "failed; only kernels/ of the commit is taken: " in str(caught.value)
    assert "outside.h" in str(caught.value)


@pytest.mark.needs_nvcc
@pytest.mark.nightly
def test_a_header_of_the_working_tree_is_no_header_of_a_commit(cuda: Repo, shared_cache: Path) -> None:
    """An include folder with an absolute path in the repository has today's headers: there is no verdict."""
    repo = cuda._replace(cache=shared_cache)
    folder = repo.top / "third_party"
    folder.mkdir()
    (folder / "today.h").write_text("", encoding="utf-8")
    repo.write("mine/variant.yaml", CUDA_MANIFEST + f"entry: {{include: [{folder}]}}\n")
    repo.write("mine/kernel.cu", f'#include "today.h"\n{CUDA_SOURCE}')
    commit(repo.top, "absolute")
    with pytest.raises(NoVerdict, match=f"was built with {folder / 'today.h'}, which is not of HEAD"):
        repo.compared()


def test_host_code_decides_where_there_is_no_device_code(tmp_path: Path) -> None:
    """The code identity of C++ libraries is that of no device code: only their host code tells them apart."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    builds = []
    texts = ("int f(int x) { return x; }", "// a remark\nint f(int x) { return x; }", "int f(int x) { return 2 * x; }")
    for number, text in enumerate(texts):
        source, library = tmp_path / f"{number}.cpp", tmp_path / f"{number}.so"
        source.write_text(text, encoding="utf-8")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        builds.append(msgspec.structs.replace(build("sm_80"), library=library.name))
    codes = [same_machine_code(builds[0], other, tmp_path) for other in builds]
    assert [code is not None for code in codes] == [True, True, False]
    assert host_code(tmp_path / "absent.so") is None


@pytest.mark.parametrize(
    ("status", "verdicts", "expected"),
    [
        (0, {"PASS"}, GOOD),
        (1, {"FAIL"}, BAD),
        (1, {"FAIL", "PASS"}, BAD),
        (10, {"INCONCLUSIVE"}, SKIP),
        (11, {"INCONCLUSIVE"}, SKIP),
        (0, set(), SKIP),
        (1, set(), SKIP),
        (1, {"PASS"}, SKIP),
        (2, {"FAIL"}, SKIP),
        (3, set(), SKIP),
        (4, set(), SKIP),
        (5, set(), SKIP),
    ],
)
def test_a_bisect_trusts_only_verdicts(status: int, verdicts: set[str], expected: int) -> None:
    """0 and 1 need a verdict of a gate; every other end of a run skips the commit."""
    assert expected == status_for_bisect(status, frozenset(verdicts))


def test_trees_are_removed_with_the_builds(python: Repo) -> None:
    """`--fa-clean` deletes the trees of other revisions; the one that this run uses stays."""
    (python.cache / "trees" / "0123").mkdir(parents=True)
    session = python.session(clean=True)
    session.builds.clean()
    (at,) = Opponents.of(session.run_plan).revisions.values()
    assert [folder.name for folder in (python.cache / "trees").iterdir()] == [at.revision.tree]
