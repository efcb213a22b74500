"""Every public name has a docstring, and stands on one page of the API reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import reference

import parallelize
import parallelize.plugins.base


@pytest.mark.parametrize("module", [parallelize, parallelize.plugins.base])
def test_public_names_have_docstrings(module: ModuleType) -> None:
    """Functions, classes and their public methods all have one."""
    assert reference.undocumented(module) == []


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


def test_each_public_name_stands_in_one_subject() -> None:
    """The pages of the reference describe all public names, each once."""
    public = {f"parallelize.{name}" for name in parallelize.__all__}
    of_authors = set(parallelize.plugins.base.__all__) - set(parallelize.__all__)
    public |= {f"parallelize.plugins.base.{name}" for name in of_authors}
    # Classes that public functions return, and one whose options three backends inherit.
    behind_public_names = {
        "parallelize.backends.ddp_engine.DDPOptions",
        "parallelize.checkpoint.checkpoints.Checkpoints",
        "parallelize.comparison.compare.Comparison",
    }
    assert sorted(reference.described_names()) == sorted(public | behind_public_names)
