"""The command line: the flags of the compiler, which paths are not in it, and what changes the keys."""

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
        ("sm_120", "-gencode=arch=compute_120,code=[sm_120,compute_120]"),
        ("sm_100f", "-gencode=arch=compute_100f,code=sm_100f"),
    ],
)
def test_one_architecture(unbuilt: Workplace, arch: Arch, gencode: str) -> None:
    """Each build is for one architecture, selected by -gencode; plain ones include PTX, but not sm_89."""
    flags = command.compile_flags(unbuilt.variant(), arch)

    assert [flag for flag in flags if flag.startswith(("-gencode", "-arch", "--gpu"))] == [gencode]


@pytest.mark.needs_nvcc
def test_sm_80_build_holds_ptx(workplace: Workplace) -> None:
    """An sm_80 build holds compute_80 PTX, so newer GPUs can run it."""
    listed = subprocess.run(
        [str(find_tool("cuobjdump")), "-lptx", str(workplace.library())], capture_output=True, text=True, check=True
    )

    assert listed.stdout.count("sm_80.ptx") == 1


def test_definitions_reach_the_compiler_in_order(unbuilt: Workplace) -> None:
    """Each definition of the manifest becomes one line of the header that nvcc includes first, and no option."""
    unbuilt.write_manifest("defines: {STAGES: 2, BLOCK_M: 64, NAME: fast}\n")

    flags = command.compile_flags(unbuilt.variant(), "sm_90a")

    assert command.defines_header(unbuilt.variant()) == "#define STAGES 2\n#define BLOCK_M 64\n#define NAME fast\n"
    assert [flag for flag in flags if flag.startswith(("-D", "-include"))] == ["-include=generated/fa_defines.h"]


def test_shown_command_has_definitions_as_options(unbuilt: Workplace) -> None:
    """The command in a record, and that of a failed compilation, can be run by hand: it has -D options."""
    unbuilt.write_manifest("defines: {STAGES: 2, BLOCK_M: 64}\n")
    variant = unbuilt.variant()

    shown, failed = recipe.shown_command(variant, "sm_80"), recipe.failed_command(variant, "sm_80", TOOLCHAIN)

    for words in (shown, failed):
        assert [word for word in words if word.startswith(("-D", "-include"))] == ["-DSTAGES=2", "-DBLOCK_M=64"]


def test_manifest_flags_reach_the_compiler(unbuilt: Workplace) -> None:
    """The manifest's flags are in the command, in their order."""
    unbuilt.write_manifest("flags: [--maxrregcount=128, -use_fast_math]\n")

    words = command.compile_command(unbuilt.variant(), "sm_90a", TOOLCHAIN)

    assert [word for word in words if word in {"--maxrregcount=128", "-use_fast_math"}] == [
        "--maxrregcount=128",
        "-use_fast_math",
    ]


@pytest.mark.parametrize("arch", ARCHES)
def test_flags_hold_no_path_of_this_machine(unbuilt: Workplace, arch: Arch) -> None:
    """The flags contain no absolute path, so they are the same on all machines."""
    flags = command.compile_flags(unbuilt.variant(), arch)

    assert [
        flag for flag in flags if "/" in flag and flag not in ("-Iroot/include", "-include=generated/fa_defines.h")
    ] == []


def test_command_of_a_variant(unbuilt: Workplace) -> None:
    """The command names the host compiler, the source by its link, the depfile and the binding."""
    words = command.compile_command(unbuilt.variant(), "sm_90a", TOOLCHAIN)

    assert words[:3] == ["/opt/cuda/bin/nvcc", "-ccbin", "/usr/bin/g++"]
    assert words[words.index("-MF") + 1] == "deps.d"
    assert words[words.index("-o") + 1 :][:3] == ["kernel.so", "src/kernel.cu", "binding/binding.o"]
    assert "-L/opt/cuda/lib64" in words


def test_links_point_to_the_sources(unbuilt: Workplace) -> None:
    """The links point to the variant's folder, its root and the packaged headers."""
    roots = command.links(unbuilt.variant())

    assert (roots["src"], roots["root"]) == (unbuilt.folder, unbuilt.root)
    assert (roots["fa"] / "fa_forward.h").is_file()


def test_instantiations_header(unbuilt: Workplace) -> None:
    """The manifest's pairs of dtype and head_dim are in one macro."""
    unbuilt.write_manifest("supports: {dtype: [fp16, bf16], head_dim: [64, 128]}\n")

    assert command.instantiations_header(unbuilt.variant()) == (
        "#define FA_FOR_EACH_INSTANTIATION(X) X(fp16, 64) X(fp16, 128) X(bf16, 64) X(bf16, 128)\n"
    )


@pytest.mark.parametrize(
    ("manifest", "changes"),
    [
        ("defines: {STEP: 2}\n", True),
        ("flags: [-lineinfo]\n", True),
        ("supports: {head_dim: [128]}\n", True),
        ("limits: {spill_bytes: 0}\n", False),
        ("tolerance: absolute\n", False),
        ("role: ablation\n", False),
    ],
)
def test_request_key_changes_with_what_affects_the_code(unbuilt: Workplace, manifest: str, *, changes: bool) -> None:
    """Definitions, flags and instantiations change the request key; limits, tolerance and role do not."""
    before = recipe.request_key(unbuilt.variant(), "sm_80")

    unbuilt.write_manifest(manifest)

    assert (recipe.request_key(unbuilt.variant(), "sm_80") != before) == changes


def test_request_key_is_the_same_in_another_folder(unbuilt: Workplace, tmp_path: Path) -> None:
    """The request key does not depend on the folder."""
    before = recipe.request_key(unbuilt.variant(), "sm_80")

    unbuilt.root.rename(tmp_path / "moved")
    unbuilt.root, unbuilt.folder = tmp_path / "moved", tmp_path / "moved" / "tile"

    assert recipe.request_key(unbuilt.variant(), "sm_80") == before


@pytest.mark.parametrize("name", command.COMPILER_ENVIRONMENT)
def test_toolchain_key_changes_with_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each environment variable that nvcc and g++ read changes the toolchain key."""
    monkeypatch.delenv(name, raising=False)
    before = command.toolchain_key(TOOLCHAIN)

    monkeypatch.setenv(name, "-lineinfo")

    assert command.toolchain_key(TOOLCHAIN) != before


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        ({"versions": ("release 13.1", "ptxas", "g++ 12.2.0")}, True),
        ({"stamps": (("/opt/cuda/bin/nvcc", 101, 1), ("/usr/bin/g++", 200, 2))}, True),
        ({"stamps": (("/opt/cuda/bin/nvcc", 100, 1), ("/usr/bin/g++", 200, 3))}, True),
        ({"stamps": (("/usr/local/bin/nvcc", 100, 1), ("/usr/bin/g++", 200, 2))}, False),
        ({"home": "/usr/local/cuda"}, False),
    ],
    ids=["version", "size", "time", "folder", "home"],
)
def test_toolchain_key_changes_with_the_programs(change: dict[str, object], *, changes: bool) -> None:
    """Versions, sizes and times of the programs change the key; their folders do not."""
    changed = msgspec.structs.replace(TOOLCHAIN, **change)

    assert (command.toolchain_key(changed) != command.toolchain_key(TOOLCHAIN)) == changes
