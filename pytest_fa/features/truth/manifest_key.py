"""The manifest key `truth`: the functions with which a variant is compared, in a file relative to the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import msgspec

from pytest_fa.catalog.feature_keys import FeatureKey
from pytest_fa.catalog.own_truth import OwnTruth
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.features.truth.functions import FORM, functions_of


class TruthKey(FeatureKey, frozen=True):
    """The text of the key, such as `window.py:truth,reference`."""

    feature: ClassVar[str] = "truth"

    functions: str

    @classmethod
    def of_yaml(cls, value: Any) -> Any:  # noqa: ANN401  # any YAML value, and what `msgspec.convert` takes
        """The key is a text in a manifest."""
        if not isinstance(value, str):
            raise msgspec.ValidationError(f"Expected a text `{FORM}`, got {value!r}")
        return {"functions": value}

    def own_truth(self, variant: Variant) -> OwnTruth:
        """The functions.  Raises `UsageProblem`."""
        return functions_of("truth", self.functions, Path(variant.folder))

    def problem(self, variant: Variant) -> str | None:
        """Why the functions cannot be used."""
        if variant.computes != "attention":
            return f"truth is {self.functions!r}, but computes is {variant.computes!r}; only attention has a truth"
        try:
            self.own_truth(variant)
        except UsageProblem as problem:
            return str(problem)
        return None

    def line(self, variant: Variant) -> str:
        """With what the variant is compared."""
        return f"truth of {variant.name}: {self.functions}"
