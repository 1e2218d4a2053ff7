"""What a compiler looked for and did not find.  A file that appears there later could be found first.

A dependency file lists only what was found.  A build is therefore stored with the places that were empty: for each name
that an `#include` or a `__has_include` asks for, the folders that were searched before the one that has it, or all of
them if none has.  A name with folders in it, such as `lib/tile.h`, is kept by the first of them that does not exist.

The names are read from the files that the compiler has read, also from parts that it skipped.  If a file of the user
asks for a name that only the preprocessor knows, every new file in the searched folders of the user counts.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.build.keys import Dependency, digest, file_hash
from pytest_fa.errors import ToolchainError

MAX_SECONDS = 60.0
_GAP = rb"(?:[ \t]|/\*(?>[^*]|\*(?!/))*\*/)*+"  # spaces and comments
_NAME = rb'(?:"([^"\n]+)"|<([^>\n]+)>)'
_INCLUDE = re.compile(rb"include(_next)?" + _GAP + _NAME)
_BY_MACRO = re.compile(rb"#[ \t]*include(?:_next)?[ \t]+\w")
_IMPORT = re.compile(rb"(?:import|embed)()" + _GAP + _NAME)
_DEFINE = re.compile(rb"define[ \t]+(\w+)\(([^()\n]*)\)([^\n]*)")
_QUESTIONS = (rb"__has_include(?:_next)?(?:__)?", rb"__has_embed")
_LISTS = ('#include "..." search starts here:', "#include <...> search starts here:", "End of search list.")
_IGNORED = re.compile(r'ignoring nonexistent directory "(.+)"')
_TAKE_A_WORD = frozenset({"-o", "-x", "-MF", "-MT", "-MQ", "-include", "-imacros"})
_SOURCES = (".cu", ".cpp", ".cc", ".cxx", ".c")


class Lookups(msgspec.Struct, frozen=True):
    """What must stay as it is: names that folders do not have, and the files that other folders have, as a digest.

    Folders are named like dependencies.  `listed` is empty unless a name could not be told.
    """

    missing: dict[str, tuple[str, ...]] = {}
    listed: dict[str, str] = {}

    def changed(self, real_path: Callable[[str], str | None]) -> list[str]:
        """Return what has appeared since.  `real_path` returns the path of a folder, or None if it does not count."""
        appeared = []
        for folder, names in self.missing.items():
            if path := real_path(folder):
                appeared += [f"{folder.removesuffix('/.')}/{name} (new)" for name in _present(path, names)]
        for folder, files in self.listed.items():
            if (path := real_path(folder)) and _listing(path) != files:
                appeared.append(f"the files in {folder}")
        return appeared


class CompiledFrom(NamedTuple):
    """What a build was compiled from: files with their hashes, and what was looked up.

    `seen` has the real paths of other files that the compiler could find, whether it read them or not.
    """

    dependencies: tuple[Dependency, ...]
    lookups: Lookups
    seen: frozenset[str]

    @property
    def key_parts(self) -> object:
        """The part of the build's key for them."""
        return key_parts(self.dependencies, self.lookups)


def key_parts(dependencies: tuple[Dependency, ...], lookups: Lookups | None) -> object:
    """Return the part of a build's key for what it was compiled from; builds of earlier versions have no lookups."""
    return dependencies if lookups is None else [dependencies, lookups]


class Searched(NamedTuple):
    """What the compiler looked up, beside its dependencies.  All paths are as the compiler names them.

    `missing` has pairs of a folder and a name that it does not have.  `asked` are files whose existence was asked for
    with `__has_include`, and `seen` are all files that were found.
    """

    missing: set[tuple[str, str]]
    listed: dict[str, str]
    asked: set[str]
    seen: set[str]

    def inputs(
        self, dependencies: tuple[Dependency, ...], folder: Path, portable: Callable[[str], str | None]
    ) -> CompiledFrom:
        """What a build in this working folder was compiled from.

        `portable` returns the name that the cache has for a path; None for a file of the working folder itself.
        """
        asked = {place: path for path in self.asked if (place := portable(path)) is not None}
        known = dict(dependencies)
        more = {place: file_hash(str(folder / path)) or "" for place, path in asked.items() if place not in known}
        others = ((portable(path), path) for path in self.seen)
        seen = frozenset(str(folder / path) for place, path in others if place is not None and place not in known)
        return CompiledFrom(tuple(sorted({**known, **more}.items())), self._lookups(portable), seen)

    def _lookups(self, portable: Callable[[str], str | None]) -> Lookups:
        missing = dict[str, list[str]]()
        for folder, name in sorted(self.missing):
            if (place := portable(folder)) is not None:
                missing.setdefault(place, []).append(name)
        listed = {place: files for folder, files in self.listed.items() if (place := portable(folder)) is not None}
        return Lookups({place: tuple(dict.fromkeys(names)) for place, names in missing.items()}, listed)


