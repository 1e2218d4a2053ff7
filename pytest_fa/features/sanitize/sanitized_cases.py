"""The cases on which the tools of compute-sanitizer run."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.plan import Plan, first_seeds
from pytest_fa.catalog.properties import property_case
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.sanitize.plugin import SanitizeOptions
from pytest_fa.plugin.keys import OPTIONS_KEY

TILE = 64  # if the manifest defines no tile size
MIN_TILES = 3  # along queries and along keys


def sanitizer_case(variant: Variant) -> Case:
    """The smallest supported case with three full tiles of queries and keys, and a partial one if supported."""
    tiles = [variant.defines.get(name) for name in ("BLOCK_M", "BLOCK_N")]
    tile = max((size for size in tiles if isinstance(size, int)), default=TILE)
    return msgspec.structs.replace(property_case(variant, MIN_TILES * tile + 1), batch=1, heads=2, kv_heads=2)


def sanitized(plan: Plan, tools: tuple[str, ...]) -> list[tuple[Variant, Case, str]]:
    """The triples of `test_sanitize`: each judged variant, on a small case or the named ones, with each tool."""
    if not tools:
        return []
    pairs = [(variant, case) for variant in plan.judged for case in _cases(plan, variant)]
    return [(variant, case, tool) for variant, case in pairs for tool in tools]


def _cases(plan: Plan, variant: Variant) -> list[Case]:
    return first_seeds(plan.cases_of(variant)) if plan.cases_are_named else [sanitizer_case(variant)]


def parametrize(metafunc: pytest.Metafunc, plan: Plan) -> None:
    """Parametrize with variant and tool, and with the case if the test uses `fa_case`.

    The shape is part of the test id only if `--fa-case` selects cases.
    """
    asked = metafunc.config.stash[OPTIONS_KEY].part(SanitizeOptions)
    triples = sanitized(plan, asked.tools if asked else ())
    if "fa_case" in metafunc.fixturenames:
        params = []
        for variant, case, tool in triples:
            id_parts = (variant.name, case.shape_id, tool) if plan.cases_are_named else (variant.name, tool)
            params.append(pytest.param(variant, case, tool, id="-".join(id_parts)))
        metafunc.parametrize(("fa_variant", "fa_case", "fa_sanitizer"), params, indirect=True)
        return
    pairs = {(variant.name, tool): (variant, tool) for variant, _, tool in triples}
    params = [pytest.param(*pair, id="-".join(key)) for key, pair in pairs.items()]
    metafunc.parametrize(("fa_variant", "fa_sanitizer"), params, indirect=True)
