"""The compiler flags that a manifest may use.

Some flags of nvcc, g++ and the linker start a program or load a plugin, such as `-ccbin=` and `-fplugin=`.  A manifest
may therefore use only the flags that are listed here.  `--fa-allow-flag` adds others, and the build's record names
those that were used.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from pytest_fa.catalog.variant import Variant

_WORD, _PATH, _SWITCH = r"[\w.+-]+", r"[\w./+-]+", r"(?:true|false)"
_COMMON = (
    r"-O[0-3]",
    r"-g",
    r"-w",
    rf"-[DU][A-Za-z_]\w*(?:={_WORD})?",
    rf"-I{_PATH}",
    rf"-l{_WORD}",
    rf"-L{_PATH}",
)
_CXX = (
    *_COMMON,
    r"-O(?:s|g|fast)",
    r"-std=(?:c|gnu)\+\+\d\d",
    r"-W(?![lpa],)[a-z][\w+=-]*",
    r"-m(?:arch|tune)=[\w.-]+",
    r"-m(?:avx\w*|fma|sse[\w.]*|f16c|bmi2?)",
    r"-pthread",
    r"-f(?:no-)?(?:fast-math|finite-math-only|math-errno|trapping-math|unsafe-math-optimizations|openmp|openmp-simd)",
    r"-f(?:no-)?(?:strict-aliasing|exceptions|rtti|permissive|omit-frame-pointer|unroll-loops|tree-vectorize|inline)",
    r"-f(?:no-)?gnu-unique",
    r"-f(?:PIC|pic|visibility=\w+)",
)
_LINKER = (
    rf"-l{_WORD}",
    rf"-L{_PATH}",
    r"-pthread",
    r"-s",
    rf"-Wl,(?:--no-as-needed|--as-needed|-rpath[,=]{_PATH})(?:,-l{_WORD})*",
)
_PTXAS = (
    r"-O[0-4]",
    r"-v|--verbose",
    r"-d[ls]cm=\w+",
    r"--def-(?:load|store)-cache=\w+",
    r"--?warn-[\w-]+",
    rf"--?(?:allow-expensive-optimizations|fmad)(?:={_SWITCH})?",
    r"--?(?:register-usage-level|maxrregcount|opt-level)=\d+",
)
_NVCC = (
    *_COMMON,
    r"-G|--device-debug",
    r"--?std=c\+\+\d\d",
    r"-lineinfo|--generate-line-info",
    r"--?use_fast_math",
    r"--?restrict",
    r"-res-usage|--resource-usage",
    rf"-rdc={_SWITCH}|--relocatable-device-code={_SWITCH}",
    rf"--?(?:ftz|prec-div|prec-sqrt|fmad)={_SWITCH}",
    r"--?maxrregcount=\d+",
    r"--?expt-(?:relaxed-constexpr|extended-lambda)|--?extended-lambda",
    r"--?extra-device-vectorization",
    r"--?default-stream=[\w-]+",
    r"--?split-compile=\d+",
    r"(?:-t|--threads)=\d+",
    r"--?diag-suppress=[\d,]+",
    r"-W[a-z][\w-]*",
    r"-Xcudafe=--(?:diag_suppress=\w+|display_error_number)",
)
_LISTS = {  # flags with a list of flags for another program, separated by commas
    r"(?:-Xptxas|--ptxas-options)=": _PTXAS,
    r"(?:-Xcompiler|--compiler-options)=": _CXX,
}


def unlisted_flags(variant: Variant) -> tuple[str, ...]:
    """Return the flags of a variant's manifest that are not on the list above."""
    cuda = [flag for flag in variant.flags if not _is_listed_for_nvcc(flag)]
    host = [flag for flag in variant.entry.cflags if not _matches(_CXX, flag)]
    linker = [flag for flag in variant.entry.ldflags if not _matches(_LINKER, flag)]
    return (*cuda, *host, *linker)


def refusal(variant: Variant, allowed: tuple[str, ...]) -> str | None:
    """Return why a variant may not be built with its flags, or None; `allowed` are the globs of `--fa-allow-flag`."""
    refused = [flag for flag in unlisted_flags(variant) if not any(fnmatchcase(flag, glob) for glob in allowed)]
    if not refused:
        return None
    listed, verb = ", ".join(refused), "are" if len(refused) > 1 else "is"
    options = " ".join(f"--fa-allow-flag={flag}" for flag in refused)
    return (
        f"flags: {listed} {verb} not on the list of allowed flags (docs/reference/manifest.md#compiler-flags); some "
        f"flags start programs. If you trust this manifest, add {options}"
    )


def _is_listed_for_nvcc(flag: str) -> bool:
    for prefix, items in _LISTS.items():
        if start := re.match(prefix, flag):
            return all(_matches(items, item) for item in flag[start.end() :].split(","))
    return _matches(_NVCC, flag)


def _matches(patterns: tuple[str, ...], flag: str) -> bool:
    return any(re.fullmatch(pattern, flag, re.ASCII) for pattern in patterns)