class SearchPath(NamedTuple):
    """Where a compiler looks for headers: first for `"..."` only, then for both kinds.

    `absent` are folders that it was told to search and that do not exist; `forced` are the names of `-include`.  A
    dependency file that leaves system headers out has no files of the folders `unlisted`.
    """

    quoted: tuple[str, ...]
    angled: tuple[str, ...]
    absent: tuple[str, ...]
    forced: tuple[str, ...]
    unlisted: tuple[str, ...] = ()

    @property
    def folders(self) -> tuple[str, ...]:
        """Those that exist, in the order of the search."""
        return (*self.quoted, *self.angled)


class _Asked(NamedTuple):
    """One name that a file asks for: with `"..."` or `<...>`, by `#include_next`, or only whether it is there."""

    name: str
    is_quoted: bool
    is_next: bool
    is_question: bool


# -- where a compiler searches ----------------------------------------------------------------------------------------


def search_path(command: list[str], folder: Path, *, is_nvcc: bool) -> SearchPath:
    """Return where the compiler of a command searches, as it says itself.  Raises `ToolchainError`.

    It starts one or two programs, which compile nothing.
    """
    words = _host_command(command, folder) if is_nvcc else command
    forced = [word for before, word in pairwise(words) if before in ("-include", "-imacros")]
    forced += [word.partition("=")[2] for word in words if word.startswith(("-include=", "--include="))]
    quoted, angled, absent = _folders(tuple(_without_files(words)), folder)
    unlisted = tuple(place for place in angled if place in _system_folders(words)) if "-MMD" in words else ()
    return SearchPath(quoted, angled, absent, tuple(forced), unlisted)


@cache
def default_folders(compiler: str) -> tuple[str, ...]:
    """Return the folders in which a host compiler searches by itself."""
    return _folders((compiler,), Path("/"), is_plain=True)[1]


def _system_folders(words: list[str]) -> set[str]:
    """Return the folders that a command or the environment names as those of system headers."""
    variables = (os.environ.get(name, "") for name in ("C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"))
    folders = {folder for value in variables for folder in value.split(os.pathsep)}
    for option in ("-isystem", "-idirafter"):
        folders |= {word.removeprefix(option) for word in words if word.startswith(option)}
        folders |= {word for before, word in pairwise(words) if before == option}
    return folders


def _host_command(command: list[str], folder: Path) -> list[str]:
    """Return the host compiler's command with which nvcc preprocesses a source."""
    nvcc, *rest = command
    lines = _output([nvcc, "--dryrun", *rest], folder).splitlines()
    words = next((line for line in lines if line.startswith("#$ ") and " -E " in line), None)
    if words is None:
        raise ToolchainError(f"{nvcc} --dryrun shows no command that preprocesses the source")
    return shlex.split(words.removeprefix("#$ "))


def _without_files(words: list[str]) -> Iterator[str]:
    """The compiler and its options, without its sources and the options that name a file to read or to write."""
    before = ""
    for word in words:
        is_dropped = before in _TAKE_A_WORD or word in (*_TAKE_A_WORD, "-c") or word.startswith(("-M", "-include="))
        if not is_dropped and not word.endswith(_SOURCES):
            yield word
        before = word


