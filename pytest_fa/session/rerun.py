"""Rerun commands: the command line that repeats one test, as pasted into the folder in which the run was started."""

from __future__ import annotations

import shlex

from pytest_fa.catalog.case import Case
from pytest_fa.feature import features
from pytest_fa.options.command_line import SUITE, SUITE_FILES
from pytest_fa.options.options import Options
from pytest_fa.records.record import RecordKind

_SUITE_WORDS = ("--pyargs", SUITE)


def rerun_command(
    options: Options,
    kind: RecordKind,
    variant: str,
    case: Case | None,
    property_name: str | None = None,
    tool: str | None = None,
) -> str:
    """The command that runs one test of the shipped suite again; for a timing, also those of its companions.

    `tool` is the tool of the test, if there is only one.
    """
    words = [f"--fa-variant={variant}", *_options_of(options, kind, tool)]
    if kind == "selftest":
        return shlex.join([*_words_without_suite(options), *reversed(words)])
    if case and not property_name:
        words.append(f"--fa-case={case.id}")
    test = f"test_{kind}"
    if property_name:
        test += f"[{variant}-{property_name}]"
        words += [f"--fa-dtype={','.join(options.dtypes)}"] if options.dtypes else []
    elif "test_" not in variant:
        return shlex.join([*options.rerun, *words, "-k", test])
    # -k selects by parts of names, so it would select too much: the other properties, or every test of the variant.
    file_id = SUITE_FILES["test_attention.py"]
    return shlex.join([*_words_without_suite(options), *words, "--pyargs", f"{file_id}::{test}"])


def own_rerun_command(options: Options, kind: RecordKind, variant: str, command: str, test_id: str) -> str:
    """The command that runs a user's own test with `fa_run` again.  The path in `test_id` starts where pytest did.

    `command` is that of the shipped suite.
    """
    words = [f"--fa-variant={variant}", *_options_of(options, kind, None)]
    words += [word for word in shlex.split(command) if word.startswith("--fa-case=") or _is_of_feature(word)]
    words += [f"--fa-dtype={','.join(options.dtypes)}"] if options.dtypes else []
    words += [f"--fa-seeds={','.join(map(str, options.seeds))},"] if options.seeds else []
    first_words = _words_without_suite(options)
    return shlex.join([*first_words, *(word for word in dict.fromkeys(words) if word not in first_words), test_id])


def _words_without_suite(options: Options) -> list[str]:
    return [word for word in options.rerun if word not in _SUITE_WORDS]


def _options_of(options: Options, kind: RecordKind, tool: str | None) -> list[str]:
    """The options without which the suite contains no test of this kind, or without which it tests something else."""
    words = [word for part in options.parts for word in part.rerun_words(kind, tool)]
    return ["--fa-static"] if kind == "build" and options.static else words


def _is_of_feature(word: str) -> bool:
    """Whether a word of a rerun command is an option of a feature that decides what its test does."""
    flags = {row.flag for feature in features() for row in feature.options if row.in_rerun}
    return word.partition("=")[0] in flags
