"""The machine code of kernels for long sequences: the order that the overlap needs, and where addresses are kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.catalog.discover import discover
from pytest_fa.records.built import Build
from tests.unit.build.listings import functions_of

KERNELS = Path(__file__).parents[3] / "kernels"
# At D = 128, ptxas moves nearly all exponentials of these kernels below the wait, because O, P V of a tile and S take
# most of the registers.  P V of one warpgroup then runs during the exponentials of the other one only.
OUT_OF_ORDER = dict.fromkeys(
    ("fp8_tiles", "fp8_max", "fp8_split", "fp8_four", "fp8_stages"), ("128", "128")
)  # D and the keys of a tile
# Only calls without a mask divide work tiles.  There, only a negative scale leads to the step with a mask.  With one
# warpgroup at D = 128 in e4m3, ptxas moves the exponentials of that step.
WITHOUT_MASK = re.compile(r"Divided|SplitTiles|fp8_\w+ShapeILi128ELi1E")
MIN_SHARE = 0.8  # of the exponentials of a key tile that stand before the wait for P V

# After `wgmma.wait_group 1`, S is complete; after `wgmma.wait_group 0`, P V is, too.
STEP = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1 ;(?P<softmax>.*?)WARPGROUP\.DEPBAR\.LE gsb0, 0x0 ;", re.DOTALL)
# With P V in halves, as in e4m3 with four warpgroups, half of the exponentials stand before the wait for the first one,
# and half before the other wait.
AFTER_S = STEP.pattern[STEP.pattern.index("(?P") :]
STEP_IN_HALVES = re.compile(STEP.pattern + AFTER_S.replace("softmax", "other"), re.DOTALL)

SHAPE = re.compile(r"ShapeILi(?P<head_dim>\d+)ELi(?P<groups>\d+)ELi(?P<keys>\d+)E")  # in a mangled name


# From a wait for all products to the next wait for S: the start of both products of a step stands there.
START = re.compile(
    r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0 ;((?:(?!WARPGROUP\.DEPBAR).)*)WARPGROUP\.DEPBAR\.LE gsb0, 0x1 ;", re.DOTALL
)
MAX_MOVES = 4  # from a register per lane to a uniform one, in a step

LONG_RUNGS = ("long_overlap", "long_tail", "long_from_end", "long_heads_tail")
E4M3_RUNGS = ("fp8_tiles", "fp8_max", "fp8_keys", "fp8_split", "fp8_four", "fp8_stages")


@pytest.fixture(scope="module", params=(*LONG_RUNGS, *E4M3_RUNGS))
def listings(
    request: pytest.FixtureRequest, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The machine code of each kernel of a variant, by its mangled name."""
    functions = _kernels_of(request.param, shared_cache, tmp_path_factory.mktemp("cubins"))
    return {name: text for name, text in functions.items() if not _is_out_of_order(request.param, name)}


def _kernels_of(rung: str, cache: Path, folder: Path) -> dict[str, str]:
    variant = discover((KERNELS,)).variants[rung]
    build = ensure([(variant, "sm_90a")], cache).outcomes[(variant.name, "sm_90a")]
    assert isinstance(build, Build), build
    return {
        name: text for name, text in functions_of(cache / build.library, folder).items() if "transpose_v" not in name
    }


def _is_out_of_order(rung: str, name: str) -> bool:
    match = SHAPE.search(name)
    return match is not None and (match["head_dim"], match["keys"]) == OUT_OF_ORDER.get(rung)


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_exponentials_stand_before_the_wait_for_pv(listings: dict[str, str]) -> None:
    """In each step, 80 % of the exponentials or more stand between the waits for S and for P V.

    ptxas may move arithmetic below a wait.  Then P V of the previous tile no longer runs during the exponentials.
    """
    shapes = [match for name in listings if (match := SHAPE.search(name))]
    assert len(shapes) == len(listings)
    head_dims = {match["head_dim"] for match in shapes}
    assert "64" in head_dims or head_dims == {"80", "96", "112"}  # those of long_heads_tail
    for name, listing in listings.items():
        match = SHAPE.search(name)
        assert match
        step = STEP_IN_HALVES if match["groups"] == "4" and "fp8_" in name else STEP
        steps = [found.groups() for found in step.finditer(listing)]
        assert len(steps) == 2, name  # the step with a mask and the one without
        for halves in steps[WITHOUT_MASK.search(name) is not None :]:
            exponentials = [softmax.count("MUFU.EX2") for softmax in halves]
            all_of_lane = int(match["keys"]) / 2  # 64 rows x keys / 128 threads
            assert min(exponentials) >= MIN_SHARE * all_of_lane / len(halves), (name, exponentials)


def _moves_of(rung: str, cache: Path, folder: Path) -> dict[str, int]:
    """The R2UR at the start of a step, the most of each kernel."""
    listings = _kernels_of(rung, cache, folder)
    return {name: max(text.count("R2UR") for text in START.findall(listing)) for name, listing in listings.items()}


@pytest.mark.nightly
@pytest.mark.needs_nvcc
@pytest.mark.parametrize("rung", ["long_list", "long_ragged", "long_from_end", "long_heads_tail"])
def test_the_addresses_of_key_tiles_are_in_uniform_registers(rung: str, shared_cache: Path, tmp_path: Path) -> None:
    """Else each wgmma needs a move, and a step has over a sixth more instructions."""
    moves = _moves_of(rung, shared_cache, tmp_path)
    assert max(moves.values()) <= MAX_MOVES, moves
