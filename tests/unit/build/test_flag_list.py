"""The list of allowed compiler flags: what is on it, and that a flag which starts a program is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.build.builder import ensure
from pytest_fa.build.flag_list import refusal, unlisted_flags
from pytest_fa.build.outcomes import BuildFailure
from tests.unit.build.conftest import build_of

if TYPE_CHECKING:
    from tests.unit.build.conftest import Workplace

LISTED = [
    "-O3",
    "-lineinfo",
    "--use_fast_math",
    "-use_fast_math",
    "--maxrregcount=128",
    "-ftz=true",
    "--expt-relaxed-constexpr",
    "--extended-lambda",
    "-std=c++20",
    "-Xptxas=-O3,-dlcm=ca,--register-usage-level=10",
    "-Xcompiler=-fopenmp,-Wall,-Wno-unused-parameter,-march=native",
    "-I../../third_party/cutlass/include",
    "-DNDEBUG",
    "-DWIDTH=8",
    "-UNDEBUG",
    "-lcuda",
    "-diag-suppress=177,550",
    "-Xcudafe=--diag_suppress=177",
]
# Each of these starts a program, loads a plugin, or writes to a file of its choice.
UNLISTED = [
    "-ccbin=/tmp/evil",
    "--compiler-bindir=/tmp/evil",
    "-Xcompiler=-fplugin=evil.so",
    "-Xcompiler=-Wall,-fplugin=evil.so",
    "-Xcompiler=-wrapper,evil",
    "-Xcompiler=-Wl,evil",
    "-Xcompiler=-Wp,-fplugin=evil.so",
    "-Xcompiler=-Wa,-o,evil",
    "-Xcompiler=-B/tmp/evil",
    "-Xcompiler=-specs=evil",
    "-Xcompiler=-fdump-tree-all=evil",
    "-Xcompiler=@evil",
    "-Xptxas=-o,evil",
    "-Xlinker=--plugin,evil.so",
    "-o",
    "-optf=evil",
    "--options-file=evil",
    "-ldir=/tmp/evil",
    "--dont-use-profile",
    "-run",
    "--run",
    "-keep-dir=/tmp/evil",
    "-arch=sm_75",
    "--libdevice-directory=/tmp/evil",
    "-Xnvlink=evil",
    "-fopenmp",
]


@pytest.mark.parametrize("flag", LISTED)
def test_ordinary_flags_are_listed(unbuilt: Workplace, flag: str) -> None:
    """A flag that only changes code, warnings or search paths is on the list."""
    (unbuilt.folder / "../../third_party/cutlass/include").mkdir(parents=True)
    unbuilt.write_manifest(f"flags: ['{flag}']\n")
    assert unlisted_flags(unbuilt.variant()) == ()


@pytest.mark.parametrize("flag", UNLISTED)
def test_other_flags_are_not_listed(unbuilt: Workplace, flag: str, snapshot: SnapshotAssertion) -> None:
    """Any other flag is refused by name, and the message has the option that allows it."""
    unbuilt.write_manifest(f"flags: [-O3, '{flag}']\n")
    assert snapshot == refusal(unbuilt.variant(), ())
    assert refusal(unbuilt.variant(), (flag,)) is None
    assert refusal(unbuilt.variant(), ("-*",)) is None


@pytest.mark.parametrize(
    ("key", "listed", "unlisted"),
    [
        ("cflags", ["-g", "-fno-rtti", "-mavx2", "-Wextra"], "-fplugin=evil.so"),
        ("ldflags", ["-lm", "-L../lib", "-Wl,-rpath,../lib", "-pthread"], "-Wl,--plugin=evil.so"),
    ],
)
def test_flags_of_an_extension(unbuilt: Workplace, key: str, listed: list[str], unlisted: str) -> None:
    """The flags of the C++ compiler and of the linker have lists, too."""
    (unbuilt.folder / "a.cpp").write_text("", encoding="utf-8")
    entry = f"entry: {{kind: torch, sources: [a.cpp], target: f, {key}: {[*listed, unlisted]}}}\n"
    unbuilt.write_manifest(entry)
    assert unlisted_flags(unbuilt.variant()) == (unlisted,)


def test_an_unlisted_flag_fails_its_own_build(unbuilt: Workplace) -> None:
    """Without the option nothing is compiled, and nothing is started."""
    unbuilt.write_manifest(f"flags: [-ccbin={unbuilt.cache}/evil]\n")
    report = ensure([(unbuilt.variant(), "sm_80")], unbuilt.cache)
    (outcome,) = report.outcomes.values()
    assert isinstance(outcome, BuildFailure)
    assert "-ccbin=" in outcome.reason
    assert (report.compiled, report.failed) == (0, 1)
    assert list(unbuilt.cache.iterdir()) == []


@pytest.mark.needs_nvcc
def test_the_record_names_an_allowed_flag(with_binding: Workplace) -> None:
    """With the option the variant is built, and the build says which flags are not on the list."""
    with_binding.write_manifest("flags: [-Xcompiler=-fdiagnostics-color=never]\n")
    request = (with_binding.variant(), "sm_80")
    build = build_of(ensure([request], with_binding.cache, allowed_flags=("-Xcompiler=-fdiagnostics-*",)))
    assert build.unlisted_flags == ("-Xcompiler=-fdiagnostics-color=never",)


@pytest.mark.needs_nvcc
def test_the_record_names_the_environment(unbuilt: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment variables that change what the compiler does are in the build."""
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DSTEP=3")
    assert unbuilt.build().environment["NVCC_APPEND_FLAGS"] == "-DSTEP=3"
