"""What a gate adds to a record is read back with its type, within the ranges of its figures."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.features.gate.gated import Gate
from pytest_fa.records.read import read_record
from pytest_fa.records.record import to_builtins
from tests.factories import record

GATE = Gate(
    0.95, "PASS", "every interval is below 0.95", 6, 0, 0, 0.01, 0.002, 20.0, {"b1h2s64d64-fp16": {"a": 1.0}}, ()
)
GATED = GATE.to(msgspec.structs.replace(record(kind="gate"), case=None))


def test_a_gate_is_read_back_equal() -> None:
    """A record of a gate passes through JSON, and then has the same gate."""
    read = read_record(to_builtins(GATED))
    assert (read, Gate.of(read)) == (GATED, GATE)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ratio", 1e200), ("processes", -1), ("seconds", "many"), ("verdict", "MAYBE"), ("pilot_us", {"x": {"a": -1.0}})],
)
def test_an_impossible_figure_is_refused(field: str, value: object) -> None:
    """A record with a figure that no gate can have is refused, with the place of the figure."""
    content = to_builtins(GATED)
    content["added"]["gate"][field] = value
    with pytest.raises(msgspec.ValidationError, match=rf"`\$\.added\.gate\.{field}"):
        read_record(content)
