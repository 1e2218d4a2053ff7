"""`python -m pytest_fa doctor`: its lines on simulated machines, and that no broken part can stop it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.__main__ import main
from pytest_fa.features.doctor import doctor as run_module
from pytest_fa.features.doctor import machine_probes, python_probes
from pytest_fa.features.doctor.finding import Finding, Places, one_line, run_guarded
from pytest_fa.features.sanitize.sanitizer import find_sanitizer
from pytest_fa.records import environment
from pytest_fa.records.environment import Gpu
from tests.factories import FAKES, MANIFEST, PYTHON_MANIFEST, WriteVariant

REPOSITORY = Path(__file__).parents[3]
H200 = Gpu("NVIDIA H200", "GPU-aaaa", (9, 0), "580.1", "13.0")
NVCC = """\
#!/bin/sh
case "$*" in
  *--dryrun*) echo "#$ _HERE_=${0%/*}" >&2 ;;
  *--list-gpu-code*) echo sm_80; echo sm_89; echo sm_90 ;;
  *) echo 'Cuda compilation tools, release 13.0, V13.0.88' ;;
esac
"""
PROGRAM = "#!/bin/sh\necho 'g++ (Distribution 12.2.0-14) 12.2.0'\n"
TOOLS = ("bin/nvcc", "bin/ptxas", "bin/cudafe++", "nvvm/bin/cicc", "bin/g++", "bin/cuobjdump", "bin/nvdisasm")
ROOT, USER = "CapEff:\t000001ffffffffff\n", "CapEff:\t0000000000000000\n"
TORCH = """print('{"version": "2.13.0+cu130", "cuda": "13.0", "usable": true}')"""


class Computer:
    """A simulated machine in a folder: a CUDA toolkit, ncu and compute-sanitizer, a GPU and its driver."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        for name in TOOLS:
            path = folder / "toolkit" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(NVCC if name == "bin/nvcc" else PROGRAM, encoding="utf-8")
            path.chmod(0o755)
        monkeypatch.chdir(folder)
        for name in ("CUDA_HOME", "CXX", "CUDA_VISIBLE_DEVICES", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_PLUGINS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", f"{folder / 'toolkit' / 'bin'}:{FAKES}:/usr/bin:/bin")
        monkeypatch.setenv("FAKE_RECORDED", str(folder))
        monkeypatch.setattr(python_probes, "ASK_TORCH", TORCH)
        monkeypatch.setattr(python_probes, "INTERFERING", {})
        self.has(H200)
        self.counters(restricted=True, capabilities=ROOT)

    def has(self, *gpus: Gpu, others: tuple[str, ...] = ()) -> None:
        """Simulate these GPUs."""
        self._monkeypatch.setattr(environment, "find_gpu", lambda: gpus[0] if gpus else None)
        self._monkeypatch.setattr(environment, "find_gpus", lambda: list(gpus))
        self._monkeypatch.setattr(environment, "find_other_gpu_processes", lambda: others)

    def counters(self, *, restricted: bool, capabilities: str) -> None:
        """Simulate the driver's parameters and the capabilities of this process."""
        parameters, status = self.folder / "params", self.folder / "status"
        parameters.write_text(f"EnableMSI: 1\nRmProfilingAdminOnly: {int(restricted)}\n", encoding="utf-8")
        status.write_text(f"Name:\tpython\n{capabilities}", encoding="utf-8")
        self._monkeypatch.setattr(machine_probes, "DRIVER_PARAMETERS", parameters)
        self._monkeypatch.setattr(machine_probes, "PROCESS_STATUS", status)


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Computer]:
    """A simulated machine that lacks nothing."""
    find_sanitizer.cache_clear()
    yield Computer(tmp_path, monkeypatch)
    find_sanitizer.cache_clear()


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, list[str]], str]:
    """The exit status, the lines of each level without it, and the last line."""
    status = main(["doctor", "--cache", "cache", *arguments])
    *lines, last = capsys.readouterr().out.splitlines()
    levels: dict[str, list[str]] = {"ok": [], "warning": [], "missing": []}
    for line in lines:
        levels[line.split()[0]].append(line[9:])
    return status, levels, last


