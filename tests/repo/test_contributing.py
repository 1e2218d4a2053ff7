"""What contributors read and use: the map in `CONTRIBUTING.md`, the forms for issues, and the hooks before a commit."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.projects import ONE_CASE, Project
from tests.repo.test_layers import LAYERS

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
FORMS = sorted(path.name for path in (REPOSITORY / ".github/ISSUE_TEMPLATE").glob("[0-9]-*.yml"))


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page, without its own heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names_in(cell: str) -> list[str]:
    """The texts of a cell that stand in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_map_has_every_layer() -> None:
    """The map of the page has every layer of `test_layers.py`, in the same order."""
    named = [name for layer, _ in rows_below("Layers") for name in names_in(layer)]
    assert list(LAYERS) == [name for name in named if name in LAYERS]


def test_every_place_exists() -> None:
    """Each file or folder of the table of places is in the package or in the repository."""
    rows = rows_below("Where does a line belong")
    assert len(rows) >= 20
    places = [name for _, place in rows for name in names_in(place) if "/" in name and "<" not in name]
    roots = (REPOSITORY / "pytest_fa", REPOSITORY)
    assert [place for place in places if not any((root / place).exists() for root in roots)] == []


@pytest.mark.nightly
def test_the_example_is_a_complete_feature(project: Project, tmp_path: Path) -> None:
    """The feature of the page, with its name in the list, has an option that prints its line below the table."""
    package = tmp_path / "pytest_fa"
    shutil.copytree(REPOSITORY / "pytest_fa", package, ignore=shutil.ignore_patterns("__pycache__"))
    files = dict(re.findall(r"```python\n# pytest_fa/(features/count/\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
    assert list(files) == ["features/count/plugin.py", "features/count/hooks.py"]
    for name, text in {"features/count/__init__.py": "", **files}.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    listed = package / "feature.py"
    listed.write_text(listed.read_text(encoding="utf-8").replace('    "api",\n', '    "api",\n    "count",\n'), "utf-8")
    project.python_variant("mine")
    environment = {"PYTHONPATH": str(tmp_path), "PYTEST_FA_SERVER": "off"}
    run = project.suite("--fa-count", "--fa-variant=mine", ONE_CASE, "--benchmark-disable", env=environment)
    assert (run.ret, f"records: {len(project.records)}" in run.outlines) == (0, True)


# -- forms for issues -------------------------------------------------------------------------------------------------


def form(name: str) -> dict[str, Any]:
    """The content of a form."""
    content: dict[str, Any] = yaml.safe_load((REPOSITORY / ".github/ISSUE_TEMPLATE" / name).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_one_that_github_accepts(name: str) -> None:
    """A form has only keys and types that GitHub knows; each field has its own label and id; options are text."""
    content = form(name)
    assert set(content) == {"name", "description", "labels", "body"}
    fields = [part for part in content["body"] if part["type"] != "markdown"]
    ids = [part["id"] for part in fields]
    assert (len(set(ids)), {bool(re.fullmatch(r"[a-z]+", each)) for each in ids}) == (len(ids), {True})
    for part in content["body"]:
        allowed = {"markdown": {"value"}, "dropdown": {"label", "description", "options"}}
        keys = allowed.get(part["type"], {"label", "description", "placeholder", "render"})
        assert part["type"] in {"markdown", "dropdown", "textarea"}
        assert set(part["attributes"]) <= keys
        assert {type(option) for option in part["attributes"].get("options", [])} <= {str}
        assert part.get("validations", {"required": True}) == {"required": True}
    assert len({part["attributes"]["label"] for part in fields}) == len(fields)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_asks_for_what_a_reader_needs(name: str) -> None:
    """Each form asks for the command, the record and the output of doctor; that of a feature demands none of them."""
    fields = {part["id"]: part for part in form(name)["body"] if "id" in part}
    required = {key for key, part in fields.items() if part.get("validations", {}).get("required")}
    needed = {"command", "record", "doctor"}
    assert needed <= set(fields)
    assert "python -m pytest_fa doctor" in fields["doctor"]["attributes"]["label"]
    demanded = {"3-installation.yml": {"command", "doctor"}, "4-feature.yml": set()}
    assert demanded.get(name, needed) == needed & required


def test_there_is_a_form_for_each_kind() -> None:
    """There are four forms, no blank issue, and the links of the chooser have all that GitHub requires."""
    chooser = form("config.yml")
    assert FORMS == ["1-wrong-verdict.yml", "2-wrong-time.yml", "3-installation.yml", "4-feature.yml"]
    assert chooser["blank_issues_enabled"] is False
    assert {tuple(sorted(link)) for link in chooser["contact_links"]} == {("about", "name", "url")}


def test_links_of_forms_lead_to_pages() -> None:
    """A link of a form or of the chooser to a file of the repository names one that exists."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    root = f"{project['urls']['Source']}/"
    texts = [path.read_text(encoding="utf-8") for path in (REPOSITORY / ".github/ISSUE_TEMPLATE").iterdir()]
    links = [link for text in texts for link in re.findall(r"https://[^\s)]+", text)]
    assert [link for link in links if not link.startswith(root)] == []
    pages = [link.removeprefix(f"{root}blob/main/") for link in links if link.startswith(f"{root}blob/")]
    assert pages != []
    assert [page for page in pages if not (REPOSITORY / page).is_file()] == []


# -- hooks before a commit --------------------------------------------------------------------------------------------


def test_hooks_are_what_lint_runs() -> None:
    """Hooks run the commands of `./repro.sh lint` in its environment, after a change of a file that they read."""
    content = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = content["repos"]
    script = (REPOSITORY / "repro.sh").read_text(encoding="utf-8")
    functions = re.findall(r"^check_(?:style|types)\(\) \{\n(.*?)^\}", script, re.MULTILINE | re.DOTALL)
    lint = re.findall(r'"\$PYTHON" (-m [\w .-]+)', "".join(functions))
    assert len(lint) == 3
    assert [f".venv-repro/bin/python {command.strip()}" for command in lint] == [
        hook["entry"] for hook in local["hooks"]
    ]
    assert (local["repo"], {(hook["language"], hook["pass_filenames"]) for hook in local["hooks"]}) == (
        "local",
        {("system", False)},
    )
    names = ("pytest_fa/errors.py", "pyproject.toml", "README.md", "kernels/minimal/kernel.cu")
    assert [name for name in names if re.search(content["files"], name)] == ["pytest_fa/errors.py", "pyproject.toml"]
