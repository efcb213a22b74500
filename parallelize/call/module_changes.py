"""Changes of a program to imported modules: settings such as `config.lr = 0.1`, replaced functions, filled tables.

A worker imports modules anew and runs no script, so it would have the values of the import. Whether a value has changed
since its module was imported cannot be seen: the source code of the script and of the user's modules tells which
variables of other modules are assigned, and which objects in them are changed. They are sent with their current values.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from parallelize.call.imported_state import Binding
from parallelize.call.reachable import STATEFUL, is_a, is_user_code, namespace
from parallelize.call.serialization import is_copyable

__all__ = ["find_module_changes"]

# Each process has its own streams, arguments, handlers and so on; environment variables are sent by the launcher.
_OF_PROCESS = frozenset({"logging", "multiprocessing", "os", "signal", "sys", "threading", "warnings"})

# What mentions these is different in each worker.
_OF_RANK = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "get_rank", "get_world_size", "getpid", "gethostname"}
)

# Larger values are data, which the workers read again when they import the module.
_MAX_BYTES = 64 * 2**20


class _Change(NamedTuple):
    """A statement that changes something: ("config", "lr") is an attribute of what the source code calls `config`."""

    kind: Literal["assign", "modify", "global"]
    path: tuple[str, ...]

    @property
    def assigned(self) -> set[tuple[str, ...]]:
        """Return the variables that the statement assigns, or declares to do so."""
        if self.kind == "global":
            return {(name,) for name in self.path}
        return {self.path} if self.kind == "assign" else set()


def find_module_changes(
    *, is_importable: Callable[[types.ModuleType], bool], mentioned: Collection[str]
) -> dict[Binding, object]:
    """Return the variables of importable modules, and of their classes, that the program may have changed.

    Args:
        is_importable: whether a worker can import a module.
        mentioned: names in the functions that the call reaches; of the user's modules, only such variables are sent.

    Returns:
        (module, dotted name) -> current value.
    """
    imports = functools.cache(lambda name: is_importable(sys.modules[name]))
    modules = {name: each for name, each in list(sys.modules.items()) if _is_module(each, name)}
    own = {name: each for name, each in modules.items() if name != "__main__" and _is_own(name)}
    holders: defaultdict[int, list[Binding]] = defaultdict(list)
    for name, module in own.items():
        for key, value in list(vars(module).items()):
            holders[id(value)].append((name, key))
    of_rank = functools.cache(lambda name: _source(own[name]).of_rank if name in own else set[str]())
    found: dict[Binding, object] = {}
    for module in (sys.modules["__main__"], *own.values()):
        names = _names_in(module)
        for change in _changes_in(module):
            bindings = _bindings(change, module, names, holders)
            group = {(owner, name): value for (owner, name), value in bindings if owner in modules and imports(owner)}
            is_set_by_script = module.__name__ == "__main__" and change.kind == "assign"
            if not is_set_by_script and any(name.rpartition(".")[2] in of_rank(owner) for owner, name in group):
                continue
            is_used = any(owner not in own or name.rpartition(".")[2] in mentioned for owner, name in group)
            if is_used and not group.keys() <= found.keys():
                found |= _sendable(group, all_or_none=change.kind == "global")
    return found


def _is_module(module: object, name: str) -> bool:
    """Whether a member of sys.modules is a module of this name; programs put None, other objects and aliases there."""
    return is_a(module, types.ModuleType) and namespace(module).get("__name__") == name


def _sendable(values: Mapping[Binding, object], *, all_or_none: bool) -> dict[Binding, object]:
    """Return the values that can be sent. What a function sets together may be a file, and that it is open."""
    changed = {key: value for key, value in values.items() if not _is_as_imported(*key, value)}
    sent = {key: value for key, value in changed.items() if is_copyable(value, at_most=_MAX_BYTES)}
    return {} if all_or_none and len(sent) < len(changed) else sent


_is_own = functools.cache(is_user_code)  # for thousands of modules, on every call


def _bindings(
    change: _Change,
    module: types.ModuleType,
    names: Mapping[str, object],
    holders: Mapping[int, Collection[Binding]],
) -> Iterator[tuple[Binding, object]]:
    """Yield the variables that a statement of a module changes, with their values.

    Args:
        change: the statement.
        module: the module that has it.
        names: what the names in its source code refer to.
        holders: id of an object -> variables of the user's modules that hold it.
    """
    if change.kind == "global":
        yield from (((module.__name__, name), vars(module)[name]) for name in change.path if name in vars(module))
        return
    owner = names.get(change.path[0])
    for name in change.path[1:]:
        if not is_a(owner, (types.ModuleType, type)):
            break
        if name == change.path[-1] and change.kind == "assign":
            if _is_found(owner) and _is_plain_owner(owner):
                yield from ((_binding(owner, each), namespace(owner)[each]) for each in _variables(owner, name))
            return
        owner = namespace(owner).get(name)
    if id(owner) not in holders or is_a(owner, (types.ModuleType, type, types.FunctionType, *STATEFUL)):
        return
    if not _is_of_process(owner):
        # `from config import options`: each of these modules has it
        yield from ((binding, owner) for binding in holders[id(owner)])


def _is_of_process(value: object) -> bool:
    """Whether a value is `os.environ`, `sys.path` or another variable of these modules."""
    modules = map(namespace, map(sys.modules.get, _OF_PROCESS))
    return any(value is each for variables in modules for each in variables.values())


def _variables(owner: Any, name: str) -> list[str]:
    """Return the variable with a name; for "*", if the owner is a module of the user, those that begin as literals."""
    if name != "*":
        return [name] if name in namespace(owner) else []
    is_own = is_a(owner, types.ModuleType) and is_user_code(owner.__name__)
    return [each for each in _source(owner).literals if each in vars(owner)] if is_own else []


def _is_found(owner: Any) -> bool:
    """Whether the name of a module or class refers to it; that of a renamed class, or one in a function, does not."""
    if not is_a(owner, type):
        return sys.modules.get(owner.__name__) is owner
    found: object = sys.modules.get(owner.__module__)
    for part in owner.__qualname__.split("."):
        found = namespace(found).get(part)
    return found is owner


def _binding(owner: Any, name: str) -> Binding:
    return (owner.__module__, f"{owner.__qualname__}.{name}") if is_a(owner, type) else (owner.__name__, name)


def _is_plain_owner(owner: Any) -> bool:
    """Whether setting a variable sets nothing else; `torch.backends.cudnn`, for example, calls functions of torch."""
    module = owner.__module__ if is_a(owner, type) else owner.__name__
    is_process = module.partition(".")[0] in _OF_PROCESS
    return not is_process and (isinstance(owner, type) or type(owner) is types.ModuleType)


def _is_as_imported(module: str, name: str, value: Any) -> bool:
    """Whether a function or class is the one that its module defines by this name."""
    is_code = is_a(value, (types.FunctionType, types.BuiltinFunctionType, type))
    return is_code and (value.__module__, value.__qualname__) == (module, name)


def _names_in(module: types.ModuleType) -> Mapping[str, object]:
    """Return what names in the source code of a module refer to: its variables, and imports inside functions."""
    imported = {}
    for name, (target, attribute) in _source(module).imports.items():
        full = f"{target}.{attribute}" if attribute else target
        imported[name] = sys.modules.get(full) or namespace(sys.modules.get(target)).get(attribute)
    return {**imported, **vars(module)}


def _changes_in(module: types.ModuleType) -> Collection[_Change]:
    source = _source(module)
    # What a module does when it is imported, a worker repeats.
    return source.changes if module.__name__ == "__main__" else source.changes_in_functions


class _Source:
    """What the source code of a module says.

    Attributes:
        changes: what its statements change, in this order; `changes_in_functions`: only those inside functions.
        lazy: what functions set that also test it, as `if client is None: client = ...`; a worker does this itself.
        literals: its variables that begin as literals.
        of_rank: its variables, and those of its classes, that begin with a value that depends on the rank.
        imports: name -> (module, name in it or "").
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.changes: dict[_Change, None] = {}
        self.changes_in_functions: dict[_Change, None] = {}
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
        """Visit statements; `tests` is what the conditions of the function around them mention, None outside of one."""
        for node in statements:
            self.imports.update(_imports(node))
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and tests is None and node.value is not None:
                self._visit_variables(node, node.value)
            found = dict.fromkeys(_changes(node))
            self.changes |= found
            if tests is not None:
                self.changes_in_functions |= found
                self.lazy.update(*(each.assigned for each in found if not each.assigned.isdisjoint(tests)))
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            inner = set(_tests(node)) if is_function and tests is None else tests
            for part in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                inside = [each for block in ("body", "orelse", "finalbody") for each in getattr(part, block, ())]
                self._visit(inside, tests=inner)

    def _visit_variables(self, node: ast.Assign | ast.AnnAssign, value: ast.expr) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {each.id for each in targets if isinstance(each, ast.Name)}
        if isinstance(value, ast.Constant):
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
    """Yield the variables in the conditions of a function, except those that only lead to an error."""
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.IfExp)):
            is_check = isinstance(node, ast.If) and all(isinstance(each, ast.Raise) for each in node.body)
            parts = () if is_check else ast.walk(node.test)
            yield from (_path(part) for part in parts if isinstance(part, (ast.Name, ast.Attribute)))


