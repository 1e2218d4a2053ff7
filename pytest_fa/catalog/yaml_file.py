"""Read a YAML file that anybody may have written: strict types, no duplicate keys, and limits on size and depth."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pytest_fa.errors import ManifestError

MOST_BYTES = 65_536
MOST_DEPTH = 20  # mappings and lists inside one another
MOST_NODES = 10_000  # scalars, lists and mappings; an alias counts as often as the node that it repeats


def load_yaml(path: Path) -> Any:  # noqa: ANN401  # any YAML value; the caller checks it
    """Return the content of a YAML file.

    Raises `ManifestError`, with the file and one sentence, for a file that is not a regular file, is too large, is not
    UTF-8, is not YAML, is nested too deeply, or repeats a key.
    """
    try:
        text = _read(path)
        _require_small(yaml.parse(text, Loader=StrictLoader))
        return yaml.load(text, Loader=StrictLoader)  # noqa: S506  # a subclass of SafeLoader
    except ManifestError as problem:
        raise ManifestError(f"{path}: {problem}") from None
    except (yaml.YAMLError, OSError, UnicodeDecodeError, ValueError, OverflowError, RecursionError) as problem:
        raise ManifestError(f"{path}: {' '.join(str(problem).split())}") from None


def _read(path: Path) -> str:
    """Return the text of a file.  Does not wait for a FIFO or a device, and reads no more than the limit."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ManifestError("it is not a regular file")
        data = os.read(descriptor, MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MOST_BYTES:
        raise ManifestError(f"it is larger than {MOST_BYTES} bytes, the limit for a manifest")
    return data.decode("utf-8")


def _require_small(events: Iterator[yaml.Event]) -> None:
    """Raise `ManifestError` if a document is nested too deeply or has too many nodes, before it is constructed."""
    sizes: dict[str, int] = {}  # the number of nodes below each anchor
    open_nodes: list[tuple[str | None, int]] = []  # of each open list or mapping: its anchor, and the count before it
    count = 0
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor or ""] = count - before + 1
        if isinstance(event, yaml.AliasEvent) and event.anchor in [anchor for anchor, _ in open_nodes]:
            raise ManifestError(f"the alias *{event.anchor} is inside the value that it repeats")
        count += sizes.get(event.anchor or "", 1) if isinstance(event, yaml.AliasEvent) else 1
        if len(open_nodes) > MOST_DEPTH:
            line = f"line {event.start_mark.line + 1}" if event.start_mark else "it"
            raise ManifestError(f"{line} is nested more than {MOST_DEPTH} levels deep")
        if count > MOST_NODES:
            raise ManifestError(f"it has more than {MOST_NODES} values, the limit for a manifest")


class StrictLoader(yaml.SafeLoader):
    """A YAML loader for the core types of YAML 1.2 that refuses duplicate keys.

    PyYAML follows YAML 1.1, where `no` is False and `010` is 8, and it keeps the last of two equal keys.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML reads this class attribute

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
    StrictLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first) + [""] * (_tag == "null")
    )
