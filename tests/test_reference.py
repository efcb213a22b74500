"""Every public name is documented where the reference looks for it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType

import reference

import parallelize


def test_public_names_have_docstrings() -> None:
    """Functions, classes and their public methods: none is without words."""
    assert reference.undocumented(parallelize) == []


def test_a_name_without_a_docstring_is_seen() -> None:
    """The check above finds a function, a class, a method and a property without one."""
    module = ModuleType("module")

    class Named:
        """With words."""

        def method(self) -> None: ...

        @property
        def quality(self) -> int: ...

        def _private(self) -> None: ...

    class Unnamed: ...

    def told() -> None:
        """With words."""

    module.__dict__.update(Named=Named, Unnamed=Unnamed, bare=lambda: None, told=told, VALUE=1)
    module.__all__ = ["VALUE", "Named", "Unnamed", "bare", "told"]
    assert reference.undocumented(module) == ["Named.method", "Named.quality", "Unnamed", "bare"]


def test_types_of_fields_are_shown() -> None:
    """A dataclass shows types, though its fields came from a module whose names it does not know."""

    @dataclass(frozen=True)
    class Options(parallelize.DDPBackend):
        """With words."""

    assert "CommHook" in str(inspect.signature(Options))
    reference.resolve_fields(Options)
    assert "Literal['fp16'" in str(inspect.signature(Options))
