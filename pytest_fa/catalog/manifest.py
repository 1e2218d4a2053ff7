"""Read `variant.yaml`, and `planted.yaml` beside it, which has the folder's deliberately wrong kernels and ablations.

Unknown keys, wrong types and duplicate keys are refused with a one-line message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pytest_fa.attention import parts
from pytest_fa.attention.backward import GRADIENTS, means_gradients
from pytest_fa.attention.backward import LINE as BACKWARD_LINE
from pytest_fa.attention.dtypes import Dtype, dtype_called
from pytest_fa.attention.not_judged import recognised
from pytest_fa.attention.pages import KV_CACHE
from pytest_fa.attention.scores import Computes
from pytest_fa.attention.sizes import in_order, read_range
from pytest_fa.catalog.claims import claim_problem
from pytest_fa.catalog.conventions import Declared, conventions_problem, read_conventions
from pytest_fa.catalog.entry import entry_problem
from pytest_fa.catalog.feature_keys import FIELD, key_types, problem_of, with_feature_keys
from pytest_fa.catalog.grammar import (
    DEFINE_NAME,
    FOLDER_NAME,
    NAME,
    arch_problem,
    define_problem,
    flag_problem,
    name_problem,
)
from pytest_fa.catalog.probe import probe_problem, read_cases
from pytest_fa.catalog.returns import returns_problem
from pytest_fa.catalog.variant import (
    ARCHES,
    FEW,
    SOME,
    Arch,
    Call,
    Constant,
    Entry,
    InstructionLimit,
    Invariance,
    Limits,
    Returns,
    Role,
    Rounding,
    Sanitizer,
    Supports,
    Suppression,
    Target,
    Tolerance,
    Variant,
)
from pytest_fa.catalog.wrong_type import wrong_type, wrong_values
from pytest_fa.catalog.yaml_file import load_yaml
from pytest_fa.errors import ManifestError, UsageProblem, suggestion

MANIFEST_NAME = "variant.yaml"
FIELDS = Supports.__struct_fields__
MORE = "more"  # the field of `Supports` for the parts of attention that have no field there
PLANTED_NAME = "planted.yaml"
PLANTED_ROLES: tuple[Role, ...] = ("wrong", "ablation")

Instantiation = Annotated[str, msgspec.Meta(pattern=r"^(fp16|bf16|fp32|e4m3)-d[0-9]+$")]
Defines = dict[str, int | str]
Deterministic = bool | dict[str, bool]  # for all outputs, or for each one


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `variants`: one of several variants with the same source, and how it differs from the folder's keys.

    `supports`, `limits`, `conventions` and `defines` are merged with the folder's key by key; other keys replace the
    folder's.
    """

    defines: Defines = {}
    role: Role | None = None
    computes: Computes | None = None
    cases: Annotated[tuple[str, ...], FEW] | None = None
    target: str | None = None
    context: str | None = None
    call: Call | None = None
    step: str | None = None
    parent: str | None = None
    because: str | None = None
    expect: str | None = None
    supports: Supports | None = None
    limits: Limits | None = None
    rounds: tuple[Rounding, ...] | None = None
    tolerance: Tolerance | None = None
    deterministic: Deterministic | None = None
    invariant: tuple[Invariance, ...] | None = None
    checks_arguments: bool | None = None
    omits: str | None = None
    suppressions: dict[Sanitizer, Suppression] | None = None
    returns: Annotated[tuple[Returns, ...], SOME] | None = None
    conventions: Declared | None = None
    feature_keys: dict[str, Any] = {}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `variant.yaml`, none of which is required; `docs/reference/manifest.md` explains each."""

    step: str = ""
    because: str = ""
    expect: str = ""
    parent: str | None = None
    role: Role = "candidate"
    computes: Computes = "attention"
    cases: Annotated[tuple[str, ...], FEW] = ()
    entry: Entry = Entry()
    arch: Annotated[tuple[str, ...], SOME] | None = None
    supports: Supports = Supports()
    instantiations: Annotated[tuple[Instantiation, ...], SOME] | None = None
    defines: Defines = {}
    flags: Annotated[tuple[str, ...], FEW] = ()
    rounds: tuple[Rounding, ...] = ()
    limits: Limits = Limits()
    tolerance: Tolerance = "same_precision"
    deterministic: Deterministic = True
    invariant: tuple[Invariance, ...] = ()
    checks_arguments: bool = False
    optional: bool = False
    omits: str = ""
    suppressions: dict[Sanitizer, Suppression] = {}
    returns: Annotated[tuple[Returns, ...], SOME] | None = None
    conventions: Declared = {}
    feature_keys: dict[str, Any] = {}
    variants: Annotated[dict[str, Member], msgspec.Meta(min_length=1, max_length=256)] | None = None


class Planted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key of `planted.yaml`: variants that are deliberately wrong or omit a phase, as `variants` has them."""

    variants: Annotated[dict[str, Member], msgspec.Meta(min_length=1, max_length=256)]


