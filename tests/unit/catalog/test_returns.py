"""`returns` in a manifest, and the words of `entry.call` that belong to it."""

from __future__ import annotations

import pytest

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Call
from pytest_fa.errors import ManifestError
from tests.factories import WriteVariant

PYTHON = "entry: {target: 'entry:forward'}\n"


def with_call(call: str, returns: str = "[out, lse]") -> str:
    """Return a manifest with this `entry.call` and `returns`."""
    return f"entry: {{target: 'entry:forward', call: {{{call}}}}}\nreturns: {returns}\n"


def test_returns(write_variant: WriteVariant) -> None:
    """By default a variant returns its output; a member of `variants` may differ from the folder."""
    text = f"{PYTHON}returns: [out, lse]\nvariants:\n  both: {{}}\n  one: {{returns: [out]}}\n"
    folder = write_variant("thing", manifest=text)
    assert [each.returns for each in read_manifest(folder / "variant.yaml", folder)] == [("out", "lse"), ("out",)]
    folder = write_variant("plain", manifest=PYTHON)
    assert [each.returns for each in read_manifest(folder / "variant.yaml", folder)] == [("out",)]


@pytest.mark.parametrize(
    ("call", "places"),
    [
        ("returns: 1", (1, None)),
        ("returns: [out, lse]", (0, 1)),
        ("returns: [null, lse, out]", (2, 1)),
        ("arguments: [q, k, v, out, lse]", (None, None)),
    ],
)
def test_places(write_variant: WriteVariant, call: str, places: tuple[int | None, int | None]) -> None:
    """`entry.call.returns` is the index of the output, or names the items that a function returns."""
    returns = "[out, lse]" if "lse" in call else "[out]"
    folder = write_variant("thing", manifest=with_call(call, returns))
    (variant,) = read_manifest(folder / "variant.yaml", folder)
    assert isinstance(variant.entry.call, Call)
    assert (variant.entry.call.place_of("out"), variant.entry.call.place_of("lse")) == places


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{PYTHON}returns: [lse]\n", "returns is [lse]; allowed are [out] and [out, lse]"),
        (f"{PYTHON}returns: [out, m]\n", "returns[1] is 'm'; allowed: out, lse, dq, dk, dv, dbias, dsink"),
        (
            f"{PYTHON}returns: [dq, dk, dv]\n",
            "returns is [dq, dk, dv], but computes is 'attention'; write `computes: gradients`",
        ),
        (
            f"{PYTHON}computes: gradients\nreturns: [out, dq, dk, dv]\n",
            (
                "returns is [out, dq, dk, dv], but computes is 'gradients'; write [dq, dk, dv], which dbias and dsink "
                "may follow, or drop returns"
            ),
        ),
        (
            f"{PYTHON}role: probe\ncomputes: scores\ncases: [b1h1s4d64-fp16]\nreturns: [out, lse]\n",
            "returns is [out, lse], but computes is 'scores', which have no log-sum-exp; write [out]",
        ),
        (
            with_call("arguments: [q, k, v]"),
            (
                "returns is [out, lse], but entry.call names no 'lse'; add it to arguments if the function writes it, "
                "or write `returns: [out, lse]` in entry.call if the function returns it"
            ),
        ),
        (
            with_call("returns: [out, lse]", "[out]"),
            "entry.call names 'lse', but returns is [out]; write `returns: [out, lse]` at the top level, too",
        ),
        (
            with_call("arguments: [q, k, v, lse], returns: [out, lse]"),
            "entry.call passes 'lse' and names it in returns; use only one of the two",
        ),
        (
            with_call("returns: [null, lse]"),
            "entry.call.returns has no 'out', and 'out' is not passed; add 'out' to one of them",
        ),
    ],
)
def test_problems(write_variant: WriteVariant, text: str, problem: str) -> None:
    """A manifest that contradicts itself is refused with the values found and the line to write."""
    folder = write_variant("thing", manifest=text)
    with pytest.raises(ManifestError) as raised:
        read_manifest(folder / "variant.yaml", folder)
    assert str(raised.value) == f"{folder / 'variant.yaml'}: {problem}"
