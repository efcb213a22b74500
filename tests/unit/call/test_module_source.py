"""Statements that change imported modules, as found in source code."""

from __future__ import annotations

import re

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
        ("if x == -1 or not len(x):\n        x = 1", []),
        ("x = 1 if not isinstance(x, int) else x", []),
        ("if x != os.getpid():\n        x = os.getpid()", []),
        ("if v != x:\n        x = v", ["x"]),
        ("if v == x:\n        return\n    x = v", ["x"]),
        ("if x is None or x != v:\n        x = v", ["x"]),
        ("if not isclose(v, x):\n        x = v", ["x"]),
        ("old = float(v)\n    if old is not x:\n        x = old", ["x"]),
        ("if x != FAST:\n        x = FAST", ["x"]),
        ("x = v if x < v else x", ["x"]),
        ("if x is not None:\n        print('changed')\n    x = v", ["x"]),
    ],
)
def test_what_a_function_sets_only_once_is_left_to_each_process(code: str, names: list[str]) -> None:
    """A comparison with another value, and a condition that leads to an error or a message only, are no such test."""
    for declaration, path in {"global x": "x", "pass": "State.x"}.items():
        body = re.sub(r"\bx\b", path, code)
        found = Source([f"def f(v):\n    {declaration}\n    {body}"]).changes_in_functions
        assert [each.path[-1] for each in found] == names


CLASS = """
class Config:
    lr, patience, layers, rank, made = 0.1, 0, [1], None, None
    patience = -1
    layers = [1]
    size = f()

    @classmethod
    def set(cls, lr, **others):
        cls.lr, cls.wd = lr, 0
        cls.size.x = 1

    @classmethod
    def connect(cls):
        if cls.made is None:
            cls.made = connect()

    @classmethod
    def reset(cls):
        cls.made = None

    def of_object(cls):
        cls.rank = 1
"""


def test_what_a_class_method_sets_is_one_change_of_the_class() -> None:
    """What one of them sets up lazily, is not that of another, either."""
    found = Source([CLASS])
    assert [each for each in found.changes_in_functions if each.kind == "class"] == [("class", ("Config", "lr", "wd"))]
    assert found.literals == {"patience", "layers"}


def test_a_test_of_an_argument_for_being_unset_counts() -> None:
    """Setting an attribute of an argument only once is no change of a module called alike."""
    code = "def f(config):\n    if config.lr is None:\n        config.lr = 1"
    assert not Source([code]).changes_in_functions


def test_a_cell_with_magics_is_skipped() -> None:
    """A notebook's history has cells that are no Python code."""
    assert [*Source(["%time f()", "config.lr = 1"]).changes] == [("assign", ("config", "lr"))]


@pytest.mark.filterwarnings("error")
def test_code_that_python_warns_of_is_read_silently() -> None:
    """A regular expression in a plain string; and expressions that are too deep for the parser are skipped."""
    deep = "config.x = " + " + ".join(["1"] * 5000)
    assert [*Source(["config.lr = '\\d'", deep]).changes] == [("assign", ("config", "lr"))]
