"""The description of the package on an index: README.md, with links and pictures that work outside of the repository.

Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

FOLDER = Path(__file__).parent
REPOSITORY = "https://github.com/pytest-fa/pytest-fa/blob"
FILES = "https://raw.githubusercontent.com/pytest-fa/pytest-fa"
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https:|#)[^)]+)\)")


def description() -> str:
    """Return README.md; its relative links lead to the files of this version's tag."""
    version = re.search(r'^__version__ = "(.*)"$', (FOLDER / "pytest_fa/__init__.py").read_text("utf-8"), re.MULTILINE)
    if version is None:
        raise ValueError("pytest_fa/__init__.py has no line `__version__ = ...`")

    def absolute(link: re.Match[str]) -> str:
        place = FILES if link["picture"] else REPOSITORY
        return f"{link['picture']}[{link['text']}]({place}/v{version[1]}/{link['target']})"

    return LINK.sub(absolute, (FOLDER / "README.md").read_text("utf-8"))


setup(long_description=description(), long_description_content_type="text/markdown")
