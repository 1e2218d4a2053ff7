"""The machine code of kernels for long sequences has the order that the overlap needs: exponentials before P V ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.catalog.discover import discover
from pytest_fa.records.built import Build
from tests.unit.build.listings import functions_of

KERNELS = Path(__file__).parents[3] / "kernels"
LEAST_SHARE = 0.8  # of the exponentials of a key tile that stand before the wait for P V

# After `wgmma.wait_group 1`, S is complete; after `wgmma.wait_group 0`, P V is, too.
STEP = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1 ;(?P<softmax>.*?)WARPGROUP\.DEPBAR\.LE gsb0, 0x0 ;", re.DOTALL)


SHAPE = re.compile(r"ShapeILi(?P<head_dim>\d+)ELi(?P<groups>\d+)ELi(?P<keys>\d+)E")  # in a mangled name


@pytest.fixture(scope="module", params=["long_overlap", "long_shapes", "fp8_overlap", "fp8_tiles", "fp8_max"])
def listings(
    request: pytest.FixtureRequest, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The machine code of each kernel of a variant, by its mangled name."""
    variant = discover((KERNELS,)).variants[request.param]
    build = ensure([(variant, "sm_90a")], shared_cache).outcomes[(variant.name, "sm_90a")]
    assert isinstance(build, Build), build
    functions = functions_of(shared_cache / build.library, tmp_path_factory.mktemp("cubins"))
    return {name: text for name, text in functions.items() if "wgmma_kernel" in name}


@pytest.mark.needs_nvcc
def test_exponentials_stand_before_the_wait_for_pv(listings: dict[str, str]) -> None:
    """In each step, 80 % of the exponentials or more stand between the waits for S and for P V.

    ptxas may move arithmetic below a wait.  Then P V of the previous tile no longer runs during the exponentials.
    """
    shapes = [match for name in listings if (match := SHAPE.search(name))]
    assert len(shapes) == len(listings)
    assert {match["head_dim"] for match in shapes} == {"64", "128"}
    for name, listing in listings.items():
        exponentials = [softmax.count("MUFU.EX2") for softmax in STEP.findall(listing)]
        assert len(exponentials) == 2, name  # the step with a mask and the one without
        keys = int(SHAPE.search(name)["keys"])  # type: ignore[index]  # it matched
        assert min(exponentials) >= LEAST_SHARE * keys / 2, (name, exponentials)  # 64 rows x keys / 128 threads
