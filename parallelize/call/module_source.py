"""What the source code of a module changes: statements that assign attributes, or call methods of objects."""

from __future__ import annotations

import ast
import contextlib
import functools
import types
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from parallelize.call.reachable import namespace

__all__ = ["Change", "Source", "source_of"]

# What mentions these is different in each worker.
_OF_RANK = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "get_rank", "get_world_size", "getpid", "gethostname"}
)

_EMPTY = frozenset({"None", "False", "0", "-1", "''", "()", "[]", "{}"})


class Change(NamedTuple):
    """A statement that changes something: ("config", "lr") is an attribute of what the source code calls `config`."""

    kind: Literal["assign", "modify", "global", "class"]
    path: tuple[str, ...]

    @property
    def assigned(self) -> set[tuple[str, ...]]:
        """Return the variables that the statement assigns, or declares to do so."""
        if self.kind == "global":
            return {(name,) for name in self.path}
        if self.kind == "class":
            return {(self.path[0], name) for name in self.path[1:]}
        return {self.path} if self.kind == "assign" else set()


class Source:
    """What the source code of a module says.

    Attributes:
        changes: what its statements change, in this order; `changes_in_functions`: only those inside functions.
        lazy: what functions set if it is unset, as `if client is None: client = ...`; a worker does this itself.
        literals: its variables that begin as literals.
        of_rank: its variables, and those of its classes, that begin with a value that depends on the rank.
        imports: name -> (module, name in it or "").
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.changes: dict[Change, None] = {}
        self.changes_in_functions: dict[Change, None] = {}
        self.lazy: set[tuple[str, ...]] = set()
        self.literals: set[str] = set()
        self.of_rank: set[str] = set()
        self.imports: dict[str, tuple[str, str]] = {}
        for text in texts:
            # A notebook's cell with magics; a generated file that is nested too deeply. Python has warned on import.
            with contextlib.suppress(SyntaxError, ValueError, RecursionError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._visit(ast.parse(text).body, tests=None)
        self.changes_in_functions = {
            each: None for each in self.changes_in_functions if self.lazy.isdisjoint(each.assigned)
        }

    def _visit(self, statements: Iterable[ast.stmt], *, tests: Collection[tuple[str, ...]] | None) -> None:
        """Visit statements; `tests` is what the function around them tests for being unset, None outside of one."""
        for node in statements:
            self.imports.update(_imports(node))
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and tests is None and node.value is not None:
                self._visit_variables(node, node.value)
            found = dict.fromkeys(_changes(node))
            self.changes |= found
            if tests is not None:
                self.changes_in_functions |= found
                self.lazy.update(*(each.assigned for each in found if not each.assigned.isdisjoint(tests)))
            if isinstance(node, ast.ClassDef):
                self._visit_class_methods(node)
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            inner = set(_tests(node)) if is_function and tests is None else tests
            for part in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                inside = [each for block in ("body", "orelse", "finalbody") for each in getattr(part, block, ())]
                self._visit(inside, tests=inner)

    def _visit_class_methods(self, node: ast.ClassDef) -> None:
        """Add what class methods set: `cls.lr` and `cls.wd` is Change("class", ("Config", "lr", "wd"))."""
        for each in node.body:
            if not isinstance(each, ast.FunctionDef) or "classmethod" not in map(ast.unparse, each.decorator_list):
                continue
            found = [change for part in ast.walk(each) if isinstance(part, ast.stmt) for change in _changes(part)]
            cls = each.args.args[0].arg if each.args.args else ""
            paths = {path: None for kind, path in found if kind == "assign" and path[0] == cls and len(path) == 2}
            change = Change("class", (node.name, *(name for _, name in paths)))
            if paths:
                self.changes_in_functions[change] = None
            if not paths.keys().isdisjoint(_tests(each)):
                self.lazy |= change.assigned

    def _visit_variables(self, node: ast.Assign | ast.AnnAssign, value: ast.expr) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {each.id for each in targets if isinstance(each, ast.Name)}
        with contextlib.suppress(ValueError):
            ast.literal_eval(value)
            self.literals |= names
        mentioned = {
            getattr(each, attribute, None)
            for each in ast.walk(value)
            for attribute in ("id", "attr", "value")
            if isinstance(each, (ast.Name, ast.Attribute, ast.Constant))
        }
        if not mentioned.isdisjoint(_OF_RANK | self.of_rank):
            self.of_rank |= names


def _tests(function: ast.stmt) -> Iterator[tuple[str, ...]]:
    """Yield the variables that a function tests for being unset, to set them or to return."""
    nodes = list(ast.walk(function))
    names = {path[0] for path in _assigned(nodes) if len(path) == 1}
    names.update(each.arg for each in nodes if isinstance(each, ast.arg))
    local = names.difference(*(each.names for each in nodes if isinstance(each, ast.Global)))
    for node in nodes:
        if isinstance(node, (ast.If, ast.IfExp)):
            inside = list(ast.walk(node))
            is_set_or_not = isinstance(node, ast.IfExp) or any(isinstance(each, ast.Return) for each in inside)
            tested = _tested_for_unset(node.test, local)
            yield from tested if is_set_or_not else tested.intersection(_assigned(inside))


def _assigned(nodes: Iterable[ast.AST]) -> set[tuple[str, ...]]:
    targets = (each for each in nodes if isinstance(each, (ast.Name, ast.Attribute)))
    return {_path(each) for each in targets if isinstance(each.ctx, ast.Store)}


def _tested_for_unset(test: ast.expr, local: Collection[str]) -> set[tuple[str, ...]]:
    """Return the variables that a condition tests, as `x is None` or `not x` does, without those that it compares."""
    unset: set[tuple[str, ...]] = set()
    compared: set[tuple[str, ...]] = set()
    conditions = [test]
    for each in conditions:
        if isinstance(each, (ast.BoolOp, ast.UnaryOp)):
            conditions += each.values if isinstance(each, ast.BoolOp) else [each.operand]
        else:
            paths = {_path(part) for part in ast.walk(each) if isinstance(part, (ast.Name, ast.Attribute))}
            is_with_local = len({path[0] in local for path in paths if path}) > 1
            (compared if is_with_local or _is_comparison(each) else unset).update(paths)
    return unset - compared


def _is_comparison(condition: ast.expr) -> bool:
    """Whether a condition compares two values: not with an empty one, by `is`, or with what depends on the process."""
    if not isinstance(condition, ast.Compare) or isinstance(condition.ops[0], (ast.Is, ast.IsNot)):
        return False
    sides = [condition.left, *condition.comparators]
    names = {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(condition)}
    return names.isdisjoint(_OF_RANK) and not any(ast.unparse(each) in _EMPTY for each in sides)


def source_of(module: types.ModuleType) -> Source:
    """Return what the source code of a module says, or that of a notebook; nothing for other modules."""
    cells = namespace(module).get("In")
    if module.__name__ == "__main__" and isinstance(cells, list) and "get_ipython" in vars(module):
        return Source(map(str, cells))
    path = str(namespace(module).get("__file__") or "")
    try:
        return _read(path, Path(path).stat().st_mtime_ns) if path.endswith(".py") else Source(())
    except (OSError, UnicodeDecodeError):
        return Source(())


@functools.cache
def _read(path: str, _changed_at: int) -> Source:
    return Source([Path(path).read_text(encoding="utf-8")])


def _imports(node: ast.stmt) -> Iterator[tuple[str, tuple[str, str]]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, (alias.name if alias.asname else top, "")
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from ((alias.asname or alias.name, (node.module or "", alias.name)) for alias in node.names)


def _changes(node: ast.stmt) -> Iterator[Change]:
    """Yield what a statement changes."""
    if isinstance(node, ast.Global):
        yield Change("global", tuple(node.names))
    assigned: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        assigned = [part for each in node.targets for part in getattr(each, "elts", [each])]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        assigned = [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called, args = node.value.func, node.value.args
        if isinstance(called, ast.Attribute) and (path := _path(called.value)):
            yield Change("modify", path)  # `options.update(...)`
        elif isinstance(called, ast.Name) and called.id == "setattr" and len(args) == 3 and (path := _path(args[0])):
            yield Change("assign", (*path, str(args[1].value) if isinstance(args[1], ast.Constant) else "*"))
    for target in assigned:
        path = _path(target)
        if path and isinstance(target, ast.Subscript):
            yield Change("modify", path)
        elif len(path) > 1:
            yield Change("assign", path)


def _path(node: ast.expr) -> tuple[str, ...]:
    """Return the names of `config.training.lr`, or of what has the item; empty: it does not begin with a name."""
    if isinstance(node, ast.Subscript):
        return _path(node.value)
    if isinstance(node, ast.Attribute):
        before = _path(node.value)
        return (*before, node.attr) if before else ()
    return (node.id,) if isinstance(node, ast.Name) else ()
