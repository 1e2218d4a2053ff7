"""Keys of a manifest that belong to features.  The type of such a key is in the feature's folder, named in `plugin.py`.

The key has the name of the feature.  If the feature is absent, its key is allowed and not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from pytest_fa.feature import FEATURES, features

if TYPE_CHECKING:
    from pytest_fa.catalog.own_truth import OwnTruth
    from pytest_fa.catalog.variant import Variant

FIELD = "feature_keys"  # of a manifest that was read, and of a variant


class FeatureKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base class of the value of such a key; `feature` is the feature's name, which is the key."""

    feature: ClassVar[str]

    @classmethod
    def of(cls, variant: Variant) -> Self | None:
        """The value in the manifest of a variant, if it has the key."""
        value = variant.feature_keys.get(cls.feature)
        return value if isinstance(value, cls) else None

    def problem(self, variant: Variant) -> str | None:
        """The first problem of the value: the key, the value found, what is allowed; None if there is none."""
        del variant
        return None

    def own_truth(self, variant: Variant) -> OwnTruth | None:
        """The functions with which outputs are compared in place of attention; raises `UsageProblem`."""
        del variant
        return None

    @classmethod
    def of_yaml(cls, value: Any) -> Any:  # noqa: ANN401  # any YAML value, and what `msgspec.convert` takes
        """What a value in the manifest stands for.  Raises `msgspec.ValidationError` for one that is not allowed."""
        return value

    def line(self, variant: Variant) -> str:
        """A line of `--fa-list`; empty if there is none."""
        del variant
        return ""


@functools.cache
def key_types() -> dict[str, type[FeatureKey]]:
    """The type of each key of a feature, by the name of the feature."""
    return {feature.name: feature.named(feature.manifest_key) for feature in features() if feature.manifest_key}


def values_of(variant: Variant) -> list[FeatureKey]:
    """The values of the keys of features in the manifest of a variant, without those of absent features."""
    return [value for value in variant.feature_keys.values() if isinstance(value, FeatureKey)]


def with_feature_keys(data: Any) -> Any:  # noqa: ANN401  # any YAML value
    """Return a manifest's data with the keys of features in one field, also those of its members.

    Raises `msgspec.ValidationError` for a value that is not allowed, and for a key with the name of that field.
    """
    if not isinstance(data, dict):
        return data
    data = _moved(data, "$")
    if isinstance(members := data.get("variants"), dict):
        return {**data, "variants": {name: _moved(member, "$.variants[...]") for name, member in members.items()}}
    return data


def _moved(owner: Any, place: str) -> Any:  # noqa: ANN401  # any YAML value
    if not isinstance(owner, dict):
        return owner
    if FIELD in owner:
        raise msgspec.ValidationError(f"Object contains unknown field `{FIELD}` - at `{place}`")
    absent = set(FEATURES) - {feature.name for feature in features()}
    owned = {key: value for key, value in owner.items() if key in key_types() or key in absent}
    values = {
        key: _converted_key(value, key_types()[key], f"{place}.{key}") if key in key_types() else value
        for key, value in owned.items()
        if value is not None
    }
    others = {key: value for key, value in owner.items() if key not in owned}
    return {**others, FIELD: values} if values else others


def _converted_key(value: Any, kind: type[FeatureKey], place: str) -> Any:  # noqa: ANN401  # any YAML value
    return converted(value, kind | None, place, kind.of_yaml)


def converted(
    value: Any,  # noqa: ANN401  # any value of YAML or JSON
    kind: Any,  # noqa: ANN401  # any type
    place: str,
    read: Callable[[Any], Any] = lambda value: value,
) -> Any:  # noqa: ANN401  # of that type
    """The value, read by `read`, with its type.  Raises `msgspec.ValidationError` with its place: `$.added.gate`."""
    try:
        return msgspec.convert(read(value), kind)
    except msgspec.ValidationError as problem:
        text = str(problem)
        placed = text.replace("`$", f"`{place}", 1) if "`$" in text else f"{text} - at `{place}`"
        raise msgspec.ValidationError(placed) from None


def problem_of(variant: Variant) -> str | None:
    """The first problem of the keys of features; None if there is none."""
    return next((problem for value in values_of(variant) if (problem := value.problem(variant))), None)
