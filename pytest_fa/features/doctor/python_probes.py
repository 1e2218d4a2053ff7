"""Probes of Python: the interpreter, the installed packages, pytest's plugins, torch, and the constraints."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import pytest_fa
from pytest_fa.features.doctor.finding import Finding, Places

MIN_PYTHON = (3, 11)
TORCH_LIMIT_SECONDS = 80.0
INSTALL = "pip install pytest-fa"
# Plugins that change the result of a run, and how.
INTERFERING = {
    "pytest-rerunfailures": "with --reruns, a kernel that is wrong only now and then passes",
    "flaky": "a test that it runs again hides a kernel that is wrong only now and then",
    "pytest-timeout": "its limit includes the time of all builds; --fa-watchdog limits one launch",
    "pytest-randomly": "it shuffles the tests, so that the first one is not test_build",
}
# Run in a child process, so that a broken torch cannot end the doctor.
ASK_TORCH = """\
import json, torch
cuda = torch.version.cuda
usable = bool(cuda) and torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "cuda": cuda, "usable": usable}))
"""


def probe_python(_: Places) -> Iterator[Finding]:
    """The interpreter and the operating system."""
    version = platform.python_version()
    text = f"{version} ({sys.executable}), pytest-fa {pytest_fa.__version__}"
    if sys.platform != "linux":
        yield Finding("missing", "python", f"{text} on {sys.platform}", "pytest-fa runs on Linux only")
    elif sys.version_info < MIN_PYTHON:
        yield Finding("missing", "python", text, "install Python 3.11 or newer")
    else:
        yield Finding("ok", "python", text)


def probe_packages(_: Places) -> Iterator[Finding]:
    """Whether every required package is installed in a version that is allowed."""
    from packaging.requirements import Requirement  # noqa: PLC0415  # a dependency of pytest, which may be missing

    try:
        requirements = [Requirement(line) for line in metadata.requires("pytest-fa") or ()]
    except metadata.PackageNotFoundError:
        yield Finding("warning", "packages", "pytest-fa is imported from a folder, not installed", INSTALL)
        return
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    unfit = [
        f"{each.name} is {version or 'not installed'}, needed is {each.specifier}"
        for each in needed
        if (version := installed_version(each.name)) is None or not each.specifier.contains(version, prereleases=True)
    ]
    for text in unfit:
        yield Finding("missing", "packages", text, INSTALL)
    if not unfit:
        yield Finding("ok", "packages", f"all {len(needed)} required packages are installed")


def probe_plugins(_: Places) -> Iterator[Finding]:
    """Whether pytest finds pytest-fa, and which other plugins change what a run does."""
    registered = any(point.value == "pytest_fa.plugin" for point in metadata.entry_points(group="pytest11"))
    by_variable = "pytest_fa.plugin" in os.environ.get("PYTEST_PLUGINS", "").split(",")
    by_variable_only = "set PYTEST_PLUGINS=pytest_fa.plugin"
    pytest_version = f"pytest {installed_version('pytest') or '(not installed)'}"
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD") and not by_variable:
        text = f"{pytest_version} loads no installed plugin: PYTEST_DISABLE_PLUGIN_AUTOLOAD is set"
        yield Finding("missing", "pytest", text, f"unset it, or {by_variable_only}")
    elif registered or by_variable:
        yield Finding("ok", "pytest", f"{pytest_version} finds pytest-fa")
    else:
        yield Finding(
            "missing", "pytest", f"{pytest_version} does not find pytest-fa", f"{INSTALL}, or {by_variable_only}"
        )
    if benchmark := installed_version("pytest-benchmark"):
        yield Finding("ok", "benchmark", f"pytest-benchmark {benchmark} shows and saves times")
    if xdist := installed_version("pytest-xdist"):
        yield Finding(
            "ok", "xdist", f"pytest-xdist {xdist}: -n builds and checks in parallel; its times are only in the records"
        )
    for package, effect in INTERFERING.items():
        if version := installed_version(package):
            yield Finding("warning", "plugins", f"{package} {version} is installed: {effect}")


def probe_torch(_: Places) -> Iterator[Finding]:
    """Whether torch can be imported, and whether its CUDA fits the driver."""
    try:
        child = subprocess.run(  # noqa: S603
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, check=False, timeout=TORCH_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        text = f"importing torch took more than {TORCH_LIMIT_SECONDS:g} s"
        yield Finding("warning", "torch", text, "look at the file system that holds the Python environment")
        return
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        yield Finding("missing", "torch", f"cannot be imported: {last}", "pip install torch")
        return
    yield torch_finding(json.loads(child.stdout.splitlines()[-1]))


def torch_finding(torch: dict[str, str | bool | None]) -> Finding:
    """The finding for torch's answer (`version`, `cuda` and `usable`), compared with the driver of this machine."""
    from pytest_fa.records.environment import find_gpu  # noqa: PLC0415  # msgspec may be missing

    gpu, cuda = find_gpu(), torch["cuda"]
    text = f"{torch['version']} {f'with CUDA {cuda}' if cuda else 'without CUDA'}"
    if gpu is None or torch["usable"]:
        return Finding("ok", "torch", text)
    if not cuda:
        return Finding("warning", "torch", f"{text}, so no kernel can use the {gpu.name}", "install a torch with CUDA")
    text = f"{text} cannot use the {gpu.name}: driver {gpu.driver} supports CUDA up to {gpu.cuda}"
    return Finding("warning", "torch", text, "update the driver, or install a torch for an older CUDA")


def probe_constraints(places: Places) -> Iterator[Finding]:
    """Which installed packages differ from `constraints.txt`, if there is one."""
    from pytest_fa.features.bundle.constraints import differences, read_constraints  # noqa: PLC0415  # msgspec may be missing

    path = places.root / "constraints.txt"
    if not path.is_file():
        return
    changed = [str(each) for each in differences(read_constraints(path)) if each.installed is not None]
    if changed:
        listed = f"{', '.join(changed[:2])}{' and others' if len(changed) > 2 else ''}"  # noqa: PLR2004  # two of them
        advice = "pip install -c constraints.txt -e . restores them"
        yield Finding("warning", "constraints", f"{len(changed)} installed packages differ: {listed}", advice)
    else:
        yield Finding("ok", "constraints", "every installed package that constraints.txt pins has its version")


def installed_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
