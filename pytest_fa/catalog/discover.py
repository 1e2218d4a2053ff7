"""Find variants in the kernels folders, in installed packages, and in the built-in `builtin/` folder."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import msgspec

import pytest_fa
from pytest_fa.catalog.kernels_folder import how_to_make
from pytest_fa.catalog.manifest import MANIFEST_NAME, PLANTED_NAME, read_manifest, read_planted
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import ManifestError, UnusableRun, UsageProblem, suggestion

ENTRY_POINT_GROUP = "pytest_fa.kernels"
BUILTIN_ROOT = Path(pytest_fa.__file__).parent / "builtin"


class Catalog(msgspec.Struct, frozen=True):
    """All variants, in the order of the roots.

    `broken` holds the manifests that cannot be read, by path.  `clashes` holds one sentence for each name that several
    manifests declare.  A variant with such a name is not in `variants`, except the built-in one.  `planted` has the
    path of `planted.yaml` by the name of each variant that it declares.
    """

    variants: dict[str, Variant]
    broken: dict[str, BrokenVariant]
    clashes: dict[str, str] = {}
    planted: dict[str, str] = {}

    def require_unique_names(self) -> None:
        """Raise `UnusableRun`, with the path of every manifest, if several variants have the same name."""
        if self.clashes:
            raise UnusableRun("\n".join(self.clashes.values()))


def discover(roots: tuple[Path, ...], *, with_installed: bool = True) -> Catalog:
    """Read every manifest in `roots`, then, `with_installed`, in the folders of installed packages and in `builtin/`.

    A folder with a file that cannot be read becomes a `BrokenVariant`; the others are not affected.  A name that is
    declared more than once becomes a clash.  Raises `UsageProblem` if a root is not a folder.
    """
    declared: dict[str, list[tuple[Path, Variant]]] = {}  # with the files
    broken: dict[str, BrokenVariant] = {}
    package_roots, broken_packages = _package_roots() if with_installed else ([], {})
    broken.update(broken_packages)
    for root in _unique((*roots, *package_roots, *([BUILTIN_ROOT] if with_installed else []))):
        if not root.is_dir():
            raise UsageProblem(f"--fa-kernels: no folder {str(root)!r}{_nearest(root)}; {how_to_make('NAME', root)}")
        for path in sorted(root.glob(f"*/{MANIFEST_NAME}")):
            members, problems = _read_folder(path, root)
            broken.update(problems)
            for file, variant in members:
                declared.setdefault(variant.name, []).append((file, variant))
    declared = {name: sorted(same, key=lambda each: _is_builtin(each[1])) for name, same in declared.items()}
    clashes = {name: _clash(name, same) for name, same in declared.items() if len(same) > 1}
    unique = {name: same[-1] for name, same in declared.items() if name not in clashes or _is_builtin(same[-1][1])}
    variants = {name: variant for name, (_, variant) in unique.items()}
    planted = {name: str(file) for name, (file, _) in unique.items() if file.name == PLANTED_NAME}
    return Catalog(variants, broken, clashes, planted)


def _nearest(root: Path) -> str:
    """The name of the folder beside a missing one that may be meant, as a question."""
    return suggestion(root.name, [path.name for path in root.parent.glob("*/")])


def _read_folder(path: Path, root: Path) -> tuple[list[tuple[Path, Variant]], dict[str, BrokenVariant]]:
    """The variants of a manifest and of the `planted.yaml` beside it, if there is one, each with its file.

    If one of the files cannot be read, there are none, but the broken variant by the path of that file.
    """
    members: list[tuple[Path, Variant]] = []
    for file, read in ((path, read_manifest), (path.with_name(PLANTED_NAME), read_planted)):
        if file != path and not os.path.lexists(file):
            continue
        try:
            members += [(file, variant) for variant in read(file, root)]
        except ManifestError as problem:
            return [], {str(file): BrokenVariant(path.parent.name, str(problem))}
    return members, {}


def _clash(name: str, same: list[tuple[Path, Variant]]) -> str:
    """The sentence about variants with the same name.  The names of built-in variants are reserved."""
    *others, last = [str(file) for file, _ in same]
    remedy = "its folder, or its key under 'variants'"
    if _is_builtin(same[-1][1]):
        return (
            f"variant {name!r} of {' and of '.join(others)} has the name of a built-in variant ({last}), which is "
            f"reserved; rename yours ({remedy})"
        )
    return (
        f"variant {name!r} is declared {len(same)} times: in {', '.join(others)} and in {last}; rename one ({remedy})"
    )


def _is_builtin(variant: Variant) -> bool:
    return variant.root == str(BUILTIN_ROOT.resolve())


def _package_roots() -> tuple[list[Path], dict[str, BrokenVariant]]:
    """Return the folders of installed packages that provide variants, and a broken variant for each unusable one.

    An entry point of the group `pytest_fa.kernels` names a package whose folder holds variant folders.
    """
    folders, broken = [], {}
    for entry_point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        folder = _package_folder(entry_point.value)
        if folder is not None:
            folders.append(folder)
        else:
            text = (
                f"entry point {entry_point.name} ({entry_point.value}) provides no variants: there is no folder of a "
                f"package with this name"
            )
            broken[f"entry point {entry_point.name}"] = BrokenVariant(entry_point.name, text)
    return folders, broken


def _package_folder(name: str) -> Path | None:
    """Return the folder of an installed package, or None.  The package is not imported, so none of its code runs."""
    top, *rest = name.split(".")
    if not all(part.isidentifier() for part in (top, *rest)):
        return None
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    places = (spec.submodule_search_locations or ()) if spec else ()
    return next((folder for place in places if (folder := Path(place, *rest)).is_dir()), None)


def _unique(roots: tuple[Path, ...]) -> list[Path]:
    return list({root.resolve(): None for root in roots})
