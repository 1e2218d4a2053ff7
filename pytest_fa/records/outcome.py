"""What came of one test: every outcome of a record, and all that other modules need to know about it, in one table.

Smaller vocabularies say something else and have types of their own: the state of one stage (`record.StageState`), how
the program or the statistics of a feature ended, how two sides compare, and the results of a trial and of the command
`judge`, which take their failures from `Defect`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

FAILURE_STATUS = 1  # pytest's exit status after a failure, which wins over every other outcome
UNDECIDED_STATUS = 10  # if something has no verdict and nothing failed


class Defect(StrEnum):
    """What is wrong with a variant, in fewer words than the outcomes have."""

    CHEAT = "cheat"
    WRONG = "wrong"
    REFUSED = "refused"
    CRASHED = "crashed"
    HUNG = "hung"
    NOT_BUILT = "not_built"
    OVER_LIMIT = "over_limit"


class State(StrEnum):
    """What all records of a variant say together, in the order in which the answer counts the variants."""

    RIGHT = "correct"
    CHEAT = "cheat"
    WRONG = "wrong"
    FAILED = "failed"
    NOT_BUILT = "not built"
    ONLY_BUILT = "only built"
    NOT_JUDGED = "not judged"

    @property
    def is_failure(self) -> bool:
        """Whether a failure led to this state."""
        return self in WORST_FIRST


WORST_FIRST = (State.CHEAT, State.WRONG, State.NOT_BUILT, State.FAILED)


class Outcome(StrEnum):
    """The outcome of a record.  As a string it is the word that records contain.

    `headline` has the words before the message.  Pytest shows the first line of a failure in its summary, cut at the
    width of the terminal, so it begins with the cause; the test's id is in front of it already.  `heading` says it on a
    page, where no message follows.  `state` is that of a variant without a worse outcome.  `defect` is None if the
    variant has none; a failed gate is not one.  `exit_status` is pytest's if no other test decides it.
    """

    headline: str
    heading: str
    state: State
    defect: Defect | None
    exit_status: int

    # word, headline, heading, state, defect, exit status unless it is that of a failure
    OK = "ok", "", "passed", State.RIGHT, None, 0
    FAILED = "failed", "", "failed", State.FAILED, Defect.CRASHED
    WRONG = "wrong", "wrong: ", "wrong result", State.WRONG, Defect.WRONG
    CHEAT = "cheat", "cheat: ", "tampered with the judge", State.CHEAT, Defect.CHEAT
    UNSUPPORTED = "unsupported", "refused: ", "refused a case that its manifest supports", State.FAILED, Defect.REFUSED
    LAUNCH_FAILED = "launch_failed", "", "did not launch", State.FAILED, Defect.CRASHED
    DEVICE_ERROR = "device_error", "CUDA context lost: ", "lost its CUDA context", State.FAILED, Defect.CRASHED
    CRASHED = "crashed", "", "crashed its process", State.FAILED, Defect.CRASHED
    HUNG = "hung", "", "hung", State.FAILED, Defect.HUNG
    NOT_BUILT = "not_built", "not built: ", "was not built", State.NOT_BUILT, Defect.NOT_BUILT
    BUILD_CHANGED = "build_changed", "", "has a file that changed after it was checked", State.FAILED, Defect.NOT_BUILT
    OVER_LIMIT = "over_limit", "over the limit: ", "exceeds the limits of its manifest", State.FAILED, Defect.OVER_LIMIT
    GATE_FAILED = "gate_failed", "gate ", "failed the gate", State.FAILED, None
    INCONCLUSIVE = "inconclusive", "no verdict: ", "has no verdict", State.NOT_JUDGED, None, UNDECIDED_STATUS
    NOT_MEASURED = "not_measured", "", "was not measured", State.NOT_JUDGED, None, 0
    HAZARD = "hazard", "", "is not clean under compute-sanitizer", State.FAILED, Defect.WRONG

    def __new__(  # one argument for each column
        cls,
        word: str,
        headline: str,
        heading: str,
        state: State,
        defect: Defect | None,
        exit_status: int = FAILURE_STATUS,
    ) -> Self:
        """Make a member whose value is its word."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.headline, member.heading, member.state, member.defect = headline, heading, state, defect
        member.exit_status = exit_status
        return member

    def __repr__(self) -> str:
        return repr(self.value)

    @property
    def is_failure(self) -> bool:
        """Whether a test with this outcome fails for good: neither passed, nor left without a verdict."""
        return self.exit_status == FAILURE_STATUS

    @property
    def is_verdict(self) -> bool:
        """Whether it says anything about the variant."""
        return self.state is not State.NOT_JUDGED
