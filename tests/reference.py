"""API reference: `python tests/reference.py build/docs` generates it from the docstrings of the public names."""

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
    """Return the public functions, classes and methods of a module that have no docstring."""
    missing = []
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) and not inspect.getdoc(value):
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
    """Write the reference as HTML; warnings are errors.

    Raises:
        SystemExit: a public name has no docstring.
    """
    import pdoc  # installed in tox's environment `docs`

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
