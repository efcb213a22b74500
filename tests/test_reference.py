"""Every public name has a docstring that the generated reference finds."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType

import reference

import parallelize


def test_public_names_have_docstrings() -> None:
    """Functions, classes and their public methods all have one."""
    assert reference.undocumented(parallelize) == []


def test_a_name_without_a_docstring_is_found() -> None:
    """The check above finds a function, a class, a method and a property without one."""
    module = ModuleType("module")

    class Documented:
        """A docstring."""

        def method(self) -> None: ...

        @property
        def prop(self) -> int: ...

        def _private(self) -> None: ...

    class Undocumented: ...

    def documented() -> None:
        """A docstring."""

    module.__dict__.update(
        Documented=Documented, Undocumented=Undocumented, bare=lambda: None, documented=documented, VALUE=1
    )
    module.__all__ = ["VALUE", "Documented", "Undocumented", "bare", "documented"]
    assert reference.undocumented(module) == ["Documented.method", "Documented.prop", "Undocumented", "bare"]


def test_types_of_inherited_fields_are_resolved() -> None:
    """A dataclass shows the types of inherited fields, although its own module does not import them."""

    @dataclass(frozen=True)
    class Options(parallelize.DDPBackend):
        """A docstring."""

    assert "CommHook" in str(inspect.signature(Options))
    reference.resolve_fields(Options)
    assert "Literal['fp16'" in str(inspect.signature(Options))
