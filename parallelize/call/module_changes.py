"""Changes of a program to imported modules: settings such as `config.lr = 0.1`, replaced functions, filled tables.

A worker imports modules anew and runs no script, so it would have the values of the import. Whether a value has changed
since its module was imported cannot be seen: the source code of the script and of the user's modules tells which
variables of other modules are assigned, and which objects in them are changed. They are sent with their current values.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from parallelize.call.imported_state import Binding
from parallelize.call.module_source import Change, source_of
from parallelize.call.reachable import STATEFUL, is_a, is_user_code, namespace
from parallelize.call.serialization import is_copyable

__all__ = ["find_module_changes"]

# Each process has its own streams, arguments, handlers and so on; environment variables are sent by the launcher.
_OF_PROCESS = frozenset({"logging", "multiprocessing", "os", "signal", "sys", "threading", "warnings"})

# Larger values are data, which the workers read again when they import the module.
_MAX_BYTES = 16 * 2**20


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
    of_rank = functools.cache(lambda name: source_of(own[name]).of_rank if name in own else set[str]())
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
            is_one = change.kind in ("global", "class") and "*" not in change.path
            if is_used and not group.keys() <= found.keys():
                found |= _sendable(group, all_or_none=is_one)
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
    change: Change,
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
    if change.kind == "class":
        for name in change.path[1:]:
            yield from _bindings(Change("assign", (change.path[0], name)), module, names, holders)
        return
    for name in change.path[1:]:
        if not is_a(owner, (types.ModuleType, type)):
            break
        if name == change.path[-1] and change.kind == "assign":
            if _is_found(owner) and _is_plain_owner(owner):
                found = _variables(owner, name, holders)
                yield from ((_binding(owner, each), namespace(owner)[each]) for each in found)
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


def _variables(owner: Any, name: str, holders: Mapping[int, Collection[Binding]]) -> list[str]:
    """Return the variable with a name; for "*", of the user's modules and classes, those that begin as literals.

    It has set neither what class methods set by name, nor containers that several modules share.
    """
    if name != "*":
        return [name] if name in namespace(owner) else []
    module = owner.__module__ if is_a(owner, type) else owner.__name__
    if not _is_own(module):
        return []
    source = source_of(sys.modules[module])
    by_name = source.lazy.union(*(each.assigned for each in source.changes_in_functions))
    return [
        each
        for each in source.literals - source.of_rank
        if each in namespace(owner) and (owner.__name__, each) not in by_name
        if not is_a(value := namespace(owner)[each], (list, dict, set)) or len(holders.get(id(value), ())) < 2
    ]


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
    for name, (target, attribute) in source_of(module).imports.items():
        full = f"{target}.{attribute}" if attribute else target
        imported[name] = sys.modules.get(full) or namespace(sys.modules.get(target)).get(attribute)
    return {**imported, **vars(module)}


def _changes_in(module: types.ModuleType) -> Collection[Change]:
    source = source_of(module)
    # What a module does when it is imported, a worker repeats.
    return source.changes if module.__name__ == "__main__" else source.changes_in_functions
