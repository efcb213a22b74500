"""Statements that change imported modules, as found in source code."""

from __future__ import annotations

import pytest

from parallelize.call.module_changes import _Source


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("config.lr = 1", [("assign", ("config", "lr"))]),
        ("a.b.c, x = 1, 2", [("assign", ("a", "b", "c"))]),
        ("config.lr *= 2", [("assign", ("config", "lr"))]),
        ("if x:\n    pass\nelse:\n    config.lr: int = 2", [("assign", ("config", "lr"))]),
        ("table['a'][0] = 1", [("modify", ("table",))]),
        ("config.table['a'].lr = 1", [("assign", ("config", "table", "lr"))]),
        ("config.table.update(a=1)", [("modify", ("config", "table"))]),
        ("setattr(config, 'lr', 1)", [("assign", ("config", "lr"))]),
        ("setattr(config, name, 1)", [("assign", ("config", "*"))]),
        ("lr = 1\nf(x)\nf().lr = 1\nlr.value", []),
    ],
)
def test_a_statement_is_found_in_a_script_and_in_functions_of_modules(code: str, changes: list[object]) -> None:
    """In modules, only inside functions: what happens on import, a worker repeats."""
    indented = code.replace("\n", "\n    ")
    top, inside = _Source([code]), _Source([f"class A:\n  def f():\n    {indented}"])
    assert [*top.changes] == [*inside.changes_in_functions] == [*inside.changes] == changes
    assert not top.changes_in_functions


def test_global_variables_that_a_function_sets_are_one_change() -> None:
    """They are sent together or not at all."""
    found = _Source(["is_open = False\ndef f():\n    global file, is_open\n    import a.b as c"])
    assert [*found.changes_in_functions] == [("global", ("file", "is_open"))]
    assert found.literals == {"is_open"}
    assert found.imports == {"c": ("a.b", "")}


def test_a_cell_with_magics_is_skipped() -> None:
    """A notebook's history has cells that are no Python code."""
    assert [*_Source(["%time f()", "config.lr = 1"]).changes] == [("assign", ("config", "lr"))]
