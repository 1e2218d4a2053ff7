"""A bundle of records measured on an H200 is verified; every edit of a value or of a verdict is noticed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.features.bundle.archive import read_archive
from pytest_fa.features.bundle.commands import main
from pytest_fa.features.bundle.make import make_bundle
from pytest_fa.features.bundle.plausible import implausible
from pytest_fa.features.bundle.recompute import contradictions
from pytest_fa.features.bundle.seal import SEAL, make_seal
from pytest_fa.features.bundle.verify import Verification, _of_seal, verify_bundle
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.gate.noise import read_noise
from pytest_fa.records.arm_orders import recorded_order
from pytest_fa.records.checks import Bound
from pytest_fa.records.files import read_record_file
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record, to_json
from pytest_fa.records.source import read_source
from pytest_fa.records.timing import POWER_CAP_BIT, Agreement, NodeTime, OutsideTime, ProfilerTime, Speed
from tests import factories
from tests.factories import check
from tests.written_runs import end_run

REPOSITORY = Path(__file__).parents[3]
PROFILES = REPOSITORY / "tests" / "recorded" / "profiles" / "nvidia-h200"
RECORDS = "artifacts/records/run.jsonl"
Content = dict[str, bytes]


def _samples() -> list[Record]:
    """Two records of each kind that a run on an H200 made, and every verdict of a gate.

    They were measured before there was a judge's clock.  Each time and each gate gets one that agrees.
    """
    records = [
        record
        for name in ("cluster_latency", "swizzle_async", "sdpa_cudnn", "ws_p2")
        for record in read_record_file(PROFILES / f"{name}.jsonl").records
        if not _has_judges_clock(record)
    ]
    records.sort(key=lambda record: record.measured_at, reverse=True)
    records.sort(key=lambda record: Gate.of(record) is None)  # the build that was gated
    environment = next(record.environment for record in records if Gate.of(record))
    chosen: dict[tuple[str, str], list[Record]] = {}
    keys: dict[str, str] = {}  # a bundle has one build of each variant, the saved records have several
    for record in records:
        is_same_build = all(keys.setdefault(build.variant, build.key) == build.key for build in record.builds)
        if record.environment == environment and is_same_build:
            gate = Gate.of(record)
            verdict = gate.verdict if gate else ""
            chosen.setdefault((record.kind, verdict), []).append(record)
    return [_with_judges_clock(record) for group in chosen.values() for record in group[:2]]


def _has_judges_clock(record: Record) -> bool:
    """Whether a record has costs, as all have that were measured since there is a judge's clock."""
    gate = Gate.of(record)
    return record.costs is not None or bool(gate and gate.pairs[0].samples.outside)


def _with_judges_clock(record: Record) -> Record:
    """The record with figures of the judge's clock that are those of the candidate's own clock."""
    speed, gate = record.speed, Gate.of(record)
    if speed:
        us = speed.device.median_us
        speed = msgspec.structs.replace(speed, outside=OutsideTime(us, 0.001, us, 3000, us, 1000))
    if gate:
        samples = [msgspec.structs.replace(pair.samples, outside=tuple(pair.samples.means)) for pair in gate.pairs]
        pairs = [msgspec.structs.replace(pair, samples=own) for pair, own in zip(gate.pairs, samples, strict=True)]
        gate = msgspec.structs.replace(gate, pairs=tuple(pairs))
    changed = msgspec.structs.replace(record, speed=speed)
    return gate.to(changed) if gate else changed


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle of those records, with the GPU's ceilings and noise among its source files."""
    tree = tmp_path_factory.mktemp("tree")
    (tree / "profiles/nvidia-h200").mkdir(parents=True)
    for name in ("ceilings.json", "noise.json"):
        (tree / "profiles/nvidia-h200" / name).write_bytes((PROFILES / name).read_bytes())
    (tree / ".gitignore").write_text("/artifacts/\n", encoding="utf-8")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *words], cwd=tree, check=True)
    read_source.cache_clear()
    records = [msgspec.structs.replace(record, source=read_source(tree)) for record in _samples()]
    (tree / RECORDS).parent.mkdir(parents=True)
    (tree / RECORDS).write_bytes(b"".join(to_json(record) + b"\n" for record in records))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_fa.features.bundle.make.read_environment", lambda: records[0].environment)
        end_run(tree / RECORDS, 1)
        return make_bundle(tree, tree / "artifacts", tree / RECORDS, 1).archive


