"""The commands of `python -m pytest_fa`: new, doctor, judge, report, compare, export, bundle and others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_fa.errors import FaError, suggestion
from pytest_fa.feature import Feature, Subcommand, features


def main(arguments: list[str]) -> int:
    """Run one command; return its exit status, or 2 after one line on stderr if it fails."""
    try:
        for feature, command in _commands():
            if command.add_arguments is None and arguments[:1] == [command.name]:
                return _run_main(feature, command, arguments[1:])
        _require_known(arguments[:1])
        options = _parser().parse_args(arguments)
        return int(options.run(options) or 0)
    except (FaError, OSError, ImportError) as problem:
        sys.stderr.write(f"pytest_fa: {problem}\n")
        return 2


def _commands() -> list[tuple[Feature, Subcommand]]:
    """The commands of all features."""
    return [(feature, command) for feature in features() for command in feature.commands]


def _require_known(command: list[str]) -> None:
    """Raise `FaError` if the first word is no option and no command."""
    known = ["serve", *(each.name for _, each in _commands())]
    for word in command:
        if word not in known and not word.startswith("-"):
            raise FaError(f"no command {word!r}{suggestion(word, known)} (allowed: {', '.join(sorted(known))})")


def _run_main(feature: Feature, command: Subcommand, words: list[str]) -> int:
    """Run a command that parses its words by itself."""
    if command.forgets_folder and not sys.flags.safe_path and sys.path[0] == str(Path.cwd()):
        del sys.path[0]  # where Python's option -m looks first: it may be a stranger's
    status: int = feature.module(command.module).main(words)
    return status


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands.  It imports no dependency, because `doctor` says which one is missing."""
    parser = argparse.ArgumentParser(prog="python -m pytest_fa", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for feature, command in _commands():
        added = commands.add_parser(command.name, help=command.help)
        if command.add_arguments:
            command.add_arguments(added)
            added.set_defaults(run=_runner(feature, command))
    _add_serve(commands.add_parser("serve", help="keep torch imported for the next runs, until idle or --stop"))
    return parser


def _runner(feature: Feature, command: Subcommand) -> Callable[[argparse.Namespace], int | None]:
    """The function of a command, whose module is imported when it runs."""
    return lambda options: feature.module(command.module).run(options)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--idle-minutes", type=float, default=30.0, help="end after so long without a run; default: 30")
    parser.add_argument("--stop", action="store_true", help="end the server that runs now")
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    from pytest_fa.host.fork_server import child_environment  # noqa: PLC0415  # only this command needs them
    from pytest_fa.host.resident import end_resident, resident_path, serve_command  # noqa: PLC0415  # as above

    if not options.stop:
        serve_command(child_environment(), options.idle_minutes)
    path = resident_path()
    has_ended = path is not None and end_resident(path)
    sys.stdout.write("the server has ended\n" if has_ended else "no server runs\n")
    return int(not has_ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
