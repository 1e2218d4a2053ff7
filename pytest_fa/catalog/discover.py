"""Find variants: a glob over the kernels folders, the packages that provide some, and our own companions."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import msgspec

import pytest_fa
from pytest_fa.catalog.manifest import MANIFEST_NAME, read_manifest
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import ManifestError, UsageProblem

ENTRY_POINT_GROUP = "pytest_fa.kernels"
BUILTIN_ROOT = Path(pytest_fa.__file__).parent / "builtin"


class Catalog(msgspec.Struct, frozen=True):
    """Every variant, in the order of the roots.

    `broken` are the manifests that could not be read, `notices` the lines about names of earlier versions.
    """

    variants: dict[str, Variant]
    broken: dict[str, BrokenVariant]
    notices: tuple[str, ...] = ()


def discover(roots: tuple[Path, ...]) -> Catalog:
    """Read every manifest under `roots`, the packages' folders and our own, in that order.

    A manifest that cannot be read, or that takes a name already given, is kept as broken; the others go on.
    Raises `UsageProblem` for a root that is no folder.
    """
    variants: dict[str, Variant] = {}
    broken: dict[str, BrokenVariant] = {}
    notices: list[str] = []
    provided, unusable = _package_roots()
    broken.update(unusable)
    for root in _unique((*roots, *provided, BUILTIN_ROOT)):
        if not root.is_dir():
            raise UsageProblem(f"--fa-kernels: no folder {str(root)!r}; it must hold <variant>/{MANIFEST_NAME}")
        for path in sorted(root.glob(f"*/{MANIFEST_NAME}")):
            try:
                found = read_manifest(path, root, lambda line, path=path: notices.append(f"{path}: {line}"))  # type: ignore[misc]
            except ManifestError as problem:
                broken[str(path)] = BrokenVariant(path.parent.name, str(problem))
                continue
            for variant in found:
                if twin := variants.get(variant.name):
                    text = f"{path}: variant {variant.name!r} is already defined in {twin.folder}"
                    broken[f"{path}:{variant.name}"] = BrokenVariant(variant.name, text)
                else:
                    variants[variant.name] = variant
    return Catalog(variants, broken, tuple(notices))


def _package_roots() -> tuple[list[Path], dict[str, BrokenVariant]]:
    """The folders of installed packages that provide variants: each entry point names a package that holds them.

    A package that cannot be imported is broken in the entry point's name.
    """
    found, broken = [], {}
    for entry_point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name):
        try:
            found.append(Path(next(iter(entry_point.load().__path__))))
        except Exception as problem:  # noqa: BLE001  # a package may raise anything while it is imported
            text = f"entry point {entry_point.name} ({entry_point.value}) provides no variants: {problem!r}"
            broken[f"entry point {entry_point.name}"] = BrokenVariant(entry_point.name, text)
    return found, broken


def _unique(roots: tuple[Path, ...]) -> list[Path]:
    return list({root.resolve(): None for root in roots})
