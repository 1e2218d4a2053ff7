"""Keys of a manifest that belong to features: each has the type of its feature, or is not read without the feature."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from pytest_fa.catalog import feature_keys
from pytest_fa.catalog.feature_keys import FeatureKey, values_of
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError
from pytest_fa.feature import FEATURES


class Size(FeatureKey, frozen=True, forbid_unknown_fields=True):
    """The key of a made-up feature."""

    feature: ClassVar = "size"

    most: int

    def problem(self, variant: Variant) -> str | None:
        """A size of 0."""
        return None if self.most else f"size.most is 0 in {variant.name}; 1 and more are allowed"


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the feature known."""
    monkeypatch.setattr(feature_keys, "key_types", lambda: {"size": Size})
    monkeypatch.setattr("pytest_fa.catalog.manifest.key_types", lambda: {"size": Size})


def variants_of(folder: Path, text: str) -> dict[str, Variant]:
    """The variants of a manifest with this text."""
    path = folder / "one" / "variant.yaml"
    path.parent.mkdir()
    (path.parent / "kernel.cu").touch()
    path.write_text(text)
    return {variant.name: variant for variant in read_manifest(path, folder)}


@pytest.mark.usefixtures("sized")
def test_a_key_has_the_type_of_its_feature(tmp_path: Path) -> None:
    """A variant has the value of its own, else that of the folder."""
    found = variants_of(tmp_path, "size: {most: 3}\nvariants: {a: {}, b: {size: {most: 4}}, c: {size: null}}")
    assert {name: Size.of(variant) for name, variant in found.items()} == {"a": Size(3), "b": Size(4), "c": Size(3)}


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("size: {most: 0}", "size.most is 0 in one; 1 and more are allowed"),
        ("size: {mst: 3}", r"unknown key 'mst' in size; did you mean 'most'\? \(allowed: most\)"),
        ("variants: {a: {size: {mst: 3}}}", r"unknown key 'mst' in variants\[...\].size; did you mean 'most'"),
        ("size: {most: many}", "size.most"),
        ("siz: {most: 3}", "unknown key 'siz' in the manifest; did you mean 'size'"),
        ("feature_keys: {size: {most: 3}}", "unknown key 'feature_keys' in the manifest"),
    ],
)
def test_a_wrong_value_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    """The values of a feature are checked as all others are."""
    with pytest.raises(ManifestError, match=complaint):
        variants_of(tmp_path, text)


def test_the_key_of_an_absent_feature_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A manifest may have the key of a feature that is taken out, with any value."""
    monkeypatch.setattr(feature_keys, "FEATURES", (*FEATURES, "absent"))
    found = variants_of(tmp_path, "absent: [1, 2]")
    assert (found["one"].feature_keys, values_of(found["one"])) == ({"absent": [1, 2]}, [])
