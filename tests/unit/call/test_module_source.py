"""Statements that change imported modules, as found in source code."""

from __future__ import annotations

import pytest

from parallelize.call.module_source import Source


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
    top, inside = Source([code]), Source([f"class A:\n  def f():\n    {indented}"])
    assert [*top.changes] == [*inside.changes_in_functions] == [*inside.changes] == changes
    assert not top.changes_in_functions


def test_global_variables_that_a_function_sets_are_one_change() -> None:
    """They are sent together or not at all."""
    found = Source(["is_open = False\ndef f():\n    global file, is_open\n    import a.b as c"])
    assert [*found.changes_in_functions] == [("global", ("file", "is_open"))]
    assert found.literals == {"is_open"}
    assert found.imports == {"c": ("a.b", "")}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("if x is None:\n        x = 1", []),
        ("if not x:\n        return\n    x = 1", []),
        ("if x is not None:\n        raise ValueError\n    x = 1", ["x"]),
        ("x = 1", ["x"]),
    ],
)
def test_what_a_function_sets_only_once_is_left_to_each_process(code: str, names: list[str]) -> None:
    """A check that it was not set before is none."""
    for declaration, path in {"global x": "x", "pass": "State.x"}.items():
        found = Source([f"def f():\n    {declaration}\n    {code.replace('x', path)}"]).changes_in_functions
        assert [each.path[-1] for each in found] == names


def test_a_cell_with_magics_is_skipped() -> None:
    """A notebook's history has cells that are no Python code."""
    assert [*Source(["%time f()", "config.lr = 1"]).changes] == [("assign", ("config", "lr"))]


@pytest.mark.filterwarnings("error")
def test_code_that_python_warns_of_is_read_silently() -> None:
    """A regular expression in a plain string; and expressions that are too deep for the parser are skipped."""
    deep = "config.x = " + " + ".join(["1"] * 5000)
    assert [*Source(["config.lr = '\\d'", deep]).changes] == [("assign", ("config", "lr"))]
