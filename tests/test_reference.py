"""Every public name has a docstring that the generated reference finds, and the pages of guides link to each other."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import reference

import parallelize

ROOT = Path(reference.__file__).parents[1]


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

    assert isinstance(inspect.signature(Options).parameters["comm_hook"].annotation, str)
    reference.resolve_fields(Options)
    assert not isinstance(inspect.signature(Options).parameters["comm_hook"].annotation, str)


def test_links_of_guides_are_those_of_pages() -> None:
    """A guide's link leads to its page, any other into the checkout."""
    root = Path(reference.__file__).parents[1]
    site = root / "build/docs"
    readme = {"source": root / "README.md", "page": site / "index.html"}
    assert reference.page_link("examples/guides/data.md", **readme) == "guides/data.html"
    assert reference.page_link("LICENSE", **readme) == "../../LICENSE"
    guide = {"source": root / "examples/guides/faq.md", "page": site / "guides/faq.html"}
    assert reference.page_link("data.md", **guide) == "data.html"
    assert reference.page_link("../11_resume.py", **guide) == "../../../examples/11_resume.py"


def test_the_navigation_leads_to_all_guides() -> None:
    """In the order of README; no guide is left out."""
    pages = reference.site(Path("docs"))
    sources = [source for _, source in pages.values() if source is not None]
    assert sources[0] == ROOT / "README.md"
    assert sorted(sources[1:]) == sorted((ROOT / "examples/guides").glob("*.md"))
    assert all(title for title, _ in pages.values())
