"""Files that are no ordinary manifest: each gives one sentence, soon, and without reading more than the limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.catalog.yaml_file import MAX_BYTES, MAX_DEPTH, MAX_NODES, load_yaml
from pytest_fa.errors import ManifestError


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content, encoding="utf-8")


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def _bomb() -> str:
    """Nine lists of nine aliases each: 9^9 values from a few hundred characters."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    return "\n".join(lines)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "it is not a regular file"),
    "folder": (Path.mkdir, "it is not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    "symlink to itself": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "missing": (lambda _: None, "No such file"),
    "10 MB": (_bytes(b"# comment\n" * 2**20), f"it is larger than {MAX_BYTES} bytes, the limit"),
    "half a million keys": (
        lambda path: path.write_text("".join(f"key{index}: 1\n" for index in range(500_000))),
        f"it is larger than {MAX_BYTES} bytes, the limit",
    ),
    "too many values": (
        _text("a: [" + "1," * (MAX_NODES + 1) + "]"),
        f"it has more than {MAX_NODES} values, the limit",
    ),
    "alias bomb": (_text(_bomb()), f"it has more than {MAX_NODES} values, the limit"),
    "20,000 brackets": (_text("a: " + "[" * 20_000), f"line 1 is nested more than {MAX_DEPTH} levels deep"),
    "20,000 braces": (_text("a: " + "{b: " * 10_000), f"line 1 is nested more than {MAX_DEPTH} levels deep"),
    "deep indentation": (
        _text("".join(f"{' ' * depth}a:\n" for depth in range(200))),
        f"line {MAX_DEPTH + 1} is nested more than {MAX_DEPTH} levels deep",
    ),
    "not UTF-8": (_bytes(b"step: \xff\xfe"), "codec can't decode"),
    "control character": (_bytes(b"step: a\x00b"), "line 1, column 8: the character U+0000 is not allowed"),
    "unknown alias": (_text("a: *b"), "line 1, column 4: found undefined alias 'b'"),
    "cyclic alias": (_text("a: &x [*x]"), "the alias *x is inside the value that it repeats"),
    "python object": (_text("a: !!python/object/apply:os.system [ls]"), "tags are not allowed"),
    "empty integer": (_text("a: !!int ''"), "line 1 has the tag 'tag:yaml.org,2002:int'; tags are not allowed"),
    "bool that is none": (_text("a: !!bool x"), "tags are not allowed"),
    "timestamp": (_text("a: !!timestamp x"), "tags are not allowed"),
    "tag of a key": (_text("!!int '': 1"), "tags are not allowed"),
    "tag of a list": (_text("a: !!set {x}"), "tags are not allowed"),
    "number of 5,000 digits": (_text("a: " + "1" * 5000), "Exceeds the limit"),
    "half a document": (
        _text("a: {b: "),
        "line 1, column 8: while parsing a flow node, expected the node content, but found the end of the file",
    ),
    "two documents": (
        _text("a: 1\n---\nb: 2\n"),
        "line 2, column 1: expected a single document in the stream, but found another document",
    ),
    "two colons": (_text("step: a\nsupports: x: y"), "line 2, column 12: mapping values are not allowed here"),
    "tab": (
        _text("a:\n\tb: 1"),
        "line 2, column 1: while scanning for the next token, found character '\\t' that cannot start any token",
    ),
    "key that is a list": (_text("[a]: 1"), "the key on line 1 is not a plain word"),
    "duplicate key": (_text("a: 1\na: 2"), "duplicate key 'a' on line 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_one_error(tmp_path: Path, fault: str) -> None:
    """The error is a `ManifestError` of one line that begins with the path; it takes at most two seconds of a CPU."""
    path = tmp_path / "variant.yaml"
    make, sentence = FAULTS[fault]
    make(path)
    start_s = time.process_time()
    with pytest.raises(ManifestError) as caught:
        load_yaml(path)
    assert time.process_time() - start_s < 2
    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_at_the_limits_is_read(tmp_path: Path) -> None:
    """A file of the largest size, with the deepest nesting, is read."""
    path = tmp_path / "variant.yaml"
    nested = "a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "\n"
    path.write_text(nested + "#" * (MAX_BYTES - len(nested)), encoding="utf-8")
    assert list(load_yaml(path)) == ["a"]


def test_anchors_are_allowed(tmp_path: Path) -> None:
    """An alias repeats the value of its anchor."""
    path = tmp_path / "variant.yaml"
    path.write_text("a: &limits {x: 1}\nb: *limits\n", encoding="utf-8")
    assert load_yaml(path) == {"a": {"x": 1}, "b": {"x": 1}}
