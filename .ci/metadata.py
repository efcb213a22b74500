"""Metadata that only the place of the release knows: links of the project, and the links of README.

The repository has no public address that could be written down. A workflow of GitHub has it in GITHUB_REPOSITORY, as
"owner/name", and the package index then shows where the code, the guides and the changes are. README links to files of
the repository by relative paths, which lead nowhere on a package index: they become addresses of the released version.

Without GITHUB_REPOSITORY, as on your machine, the package has no links and README stays as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Markdown, as in `[text](path)` and `![text](path)`, and HTML, as in `<img src="path">`. Addresses with a scheme, such
# as https:, and links to a heading of the page stay.
RELATIVE = r"(?!\w+:|#)"
MARKDOWN_LINK = re.compile(rf"(?<=\]\(){RELATIVE}([^)\s]+)")
MARKDOWN_IMAGE = re.compile(rf"(!\[[^\]]*\]\(){RELATIVE}([^)\s]+)")
HTML_IMAGE = re.compile(rf'(\bsrc(?:set)?="){RELATIVE}([^"]+)')
HTML_LINK = re.compile(rf'(?<=\bhref="){RELATIVE}([^"]+)')


def urls(repository: str) -> dict[str, str]:
    """Return the links that a package index shows beside the description."""
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/HEAD/examples/guides",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def with_absolute_links(readme: str, repository: str, tag: str) -> str:
    """Return README with links to files as they are at a tag, which is what the reader has installed."""
    # `raw` is the file itself, which an image needs; `blob` is the page that shows it.
    image = rf"\g<1>{repository}/raw/{tag}/\g<2>"
    page = rf"{repository}/blob/{tag}/\g<1>"
    for pattern in (MARKDOWN_IMAGE, HTML_IMAGE):
        readme = pattern.sub(image, readme)
    for pattern in (MARKDOWN_LINK, HTML_LINK):
        readme = pattern.sub(page, readme)
    return readme


class MetadataHook(MetadataHookInterface):
    """Fill the fields that pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add links and README, unless they come from PKG-INFO: then this is a build from a released sdist."""
        owner_and_name = os.environ.get("GITHUB_REPOSITORY", "")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        links: dict[str, str] = {}
        if owner_and_name:
            server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
            repository = f"{server}/{owner_and_name}"
            links = urls(repository)
            readme = with_absolute_links(readme, repository, f"v{metadata['version']}")
        metadata.setdefault("urls", links)
        metadata.setdefault("readme", {"content-type": "text/markdown", "text": readme})
