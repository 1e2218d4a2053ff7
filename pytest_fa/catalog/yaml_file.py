"""Read a YAML file that anybody may have written: strict types, no duplicate keys, and limits on size and depth."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from pytest_fa.errors import ManifestError

MAX_BYTES = 65_536
MAX_DEPTH = 20  # mappings and lists inside one another
MAX_NODES = 10_000  # scalars, lists and mappings; an alias counts as often as the node that it repeats
_SURROGATE = re.compile("[\ud800-\udfff]")
# libyaml accepts `a:<tab>b`, `[a?b]` and `|#x`, and PyYAML does not.  Unusual characters are left to PyYAML, too.
_READ_DIFFERENTLY = re.compile(r"[^\n -~]|\?|[|>][-+0-9]*#")
_MIN_LIBYAML = (0, 2, 5)  # earlier ones were not compared with PyYAML


def load_yaml(path: Path) -> Any:  # noqa: ANN401  # any YAML value; the caller checks it
    """Return the content of a YAML file.

    Raises `ManifestError`, with the file and one sentence, for a file that is not a regular file, is too large, is not
    UTF-8, is not YAML, is nested too deeply, or repeats a key.
    """
    text = ""
    try:
        text = _read(path)
        return _load(text)
    except ManifestError as problem:
        raise ManifestError(f"{path}: {problem}") from None
    except yaml.YAMLError as problem:
        raise ManifestError(f"{path}: {_sentence(problem, text)}") from None
    except (OSError, UnicodeDecodeError, ValueError, OverflowError, RecursionError) as problem:
        raise ManifestError(f"{path}: {' '.join(str(problem).split())}") from None


def _load(text: str) -> Any:  # noqa: ANN401  # any YAML value
    """The value of a YAML text.  What libyaml refuses is read again, so that every error is PyYAML's."""
    if not _READ_DIFFERENTLY.search(text):
        with contextlib.suppress(yaml.YAMLError, ManifestError):
            return yaml.load(text, Loader=QuickLoader)  # noqa: S506  # constructs what SafeLoader does
    return yaml.load(text, Loader=StrictLoader)  # noqa: S506  # a subclass of SafeLoader


def _sentence(problem: yaml.YAMLError, text: str) -> str:
    """What the parser says about `text`, with the line and the column, both from 1."""
    if isinstance(problem, yaml.MarkedYAMLError) and problem.problem_mark:
        line, column = problem.problem_mark.line + 1, problem.problem_mark.column + 1
        said = ", ".join(part for part in (problem.context, problem.problem) if part)
    elif isinstance(problem, yaml.reader.ReaderError):
        before = text[: problem.position].split("\n")
        line, column = len(before), len(before[-1]) + 1
        said = f"the character U+{problem.character:04X} is not allowed"
    else:
        return " ".join(str(problem).split())
    said = " ".join(said.split()).replace("'<stream end>'", "the end of the file")
    return f"line {line}, column {column}: {said}"


def _read(path: Path) -> str:
    """Return the text of a file.  Does not wait for a FIFO or a device, and reads no more than the limit."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ManifestError("it is not a regular file")
        data = os.read(descriptor, MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise ManifestError(f"it is larger than {MAX_BYTES} bytes, the limit")
    return data.decode("utf-8")


class _StrictNodes(Composer, SafeConstructor, Resolver):
    """Composes and constructs the core types of YAML 1.2, and refuses duplicate keys.

    PyYAML follows YAML 1.1, where `no` is False and `010` is 8, and it keeps the last of two equal keys.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML reads this class attribute
    _depth = _count = 0
    _sizes: dict[int, int]  # the number of values in each finished node, by its id

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401  # as PyYAML has it
        """Compose a node; raise `ManifestError` if a limit is exceeded, before the value is constructed."""
        event = self.peek_event()  # type: ignore[attr-defined]
        line = f"line {event.start_mark.line + 1}" if event.start_mark else "it"
        if self._depth > MAX_DEPTH:
            raise ManifestError(f"{line} is nested more than {MAX_DEPTH} levels deep")
        if getattr(event, "tag", None) is not None:
            raise ManifestError(f"{line} has the tag {event.tag!r}; tags are not allowed")
        if isinstance(event, yaml.ScalarEvent) and _SURROGATE.search(event.value):
            raise ManifestError(f"{line} has a character that UTF-8 cannot encode")
        is_alias, before = isinstance(event, yaml.AliasEvent), self._count
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise ManifestError(f"the alias *{event.anchor} is inside the value that it repeats")
        self._count += self._sizes[id(node)] if is_alias else 1
        if self._count > MAX_NODES:
            raise ManifestError(f"it has more than {MAX_NODES} values, the limit")
        if not is_alias:
            self._sizes[id(node)] = self._count - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Construct a mapping; raise `ManifestError` for a duplicate key, or a key that is not a plain word."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ManifestError(f"the key on line {line} is not a plain word")
            if key_node.value in seen:
                raise ManifestError(f"duplicate key {key_node.value!r} on line {line}")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|false)$", "tf"),
    ("int", r"^(?:0|-?[1-9][0-9]*)$", "-0123456789"),
    ("float", r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$", "-+.0123456789"),
    ("null", r"^(?:null|~|)$", "n~\0"),
):
    _StrictNodes.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first) + [""] * (_tag == "null")
    )


class StrictLoader(_StrictNodes, yaml.SafeLoader):
    """The strict loader with PyYAML's own parser, whose errors are the ones that users see."""

    def __init__(self, stream: str) -> None:
        yaml.SafeLoader.__init__(self, stream)
        self._sizes = {}


if yaml.__with_libyaml__ and yaml._yaml.get_version() >= _MIN_LIBYAML:  # noqa: SLF001  # its only name

    class QuickLoader(_StrictNodes, yaml.CSafeLoader):
        """The strict loader with the parser of libyaml, which is ten times as fast."""

        def __init__(self, stream: str) -> None:
            yaml.CSafeLoader.__init__(self, stream)
            Composer.__init__(self)
            self._sizes = {}

else:
    QuickLoader = StrictLoader  # type: ignore[misc, assignment]
