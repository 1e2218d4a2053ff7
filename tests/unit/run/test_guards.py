"""Guard bands: alignment, strides, damage, and where workspaces come from."""

from __future__ import annotations

import pytest
import torch

from pytest_fa.run.guards import ALIGNMENT_BYTES, Workspaces, guard, guard_output

BHSD = torch.arange(2 * 3 * 5 * 8, dtype=torch.float16).view(2, 3, 5, 8)
BSHD = BHSD.transpose(1, 2).contiguous().transpose(1, 2)
CPU = torch.device("cpu")


@pytest.mark.parametrize("tensor", [BHSD, BSHD, BHSD.bfloat16()], ids=["bhsd", "bshd", "bf16"])
def test_a_guarded_input_is_the_same_tensor(tensor: torch.Tensor) -> None:
    """Values, strides and dtype are kept, the start is aligned like any allocation, both neighbours are NaN."""
    found = guard(tensor).tensor
    elements = torch.as_strided(found, (2,), (found.numel() + 1,), found.storage_offset() - 1)

    assert torch.equal(found, tensor)
    assert (found.stride(), found.dtype) == (tensor.stride(), tensor.dtype)
    assert (found.storage_offset() * 2) % ALIGNMENT_BYTES == 0
    assert bool(elements.isnan().all())


def test_a_guarded_output_is_poison() -> None:
    """Every element of an output is NaN before the call, and its bands are intact."""
    found = guard_output(BHSD)

    assert (bool(found.tensor.isnan().all()), found.damage) == (True, "")


@pytest.mark.parametrize(
    ("offset", "damage"),
    [
        (240, "2 bytes past its end, the nearest 0 bytes from it"),
        (243, "2 bytes past its end, the nearest 6 bytes from it"),
        (-2, "2 bytes before its start, the nearest 2 bytes from it"),
    ],
)
def test_damage_is_located(offset: int, damage: str) -> None:
    """One element written beside the tensor is found, on its side, with its distance."""
    guarded = guard_output(BHSD)
    torch.as_strided(guarded.tensor, (1,), (1,), guarded.tensor.storage_offset() + offset).fill_(0.0)

    assert guarded.damage == damage


def test_workspaces_are_plain_outside_checks() -> None:
    """A timed call gets a workspace of just its size."""
    found = Workspaces()(100, CPU)

    assert (found.shape, found.dtype, found.untyped_storage().nbytes()) == ((100,), torch.uint8, 100)


def test_workspaces_are_poisoned_and_guarded_in_checks() -> None:
    """A checked call's workspace is NaN throughout, and a write past it is found."""
    workspaces = Workspaces()
    with workspaces.guarded():
        found = workspaces(101, CPU)
        assert bool(found[:100].view(torch.float16).isnan().all())
        torch.as_strided(found, (1,), (1,), found.storage_offset() + 102).fill_(1)

    assert (len(found), [each.damage for each in workspaces.kept.values()]) == (
        101,
        ["2 bytes past its end, the nearest 0 bytes from it"],
    )
