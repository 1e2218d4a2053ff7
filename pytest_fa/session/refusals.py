"""Why an item of a run is skipped."""

from __future__ import annotations

from pytest_fa.errors import FaError


class CannotRun(FaError):
    """This machine lacks something that the item needs."""


class Refused(CannotRun):
    """The variant does not take the case, on any machine."""
