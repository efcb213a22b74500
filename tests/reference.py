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

__all__ = ["page_link", "resolve_fields", "undocumented", "write"]

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#]+)")
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{max-width: 56rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 sans-serif}}
pre {{background: #f4f4f4; padding: 0.8rem; overflow-x: auto}} table {{border-collapse: collapse}}
td, th {{border: 1px solid #ccc; padding: 0.2rem 0.6rem; text-align: left; vertical-align: top}}</style>
<nav><a href="{start}index.html">Start</a> | <a href="{start}parallelize.html">API reference</a>
| <a href="{start}parallelize/plugins/base.html">for authors of plug-ins</a></nav>
{body}</html>
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
    _write_page(_ROOT / "README.md", folder / "index.html", start="")
    for guide in sorted((_ROOT / "examples/guides").glob("*.md")):
        _write_page(guide, folder / "guides" / f"{guide.stem}.html", start="../")


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


def _write_page(source: Path, page: Path, *, start: str) -> None:
    import markdown  # installed in tox's environment `docs`

    text = _LINK.sub(lambda link: page_link(link[1], source=source, page=page), source.read_text())
    page.parent.mkdir(parents=True, exist_ok=True)
    body = markdown.markdown(text, extensions=["extra", "toc", "sane_lists"])
    page.write_text(_PAGE.format(title=text.splitlines()[0].lstrip("# "), start=start, body=body))


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
