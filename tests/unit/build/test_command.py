"""The command line: what reaches the compiler, what must never stand in it, what moves the keys."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from pytest_fa.build import command, recipe
from pytest_fa.build.toolchain import Toolchain, find_tool
from pytest_fa.catalog.variant import ARCHES, Arch

if TYPE_CHECKING:
    from tests.unit.build.conftest import Workplace

TOOLCHAIN = Toolchain(
    nvcc="/opt/cuda/bin/nvcc",
    home="/opt/cuda",
    library_folder="/opt/cuda/lib64",
    host_compiler="/usr/bin/g++",
    versions=("Cuda compilation tools, release 13.0, V13.0.88", "ptxas", "g++ 12.2.0"),
    stamps=(("/opt/cuda/bin/nvcc", 100, 1), ("/usr/bin/g++", 200, 2)),
)


@pytest.mark.parametrize(
    ("arch", "gencode"),
    [
        ("sm_80", "-gencode=arch=compute_80,code=[sm_80,compute_80]"),
        ("sm_89", "-gencode=arch=compute_89,code=sm_89"),
        ("sm_90a", "-gencode=arch=compute_90a,code=sm_90a"),
    ],
)
def test_one_architecture(unbuilt: Workplace, arch: Arch, gencode: str) -> None:
    """Each build is for one architecture, said by -gencode and never by -arch=; sm_80 alone keeps PTX."""
    flags = command.compile_flags(unbuilt.variant(), arch)

    assert [flag for flag in flags if flag.startswith(("-gencode", "-arch", "--gpu"))] == [gencode]


@pytest.mark.needs_nvcc
def test_sm_80_leaf_holds_ptx(workplace: Workplace) -> None:
    """An sm_80 build carries compute_80 PTX, so that newer GPUs can run it."""
    listed = subprocess.run(
        [str(find_tool("cuobjdump")), "-lptx", str(workplace.library())], capture_output=True, text=True, check=True
    )

    assert listed.stdout.count("sm_80.ptx") == 1


def test_definitions_reach_the_compiler_in_order(unbuilt: Workplace) -> None:
    """Every definition of the manifest becomes one -D, in the manifest's order."""
    unbuilt.write_manifest("defines: {STAGES: 2, BLOCK_M: 64, NAME: fast}\n")

    flags = command.compile_flags(unbuilt.variant(), "sm_90a")

    assert [flag for flag in flags if flag.startswith("-D")] == ["-DSTAGES=2", "-DBLOCK_M=64", "-DNAME=fast"]


def test_manifest_flags_reach_the_compiler(unbuilt: Workplace) -> None:
    """The manifest's flags stand in the command, in their order."""
    unbuilt.write_manifest("flags: [--maxrregcount=128, -use_fast_math]\n")

    words = command.compile_command(unbuilt.variant(), "sm_90a", TOOLCHAIN)

    assert [word for word in words if word in {"--maxrregcount=128", "-use_fast_math"}] == [
        "--maxrregcount=128",
        "-use_fast_math",
    ]


@pytest.mark.parametrize("arch", ARCHES)
def test_flags_hold_no_path_of_this_machine(unbuilt: Workplace, arch: Arch) -> None:
    """What shapes the code is the same text on every machine: no absolute path stands in it."""
    flags = command.compile_flags(unbuilt.variant(), arch)

    assert [flag for flag in flags if "/" in flag.replace("-Iroot/include", "")] == []


def test_command_of_a_variant(unbuilt: Workplace) -> None:
    """The compiler is told its host, reads the source by its link, says what it depends on, and links the binding."""
    words = command.compile_command(unbuilt.variant(), "sm_90a", TOOLCHAIN)

    assert words[:3] == ["/opt/cuda/bin/nvcc", "-ccbin", "/usr/bin/g++"]
    assert words[words.index("-MF") + 1] == "deps.d"
    assert words[words.index("-o") + 1 :][:3] == ["kernel.so", "src/kernel.cu", "binding/binding.o"]
    assert "-L/opt/cuda/lib64" in words


