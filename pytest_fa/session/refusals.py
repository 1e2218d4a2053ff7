"""The exceptions that skip a test."""

from __future__ import annotations

from pytest_fa.errors import FaError


class CannotRun(FaError):
    """This machine lacks something that the test needs."""


class Refused(CannotRun):
    """The variant does not support the case or the property, on any machine."""