def read_manifest(path: Path, root: Path) -> list[Variant]:
    """Return the variants of one `variant.yaml`.

    Raises `ManifestError` with the file, the key, the value found and what is allowed.
    """
    data = _load(path)
    with _named_problems(path, data, Manifest):
        manifest = msgspec.convert(_with_owned(_with_kind(_merged(data, data))), Manifest, strict=True)
        return _variants(path, root, manifest, manifest.variants or {path.parent.name: Member()})


def read_planted(path: Path, root: Path) -> list[Variant]:
    """Return the variants of one `planted.yaml`, which differ from the keys of the `variant.yaml` beside it.

    Raises `ManifestError` as `read_manifest` does, also for a variant that is neither wrong nor an ablation.
    """
    base, data = _load(path.with_name(MANIFEST_NAME)), _load(path)
    with _named_problems(path, data, Planted):
        planted = msgspec.convert(_with_owned(_merged(data, base)), Planted, strict=True)
        manifest = msgspec.convert({**_with_owned(_with_kind(base)), "variants": None}, Manifest, strict=True)
        manifest = msgspec.structs.replace(manifest, variants=planted.variants)
        variants = _variants(path, root, manifest, planted.variants)
        for variant in variants:
            if variant.role not in PLANTED_ROLES:
                allowed = " or ".join(map(repr, PLANTED_ROLES))
                raise ManifestError(
                    f"{path}: {variant.name}: role is {variant.role!r}; here it is {allowed}, others belong in "
                    f"{MANIFEST_NAME}"
                )
        return variants


def _load(path: Path) -> Any:  # noqa: ANN401  # any YAML value
    """The data of a file.  An empty file has no keys."""
    data = load_yaml(path)
    return {} if data is None else data


@contextmanager
def _named_problems(path: Path, data: Any, keys: type[msgspec.Struct]) -> Iterator[None]:  # noqa: ANN401  # as above
    """Raise what is wrong with the data of a file with these keys as `ManifestError`, which names the file."""
    try:
        yield
    except msgspec.ValidationError as problem:
        raise ManifestError(f"{path}: {_explain(str(problem), data, keys)}") from None
    except (UsageProblem, ValueError, RecursionError) as problem:
        raise ManifestError(f"{path}: {' '.join(str(problem).split())}") from None


def _variants(path: Path, root: Path, manifest: Manifest, members: dict[str, Member]) -> list[Variant]:
    """The variants of a file."""
    for problem in _text_problems(path.parent, manifest, members):
        raise ManifestError(f"{path}: {problem}")
    return [_variant(name, member, manifest, path, root) for name, member in members.items()]