def test_links_lead_to_the_sources(unbuilt: Workplace) -> None:
    """The relative folders of the command are the variant's, its root's and the shipped headers'."""
    roots = command.links(unbuilt.variant())

    assert (roots["src"], roots["root"]) == (unbuilt.folder, unbuilt.root)
    assert (roots["fa"] / "fa_forward.h").is_file()


def test_instantiations_header(unbuilt: Workplace) -> None:
    """The manifest's pairs of dtype and head_dim become one macro."""
    unbuilt.write_manifest("supports: {dtype: [fp16, bf16], head_dim: [64, 128]}\n")

    assert command.instantiations_header(unbuilt.variant()) == (
        "#define FA_FOR_EACH_INSTANTIATION(X) X(fp16, 64) X(fp16, 128) X(bf16, 64) X(bf16, 128)\n"
    )


@pytest.mark.parametrize(
    ("manifest", "moves"),
    [
        ("defines: {STEP: 2}\n", True),
        ("flags: [-lineinfo]\n", True),
        ("supports: {head_dim: [128]}\n", True),
        ("limits: {spill_bytes: 0}\n", False),
        ("tolerance: absolute\n", False),
        ("role: ablation\n", False),
    ],
)
def test_request_key_moves_with_what_shapes_the_code(unbuilt: Workplace, manifest: str, *, moves: bool) -> None:
    """Definitions, flags and instantiations make another request; limits, tolerance and role do not."""
    before = recipe.request_key(unbuilt.variant(), "sm_80")

    unbuilt.write_manifest(manifest)

    assert (recipe.request_key(unbuilt.variant(), "sm_80") != before) == moves


def test_request_key_is_the_same_in_another_folder(unbuilt: Workplace, tmp_path: Path) -> None:
    """A request is known again on another machine: its key holds no folder."""
    before = recipe.request_key(unbuilt.variant(), "sm_80")

    unbuilt.root.rename(tmp_path / "moved")
    unbuilt.root, unbuilt.folder = tmp_path / "moved", tmp_path / "moved" / "tile"

    assert recipe.request_key(unbuilt.variant(), "sm_80") == before


@pytest.mark.parametrize("name", command.COMPILER_ENVIRONMENT)
def test_toolchain_key_moves_with_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What nvcc and g++ read from the environment is part of what a build was compiled with."""
    monkeypatch.delenv(name, raising=False)
    before = command.toolchain_key(TOOLCHAIN)

    monkeypatch.setenv(name, "-lineinfo")

    assert command.toolchain_key(TOOLCHAIN) != before


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({"versions": ("release 13.1", "ptxas", "g++ 12.2.0")}, True),
        ({"stamps": (("/opt/cuda/bin/nvcc", 101, 1), ("/usr/bin/g++", 200, 2))}, True),
        ({"stamps": (("/opt/cuda/bin/nvcc", 100, 1), ("/usr/bin/g++", 200, 3))}, True),
        ({"stamps": (("/usr/local/bin/nvcc", 100, 1), ("/usr/bin/g++", 200, 2))}, False),
        ({"home": "/usr/local/cuda"}, False),
    ],
    ids=["version", "size", "time", "folder", "home"],
)
def test_toolchain_key_moves_with_the_programs(change: dict[str, object], *, moves: bool) -> None:
    """Versions, sizes and times of the programs count; the folders they lie in do not."""
    other = msgspec.structs.replace(TOOLCHAIN, **change)

    assert (command.toolchain_key(other) != command.toolchain_key(TOOLCHAIN)) == moves


@pytest.mark.parametrize(
    ("folder", "name", "moves"), [("src", "x.h", True), ("include", "x.cuh", True), ("src", "notes.txt", False)]
)
def test_request_key_moves_with_a_header_that_may_shadow(
    unbuilt: Workplace, folder: str, name: str, *, moves: bool
) -> None:
    """A new header where an include may find it asks for a new build, though no old depfile names it."""
    variant = unbuilt.variant()
    before = recipe.request_key(variant, "sm_80")
    place = Path(variant.folder) if folder == "src" else Path(variant.root) / "include"
    place.mkdir(exist_ok=True)
    (place / name).write_text("#define X 2\n", encoding="utf-8")
    assert (recipe.request_key(variant, "sm_80") != before) == moves