def _folders(
    command: tuple[str, ...], folder: Path, *, is_plain: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the folders of `"..."`, those of both kinds, and those that do not exist."""
    lines = _output([*command, "-v", "-E", "-x", "c++", os.devnull, "-o", os.devnull], folder, is_plain=is_plain)
    listed = lines.splitlines()
    if not set(_LISTS) <= set(listed):
        raise ToolchainError(f"{command[0]} -v does not say where it searches for headers: {lines.strip()[-200:]}")
    first, second, end = (listed.index(line) for line in _LISTS)
    absent = [match[1] for line in listed if (match := _IGNORED.fullmatch(line))]
    quoted, angled = listed[first + 1 : second], listed[second + 1 : end]
    return tuple(map(str.strip, quoted)), tuple(map(str.strip, angled)), tuple(absent)


def _output(command: list[str], folder: Path, *, is_plain: bool = False) -> str:
    names = ("PATH",) if is_plain else tuple(os.environ)
    environment = {name: os.environ[name] for name in names if name in os.environ} | {"LC_ALL": "C"}
    try:
        run = subprocess.run(  # noqa: S603
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=MAX_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ToolchainError(f"{command[0]} cannot be run: {problem}") from problem
    return run.stdout + run.stderr


# -- what it asked for ------------------------------------------------------------------------------------------------


class LookupReader:
    """Reads what a compiler has read in one working folder, and notes what it looked for.

    `systems` are the folders of compilers and of their libraries: what their files ask for is noted as far as it can be
    told.
    """

    def __init__(self, folder: Path, systems: Iterable[str]) -> None:
        self._folder, self._tree = folder, _Tree(folder)
        self._systems = tuple(os.path.realpath(folder / place) for place in systems)

    def searched(self, files: Iterable[str], paths: list[SearchPath]) -> Searched:
        """Return what was looked up while the compiler read these files, on one of the search paths."""
        tree, texts, pending = self._tree, dict[str, bytes](), set(files)
        is_untold = False
        while pending:
            texts.update((name, tree.read(name)) for name in sorted(pending))
            is_untold = self._search(texts, paths) or is_untold
            unlisted = tuple(f"{place}/" for path in paths for place in path.unlisted if self._is_own(place))
            pending = {name for name in tree.seen if name.startswith(unlisted)} - texts.keys() if unlisted else set()
            tree.asked |= pending
        for path in paths:
            for name in path.forced:
                tree.look_up(name, ("", *path.folders))
            for place in path.absent:
                tree.note_missing("", place)
        return Searched(tree.missing, self._listed(texts, paths) if is_untold else {}, tree.asked, tree.seen)

    def _search(self, texts: dict[str, bytes], paths: list[SearchPath]) -> bool:
        """Look up what these texts ask for; return whether a file of the user asks for a name that is unknown."""
        questions = _questions(texts.values())
        asked = {name: tuple(_asked(text, questions)) for name, text in texts.items()}
        own = {name: os.path.dirname(name) for name in texts if self._is_own(os.path.dirname(name))}  # noqa: PTH120
        beside = tuple(dict.fromkeys(folder for name, folder in own.items() if _BY_MACRO.search(texts[name])))
        for path in paths:
            for name in texts:
                self._look_up_from(name, asked[name], path, is_own=name in own)
            for name in texts if beside else texts.keys() - self._tree.seen:  # a macro has its name
                for place in path.folders:
                    if name.startswith(f"{place}/") and ".." not in (rest := name[len(place) + 1 :]).split("/"):
                        self._tree.look_up(rest, (*beside, *path.folders))
        return any(not each.name for name in own for each in asked[name])

    def look_up_libraries(self, words: Iterable[str]) -> None:
        """Note where the linker looks for the libraries of `-l`.  A static library becomes part of the build."""
        words = tuple(words)
        places = [word.removeprefix("-L") for word in words if word.startswith("-L")]
        places += filter(None, os.environ.get("LIBRARY_PATH", "").split(os.pathsep))
        for library in (word.removeprefix("-l") for word in words if word.startswith("-l")):
            for place in places:
                shared, static = f"lib{library}.so", f"lib{library}.a"
                if self._tree.look_up(shared, (place,)):
                    break
                if self._tree.look_up(static, (place,), is_question=self._is_own(place)):
                    break

    def _look_up_from(self, file: str, asked: Iterable[_Asked], path: SearchPath, *, is_own: bool) -> None:
        """Look up what a file asks for; in a file of the user, also the precompiled header that g++ prefers."""
        beside = os.path.dirname(file)  # noqa: PTH120  # 600 times in a build
        for each in asked:
            if not each.name:
                continue
            places = path.angled[_after(file, each.name, path.angled) :] if each.is_next else path.angled
            before = (beside, *path.quoted) if each.is_quoted and not each.is_next else ()
            self._tree.look_up(each.name, (*before, *places), is_question=each.is_question)
            if is_own and not each.is_question:
                self._tree.look_up(f"{each.name}.gch", (*before, *places))

    def _listed(self, files: Iterable[str], paths: Iterable[SearchPath]) -> dict[str, str]:
        """The files in the user's folders that are searched."""
        places = {place for path in paths for place in path.folders} | {os.path.dirname(name) for name in files}  # noqa: PTH120
        return {place: _listing(str(self._folder / place)) for place in sorted(places) if place and self._is_own(place)}

    def _is_own(self, place: str) -> bool:
        """Whether a folder is the user's."""
        real = os.path.realpath(self._folder / place)
        return not any(real == system or real.startswith(f"{system}/") for system in self._systems)


class _Questions(NamedTuple):
    """How texts ask whether a header is there: the expression, and words of which it has one."""

    expression: re.Pattern[bytes]
    words: tuple[bytes, ...]


def _questions(texts: Iterable[bytes]) -> _Questions:
    """Return how texts ask: with `__has_include`, or with a macro that only passes a name on to it."""
    defines = [match.groups() for text in texts if b"__has_" in text for match in _DEFINE.finditer(text)]
    macros = dict[bytes, None]()
    while True:
        names = b"|".join((*_QUESTIONS, *macros))
        expression = re.compile(rb"\b(?:" + names + rb")" + _GAP + rb"\(" + _GAP + rb"(?:" + _NAME + rb"|(\w+))?")
        found = {
            name
            for name, parameters, body in defines
            for match in expression.finditer(body)
            if match[3] and match[3] in parameters.replace(b" ", b"").split(b",")
        }
        if found <= macros.keys():
            return _Questions(expression, (b"__has_", *macros))
        macros.update(dict.fromkeys(sorted(found)))


def _asked(text: bytes, questions: _Questions) -> Iterator[_Asked]:
    """Yield the names that a text asks for; the name is empty if only the preprocessor knows it."""
    for expression in (_INCLUDE, _IMPORT):
        for match in expression.finditer(text):
            yield _Asked(_text(match[2] or match[3]), match[2] is not None, bool(match[1]), is_question=False)
    if not any(word in text for word in questions.words):
        return
    wrappers = [match.span() for match in _DEFINE.finditer(text) if questions.expression.match(match[1] + b"(")]
    for match in questions.expression.finditer(text):
        if name := match[1] or match[2]:
            yield _Asked(_text(name), match[1] is not None, b"_next" in match[0], is_question=True)
        elif not any(start <= match.start() < end for start, end in wrappers):
            yield _Asked("", is_quoted=False, is_next=False, is_question=True)


def _text(name: bytes) -> str:
    """A name as text; empty if it is none, so that it counts as unknown."""
    text = name.decode(errors="replace")
    return text if text.isprintable() and "\ufffd" not in text else ""


def _after(file: str, name: str, places: tuple[str, ...]) -> int:
    """Return the index of the folder after the one that has a file, where `#include_next` begins."""
    own = (index for index, place in enumerate(places) if file == f"{place}/{name}" or file.startswith(f"{place}/"))
    return next(own, -1) + 1


class _Tree:
    """The files below one working folder, and what was looked up there.  Each path is looked at once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._kinds = str(folder), dict[str, bool | None]()
        self._done = dict[tuple[str, tuple[str, ...], bool], bool]()
        self.missing, self.asked, self.seen = set[tuple[str, str]](), set[str](), set[str]()

    def read(self, name: str) -> bytes:
        """The content of a file, with its continued lines joined."""
        with open(os.path.join(self._folder, name), "rb") as stream:  # noqa: PTH118, PTH123  # 600 times in a build
            text = stream.read()
        return re.sub(rb"\\[ \t]*\r?\n", b"", text) if b"\\" in text else text

    def look_up(self, name: str, places: tuple[str, ...], *, is_question: bool = False) -> bool:
        """Note where a file of this name is not, up to the first folder that has it; return whether one has."""
        if (known := self._done.get((name, places, is_question))) is not None:
            return known
        self._done[name, places, is_question] = is_found = self._look_up(name, places, is_question=is_question)
        return is_found

    def _look_up(self, name: str, places: tuple[str, ...], *, is_question: bool) -> bool:
        for place in places:
            path = os.path.join(place, name)  # noqa: PTH118
            if self._is_file(path):
                self.seen.add(path)
                if is_question:
                    self.asked.add(path)
                return True
            self.note_missing(place, name)
        return False

    def note_missing(self, place: str, name: str) -> None:
        """Note the first part of a path that does not exist.  A folder of the name of a file is not missing."""
        folder = place
        if name.startswith("/"):
            folder, name = "/", name.lstrip("/")
        for part in name.split("/"):
            path = os.path.join(folder, part)  # noqa: PTH118
            if self._is_file(path) is None:
                self.missing.add((folder, part))
                return
            folder = path

    def _is_file(self, path: str) -> bool | None:
        """Whether a path is a file and no folder; None if there is nothing."""
        if path not in self._kinds:
            real = os.path.join(self._folder, path)  # noqa: PTH118
            self._kinds[path] = not os.path.isdir(real) if os.path.exists(real) else None  # noqa: PTH110, PTH112
        return self._kinds[path]


# -- whether that is still so -----------------------------------------------------------------------------------------


def _present(folder: str, names: Iterable[str]) -> list[str]:
    """Return which of the names a folder has now."""
    wanted = set(names)
    try:
        wanted.intersection_update(os.listdir(folder))  # noqa: PTH208  # names, and not paths
    except PermissionError:
        pass  # a folder that may be searched and not listed
    except OSError:
        return []
    return sorted(name for name in wanted if os.path.exists(f"{folder}/{name}"))  # noqa: PTH110  # not a broken link


def _listing(folder: str) -> str:
    """Return a digest of the names of all files below a folder."""
    names = list[str]()
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        names += (f"{os.path.relpath(place, folder)}/{name}" for name in sorted(files))
    return digest(names)
