"""Documentation as HTML: `python tests/reference.py build/docs`.

The start page is README; the guides are those of examples/guides, and the API reference is generated from docstrings.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed.fsdp

import parallelize
import parallelize.plugins.base

__all__ = ["page_link", "resolve_fields", "site", "undocumented", "write"]

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#]+)")
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>body {{display: flex; flex-wrap: wrap; gap: 2rem; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
font: 1rem/1.5 sans-serif}} nav {{flex: 0 0 11rem}} main {{flex: 1 1 30rem; min-width: 0}}
nav ul {{list-style: none; padding: 0}} nav [aria-current] {{font-weight: bold}}
pre {{background: #f4f4f4; padding: 0.8rem; overflow-x: auto}} table {{border-collapse: collapse}}
td, th {{border: 1px solid #ccc; padding: 0.2rem 0.6rem; text-align: left; vertical-align: top}}</style>
<nav><ul>{links}</ul></nav>
<main>{body}</main></html>
"""


def undocumented(module: ModuleType) -> list[str]:
    """Return the public functions, classes and methods of a module that have no docstring."""
    missing = []
    for name in module.__all__:
        value = getattr(module, name)
        if (inspect.isroutine(value) or isinstance(value, type)) and not inspect.getdoc(value):
            missing.append(name)
        if isinstance(value, type):
            missing += [f"{name}.{each}" for each in _own(value) if not inspect.getdoc(getattr(value, each))]
    return missing


def _own(kind: type) -> Iterator[str]:
    """Yield the public methods and properties that a class defines itself."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and isinstance(value, (property, classmethod, staticmethod)) | callable(value):
            yield name


def resolve_fields(kind: type) -> None:
    """Replace the names of types in the `__init__` of a dataclass by the types, which another module may import."""
    # The package imports fsdp for type checkers only, because the import takes a second.
    hints = typing.get_type_hints(kind, localns=vars(torch.distributed.fsdp))
    for name in kind.__init__.__annotations__.keys() & hints.keys():
        kind.__init__.__annotations__[name] = hints[name]


def write(folder: Path) -> None:
    """Write the reference and the guides as HTML; warnings are errors.

    Raises:
        SystemExit: a public name has no docstring.
    """
    import pdoc  # installed in tox's environment `docs`

    missing = undocumented(parallelize) + undocumented(parallelize.plugins.base)
    if missing:
        sys.exit(f"no docstring: {', '.join(missing)}")
    public: list[Any] = [getattr(parallelize, name) for name in parallelize.__all__]
    for kind in public:
        if dataclasses.is_dataclass(kind):
            resolve_fields(kind)
    warnings.simplefilter("error")
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc("parallelize", r"!parallelize\..*", "parallelize.plugins.base", output_directory=folder)
    pages = site(folder)
    for page, (_, source) in pages.items():
        if source is not None:
            _write_page(source, page, pages)


def site(folder: Path) -> dict[Path, tuple[str, Path | None]]:
    """Return the pages in the order of the navigation: file -> title and Markdown file; None: a page of the reference.

    The guides are in the order in which README lists them.
    """
    readme, link = _ROOT / "README.md", r"\]\((examples/guides/\w+\.md)"
    in_table = re.findall(rf"^\|.*{link}", readme.read_text(), re.MULTILINE)
    guides = [_ROOT / each for each in dict.fromkeys([*in_table, *re.findall(link, readme.read_text())])]
    return {
        folder / "index.html": ("Start", readme),
        **{folder / "guides" / f"{each.stem}.html": (_title(each), each) for each in guides},
        folder / "parallelize.html": ("API reference", None),
        folder / "parallelize/plugins/base.html": ("For authors of plug-ins", None),
    }


def _title(source: Path) -> str:
    """Return the heading of a guide, without what follows a colon."""
    return source.read_text().partition("\n")[0].lstrip("# ").partition(":")[0]


def page_link(target: str, *, source: Path, page: Path) -> str:
    """Return a relative link of a Markdown file as it is in its page: to a page of a guide, or else into the checkout.

    Args:
        target: the path in the link, relative to `source`.
        source: the Markdown file.
        page: the HTML file.
    """
    path = Path(os.path.normpath(source.parent / target))
    if path.suffix == ".md" and path.parent == _ROOT / "examples/guides":
        site = page.parent if page.stem == "index" else page.parents[1]
        path = site / "guides" / f"{path.stem}.html"
    return os.path.relpath(path, page.parent)


def _write_page(source: Path, page: Path, pages: dict[Path, tuple[str, Path | None]]) -> None:
    import markdown  # installed in tox's environment `docs`, with Pygments, which colors the code

    text = _LINK.sub(lambda link: page_link(link[1], source=source, page=page), source.read_text())
    page.parent.mkdir(parents=True, exist_ok=True)
    colors = {"codehilite": {"guess_lang": False, "noclasses": True}}
    body = markdown.markdown(text, extensions=["extra", "toc", "sane_lists", "codehilite"], extension_configs=colors)
    links = "".join(
        f'<li><a href="{os.path.relpath(each, page.parent)}"{" aria-current=page" * (each == page)}>{title}</a></li>'
        for each, (title, _) in pages.items()
    )
    page.write_text(_PAGE.format(title=text.splitlines()[0].lstrip("# "), links=links, body=body))


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