def _text_problems(folder: Path, manifest: Manifest, members: dict[str, Member]) -> Iterator[str]:
    """Yield a sentence for each name, define and flag that does not have the form of `catalog.grammar`."""
    names = [("folder name", folder.name, FOLDER_NAME)]
    names += [("variants: name" if manifest.variants else "folder name", name, NAME) for name in members]
    defines = [*manifest.defines.items(), *(pair for member in members.values() for pair in member.defines.items())]
    names += [("defines: name", name, DEFINE_NAME) for name, _ in defines]
    flags = [("flags: ", flag) for flag in manifest.flags]
    flags += [(f"entry.{key}: ", flag) for key in ("cflags", "ldflags") for flag in getattr(manifest.entry, key)]
    problems = (
        *(name_problem(*name) for name in names),
        *(define_problem(*pair) for pair in defines),
        *(flag_problem(key.rstrip(), flag) for key, flag in flags),
        *(arch_problem("arch has", arch) for arch in manifest.arch or ()),
    )
    yield from (problem for problem in problems if problem)


def _merged(data: Any, base: Any) -> Any:  # noqa: ANN401  # any YAML value
    """Return a file's data, with the `supports` and the like of `base` merged into those of each member."""
    members = data.get("variants") if isinstance(data, dict) and isinstance(base, dict) else None
    for member in members.values() if isinstance(members, dict) else ():
        for key in ("supports", "limits", "conventions"):
            if isinstance(member, dict) and isinstance(member.get(key), dict) and isinstance(base.get(key), dict):
                member[key] = {**base[key], **member[key]}
    return data


def _with_kind(data: Any) -> Any:  # noqa: ANN401  # any YAML value
    """Return the file's data with `entry.kind`: `sources` belong to an extension, `target` alone to Python."""
    entry = data.get("entry") if isinstance(data, dict) else None
    if isinstance(entry, dict) and "kind" not in entry:
        entry["kind"] = "torch" if "sources" in entry else "python" if "target" in entry else "cuda"
    return data


def _with_owned(data: Any) -> Any:  # noqa: ANN401  # any YAML value
    """Return the file's data with the keys of parts of attention and of features in fields of their own."""
    return with_feature_keys(_with_claims(data))


def _with_claims(data: Any) -> Any:  # noqa: ANN401  # any YAML value
    """Return the file's data with the keys of `supports` that have no field in `Supports` moved into `more`.

    A range of `head_dim` becomes a list.

    Raises `ValueError` for a value that is not allowed.
    """
    members = data.get("variants") if isinstance(data, dict) else None
    for owner in (data, *(members.values() if isinstance(members, dict) else ())):
        if isinstance(owner, dict) and isinstance(supports := owner.get("supports"), dict):
            claims = {part.supports: part for part in parts.claimed_parts() if part.supports not in FIELDS}
            more = [(key, claims[key].read_claim(value)) for key, value in supports.items() if key in claims]
            if MORE in supports:  # no key of a manifest
                raise ValueError(f"unknown key {MORE!r} in supports (allowed: {', '.join(keys_of(Supports))})")
            plain = {key: value for key, value in supports.items() if key not in claims}
            if isinstance(sizes := plain.get("head_dim"), dict):
                plain["head_dim"] = read_range("supports.head_dim", sizes)
            owner["supports"] = {**plain, **({MORE: more} if more else {})}
    return data


