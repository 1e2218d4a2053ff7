"""The command line of `python -m pytest_fa judge`.  Every way in which it ends has a status word and a document."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from pytest_fa.errors import UsageProblem
from pytest_fa.features.judge_command.document import JudgeDocument, schema_text
from pytest_fa.features.judge_command.judging import document_of_usage, judge_variant
from pytest_fa.features.judge_command.question import Question
from pytest_fa.features.judge_command.verdict_text import verdict_text
from pytest_fa.records.record import to_json

TITLE = "judge and gate one variant, with a configuration of its own; the exit status says the verdict"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have the exit status and the document of a wrong use."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageProblem`."""
        raise UsageProblem(f"judge: {message}")


def main(words: list[str]) -> int:
    """Judge the variant that the words name; write the document to stdout, everything else to stderr."""
    is_json = "--json" in words
    try:
        options = vars(_parser().parse_args(words))
        if options.pop("schema"):
            sys.stdout.write(schema_text())
            return 0
        is_json = options.pop("json")
        document = judge_variant(Question(words=tuple(word for word in words if word != "--json"), **options))
    except UsageProblem as problem:
        question = Question("", tuple(word for word in words if word != "--json"))
        document = document_of_usage(question, str(problem))
    _write(document, is_json=is_json)
    if sys.flags.inspect:  # PYTHONINSPECT would start an interpreter here, whose exit status is another
        os._exit(document.exit_status)
    return document.exit_status


def _write(document: JudgeDocument, *, is_json: bool) -> None:
    sys.stdout.write(to_json(document).decode() if is_json else verdict_text(document))
    sys.stdout.write("\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -P -m pytest_fa judge", description=TITLE, allow_abbrev=False)
    parser.add_argument(
        "target", metavar="NAME|DIR", nargs="?", default="", help="a variant's name, or the folder of its manifest"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, which has a published schema")
    parser.add_argument("--gate", metavar="RATIO", default="1.0", help="be faster than RATIO times SDPA; default: 1.0")
    parser.add_argument("--gate-baseline", metavar="NAME", help="compare with this variant instead of SDPA")
    parser.add_argument("--tolerance", metavar="POLICY", help="the tolerance policy; default: same_precision")
    parser.add_argument("--suite", metavar="NAME[,NAME...]", help="suites of cases; default: history")
    parser.add_argument("--case", metavar="ID[,ID...]", help="only these cases; then properties are not judged")
    parser.add_argument("--kernels", metavar="DIR", help="the folder of the variants' folders; default: kernels")
    parser.add_argument("--ncu", action="store_true", help="also profile with Nsight Compute: what decides the time")
    parser.add_argument("--watchdog", metavar="SECONDS", help="a launch that takes longer hangs")
    parser.add_argument("--cache", metavar="DIR", help="the cache folder of builds")
    parser.add_argument("--no-build", action="store_true", help="use cached builds only")
    parser.add_argument("--artifacts", metavar="DIR", help="the folder of the records; default: artifacts")
    parser.add_argument("--profiles", metavar="DIR", help="the folder with this GPU's noise.json and ceilings.json")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of the document, and stop")
    return parser
