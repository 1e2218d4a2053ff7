"""`fa-list`: what the code declares, such as the options, the parts of attention or the exploits of the self-test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pytest_fa.attention import not_judged, parts
from pytest_fa.attention.dtypes import DTYPES
from pytest_fa.attention.part import Part, shown
from pytest_fa.features.selftest.exploit_lines import exploit_items, twin_items
from pytest_fa.options.flags import all_options
from tools.docs.block import NOTHING, Shown, one_of, table


def block(words: str, _root: Path) -> str:
    """The text of a list or of a table.  Raises `TableProblem` if there is no such list."""
    return one_of(words, LISTS, "the list of fa-list")()


def contents(words: str, _root: Path) -> Shown:
    """Nothing that was measured.  Raises `TableProblem` if there is no such list."""
    one_of(words, LISTS, "the list of fa-list")
    return Shown()


def _list(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _options() -> list[str]:
    """An item for each option: its form on the command line, and its help text."""
    items = []
    for option in all_options():
        value = f"={option.metavar}" if option.metavar else ""
        form = f"{option.flag}{f'[{value}]' if option.bare else value}"
        meaning = option.help[0].upper() + option.help[1:]
        default = f" Default: `{option.ini_default}`." if option.ini_default else ""
        items.append(f"`{form}`: {meaning.replace('<', '&lt;')}.{default}")
    return items


def _tokens() -> list[list[str]]:
    """What the parts of attention write into the id of a case."""
    return [["part", "meaning"], *([text, meaning] for part in parts.PARTS for text, meaning in part.rows)]


def _values(part: Part) -> str:
    """What a manifest may claim of a part."""
    return part.documented_claims or ", ".join(f"`{shown(claim)}`" for claim in part.claims)


def _claim_cells(part: Part) -> list[str]:
    values = _values(part)
    claims = f"`{part.supports}`: {values}" if part.supports else NOTHING
    words = ", ".join(f"`{word}`" for word in (*part.words, *part.output_names)) or NOTHING
    return [part.summary, claims, words, f"`{part.output}`" if part.output else NOTHING]


def _conventions() -> list[str]:
    """How kernels count: an item for each key, with the plain value, the others, and what one of them means."""
    items = []
    for key, (_, convention) in parts.conventions().items():
        plain, *others = convention.values
        meaning = f", {convention.values[others[0]]}" if len(others) == 1 else ""
        items.append(f"`{key}` (`{plain}`): {', '.join(f'`{value}`' for value in others)}{meaning}")
    return items


def _judged() -> list[list[str]]:
    """What can be judged, and what cannot, with the nearest thing that works.

    Where a truth of the user's own judges it, the second cell says so, and the third also what works without one.
    """
    rows = [
        ["attention", "judged", "manifest key, or how to judge the kernel anyway"],
        ["q, k and v of one dtype", "yes", f"`dtype`: {', '.join(f'`{name}`' for name in DTYPES)}"],
        ["any head_dim", "yes", "`head_dim`: numbers, or a range"],
        ["gradients of q, k and v", "yes", "`computes: gradients`, with `dtype`: `fp16`, `bf16`"],
        ["any scale, also zero and negative", "yes", "the placeholder `scale` in `entry.call`"],
    ]
    for part in parts.PARTS:
        if part.supports or part.output:
            key = f"`{part.supports}`: {_values(part)}" if part.supports else f"`returns: [out, {part.output}]`"
            judged = "yes" if part.is_in_c_interface or not part.supports else "yes, not in CUDA sources"
            rows.append([part.summary, judged, key])
    return [*rows, *(_not_judged_cells(row) for row in not_judged.rows().values())]


def _not_judged_cells(row: not_judged.UnjudgedKind) -> list[str]:
    how = row.nearest.removeprefix("judge the kernel ")
    subject = row.subject.rpartition(" ")[0]
    if row.is_one_function:
        return [subject, "by your reference", f"`--fa-truth`, or {how}"]
    return [subject, "no", how]


LISTS: dict[str, Callable[[], str]] = {
    "options": lambda: _list(_options()),
    "tokens": lambda: table(_tokens(), "---"),
    "conventions": lambda: _list(_conventions()),
    "judged": lambda: table(_judged(), "---"),
    "exploits": lambda: _list(exploit_items()),
    "twins": lambda: _list(twin_items()),
}
