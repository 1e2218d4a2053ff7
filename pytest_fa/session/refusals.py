"""The exceptions that end a test without a verdict: most of them skip it."""

from __future__ import annotations

from pytest_fa.errors import FaError
from pytest_fa.records.record import Record


class CannotRun(FaError):
    """This machine lacks something that the test needs."""


class Refused(CannotRun):
    """The variant does not support the case or the property, on any machine."""


class ChangedMeanwhile(CannotRun):
    """Files changed while they were measured.  This fails the test: what was measured says nothing about them."""


class NotJudged(CannotRun):
    """A full disk or a limit of the shell kept this machine from judging the variant.  This fails the test."""


class AlreadyReported(FaError):
    """Another test of this run fails with the fault that this test would report again.

    `record` is for the table of the run; it is None if the other test's record says everything.
    """

    def __init__(self, reason: str, record: Record | None = None) -> None:
        super().__init__(reason)
        self.record = record
