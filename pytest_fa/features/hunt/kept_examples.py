"""The failing examples of earlier hunts, in Hypothesis's database: the next hunt begins with them.

They are kept as ids, which stay what they are when the random cases are made in another way.
"""

from __future__ import annotations

from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.features.hunt.example import Example, read_example
from pytest_fa.features.hunt.optional_hypothesis import DirectoryBasedExampleDatabase


class KeptExamples:
    """The smallest failing examples of one variant, in a folder of the build cache."""

    def __init__(self, cache: Path, variant: str) -> None:
        self._database, self._key = DirectoryBasedExampleDatabase(cache / "hunts"), variant.encode()

    def examples(self) -> list[Example]:
        """The kept examples; one that is no longer possible is forgotten."""
        found: list[Example] = []
        for value in sorted(self._database.fetch(self._key)):
            try:
                found.append(read_example(value.decode()))
            except (UsageProblem, UnicodeDecodeError):
                self._database.delete(self._key, value)
        return found

    def add(self, example: Example) -> None:
        """Keep an example."""
        self._database.save(self._key, str(example).encode())

    def forget(self, example: Example) -> None:
        """Forget an example, which no longer fails."""
        self._database.delete(self._key, str(example).encode())
