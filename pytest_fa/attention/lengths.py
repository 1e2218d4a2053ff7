"""Lengths: the number of keys, if it is not that of the queries."""

from __future__ import annotations

from pytest_fa.attention.part import Part
from pytest_fa.attention.token import Number


class Lengths(Part):
    """S_k unlike S_q; 0 keys are allowed, and give an output of zeros."""

    name = "lengths"
    summary = "there are more or fewer keys than queries"
    tokens = (Number("seq_k", "sk", "keys", like="seq_q"),)
    rows = (("`-sk1024`", "1024 keys"),)


PART = Lengths()