def _variant(name: str, member: Member, manifest: Manifest, path: Path, root: Path) -> Variant:
    folder, supports = path.parent, member.supports or manifest.supports
    changes = {key: value for key in ("target", "context", "call") if (value := getattr(member, key)) is not None}
    entry = msgspec.structs.replace(manifest.entry, **changes)
    computes = member.computes or manifest.computes
    if problem := entry_problem(entry, supports, folder, computes) or _include_problem(manifest, folder):
        raise ManifestError(f"{path}: {problem}")
    variant = Variant(
        name=name,
        folder=str(folder),
        root=str(root),
        role=member.role or manifest.role,
        entry=entry,
        arch=_targets(manifest.arch or ARCHES, entry),
        supports=supports,
        instantiations=_instantiations(manifest.instantiations, supports),
        defines={**manifest.defines, **member.defines},
        flags=manifest.flags,
        rounds=manifest.rounds if member.rounds is None else member.rounds,
        limits=member.limits or manifest.limits,
        tolerance=member.tolerance or manifest.tolerance,
        may_differ=_may_differ(name, manifest, member),
        invariant=manifest.invariant if member.invariant is None else member.invariant,
        step=member.step or manifest.step,
        parent=member.parent or manifest.parent,
        because=member.because or manifest.because,
        expect=member.expect or manifest.expect,
        checks_arguments=manifest.checks_arguments if member.checks_arguments is None else member.checks_arguments,
        omits=manifest.omits if member.omits is None else member.omits,
        suppressions=manifest.suppressions if member.suppressions is None else member.suppressions,
        computes=computes,
        cases=read_cases(manifest.cases if member.cases is None else member.cases, computes),
        any_arch=manifest.arch is None,
        optional=manifest.optional,
        returns=_returns(manifest, member),
        conventions=read_conventions(manifest.conventions if member.conventions is None else member.conventions),
        feature_keys={**manifest.feature_keys, **member.feature_keys},
    )
    if "tf32" in variant.rounds and "fp32" not in supports.dtype:
        raise ManifestError(
            f"{path}: {name}: rounds has 'tf32', which applies to fp32; supports.dtype is "
            f"{', '.join(supports.dtype)}; add fp32 or drop 'tf32'"
        )
    if "tanh" in variant.rounds and True not in supports.values_of("softcap", (False,)):
        raise ManifestError(
            f"{path}: {name}: rounds has 'tanh', which applies to soft caps; supports.softcap is false; write "
            f"`softcap: true` or drop 'tanh'"
        )
    if variant.invariant and not variant.deterministic:
        raise ManifestError(
            f"{path}: {name}: invariant is {', '.join(variant.invariant)}, but deterministic is false: two calls may "
            f"differ; drop one of the two"
        )
    if "chunk" in variant.invariant and supports.self_attention_only:
        raise ManifestError(
            f"{path}: {name}: invariant has 'chunk', but supports.self_attention_only is true: a chunk has fewer "
            f"queries than keys; drop 'chunk'"
        )
    if supports.any_head_dim and (variant.role != "baseline" or entry.kind == "cuda"):
        values = f"supports.any_head_dim is true, role is {variant.role!r}, entry.kind {entry.kind!r}"
        needs = "it needs role 'baseline' and kind python or torch; list the head_dims of other variants in head_dim"
        raise ManifestError(f"{path}: {name}: {values}; {needs}")
    if variant.optional and variant.role != "baseline":
        values = f"optional is true, role is {variant.role!r}"
        raise ManifestError(f"{path}: {name}: {values}; optional needs role 'baseline'")
    of_claims = conventions_problem(variant) or claim_problem(variant) or _arguments_problem(variant)
    if problem := (probe_problem(variant) or returns_problem(variant) or problem_of(variant) or of_claims):
        raise ManifestError(f"{path}: {problem}")
    # The output of a variant that omits a phase is not checked, so it must be an ablation and name its parent.
    if variant.omits and (variant.role != "ablation" or variant.parent is None):
        values = f"omits is {variant.omits!r}, role is {variant.role!r}, parent is {variant.parent!r}"
        raise ManifestError(f"{path}: {name}: {values}; omits needs role 'ablation' and a parent")
    return variant


def _arguments_problem(variant: Variant) -> str | None:
    """Why malformed calls of a variant that promises to check them cannot be made, or None."""
    reason = ""
    if variant.computes != "attention":
        reason = f"computes is {variant.computes!r}, and malformed calls are made of attention only"
    if variant.packs_inputs or variant.conventions.get(KV_CACHE) is not None:
        reason = "its function gets one tensor for several, in which none can be malformed alone"
    is_broken = variant.checks_arguments and reason
    return f"{variant.name}: checks_arguments is true, but {reason}; drop checks_arguments" if is_broken else None


def _returns(manifest: Manifest, member: Member) -> tuple[Returns, ...]:
    """What a variant writes: without a key, the output or the gradients."""
    computes = member.computes or manifest.computes
    return member.returns or manifest.returns or (GRADIENTS if computes == "gradients" else ("out",))


