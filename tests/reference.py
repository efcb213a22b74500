"""The reference of the public names: `python tests/reference.py build/docs` writes it from their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed.fsdp

import parallelize

__all__ = ["resolve_fields", "undocumented", "write"]


def undocumented(module: ModuleType) -> list[str]:
    """Public functions and classes of a module, and what these define themselves, that have no docstring."""
    found = []
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) and not inspect.getdoc(value):
            found.append(name)
        if isinstance(value, type):
            found += [f"{name}.{each}" for each in _own(value) if not inspect.getdoc(getattr(value, each))]
    return found


def _own(kind: type) -> Iterator[str]:
    """Methods and properties that a class of ours defines, by public names."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and isinstance(value, (property, classmethod, staticmethod)) | callable(value):
            yield name


def resolve_fields(kind: type) -> None:
    """Put types in place of their names in `__init__` of a dataclass, whose fields may come from another module."""
    # fsdp is imported for type checkers only: it takes a second.
    hints = typing.get_type_hints(kind, localns=vars(torch.distributed.fsdp))
    for name in kind.__init__.__annotations__.keys() & hints.keys():
        kind.__init__.__annotations__[name] = hints[name]


def write(folder: Path) -> None:
    """Write the reference as HTML; a warning is an error.

    Raises:
        SystemExit: a public name has no docstring.
    """
    import pdoc  # of tox's environment `docs`

    missing = undocumented(parallelize)
    if missing:
        sys.exit(f"no docstring: {', '.join(missing)}")
    public: list[Any] = [getattr(parallelize, name) for name in parallelize.__all__]
    for kind in public:
        if dataclasses.is_dataclass(kind):
            resolve_fields(kind)
    warnings.simplefilter("error")
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc("parallelize", r"!parallelize\..*", output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