def test_a_machine_that_lacks_nothing(
    computer: Computer, write_variant: WriteVariant, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine with GPU, compilers and tools every line is ok, and the exit status is 0."""
    write_variant("right", manifest=PYTHON_MANIFEST, **{"entry.py": ""})
    status, levels, last = doctor(capsys)
    toolkit = computer.folder / "toolkit" / "bin"
    names = ("python: ", "packages: ", "pytest: ", "benchmark: ", "xdist: ", "disassemblers: ", "cache: ")
    lines = [line for line in levels["ok"] if not line.startswith(names)]
    assert (status, levels["warning"], levels["missing"], last) == (0, [], [], "runs work here")
    assert lines == [
        "torch: 2.13.0+cu130 with CUDA 13.0",
        "gpu: NVIDIA H200 (sm_90), driver 580.1, CUDA up to 13.0",
        f"host compiler: g++ 12.2.0 ({toolkit}/g++)",
        f"nvcc: 13.0.88 ({toolkit}/nvcc) compiles for sm_80, sm_89, sm_90a",
        f"nsight compute: 2025.3.1.0 ({FAKES}/ncu)",
        "gpu counters: this user may read them, as root",
        f"compute-sanitizer: 2025.3.1.0 ({FAKES}/compute-sanitizer)",
        "kernels: kernels: 1 variant",
        "records: profiles: none yet; --fa-save writes them",
    ]
    assert not (computer.folder / "cache").exists()


def test_a_machine_that_lacks_everything_but_python(
    computer: Computer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    """Without GPU, compilers and tools, each has a warning with what to do; CPU runs work, so the exit status is 0."""
    computer.has()
    monkeypatch.setenv("PATH", str(computer.folder))
    monkeypatch.setattr(machine_probes, "find_tool", lambda _: None)
    monkeypatch.setattr("pytest_fa.host.programs.PLACES", ())
    monkeypatch.setattr("pytest_fa.host.programs._in_wheels", lambda _: None)
    monkeypatch.setattr(python_probes, "ASK_TORCH", TORCH.replace('"13.0"', "null").replace("true", "false"))
    status, levels, last = doctor(capsys)
    assert (status, levels["missing"]) == (0, [])
    assert snapshot == last
    assert [line.split(":")[0] for line in levels["warning"]] == [
        "gpu",
        "host compiler",
        "nvcc",
        "disassemblers",
        "nsight compute",
        "compute-sanitizer",
        "kernels",
    ]
    assert all(";" in line for line in levels["warning"])
    assert "kernels: kernels: no such folder; `python -m pytest_fa new NAME` writes a variant" in levels["warning"]


@pytest.mark.parametrize(
    ("restricted", "capabilities", "level", "words"),
    [
        (True, USER, "warning", "the driver would answer ERR_NVGPUCTRPERM: this user may not read"),
        (True, ROOT, "ok", "this user may read them, as root"),
        (False, USER, "ok", "this user may read them, as every user"),
    ],
)
def test_the_permission_for_counters(
    computer: Computer,
    capsys: pytest.CaptureFixture[str],
    restricted: bool,  # noqa: FBT001  # a parameter of the test
    capabilities: str,
    level: str,
    words: str,
) -> None:
    """If the driver restricts the counters to administrators, only a process with CAP_SYS_ADMIN may read them."""
    computer.counters(restricted=restricted, capabilities=capabilities)
    lines = doctor(capsys)[1][level]
    assert [line.startswith(f"gpu counters: {words}") for line in lines if line.startswith("gpu counters")] == [True]


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            '{"version": "2.13.0+cpu", "cuda": null, "usable": false}',
            "torch: 2.13.0+cpu without CUDA, so no kernel can use the NVIDIA H200; install a torch with CUDA",
        ),
        (
            '{"version": "2.13.0", "cuda": "14.0", "usable": false}',
            (
                "torch: 2.13.0 with CUDA 14.0 cannot use the NVIDIA H200: driver 580.1 supports CUDA up to 13.0; "
                "update the driver, or install a torch for an older CUDA"
            ),
        ),
    ],
)
def test_a_torch_that_cannot_use_the_gpu(
    computer: Computer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, line: str
) -> None:
    """A torch without CUDA, or with a newer CUDA than the driver's, has a warning that names the GPU."""
    assert computer.folder.is_dir()
    monkeypatch.setattr(python_probes, "ASK_TORCH", f"print({answer!r})")
    assert line in doctor(capsys)[1]["warning"]


def test_an_old_gpu_and_an_old_driver(
    computer: Computer, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    """A GPU below sm_80, a driver older than nvcc, and other processes on the GPU have warnings."""
    computer.has(Gpu("NVIDIA T4", "GPU-b", (7, 5), "550.1", "12.4"), others=("7 python",))
    warnings = doctor(capsys)[1]["warning"]
    assert snapshot == [line.split(",")[0] for line in warnings if line.startswith(("gpu", "nvcc"))]


def test_a_broken_torch_is_missing(
    computer: Computer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    """If torch cannot be imported, no run can work: the exit status is 1, and the last line names it."""
    assert computer.folder.is_dir()
    monkeypatch.setattr(python_probes, "ASK_TORCH", "raise ImportError('libcudart.so.13 is missing')")
    status, levels, last = doctor(capsys)
    assert snapshot == levels["missing"]
    assert (status, last) == (1, "no run can work here yet: see torch")


def test_a_pytest_without_plugins_is_missing(
    computer: Computer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With PYTEST_DISABLE_PLUGIN_AUTOLOAD pytest does not find pytest-fa, unless PYTEST_PLUGINS names it."""
    assert computer.folder.is_dir()
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    status, levels, _ = doctor(capsys)
    assert (status, [line.split(":")[0] for line in levels["missing"]]) == (1, ["pytest"])
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_fa.plugin")
    assert doctor(capsys)[0] == 0


def test_a_cache_that_cannot_be_written_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no file can be written where the cache is or would be, no run can work; root cannot write to /proc either."""
    monkeypatch.setattr(run_module, "PROBES", {"cache": run_module.PROBES["cache"]})
    status, levels, _ = doctor(capsys, "--cache", "/proc/cache")
    assert (status, [line.split(": ")[:3] for line in levels["missing"]]) == (
        1,
        [["cache", "/proc/cache cannot be written", "/proc"]],
    )


def test_a_host_compiler_without_a_version(
    computer: Computer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program in CXX that prints no version, and one that does not exist, are warnings."""
    silent = computer.folder / "silent"
    silent.write_text("#!/bin/sh\n", encoding="utf-8")
    silent.chmod(0o755)
    monkeypatch.setenv("CXX", str(silent))
    monkeypatch.setattr(run_module, "PROBES", {"host": run_module.PROBES["host compiler"]})
    assert "prints no version; set CXX" in doctor(capsys)[1]["warning"][0]
    monkeypatch.setenv("CXX", "/bin/false-which-is-absent")
    assert "is not on PATH" in doctor(capsys)[1]["warning"][0]


def test_a_cache_of_every_user_is_missing(
    computer: Computer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache to which every user may write, and a file in its place, are refused as by a run."""
    monkeypatch.setattr(run_module, "PROBES", {"cache": run_module.PROBES["cache"]})
    cache = computer.folder / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    assert "every user may write to cache (mode 777)" in doctor(capsys)[1]["missing"][0]
    cache.rmdir()
    cache.write_text("", encoding="utf-8")
    assert "cache cannot be written: cache: Not a directory; " in doctor(capsys)[1]["missing"][0]


def test_broken_manifests_and_records_are_named(
    computer: Computer, write_variant: WriteVariant, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    """Each broken manifest and record file has a warning on one line, without control characters."""
    write_variant("right", manifest=PYTHON_MANIFEST, **{"entry.py": ""})
    write_variant("broken", manifest=MANIFEST + r'"\e[2J\nok": 1' + "\n")
    (computer.folder / "profiles" / "gpu").mkdir(parents=True)
    (computer.folder / "profiles" / "gpu" / "right.jsonl").write_text("{\n", encoding="utf-8")
    status, levels, last = doctor(capsys)
    assert status == 0
    assert snapshot == last
    manifest, records = levels["warning"]
    assert manifest.startswith(f"kernels: broken: {computer.folder}/kernels/broken/variant.yaml: ")
    assert "\\x1b[2J" in manifest
    assert records.startswith("records: profiles/gpu/right.jsonl: 1 of 1 lines cannot be read")


def test_packages_that_differ_from_the_constraints(
    computer: Computer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installed packages with another version than constraints.txt are a warning; those that are absent are not."""
    monkeypatch.setattr(run_module, "PROBES", {"constraints": run_module.PROBES["constraints"]})
    path = computer.folder / "constraints.txt"
    path.write_text("pytest==0.0.1\nno-such-package==1\n", encoding="utf-8")
    (line,) = doctor(capsys)[1]["warning"]
    assert line.startswith("constraints: 1 installed packages differ: pytest: installed is ")
    path.write_text("pytest 1\n", encoding="utf-8")
    (line,) = doctor(capsys)[1]["warning"]
    assert "could not be checked: UsageProblem: constraints.txt, line 1: 'pytest 1' is not of the form" in line


def test_a_probe_cannot_stop_the_doctor(snapshot: SnapshotAssertion) -> None:
    """A probe that raises or does not end becomes a warning."""

    def raises(_: Places) -> Iterator[Finding]:
        yield Finding("ok", "x", "first")
        raise OSError("second\nline")

    def hangs(_: Places) -> Iterator[Finding]:
        time.sleep(60)
        yield Finding("ok", "x", "never")

    places = Places(Path(), Path(), Path(), Path())
    lines = [finding.line for finding in run_guarded("x", raises, places)]
    assert snapshot == lines
    (finding,) = run_guarded("x", hangs, places, 0.05)
    assert snapshot == finding.line


def test_a_line_is_one_short_printable_line() -> None:
    """A text with line breaks, control characters or thousands of characters is one line of 400 characters at most."""
    assert one_line("a\nb\x1b[2J\u202e") == "a b\\x1b[2J\\u202e"
    assert len(one_line("x" * 10_000)) == 400


def test_it_works_without_the_dependencies(tmp_path: Path) -> None:
    """Without any dependency of pytest-fa the doctor names those that are missing, and does not end in a traceback."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "pytest_fa").symlink_to(REPOSITORY / "pytest_fa")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
from pytest_fa.__main__ import main
sys.exit(main(["doctor"]))
"""
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (1, "")
    lines = process.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("missing")] == ["missing  pytest"]
    assert [line for line in lines if "could not be checked: ModuleNotFoundError: No module named 'msgspec'" in line]


def test_it_prints_no_secrets(tmp_path: Path) -> None:
    """No value of an environment variable that holds a secret is printed."""
    secrets = {name: f"hidden-{index}" for index, name in enumerate(("GITHUB_TOKEN", "HF_TOKEN", "PIP_INDEX_URL"))}
    process = subprocess.run(
        [sys.executable, "-m", "pytest_fa", "doctor"],
        cwd=tmp_path,
        env={**os.environ, **secrets, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "hidden-" not in process.stdout + process.stderr