@pytest.fixture(scope="module")
def content(bundle: Path) -> Content:
    """Return the content of every file of the bundle."""
    with tarfile.open(bundle) as tar:
        streams = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar}
        return {name: stream.read() for name, stream in streams.items() if stream}


def _pack(folder: Path, content: Content, *, with_new_seal: bool = False) -> Path:
    """Write an archive with this content; with a new seal, all hashes fit again."""
    if with_new_seal:
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in content.items() if name != SEAL}
        content = {**content, SEAL: make_seal(hashes)}
    path = folder / "bundle.tar.gz"
    with gzip.open(path, "wb", 1) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(f"top/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def _steps(verification: Verification) -> set[str]:
    return {problem.step for problem in verification.problems}


def _lines(content: Content) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content[RECORDS].splitlines()]


def _with_lines(content: Content, lines: list[dict[str, Any]]) -> Content:
    return {**content, RECORDS: b"".join(json.dumps(line).encode() + b"\n" for line in lines)}


def test_a_bundle_is_verified(bundle: Path) -> None:
    """What `make` writes has no problem, and each kind of record is in it."""
    verification = verify_bundle(bundle)
    assert [problem.text for problem in verification.problems] == []
    assert verification.records == len(_samples())
    assert {record.kind for record in _samples()} >= {"correct", "property", "speed", "gate", "profile"}