def _source(module: types.ModuleType) -> _Source:
    cells = namespace(module).get("In")
    if module.__name__ == "__main__" and isinstance(cells, list) and "get_ipython" in vars(module):
        return _Source(map(str, cells))
    path = str(namespace(module).get("__file__") or "")
    try:
        return _read(path, Path(path).stat().st_mtime_ns) if path.endswith(".py") else _Source(())
    except (OSError, UnicodeDecodeError):
        return _Source(())


@functools.cache
def _read(path: str, _changed_at: int) -> _Source:
    return _Source([Path(path).read_text(encoding="utf-8")])


def _imports(node: ast.stmt) -> Iterator[tuple[str, tuple[str, str]]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, (alias.name if alias.asname else top, "")
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from ((alias.asname or alias.name, (node.module or "", alias.name)) for alias in node.names)


def _changes(node: ast.stmt) -> Iterator[_Change]:
    """Yield what a statement changes."""
    if isinstance(node, ast.Global):
        yield _Change("global", tuple(node.names))
    assigned: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        assigned = [part for each in node.targets for part in getattr(each, "elts", [each])]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        assigned = [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called, args = node.value.func, node.value.args
        if isinstance(called, ast.Attribute) and (path := _path(called.value)):
            yield _Change("modify", path)  # `options.update(...)`
        elif isinstance(called, ast.Name) and called.id == "setattr" and len(args) == 3 and (path := _path(args[0])):
            yield _Change("assign", (*path, str(args[1].value) if isinstance(args[1], ast.Constant) else "*"))
    for target in assigned:
        path = _path(target)
        if path and isinstance(target, ast.Subscript):
            yield _Change("modify", path)
        elif len(path) > 1:
            yield _Change("assign", path)


def _path(node: ast.expr) -> tuple[str, ...]:
    """Return the names of `config.training.lr`, or of what has the item; empty: it does not begin with a name."""
    if isinstance(node, ast.Subscript):
        return _path(node.value)
    if isinstance(node, ast.Attribute):
        before = _path(node.value)
        return (*before, node.attr) if before else ()
    return (node.id,) if isinstance(node, ast.Name) else ()
