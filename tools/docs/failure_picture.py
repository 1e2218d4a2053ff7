"""Draws a terminal in which pytest names the bug of a kernel, from a run of the commands that it shows.

python -m tools.docs.failure_picture docs/pictures/failure.svg

The commands run in an empty folder, on the CPU.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

import pytest_fa
from pytest_fa.errors import FaError

COLUMNS = 64
INDENT = "    "  # of the rest of a line that is wider
CAUSE = "the softmax scale is 1 % too large"
RUN = "pytest --fa-variant=mine -k test_correct -x"
# Environment variables that change what pytest prints.
CHANGES_OUTPUT = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "NO_COLOR", "FORCE_COLOR", "PYTEST_ADDOPTS")
SKIPPED = Text("  ...", "bright_black")
COLORS = [(72, 79, 88), (255, 123, 114), (63, 185, 80), (227, 179, 65)]  # black, red, green, yellow
COLORS += [(88, 166, 255), (188, 140, 255), (57, 197, 207), (201, 209, 217)]  # blue, magenta, cyan, white
BRIGHT = [(139, 148, 158), *COLORS[1:7], (240, 246, 252)]
THEME = TerminalTheme((13, 17, 23), (230, 237, 243), COLORS, BRIGHT)
# The picture loads nothing: where a font is missing, the next one is used, at the same width (textLength).
TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>%s</title>
<style>.{unique_id}-matrix{{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;\
font-size:{char_height}px}}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})"><g class="{unique_id}-matrix" xml:space="preserve">
{matrix}
</g></g>
</svg>
"""


class Command(NamedTuple):
    """A command, the exit status that it must have, and how the lines of its output begin that the picture shows."""

    line: str
    status: int
    shown: tuple[str, ...]


SESSION = (
    Command("python -m pytest_fa new mine --kind python", 0, ("kernels/mine: ",)),
    Command(RUN, 0, ("mine: ",)),
    Command(r"sed -i 's/\* scale/* scale * 1.01/' kernels/mine/entry.py", 0, ()),
    Command(
        RUN,
        1,
        (
            "wrong: ",
            "  elements: ",
            "  first bad: ",
            "  worst: ",
            "  likely cause: ",
            "  cross-check: ",
            "  only the candidate is wrong",
            "  rerun: ",
        ),
    ),
)


class UnexpectedOutput(FaError):
    """A command of the session did not do what the picture shows."""


def main(arguments: list[str]) -> int:
    """Run the session and draw it into a file; return 2 after one line on stderr if that fails."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="fa-session-") as folder:
            picture = draw_session(run_session(Path(folder)))
        Path(arguments[0]).write_text(picture, encoding="utf-8")
    except (FaError, OSError) as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    sys.stdout.write(f"{arguments[0]}\n")
    return 0


def run_session(folder: Path) -> list[str]:
    """The output of each command of the session, which runs in `folder`, with terminal colours.

    Raises `UnexpectedOutput` if a command has another exit status than the picture says.
    """
    environment = {name: value for name, value in os.environ.items() if name not in CHANGES_OUTPUT}
    environment |= {"COLUMNS": str(COLUMNS), "PY_COLORS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTEST_FA_SERVER": "off"}
    environment["PYTHONPATH"] = str(Path(pytest_fa.__file__).parents[1])
    programs = f'python() {{ "{sys.executable}" "$@"; }}; pytest() {{ python -m pytest "$@"; }}; '
    outputs = []
    for command in SESSION:
        process = subprocess.run(  # noqa: S603  # the commands above
            [str(shutil.which("bash")), "-c", programs + command.line],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if process.returncode != command.status:
            problem = f"$ {command.line}: exit status {process.returncode}, expected {command.status}"
            raise UnexpectedOutput(f"{problem}\n{process.stdout}")
        outputs.append(process.stdout)
    return outputs


def draw_session(outputs: Sequence[str]) -> str:
    """The session as an SVG.  Raises `UnexpectedOutput` if a line that it shows is missing."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    for number, (command, output) in enumerate(zip(SESSION, outputs, strict=True)):
        if number and SESSION[number - 1].shown:
            console.print()
        console.print(Text("$ ", "bold green").append(command.line, "bold bright_white"))
        for line in _shown_lines(command, output):
            line.highlight_regex(re.escape(CAUSE), "bold yellow")
            first, *others = line.wrap(console, COLUMNS)
            console.print(first)
            for other in others:
                console.print(Text(INDENT) + other)
    title = f"pytest reports a wrong kernel: {CAUSE}"
    return console.export_svg(title="", theme=THEME, code_format=TEMPLATE % title, unique_id="failure") + "\n"


def _shown_lines(command: Command, output: str) -> Iterator[Text]:
    """The lines that the picture shows, in their order; dots stand for skipped lines in a failure."""
    lines = [Text.from_ansi(line) for line in output.splitlines()]
    shown = [index for index, line in enumerate(lines) if line.plain.startswith(command.shown)]
    for start in command.shown:
        if not any(lines[index].plain.startswith(start) for index in shown):
            raise UnexpectedOutput(f"$ {command.line}: no line begins with '{start}'\n{output}")
    for number, index in enumerate(shown):
        if command.status and number and index > shown[number - 1] + 1:
            yield SKIPPED.copy()
        yield lines[index]


def words_in(picture: str) -> str:
    """The text in a picture, with `#` in place of each number but the percentage of the cause."""
    rows = re.findall(r"<text [^>]*>([^<]*)</text>", picture)
    text = " ".join(" ".join(rows).replace("&#160;", " ").split())
    return re.sub(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]\d+)?\b(?! %)", "#", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
