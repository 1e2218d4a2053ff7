"""Guard bands: alignment, strides and damage; and the workspaces of timed and of checked calls."""

from __future__ import annotations

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.gpu.guards import ALIGNMENT_BYTES, Workspaces, guard, guard_output

BHSD = torch.arange(2 * 3 * 5 * 8, dtype=torch.float16).view(2, 3, 5, 8)
BSHD = BHSD.transpose(1, 2).contiguous().transpose(1, 2)
CPU = torch.device("cpu")


@pytest.mark.parametrize("tensor", [BHSD, BSHD, BHSD.bfloat16(), BSHD.float()], ids=["bhsd", "bshd", "bf16", "fp32"])
def test_a_guarded_input_is_the_same_tensor(tensor: torch.Tensor) -> None:
    """Values, strides, dtype and alignment do not change, and the elements just before and after it are NaN."""
    guarded = guard(tensor).tensor
    adjacent = torch.as_strided(guarded, (2,), (guarded.numel() + 1,), guarded.storage_offset() - 1)

    assert torch.equal(guarded, tensor)
    assert (guarded.stride(), guarded.dtype) == (tensor.stride(), tensor.dtype)
    assert (guarded.storage_offset() * guarded.element_size()) % ALIGNMENT_BYTES == 0
    assert bool(adjacent.isnan().all())


def test_a_guarded_output_is_poison() -> None:
    """Every element of an output is NaN before the call, and its bands are intact."""
    guarded = guard_output(BHSD)

    assert (bool(guarded.tensor.isnan().all()), guarded.damage) == (True, "")


@pytest.mark.parametrize(
    ("offset", "damage"),
    [
        (240, "2 bytes past its end, the nearest 0 bytes from it"),
        (243, "2 bytes past its end, the nearest 6 bytes from it"),
        (-2, "2 bytes before its start, the nearest 2 bytes from it"),
    ],
)
def test_damage_is_located(offset: int, damage: str) -> None:
    """One element written outside the tensor is reported with its side and its distance in bytes."""
    guarded = guard_output(BHSD)
    torch.as_strided(guarded.tensor, (1,), (1,), guarded.tensor.storage_offset() + offset).fill_(0.0)

    assert guarded.damage == damage


def test_damage_beside_fp32_is_located(snapshot: SnapshotAssertion) -> None:
    """One element of fp32 written outside the tensor is reported as four bytes."""
    guarded = guard_output(BHSD.float())
    torch.as_strided(guarded.tensor, (1,), (1,), guarded.tensor.storage_offset() + 241).fill_(0.0)

    assert snapshot == guarded.damage


def test_workspaces_are_plain_outside_checks() -> None:
    """A timed call gets an allocation of exactly the requested size."""
    workspace = Workspaces()(100, CPU)

    assert (workspace.shape, workspace.dtype, workspace.untyped_storage().nbytes()) == ((100,), torch.uint8, 100)


def test_workspaces_are_poisoned_and_guarded_in_checks(snapshot: SnapshotAssertion) -> None:
    """The workspace of a checked call is filled with NaN, and a write past its end is found."""
    workspaces = Workspaces()
    with workspaces.guarded():
        workspace = workspaces(101, CPU)
        assert bool(workspace[:100].view(torch.float16).isnan().all())
        torch.as_strided(workspace, (1,), (1,), workspace.storage_offset() + 102).fill_(1)

    assert len(workspace) == 101
    assert snapshot == [each.damage for each in workspaces.guarded_by_size.values()]
