"""Arbitrary and changed manifests: they are read, or refused with one sentence; nothing else ever happens.

FA_FUZZ_EXAMPLES sets the number of examples of each test.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")

import yaml
from hypothesis import given
from hypothesis import strategies as st

from pytest_fa.build.command import compile_flags, defines_header
from pytest_fa.build.flag_list import refusal
from pytest_fa.build.ninja import CompileJob, _build_file
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.plan import make_plan
from pytest_fa.catalog.variant import Variant
from pytest_fa.catalog.yaml_file import QuickLoader, StrictLoader, _load
from pytest_fa.errors import ManifestError
from tests.factories import fuzz_settings
from tests.fuzz import any_json, changed_bytes, changed_json

# A warning about the size of an example is no failure.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")

REPOSITORY = Path(__file__).parents[3]
SHELL = set("$`\"'\\;|&<>#~\n\r\0")  # what a shell, ninja or a Makefile would interpret in an option


@cache
def manifests() -> list[bytes]:
    """Every manifest of the repository."""
    return [path.read_bytes() for path in sorted(REPOSITORY.glob("**/variant.yaml")) if ".venv" not in path.parts]


@cache
def values() -> list[Any]:
    """Their values."""
    return [yaml.safe_load(content) for content in manifests()]


def contents() -> st.SearchStrategy[bytes]:
    """The content of a manifest: a real one, a changed one, arbitrary YAML, or arbitrary bytes."""
    return st.one_of(
        st.deferred(lambda: changed_json(values())).map(_as_yaml),
        st.deferred(lambda: changed_json(values())).map(_as_yaml),
        st.deferred(lambda: changed_bytes(manifests())),
        any_json().map(_as_yaml),
        st.binary(max_size=200),
    )


# Parts of YAML texts, also of rare ones, on which two parsers may differ.
TOKENS = (
    *("a", "b:", ": ", ":", "- ", "-", "? ", "#", " # x", "|", "|-", "|2", ">", ">+", "&x ", "*x", "! ", "!!str "),
    *("[", "]", "{", "}", ", ", ",", "'", '"', "\\n", "\\", "%YAML 1.2", "---", "...", "\n", "\n  ", "\n    ", " "),
    *("null", "yes", "010", "1e3", "0x1F", ".5", "~", "<<: ", "=", "é", "\u2028", "\t", "@", "`", "!a "),
    *("key: value\n", "a: &x [1, *x]\n"),
)


def token_texts() -> st.SearchStrategy[bytes]:
    """YAML's own tokens in any order."""
    return st.lists(st.sampled_from(TOKENS), max_size=12).map(lambda tokens: "".join(tokens).encode())


def _as_yaml(value: Any) -> bytes:
    """A value as JSON, which is YAML, too."""
    return json.dumps(value, ensure_ascii=True).encode()


def _read(content: bytes) -> list[Variant] | str:
    """The variants of a manifest beside its sources, or the sentence that refuses it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kernels" / "fuzzed"
        folder.mkdir(parents=True)
        for source in ("kernel.cu", "entry.py", "a.cpp"):
            (folder / source).write_text("", encoding="utf-8")
        (folder / "variant.yaml").write_bytes(content)
        before = sorted(str(path) for path in Path(name).rglob("*"))
        try:
            return read_manifest(folder / "variant.yaml", folder.parent)
        except ManifestError as problem:
            return str(problem)
        finally:
            assert sorted(str(path) for path in Path(name).rglob("*")) == before


@pytest.mark.nightly
@fuzz_settings(200)
@given(contents())
def test_a_manifest_is_read_or_refused_in_one_line(content: bytes) -> None:
    """The error is one line that begins with the path; reading writes no file."""
    variants = _read(content)
    if isinstance(variants, str):
        assert "variant.yaml: " in variants
        assert "\n" not in variants
        return
    for variant in variants:
        _require_harmless(variant)


@pytest.mark.nightly
@pytest.mark.skipif(QuickLoader.__name__ == "StrictLoader", reason="PyYAML has no libyaml, or an older one")
@fuzz_settings(1000)
@given(st.one_of(contents(), token_texts(), token_texts()))
def test_the_quick_parser_reads_what_the_slow_one_reads(content: bytes) -> None:
    """A text has the same value, or the same error, whether libyaml may parse it or not."""
    text = content.decode("utf-8", errors="replace")
    assert _outcome(lambda: _load(text)) == _outcome(lambda: yaml.load(text, Loader=StrictLoader))  # noqa: S506


def _outcome(read: Callable[[], Any]) -> str:
    try:
        return repr(read())
    except Exception as problem:  # noqa: BLE001  # the errors are compared
        return f"{type(problem).__name__}: {problem}"


def _require_harmless(variant: Variant) -> None:
    """What a variant gives to the build has nothing that a shell, ninja or the preprocessor would interpret."""
    if variant.entry.kind == "cuda":
        flags = compile_flags(variant, "sm_80")
        assert [flag for flag in flags if SHELL & set(flag)] == []
        lines = _build_file([CompileJob("0", "kernel.so", ("nvcc", *flags), variant.name)]).splitlines()
        assert len(lines) == 8
    header = defines_header(variant)
    assert header.count("\n") == len(variant.defines)
    assert all(line.startswith("#define ") for line in header.splitlines())
    refusal(variant, ())


@fuzz_settings(30)
@given(st.lists(contents(), min_size=1, max_size=4))
def test_a_good_manifest_is_found_beside_any_other(several: list[bytes]) -> None:
    """Whatever stands beside it, a good manifest is found, and a plan can be made."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for index, content in enumerate([*several, manifests_good()]):
            folder = root / f"folder{index}"
            folder.mkdir()
            (folder / "kernel.cu").write_text("", encoding="utf-8")
            (folder / "variant.yaml").write_bytes(content)
        catalog = discover((root,))
        good = catalog.variants.get(f"folder{len(several)}")
        assert good is not None
        assert make_plan(catalog, (good,), ()).runnable == [good]


def manifests_good() -> bytes:
    """A manifest without special keys."""
    return b"step: s\nbecause: b\nexpect: e\n"