def _may_differ(name: str, manifest: Manifest, member: Member) -> tuple[Returns, ...]:
    """The outputs of which `deterministic` is false.  Raises `ValueError` for one that the variant does not have."""
    returns = _returns(manifest, member)
    declared = manifest.deterministic if member.deterministic is None else member.deterministic
    if isinstance(declared, bool):
        return () if declared else returns
    if unknown := [each for each in declared if each not in returns]:
        raise ValueError(f"{name}: deterministic has {unknown[0]!r}; {name} returns {', '.join(returns)}")
    return tuple(each for each in returns if not declared.get(each, True))


def _include_problem(manifest: Manifest, folder: Path) -> str | None:
    """Return which folder of an `-I` flag of a CUDA source does not exist, or None."""
    included = [flag.removeprefix("-I") for flag in manifest.flags if flag.startswith("-I")]
    missing = [path for path in included if manifest.entry.kind == "cuda" and not (folder / path).is_dir()]
    return f"flags: -I{missing[0]}; there is no folder {os.path.normpath(folder / missing[0])}" if missing else None


def _targets(arch: tuple[Arch, ...], entry: Entry) -> tuple[Target, ...]:
    """Return the architectures to compile for: none (Python), the host only (C++), or those of the manifest (CUDA)."""
    if entry.kind == "python":
        return ()
    if entry.kind == "torch" and not entry.has_cuda_sources:
        return ("host",)
    return arch


def _instantiations(listed: tuple[str, ...] | None, supports: Supports) -> tuple[tuple[Dtype, int], ...]:
    if listed is None:
        return tuple((dtype, dim) for dtype in supports.dtype for dim in in_order(supports.head_dim))
    pairs = [text.split("-d") for text in listed]
    return tuple((dtype, int(dim)) for dtype, dim in pairs)  # type: ignore[misc]  # the pattern fixes the dtypes


# -- errors -----------------------------------------------------------------------------------------------------------

_STRUCTS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    (r"\$\.(variants\[\.\.\.\]\.)?entry", Entry),
    (r"\$\.(variants\[\.\.\.\]|entry)\.call", Call),
    (r"\$\.(variants\[\.\.\.\]|entry)\.call\.(arguments|keywords)\[.*\]", Constant),
    (r"\$\.(variants\[\.\.\.\]\.)?supports", Supports),
    (r"\$\.(variants\[\.\.\.\]\.)?limits", Limits),
    (r"\$\.(variants\[\.\.\.\]\.)?limits\.instructions\[\.\.\.\]", InstructionLimit),
    (r"\$\.(variants\[\.\.\.\]\.)?suppressions\[\.\.\.\]", Suppression),
    (r"\$\.variants\[\.\.\.\]", Member),
)


def _structs() -> tuple[tuple[str, type[msgspec.Struct]], ...]:
    """The struct at each place of a manifest, also those of features."""
    of_features = ((rf"\$\.(variants\[\.\.\.\]\.)?{name}", kind) for name, kind in key_types().items())
    return (*_STRUCTS, *of_features)


def _explain(problem: str, data: Any, keys: type[msgspec.Struct]) -> str:  # noqa: ANN401  # any YAML value
    """Convert msgspec's message: put the key path first, and name the allowed keys or values, or the line to write.

    `keys` are those of the whole file.
    """
    where = place[1] if (place := re.search(r" - at (?:`key` in )?`([^`]+)`", problem)) else "$"
    text = re.sub(r" - at (?:`key` in )?`[^`]+`", "", problem)
    key = where.removeprefix("$").lstrip(".") or "the manifest"
    if reason := _not_judged(text, where, data):
        return reason
    if unknown := re.search(r"unknown field `([^`]+)`", problem):
        structs = (*_structs(), (r"\$", keys))
        known = (keys_of(struct) for pattern, struct in structs if re.fullmatch(pattern, where))
        allowed = next(known, ())
        meant = f"; write {BACKWARD_LINE}" if means_gradients(unknown[1]) else suggestion(unknown[1], allowed)
        return f"unknown key {unknown[1]!r} in {key}{meant} (allowed: {', '.join(allowed)})"
    if missing := re.search(r"missing required field `([^`]+)`", problem):
        return f"key {missing[1]!r} is missing in {key}"
    if invalid := re.search(r"Invalid enum value (.+)", text):
        in_call = ".call." in where and "[" in where
        constants = ", numbers, true, false, null, {constant: text}" if in_call else ""
        allowed_values = f"allowed: {', '.join(_allowed_values(where)) or 'see docs/reference/manifest.md'}{constants}"
        value = invalid[1].strip("'")
        dtype = dtype_called(value) if _field(where) == "dtype" else None
        meant = f"; write {dtype}" if dtype else "; replace VALUE" if in_call and value == "VALUE" else ""
        if _field(where) == "computes" and means_gradients(value):
            meant = f"; write {BACKWARD_LINE}"
        return f"{_with_keyword(key, value, data)} is {invalid[1]}{meant}; {allowed_values}"
    return wrong_type(text, where, data)


