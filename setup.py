"""Makes README's links absolute in the description that a package index shows. All else about the package is in pyproject.toml.

The address is ``Repository`` in ``[project.urls]``. Without it, links stay relative: they work in a clone and in the source
distribution.
"""

import re
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent


def description(text: str, repository: str | None, version: str) -> str:
    """Returns a page of this folder for a package index.

    Args:
        text: README, in Markdown.
        repository: the address of the repository, without a slash at its end; None if it has none.
        version: the version, whose tag the links name.
    """

    def absolute(link: re.Match[str]) -> str:
        image, before, target = link.groups()
        # An index gives headings no anchors.
        path = f"README.md{target}" if target.startswith("#") else target
        return f"{image or ''}{before}{repository}/{'raw' if image else 'blob'}/v{version}/{path})"

    return re.sub(r"(!?)(\[[^]]*\]\()(?!https?://)([^)]+)\)", absolute, text) if repository else text


if __name__ == "__main__":  # setuptools runs this file as the main one
    from setuptools import setup

    urls = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["urls"]
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (FOLDER / "sp_lightning" / "_version.py").read_text(), re.MULTILINE
    )
    setup(
        long_description=description((FOLDER / "README.md").read_text(), urls.get("Repository"), version),
        long_description_content_type="text/markdown",
    )
