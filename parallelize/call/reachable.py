"""Walk over the objects that a function can reach: arguments, attributes, containers, closures, globals and classes."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

import torch
import wrapt
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "STATEFUL",
    "global_variables",
    "holds_state",
    "is_a",
    "is_user_code",
    "members",
    "mentioned_names",
    "namespace",
    "walk",
]

STATEFUL = (nn.Module, Optimizer, LRScheduler)
_ATOMS = (str, bytes, bytearray, int, float, complex, type(None), types.ModuleType, types.CodeType)
T = TypeVar("T")

_MAX_ITEMS = 1000  # longer containers hold data, not models
_MAX_OBJECTS = 10_000  # the search is breadth first: what comes later is data


def walk(
    roots: Mapping[str, object],
    *,
    follows_code: bool = True,
    skips: tuple[type, ...] = (),
) -> Iterator[tuple[str, object]]:
    """Yield the objects reachable from `roots`, each once, with its name as shown to the user; breadth first.

    Functions and classes of installed packages are not entered, and of their instances only those attributes that hold
    state or user code. A method is entered only if a function that was entered mentions its name.

    Args:
        roots: name -> object.
        follows_code: whether functions and classes are entered; False: only closures, which hold data.
        skips: types whose instances are yielded, but not entered.
    """
    seen: dict[int, object] = {}  # keeps the objects alive: no id is used twice
    queue = deque(roots.items())
    methods = _Methods()
    while queue and len(seen) < _MAX_OBJECTS:
        name, item = queue.popleft()
        if is_a(item, wrapt.ObjectProxy):  # a decorated function
            item = getattr(item, "__wrapped__", None)
        if id(item) in seen or is_a(item, _ATOMS):
            continue
        is_code = is_a(item, (types.FunctionType, type))
        if is_code and not (is_user_code(_module_of(item)) and (follows_code or _is_closure(item))):
            continue
        seen[id(item)] = item
        yield name, item
        if not is_a(item, (torch.Tensor, *skips)):
            queue.extend(methods.filter(item, members(name, item)))
            if not is_code and follows_code:
                queue.append((type(item).__name__, type(item)))


def is_a(item: object, kinds: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Whether an object's type is one of `kinds`; isinstance would ask its `__class__`, which a proxy may not have."""
    return issubclass(type(item), kinds)


def _module_of(item: Any) -> object:
    return getattr(item, "__module__", None)


class _Methods:
    """Holds back the methods of classes until a function mentions their names."""

    def __init__(self) -> None:
        self._mentioned = {"forward"}
        self._held: dict[str, list[tuple[str, object]]] = {}

    def filter(self, item: Any, found: dict[str, object]) -> list[tuple[str, object]]:
        """Return those members of `item` that are to be followed, and methods that it mentions."""
        if is_a(item, types.FunctionType):
            new = _names(item.__code__) - self._mentioned
            self._mentioned |= new
            return [*found.items(), *(each for method in new for each in self._held.pop(method, ()))]
        if not is_a(item, type):
            is_library = not (is_user_code(type(item).__module__) or is_a(item, _CONTAINERS))
            return [(key, value) for key, value in found.items() if not is_library or _may_hold_state(value)]
        followed: list[tuple[str, object]] = []
        for key, value in found.items():
            method = key.rpartition(".")[2]
            is_held = is_a(value, types.FunctionType) and method not in self._mentioned
            to = self._held.setdefault(method, []) if is_held and not method.startswith("__") else followed
            to.append((key, value))
        return followed


_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.MethodType, functools.partial)


def _may_hold_state(value: object) -> bool:
    is_state = is_a(value, (*STATEFUL, types.FunctionType, types.MethodType, functools.partial))
    return is_state or is_user_code(type(value).__module__)


def _is_closure(item: Any) -> bool:
    return is_a(item, types.FunctionType) and bool(item.__closure__) and "<locals>" in item.__qualname__


def holds_state(value: object) -> bool:
    """Whether a value is or holds a module, optimizer, scheduler, or tensor that requires grad."""
    return any(
        is_a(item, STATEFUL) or (is_a(item, torch.Tensor) and item.requires_grad)
        for _, item in walk({"": value}, follows_code=False)
    )


def is_user_code(module: object) -> bool:
    """Whether the module with this name is the user's own: not Python's, not installed, not this package."""
    if not isinstance(module, str):  # built-in functions have none
        return False
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("", "parallelize"):
        return False
    # Modules in compiled code, such as those in torch._C, have no file of their own.
    paths = (namespace(sys.modules.get(name)).get("__file__") for name in (module, top))
    path = next(filter(None, paths), "")
    return "site-packages" not in path and "dist-packages" not in path