# The keys of a manifest whose values say what a kernel computes, or how it is called.
_ABOUT_ATTENTION = ("dtype", "causal", "layout", "computes", "returns", "arguments", "keywords")


def _not_judged(text: str, where: str, data: Any) -> str | None:  # noqa: ANN401  # any YAML value
    """The answer to a key, a value or a keyword of a call for which a kernel may have words and pytest-fa has none."""
    key = where.removeprefix("$").lstrip(".") or "the manifest"
    if unknown := re.search(r"unknown field `([^`]+)`", text):
        row = recognised(unknown[1])
        return f"unknown key {unknown[1]!r} in {key}: {row}; drop the key" if row else None
    if _field(where) not in _ABOUT_ATTENTION:
        return None
    if invalid := re.search(r"Invalid enum value '(.+)'", text):
        return _not_judged_value(where, key, invalid[1], data)
    values = wrong_values(data, where) if text.startswith("Expected `array`, got `str`") else []
    answers = (_not_judged_value(where, key, value, data) for value in values if isinstance(value, str))
    return next(filter(None, answers), None)


def _not_judged_value(where: str, key: str, value: str, data: Any) -> str | None:  # noqa: ANN401  # any YAML value
    """The answer to a value at a place, or to the keyword that has it."""
    place = _with_keyword(key, value, data)
    keyword = place.rpartition(".call.keywords.")[2]
    row = (recognised(keyword) if keyword != place else None) or recognised(value)
    if row is None:
        return None
    if keyword != place:
        return f"{place} is {value!r}: {row.advice_for(keyword, f'`{keyword}: {{}}`')}"
    if _field(where) == "arguments":
        return f"{place} is {value!r}: {row.advice_for(value, '`{}` in its place')}"
    return f"{place} is {value!r}: {row} (allowed: {', '.join(_allowed_values(where))})"


def _with_keyword(key: str, value: str, data: Any) -> str:  # noqa: ANN401  # any YAML value
    """The place of a value, with the name of a call's keyword in place of `[...]`."""
    place = key.removesuffix("[...]")
    if not place.endswith("call.keywords"):
        return key
    mappings = (words for words in wrong_values(data, f"$.{place}") if isinstance(words, dict))
    return f"{place}.{next(name for words in mappings for name, given in words.items() if given == value)}"


def _field(where: str) -> str:
    """The last name of a place, such as `dtype` of `$.supports.dtype[0]`."""
    return re.sub(r"(?:\[[^\]]*\])+$", "", where).rpartition(".")[2]


def keys_of(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    """The keys of a struct, as a manifest may have them."""
    if struct is not Supports:
        owned = tuple(key_types())
        return tuple(key for field in struct.__struct_fields__ for key in (owned if field == FIELD else (field,)))
    more = (part.supports for part in parts.claimed_parts() if part.supports not in FIELDS)
    return (*(field for field in FIELDS if field != MORE), *more)


def _allowed_values(where: str) -> list[str]:
    field = _field(where)
    structs: list[type[msgspec.Struct]] = [*(struct for _, struct in _structs()), Manifest]
    for struct in structs:
        for info in msgspec.structs.fields(struct):
            if info.name == field:
                return re.findall(r"'([\w-]+)'", str(info.type))
    return []