def test_the_command(bundle: Path, tmp_path: Path, content: Content, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` ends with 0, 1 or 2, and its last line is the answer; --json prints one object."""
    assert main(["verify", str(bundle)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"VERIFIED {bundle.name}: ")
    broken = _pack(tmp_path, {**content, "extra.txt": b"x"})
    assert main(["verify", str(broken), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == [
        {"step": "integrity", "text": "extra.txt is in the archive and not listed in SHA256SUMS"},
        {"step": "consistency", "text": capsys_tree_text(broken)},
    ]
    broken.write_bytes(b"no archive")
    assert main(["verify", str(broken)]) == 2
    assert "bundle.tar.gz cannot be read as an archive" in capsys.readouterr().err


def capsys_tree_text(path: Path) -> str:
    """Return the sentence about the source tree, whose ids depend on the day."""
    return next(problem.text for problem in verify_bundle(path).problems if "source files are tree" in problem.text)


# -- changed files ----------------------------------------------------------------------------------------------------

CHANGED_FILES: dict[str, tuple[Callable[[Content], Content], str]] = {
    "no seal": (lambda files: {name: data for name, data in files.items() if name != SEAL}, "there is no SHA256SUMS"),
    "no manifest": (
        lambda files: {name: data for name, data in files.items() if "manifest" not in name},
        "manifest.yaml cannot be read",
    ),
    "no records": (lambda files: {name: data for name, data in files.items() if name != RECORDS}, "it is not in the"),
    "another file": (lambda files: {**files, "profiles/x.py": b"x"}, "profiles/x.py is in the archive and not listed"),
    "a listed file missing": (
        lambda files: {name: data for name, data in files.items() if name != ".gitignore"},
        ".gitignore is listed in SHA256SUMS and not in the archive",
    ),
    "a changed file": (lambda files: {**files, ".gitignore": b"*"}, ".gitignore has another sha256"),
    "a seal with another line": (lambda files: {**files, SEAL: files[SEAL] + b"x\n"}, "is not of the form"),
    "a name listed twice": (
        lambda files: {**files, SEAL: files[SEAL] + files[SEAL].splitlines(keepends=True)[0]},
        "twice",
    ),
    "an unreadable record": (lambda files: {**files, RECORDS: files[RECORDS] + b"{}\n"}, "lines cannot be read"),
    "random bytes as records": (lambda files: {**files, RECORDS: bytes(range(256))}, "lines cannot be read"),
    "another schema": (
        lambda files: {
            **files,
            "artifacts/manifest.yaml": files["artifacts/manifest.yaml"].replace(b"schema: 3\nc", b"schema: 1\nc"),
        },
        "its schema is 1; this version reads schema 3",
    ),
    "a manifest with a tag": (
        lambda files: {**files, "artifacts/manifest.yaml": b"!!python/object/apply:os.system [true]"},
        "manifest.yaml cannot be read",
    ),
}


@pytest.mark.parametrize("change", CHANGED_FILES)
def test_changed_files(tmp_path: Path, content: Content, change: str) -> None:
    """A file that is missing, added, changed or malformed is named."""
    edit, sentence = CHANGED_FILES[change]
    problems = verify_bundle(_pack(tmp_path, edit(content))).problems
    assert [problem.text for problem in problems if sentence in problem.text], problems


# -- changed values ---------------------------------------------------------------------------------------------------


def _numbers(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every number and every truth value in a JSON value."""
    if isinstance(value, dict):
        return [inner for key, item in value.items() for inner in _numbers(item, (*path, key))]
    if isinstance(value, list):
        return [inner for index, item in enumerate(value) for inner in _numbers(item, (*path, index))]
    return [path] if isinstance(value, int | float) else []


def _set(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = change(value[path[-1]])


def test_every_edit_of_a_number_is_noticed_by_its_hash(tmp_path: Path, content: Content) -> None:
    """100 random edits of one number each are all noticed, because the file's hash changes."""
    draw = random.Random(3)  # noqa: S311  # not for cryptography
    missed = []
    for _ in range(100):
        lines = _lines(content)
        line = draw.choice(lines)
        path = draw.choice(_numbers(line))
        _set(line, path, lambda number: (not number) if isinstance(number, bool) else number * 1.5 + 1)
        archive = read_archive(_pack(tmp_path, _with_lines(content, lines)), lambda _: False)
        if not [problem for problem in _of_seal(archive, content[SEAL]) if RECORDS in problem.text]:
            missed.append((line["id"], path))
    assert missed == []


def _edits() -> dict[str, tuple[str, Callable[[dict[str, Any]], None]]]:
    """Return every edit of a verdict or a headline figure: the kind of its record, and the change."""

    def edit(path: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
        keys = tuple(int(key) if key.isdigit() else key for key in path.split("."))
        return lambda line: _set(line, keys, change)

    def halve(number: float) -> float:
        return number / 2

    def flip(value: bool) -> bool:  # noqa: FBT001
        return not value

    return {
        "outcome of a correct case": ("correct", edit("outcome", lambda _: "wrong")),
        "stage": ("correct", edit("stages.1.state", lambda _: "failed")),
        "check passed": ("correct", edit("check.passed", flip)),
        "bound holds": ("correct", edit("check.bounds.1.holds", flip)),
        "bound value": ("correct", edit("check.bounds.1.value", halve)),
        "allowed value": ("correct", edit("check.bounds.1.allowed", lambda value: value / 1e6)),
        "max error": ("correct", edit("check.max_abs_error", halve)),
        "rms error": ("correct", edit("check.rms_error", halve)),
        "non-finite count": ("correct", edit("check.nonfinite_count", lambda value: value + 1)),
        "bad count": ("correct", edit("check.bad_count", lambda _: 10**9)),
        "device time": ("speed", edit("speed.device.median_us", halve)),
        "call time": ("speed", edit("speed.call.median_us", halve)),
        "cold time": ("speed", edit("speed.cold.median_us", halve)),
        "precision": ("speed", edit("speed.device.precision", halve)),
        "dropped samples": ("speed", edit("speed.device.dropped", lambda _: 100)),
        "agreement": ("speed", edit("speed.agreement.valid", flip)),
        "shorter time": ("speed", edit("speed.agreement.least_us", halve)),
        "profiler time": ("speed", edit("speed.profiler.profiler_us", halve)),
        "case": ("speed", edit("case.seq_q", lambda _: 256)),
        "variant": ("speed", edit("variant", lambda _: "another")),
        "verdict": ("gate", edit("added.gate.verdict", lambda verdict: "FAIL" if verdict == "PASS" else "PASS")),
        "ratio": ("gate", edit("added.gate.pairs.0.ratio", halve)),
        "lower limit": ("gate", edit("added.gate.pairs.0.low", halve)),
        "upper limit": ("gate", edit("added.gate.pairs.0.high", lambda value: value * 2)),
        "bootstrap": ("gate", edit("added.gate.pairs.0.bootstrap_low", halve)),
        "required ratio": ("gate", _require_another_ratio),
        "trusted spread": ("gate", lambda line: line["added"]["gate"].update(least_sd_share=0.1)),
        "order of the arms": (
            "gate",
            lambda line: line["added"]["gate"]["pairs"][0]["samples"].update(orders=_orders(line, 1)),
        ),
        "processes": ("gate", edit("added.gate.processes", lambda count: count + 1)),
        "spread": ("gate", edit("added.gate.process_sd", halve)),
        "detectable": ("gate", edit("added.gate.detectable", lambda value: value / 4)),
        "outcome of a gate": ("gate", edit("outcome", lambda outcome: "ok" if outcome != "ok" else "gate_failed")),
        # What an outcome needs.
        "repeats that differ": ("correct", edit("repeats.differing", lambda _: 5)),
        "no repeats": ("correct", edit("repeats", lambda _: None)),
        "no repeated call": ("correct", edit("repeats.count", lambda _: 0)),
        "elements": ("correct", edit("check.element_count", lambda count: count // 2)),
        "unknown policy": ("correct", edit("check.policy", lambda _: "kind")),
        "a second stage": ("correct", edit("stages", lambda stages: [*stages, stages[0]])),
        "role": ("correct", lambda line: line.update(role="ablation", check=None)),
        "gate without a verdict": ("gate", lambda line: line.update(added={}, outcome=Outcome.OK)),
        "age of a time that counts": ("gate", _with_age),
        "pilot longer than its gate": ("gate", lambda line: line["added"]["gate"].update(pilot_seconds=1e6)),
        "no check": ("correct", edit("check", lambda _: None)),
        "no stages": ("correct", edit("stages", lambda _: [])),
        "stage not reached": ("correct", edit("stages.3.state", lambda _: "not reached")),
        "larger allowance": ("correct", edit("check.bounds.1.allowed", lambda _: 0.5)),
        "larger allowance of both": ("correct", _allow_more),
        "bound not enforced": ("correct", lambda line: line["check"]["bounds"][1].update(enforced=False)),
        "renamed bound": ("correct", edit("check.bounds.1.name", lambda _: "mean")),
        "one bound only": ("correct", edit("check.bounds", lambda bounds: bounds[:1])),
        "policy": ("correct", edit("check.policy", lambda _: "absolute")),
        "element that is shown": ("correct", edit("check.worst_got", lambda value: value + 0.25)),
        "bad elements": ("correct", edit("check.bad_count", lambda _: 3)),
        "no time": ("speed", edit("speed", lambda _: None)),
        "shape of a gate": ("gate", edit("added.gate.pairs.0.samples.shape_id", lambda _: "b1h8s4096d64-fp16")),
        "baseline of a gate": ("gate", edit("added.gate.pairs.0.samples.baseline", lambda _: "fa3")),
        "no pilot": ("gate", edit("added.gate.pilot_us", lambda _: {})),
        "unprotected": ("gate", lambda line: line.update(unprotected="no CUDA IPC")),
        "asked ratio": (
            "gate",
            lambda line: line.update(rerun_command=line["rerun_command"].replace("gate=", "gate=1")),
        ),
        "seed": ("gate", edit("added.gate.seed", lambda _: -5)),
        "schema": ("correct", edit("schema", lambda schema: schema + 1)),
        # Samples that contradict other samples, the clocks or the ceilings.
        "samples of a gate": (
            "gate",
            edit("added.gate.pairs.0.samples.blocks", lambda rows: [[value - 0.7 for value in row] for row in rows]),
        ),
        "samples of a time": (
            "speed",
            edit("speed.device", lambda timing: _scaled(timing, 1 / 30)),
        ),
        "slow calls": ("speed", edit("speed.call", lambda timing: _scaled(timing, 1 / 30))),
        "long samples": ("speed", edit("speed.device.calls_per_sample", lambda count: count * 10**6)),
        "profiler's node": ("speed", edit("speed.profiler.nodes.0.mean_us", lambda value: value * 3)),
        "commit": ("correct", edit("source.commit", lambda _: "0" * 40)),
        "GPU": ("correct", edit("environment.driver", lambda _: "1.0")),
        "time of day": ("correct", edit("measured_at", lambda _: "2999-01-01T00:00:00+00:00")),
        "build key": ("correct", edit("builds.0.key", lambda key: key[::-1])),
        "code identity": ("correct", edit("builds.0.code_identity", lambda _: "0" * 64)),
        "compiler": ("correct", edit("builds.0.compiler", lambda _: "another")),
    }


def _of_agreement(record: Record) -> list[str]:
    """What the times of a record contradict in its agreement."""
    return [problem for problem in contradictions(record, None, 0.01) if problem.startswith("the agreement says")]


def _timed() -> tuple[Record, Speed]:
    """A record with a time, and that time."""
    record = next(record for record in _samples() if record.speed and record.speed.agreement and record.speed.profiler)
    assert record.speed is not None
    return record, record.speed


def test_the_clock_of_the_judge_is_compared_again() -> None:
    """A time that the judge's clock contradicts, or that lacks it, cannot say that it is confirmed."""
    timed, speed = _timed()
    device_us = speed.device.median_us
    agrees = OutsideTime(device_us, 0.001, device_us, 3000, device_us, 1000)
    longer = msgspec.structs.replace(agrees, median_us=2 * device_us)
    times = [msgspec.structs.replace(speed, outside=outside) for outside in (agrees, longer, None)]
    lies = [bool(_of_agreement(msgspec.structs.replace(timed, speed=each))) for each in times]
    assert lies == [False, True, True]


def test_the_profilers_time_of_short_kernels_is_compared_again() -> None:
    """A difference of 0.45 us to the profiler confirms a time of a short kernel, one of 0.6 us does not."""
    timed, speed = _timed()
    outside = OutsideTime(5.0, 0.001, 5.0, 3000, 5.0, 1000)
    device = msgspec.structs.replace(speed.device, median_us=5.0)
    lies = []
    for difference_us, valid in ((0.3, True), (0.45, True), (0.45, False), (0.3, False), (0.6, True)):
        profiled_us = 5.0 + difference_us
        profiler = ProfilerTime(profiled_us, 0.0, (NodeTime("kernel", profiled_us, 1),), 0)
        agreement = Agreement(valid, "", 5.0)
        changed = msgspec.structs.replace(
            speed, device=device, outside=outside, profiler=profiler, agreement=agreement, call=device
        )
        lies.append(bool(_of_agreement(msgspec.structs.replace(timed, speed=changed))))
    assert lies == [False, False, True, True, True]


def test_the_proof_sample_is_compared_again() -> None:
    """Calls with outputs of their own that take 12 % longer contradict a confirmed time."""
    timed, speed = _timed()
    device = msgspec.structs.replace(speed.device, median_us=100.0)
    profiler = ProfilerTime(100.0, 0.0, (NodeTime("kernel", 100.0, 1),), 0)
    lies = []
    for proof_us in (104.0, 112.0, 118.0):
        outside = OutsideTime(100.0, 0.001, 100.0, 3000, proof_us, 1000)
        agreement = Agreement(valid=True, reason="", least_us=100.0)
        changed = msgspec.structs.replace(
            speed, device=device, outside=outside, profiler=profiler, agreement=agreement, call=device
        )
        lies.append(bool(_of_agreement(msgspec.structs.replace(timed, speed=changed))))
    assert lies == [False, True, True]


def _with_age(line: dict[str, Any]) -> None:
    """Say that the pilot's time of a baseline that is compared was measured by an earlier gate."""
    samples = line["added"]["gate"]["pairs"][0]["samples"]
    line["added"]["gate"]["pilot_age_seconds"] = {samples["shape_id"]: {samples["baseline"]: 20.0}}


def _allow_more(line: dict[str, Any]) -> None:
    """Allow more in both bounds, by the same amount of rounding, which is no distance between numbers."""
    largest, rms = line["check"]["bounds"][1:3]
    largest["allowed"] += 0.3
    rms["allowed"] += 0.075


def _require_another_ratio(line: dict[str, Any]) -> None:
    """Change what the gate required so that its verdict is another one."""
    line["added"]["gate"]["ratio"] *= 0.01 if line["added"]["gate"]["verdict"] == "PASS" else 100


def _orders(line: dict[str, Any], offset: int) -> list[dict[str, Any]]:
    """Return the orders of the arms in the first pair of a gate, for its seed plus `offset`."""
    processes = range(line["added"]["gate"]["processes"])
    orders = (recorded_order(3, line["added"]["gate"]["seed"] + process + offset) for process in processes)
    return [msgspec.to_builtins(order) for order in orders]


def _scaled(timing: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return a timing whose samples and median are scaled consistently."""
    samples = [factor * sample for sample in timing["samples_us"]]
    return {**timing, "samples_us": samples, "median_us": factor * timing["median_us"]}


EDITS = _edits()


def test_the_right_order_of_the_arms_is_accepted(content: Content) -> None:
    """A gate whose arms were in the order of its seed has no contradiction."""
    (line, *_) = [line for line in _lines(content) if line["kind"] == "gate" and line["added"]]
    line["added"]["gate"]["pairs"][0]["samples"]["orders"] = _orders(line, 0)
    noise = read_noise(PROFILES.parent, "NVIDIA H200")
    assert noise is not None
    assert contradictions(read_record(json.dumps(line)), None, noise.process_sd) == []


@pytest.mark.parametrize(("method", "is_accepted"), [("wall clock of 3 calls", True), ("one replay of a graph", False)])
def test_a_cpu_may_be_slower_in_the_pilot(content: Content, method: str, is_accepted: bool) -> None:  # noqa: FBT001
    """The ratio of the pilot's times binds a gate on a GPU only: on a loaded CPU they may be far off."""
    (line, *_) = [line for line in _lines(content) if line["kind"] == "gate" and line["added"]]
    for pair in line["added"]["gate"]["pairs"]:
        pair["method"] = method
    for times in line["added"]["gate"]["pilot_us"].values():
        times[line["variant"]] *= 2
    problems = [each for each in implausible(read_record(json.dumps(line))) if "the pilot's times give" in each]
    assert (problems == []) is is_accepted


# MHz before, during and after the timed calls, and under the profiler; the throttle reason; the share of `device_us`.
CLOCKS = {
    "capped": ((1980, 1800, 1800, 1470), POWER_CAP_BIT, 0.85, True),
    "capped, but not as much": ((1980, 1800, 1800, 1470), POWER_CAP_BIT, 0.8, False),
    "not capped": ((1980, 1470, 1470, 1980), 0, 0.85, False),
    "only low before": ((1200, 1980, 1980, 1980), POWER_CAP_BIT, 0.85, False),
    "only low under the profiler": ((1980, 1980, 1980, 1200), POWER_CAP_BIT, 0.85, False),
    "no reading": ((1980, 0, 0, 1980), POWER_CAP_BIT, 0.85, False),
    "lower than a power cap explains": ((1980, 1, 1, 1980), POWER_CAP_BIT, 0.4, False),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_a_cold_call_may_have_a_higher_clock(content: Content, name: str) -> None:
    """Calls that follow each other are slower under a power cap than a single call after a pause."""
    (*mhz, of_profiler), reasons, share, is_accepted = CLOCKS[name]
    (line, *_) = [line for line in _lines(content) if line["kind"] == "speed" and line["speed"]["cold"]]
    speed = line["speed"]
    before = {**speed["clocks_before"], "throttle_reasons": 0}
    speed["profiler"]["clocks"] = {**before, "sm_mhz": of_profiler}
    for reading, sm_mhz in zip(("clocks_before", "clocks_during", "clocks_after"), mhz, strict=True):
        speed[reading] = {**before, "sm_mhz": sm_mhz, "throttle_reasons": 0 if reading == "clocks_before" else reasons}
    speed["cold"]["median_us"] = share * speed["device"]["median_us"]
    problems = [problem for problem in implausible(read_record(json.dumps(line))) if problem.startswith("cold_us")]
    assert (problems == []) is is_accepted


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_a_verdict_is_noticed_although_all_hashes_fit(tmp_path: Path, content: Content, name: str) -> None:
    """A verdict or headline figure that does not follow from the raw numbers is noticed without any hash."""
    kind, edit = EDITS[name]
    lines = _lines(content)
    edit(next(line for line in lines if line["kind"] == kind))
    verification = verify_bundle(_pack(tmp_path, _with_lines(content, lines), with_new_seal=True))
    assert verification.problems
    assert "integrity" not in _steps(verification)


def test_a_wrong_exit_status_is_noticed(tmp_path: Path, content: Content) -> None:
    """An exit status that the records contradict is named, although all hashes fit."""
    manifest = content["artifacts/manifest.yaml"].replace(b"pytest_exit_status: 1", b"pytest_exit_status: 0")
    path = _pack(tmp_path, {**content, "artifacts/manifest.yaml": manifest}, with_new_seal=True)
    problem, other = verify_bundle(path).problems
    assert other.text == "the run ended with 1, the manifest says 0"
    assert problem.text.startswith("pytest's exit status is 0, but the records have ")


@pytest.mark.parametrize(
    ("dtype", "value", "is_accepted"), [("fp32", 0.001, True), ("fp32", 0.003, False), ("fp16", 0.001, False)]
)
def test_the_largest_error_and_its_bound(dtype: str, value: float, is_accepted: bool) -> None:  # noqa: FBT001
    """In fp32, bound `max` may have another element than the largest error, but not a larger one."""
    plain = check(Bound("max", value, 0.004, True))
    judged = msgspec.structs.replace(plain, max_abs_error=0.002)
    problems = contradictions(factories.record("mine", f"b1h1s64d64-{dtype}-seed0", check=judged), None, 0.008)
    assert (not any(problem.startswith("max_abs_error is") for problem in problems)) is is_accepted
