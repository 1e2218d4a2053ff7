"""Loading: `pytest_fa.load`, Python entries and their contexts."""

from __future__ import annotations

import os
import py_compile
import sys
from pathlib import Path

import pytest
import torch

import pytest_fa
from pytest_fa.candidate.module import load_forward, open_forward
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.errors import FaError, ManifestError, UsageProblem
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant

COUNTING_SOURCE = """
from contextlib import contextmanager

entered = []


@contextmanager
def counted():
    entered.append("in")
    yield
    entered.append("out")


def forward(q, k, v, *, scale, causal="none", out=None):
    entered.append("call")
    return q
"""
COUNTING_MANIFEST = PYTHON_MANIFEST.replace(
    'target: "entry:forward"', 'target: "entry:forward", context: "entry:counted"'
)


def _tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 17, 64, generator=generator).half() for _ in range(3)]


def test_load_gives_a_callable(write_variant: WriteVariant, tmp_path: Path) -> None:
    """`pytest_fa.load(name)` returns the variant's function, which writes into `out`."""
    write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    q, k, v = _tensors()
    out = torch.empty_like(q)
    result = pytest_fa.load("mine", kernels=(tmp_path / "kernels",))(q, k, v, scale=0.125, out=out)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.125)
    assert result is out
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-3)


def test_load_names_what_is_wrong(write_variant: WriteVariant, tmp_path: Path) -> None:
    """For an unknown name the error suggests a similar one; for a broken manifest it gives the manifest's path."""
    write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    write_variant("broken", manifest="step: [")
    roots = (tmp_path / "kernels",)
    with pytest.raises(UsageProblem, match="no variant 'mien'; did you mean 'mine'"):
        pytest_fa.load("mien", kernels=roots)
    with pytest.raises(ManifestError, match=r"broken/variant\.yaml"):
        pytest_fa.load("broken", kernels=roots)


def test_context_is_entered_once_around_all_calls(write_variant: WriteVariant, tmp_path: Path) -> None:
    """`open_forward` enters the manifest's context once, however many calls are made inside."""
    folder = write_variant("mine", manifest=COUNTING_MANIFEST, **{"entry.py": COUNTING_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    q, k, v = _tensors()
    with open_forward(variant, None) as forward:
        forward(q, k, v, scale=1.0)
        forward(q, k, v, scale=1.0)
    assert forward.__globals__["entered"] == ["in", "call", "call", "out"]  # type: ignore[attr-defined]


def test_loaded_function_enters_the_context_itself(write_variant: WriteVariant, tmp_path: Path) -> None:
    """The function that `pytest_fa.load` returns enters the manifest's context in each call."""
    folder = write_variant("mine", manifest=COUNTING_MANIFEST, **{"entry.py": COUNTING_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    inner = load_forward(variant, None)
    q, k, v = _tensors()
    pytest_fa.load("mine", kernels=(tmp_path / "kernels",))(q, k, v, scale=1.0)
    assert inner.__globals__["entered"] == ["in", "call", "out"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "missing_module:forward",
            r"No module named 'missing_module': entry.target 'missing_module:forward' of mine cannot be imported",
        ),
        (
            "entry:backward",
            r"entry has no 'backward'; did you mean 'forward'\? \(entry.target 'entry:backward' of mine\)",
        ),
    ],
)
def test_wrong_target_is_named(write_variant: WriteVariant, tmp_path: Path, target: str, words: str) -> None:
    """If `entry.target` cannot be imported, or the module lacks it, the error quotes the target."""
    manifest = PYTHON_MANIFEST.replace("entry:forward", target)
    folder = write_variant("mine", manifest=manifest, **{"entry.py": PYTHON_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    with pytest.raises(FaError, match=words):
        load_forward(variant, None)


def test_folders_may_have_modules_of_the_same_name(write_variant: WriteVariant, tmp_path: Path) -> None:
    """Two variants with an `entry.py` each get their own module."""
    sources = [PYTHON_SOURCE, COUNTING_SOURCE]
    loaded = []
    for name, source in zip(("first", "second"), sources, strict=True):
        folder = write_variant(name, manifest=PYTHON_MANIFEST, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        loaded.append(load_forward(variant, None))
    assert ["entered" in each.__globals__ for each in loaded] == [False, True]  # type: ignore[attr-defined]


def test_a_module_imports_one_beside_it(write_variant: WriteVariant, tmp_path: Path) -> None:
    """By `from .other import name`; folders of one name have packages of their own."""
    q, k, v = _tensors()
    for place, scale in (("one", 0.125), ("two", 0.5)):
        entry = f"from .factor import SCALE\n\n{PYTHON_SOURCE.replace('* scale', '* SCALE')}"
        write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": entry, "factor.py": f"SCALE = {scale}\n"})
        (tmp_path / "kernels").rename(tmp_path / place)
        out = pytest_fa.load("mine", kernels=(tmp_path / place,))(q, k, v, scale=1.0)
        want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-3)


def test_a_compiled_module_of_an_older_content_is_not_used(
    write_variant: WriteVariant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that was saved twice within a second, with the same size, is that of the file; no other is written."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    source = "def forward(q, k, v, *, scale, causal='none', out=None):\n    return {}\n"
    folder = write_variant("saved_twice", manifest=PYTHON_MANIFEST, **{"entry.py": source.format("'older'")})
    compiled = Path(str(py_compile.compile(str(folder / "entry.py"), doraise=True)))
    state = (folder / "entry.py").stat()
    (folder / "entry.py").write_text(source.format("'newer'"), encoding="utf-8")
    os.utime(folder / "entry.py", ns=(state.st_atime_ns, state.st_mtime_ns))
    content = compiled.read_bytes()
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    forward = load_forward(variant, None)
    result: object = forward(*_tensors(), scale=1.0, causal="none", out=None)
    assert result == "newer"
    assert compiled.read_bytes() == content
