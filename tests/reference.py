"""What the API reference describes: the `:::` lines of `.github/site/pages/api`, and the docstrings that they show."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

__all__ = ["PAGES", "described_names", "undocumented"]

PAGES = Path(__file__).parents[1] / ".github/site/pages/api"


def described_names() -> list[str]:
    """Return the full names that the pages describe; a name that stands twice is twice in the list."""
    names: list[str] = []
    for page in sorted(PAGES.glob("*.md")):
        names += re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    return names


def undocumented(module: ModuleType) -> list[str]:
    """Return the public functions, classes and methods of a module that have no docstring."""
    missing = []
    for name in module.__all__:
        value = getattr(module, name)
        if (inspect.isroutine(value) or isinstance(value, type)) and not inspect.getdoc(value):
            missing.append(name)
        if isinstance(value, type):
            missing += [f"{name}.{member}" for member in _members(value) if not inspect.getdoc(getattr(value, member))]
    return missing


def _members(kind: type) -> Iterator[str]:
    """Yield the public methods and properties that a class defines itself."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and isinstance(value, (property, classmethod, staticmethod)) | callable(value):
            yield name