def namespace(module: object) -> Mapping[str, Any]:
    """Return a module's variables; getattr would import a lazy module, which may fail."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found


def members(name: str, item: object) -> dict[str, object]:
    """Return the objects that an object refers to directly, by name as shown to the user.

    Args:
        name: name of the object.
        item: any object; of functions: their variables, of classes: their attributes and base classes.
    """
    try:
        return _members(name, item)
    except Exception:  # noqa: BLE001 - a user's attribute, slot or key may raise anything when it is read
        return {}


def _members(name: str, item: Any) -> dict[str, object]:
    if is_a(item, types.MethodType):
        return {f"self of {name}": item.__self__, name: item.__func__}
    if is_a(item, functools.partial):
        return {name: item.func, f"{name}.args": item.args, f"{name}.keywords": item.keywords}
    if is_a(item, types.FunctionType):
        return _variables_of(item)
    if is_a(item, type):
        return _class_members(item)
    if is_a(item, dict):
        pairs = dict.items(item) if len(item) <= _MAX_ITEMS else ()
        return {f"{name}[{_key_text(key)}]": value for key, value in pairs}
    if is_a(item, (list, tuple, set, frozenset, deque)):
        return {f"{name}[{index}]": value for index, value in enumerate(item)} if len(item) <= _MAX_ITEMS else {}
    slots = [slot for each in type(item).__mro__ for slot in _slots_of(each) if hasattr(item, slot)]
    attributes = {**getattr(item, "__dict__", {}), **{slot: getattr(item, slot) for slot in slots}}
    if is_a(item, nn.Module):
        attributes.update(item.named_children())
    if is_a(item, Optimizer):  # its parts come back with it
        attributes = {
            key: value for key, value in attributes.items() if key not in ("defaults", "param_groups", "state")
        }
    return {f"{name}.{attribute}": value for attribute, value in attributes.items()}


def _key_text(key: object) -> str:
    return repr(key) if type(key) in (str, int, bool, float, type(None)) else f"<{type(key).__name__} {id(key)}>"


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(each for each in slots if not each.startswith("__"))


def _class_members(kind: type) -> dict[str, object]:
    found: dict[str, object] = {base.__name__: base for base in kind.__bases__ if base is not object}
    for attribute, value in vars(kind).items():
        inner: Any = value
        if isinstance(value, property):
            inner = value.fget
        elif isinstance(value, (classmethod, staticmethod)):
            inner = value.__func__
        elif isinstance(value, functools.cached_property):
            inner = value.func
        is_function = isinstance(inner, types.FunctionType)
        if is_function or not (attribute.startswith("__") or isinstance(inner, _DESCRIPTORS)):
            found[f"{kind.__name__}.{attribute}"] = inner
    return found


_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.BuiltinFunctionType)


def _variables_of(function: types.FunctionType) -> dict[str, object]:
    """Return the variables from outside that a function mentions: free and global ones, attributes of user modules."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    free = {name: cell.cell_contents for name, cell in cells if _is_bound(cell)}
    return {**{name: value for name, value, _ in global_variables(function)}, **free}


def global_variables(function: types.FunctionType) -> Iterator[tuple[str, object, str]]:
    """Yield (name, value, module) of the global variables that a function mentions.

    `state.model` of a user module `state` is one of them, with the module "state".
    """
    names = _names(function.__code__)
    for name in sorted(_global_names(function.__code__) & function.__globals__.keys()):
        value = function.__globals__[name]
        yield name, value, function.__globals__.get("__name__", "")
        yield from _module_variables(name, value, names, seen=())


def _module_variables(
    name: str, module: object, names: set[str], *, seen: tuple[object, ...]
) -> Iterator[tuple[str, object, str]]:
    """Yield the variables of a user module with one of the names, and of its submodules."""
    if not isinstance(module, types.ModuleType) or module in seen or not is_user_code(module.__name__):
        return
    for attribute in sorted(names & vars(module).keys()):
        value = vars(module)[attribute]
        yield f"{name}.{attribute}", value, module.__name__
        yield from _module_variables(f"{name}.{attribute}", value, names, seen=(*seen, module))


def mentioned_names(reached: Iterable[tuple[str, object]]) -> set[str]:
    """Return the names of global variables and attributes that functions among `reached` mention."""
    return set[str]().union(*(_names(item.__code__) for _, item in reached if is_a(item, types.FunctionType)))


def _names(code: types.CodeType) -> set[str]:
    """Return the names of global variables and attributes that code mentions, also in functions inside it."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names of global variables only; `_names` also has attributes, which may be called alike."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname.endswith("GLOBAL")}
    return names.union(*(_global_names(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _is_bound(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - only reading a cell shows whether it is empty
    except ValueError:
        return False
    return True
