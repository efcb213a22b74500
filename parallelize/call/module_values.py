"""Values of the user's modules, and the program's changes of installed ones, that travel with a call.

A worker imports modules anew, so it would have the values of the import: not `config.lr = 0.1`, nor a table that the
program has filled. So the variables of the user's modules that the call's functions mention are pickled with the call:
objects that arguments and variables share are shared in the worker, too. Left to each process: what the import takes
from the rank, and data with a leading underscore, which says what the module itself has set up in its process.

In installed modules only what the user's code assigns (`torch.nn.functional.gelu = mine`) is sent.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import pkgutil
import re
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelize.call.pickling import Trial, is_found, is_importable
from parallelize.call.reachable import (
    CODE,
    CONTAINERS,
    PROXY,
    free_variables,
    global_variables,
    is_a,
    is_stateful,
    is_user_code,
    namespace,
)

__all__ = ["ModuleValues", "edited_modules"]

_Binding = tuple[str, str]  # (module, dotted name in it)

_MAX_ITEMS = 1000
_MAX_BYTES = 16 * 2**20  # larger values are data, which the workers read again when they import the module
# Each process has its own streams, arguments, handlers and so on; environment variables are sent by the launcher.
_OF_PROCESS = frozenset({"logging", "multiprocessing", "os", "signal", "sys", "threading", "warnings"})
# What mentions these is different in each worker.
_OF_RANK = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "get_rank", "get_world_size", "getpid", "gethostname"}
)
_DESCRIPTORS = (classmethod, staticmethod, property, types.MemberDescriptorType, types.GetSetDescriptorType)
_ASSIGNMENT = re.compile(r"""^\s*([\w.]+)\.(\w+)\s*=(?!=)|setattr\(\s*([\w.]+)\s*,\s*["'](\w+)["']""", re.MULTILINE)


@dataclass
class ModuleValues:
    """Values of variables of importable modules, by module and dotted name.

    Attributes:
        values: what is sent.
        unsendable: kinds of the values that cannot be pickled, or are too large.
    """

    values: dict[_Binding, Any] = field(default_factory=dict)
    unsendable: dict[_Binding, str] = field(default_factory=dict)

    @classmethod
    def find(cls, call: object) -> ModuleValues:
        """Return the values of what functions and classes of a call mention, and what user code has assigned."""
        found, seen, mentioned = cls(), dict[int, object](), set[_Binding]()
        imports = functools.cache(lambda name: name in sys.modules and is_importable(sys.modules[name]))
        assigned = _assigned()
        pending: deque[Any] = deque(Trial.of(call, at_most=math.inf, skips=_is_data).code)
        for binding, value in assigned.items():
            if not is_user_code(binding[0]) and imports(binding[0]):
                pending.extend(found._add(binding, value, is_assigned=True))
        while pending:
            code = pending.popleft()
            code = code.__wrapped__ if is_a(code, PROXY) else code
            if id(code) in seen or not is_user_code(getattr(code, "__module__", None)):
                continue
            seen[id(code)] = code
            pending.extend(code.__bases__ if is_a(code, type) else ())
            for module, name, value in _variables(code):
                binding = module, name
                if binding not in mentioned or not name:
                    mentioned.add(binding)
                    own = binding if name and is_user_code(module) and imports(module) else None
                    pending.extend(found._add(own, value, is_assigned=binding in assigned))
        return found

    def _add(self, binding: _Binding | None, value: Any, *, is_assigned: bool) -> list[Any]:
        """Add a value, unless the worker's own is as good; return the functions and classes that it refers to."""
        is_state = is_stateful(value)
        is_code = is_a(value, (*CODE, PROXY))
        trial = Trial([value]) if is_code else Trial.of(value, at_most=math.inf if is_state else _MAX_BYTES)
        if binding is None or not _is_sent(binding, value, is_assigned=is_assigned):
            return trial.code
        if is_code:
            if Trial.of(value, at_most=_MAX_BYTES).is_whole:
                self.values[binding] = value
        elif not trial.is_whole or not (is_state or all(map(_is_imported, trial.code))):
            self.unsendable[binding] = type(value).__name__
        else:
            self.values[binding] = value
        return trial.code

    def install(self) -> list[str]:
        """Write the values into the modules, which are imported.

        Returns:
            The variables that the program has set to what cannot be sent, or not be written here.
        """
        problems = []
        for binding in (*self.values, *self.unsendable):
            try:
                owner, name = _owner(binding)
                mine = getattr(owner, name, None)
                value = self.values.get(binding, mine)
                if value is not mine:  # not a member of an enumeration, which cannot be set
                    setattr(owner, name, value)
                    _share(mine, value)
                elif binding in self.unsendable and (mine is None or is_stateful(mine)):
                    problems.append(f"{'.'.join(binding)} ({self.unsendable[binding]})")
            except Exception as exc:  # noqa: BLE001 - a user's __getattr__ or property may raise anything
                problems.append(f"{'.'.join(binding)} ({type(exc).__name__})")
                self.values.pop(binding, None)
        return problems

    def current(self) -> dict[str, object]:
        """Return what the variables of the user's modules have now, by name as shown to the user."""
        owners = {".".join(binding): _owner(binding) for binding in self.values if is_user_code(binding[0])}
        return {name: getattr(owner, attribute, None) for name, (owner, attribute) in owners.items()}


def _is_data(item: Any) -> bool:
    """Whether a container is too long to hold models or functions."""
    return is_a(item, CONTAINERS) and len(item) > _MAX_ITEMS


def _owner(binding: _Binding) -> tuple[Any, str]:
    """Return what has the last part of a dotted name in a module, which is imported, and that part."""
    path, _, last = binding[1].rpartition(".")
    return pkgutil.resolve_name(f"{binding[0]}:{path}"), last


def _share(mine: Any, value: Any) -> None:
    """Give the object that the import has made the contents of `value`: others in the worker may refer to it."""
    if type(mine) is not type(value) or is_a(value, CODE):
        return
    if is_a(value, dict):
        items = dict(value)
        dict.clear(mine)
        dict.update(mine, items)
    elif is_a(value, list):
        list.__setitem__(mine, slice(None), value)
    if type(getattr(value, "__dict__", None)) is dict:
        attributes = dict(vars(value))
        vars(mine).clear()
        vars(mine).update(attributes)


def _variables(code: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (module, dotted name, value) of what a function mentions or a class has; "": it is no variable."""
    if is_a(code, types.FunctionType):
        for name, value, module in global_variables(code):
            yield module, name.rpartition(".")[2], value
        yield from (("", "", value) for _, value in free_variables(code))
        for attribute in ("__defaults__", "__kwdefaults__"):
            value = getattr(code, attribute)
            each = value.values() if is_a(value, dict) else value or ()
            if "<locals>" not in code.__qualname__ and any(map(is_stateful, each)):
                yield code.__module__, f"{code.__qualname__}.{attribute}", value
    elif is_a(code, type):
        prefix = f"{code.__qualname__}." if _is_imported(code) else ""
        for name, value in list(vars(code).items()):
            if is_a(value, types.FunctionType) or not name.startswith("__"):
                yield code.__module__, f"{prefix}{name}" if prefix else "", value


def _is_sent(binding: _Binding, value: Any, *, is_assigned: bool) -> bool:
    """Whether the caller's value counts: not what the import makes anew, is private, or depends on the process."""
    module, last, kind = binding[0], binding[1].rpartition(".")[2], type(value)
    if is_a(value, CODE):
        is_own = (value.__module__, value.__qualname__) == binding
        return not is_own and (is_assigned or value.__module__ == "__main__")
    return not is_user_code(module) or not (
        kind is object
        or is_a(value, (PROXY, types.ModuleType, *_DESCRIPTORS))
        or (last.startswith("_") and not last.startswith("__") and not is_stateful(value))
        or kind.__module__.partition(".")[0] in _OF_PROCESS
        or (last in _source_of(sys.modules[module])[1] and not hasattr(kind, "state_dict"))
    )


def _is_imported(code: Any) -> bool:
    """Whether a worker finds a function or class where the caller has it."""
    return code.__module__ == "__main__" or is_found(code, f"{code.__module__}:{code.__qualname__}")


# Source code


def _source_of(module: types.ModuleType) -> tuple[set[tuple[str, str]], set[str]]:
    """Return the attributes of other objects that a module's source code assigns, and what it sets from the rank."""
    cells = namespace(module).get("In")
    if module.__name__ == "__main__" and isinstance(cells, list) and "get_ipython" in vars(module):
        return _parse("\n".join(map(str, cells)))
    path = Path(str(namespace(module).get("__file__") or ""))
    try:
        return _read(path, path.stat().st_mtime_ns) if path.suffix == ".py" else (set(), set())
    except (OSError, UnicodeDecodeError):
        return set(), set()


@functools.cache
def _read(path: Path, _changed_at: int) -> tuple[set[tuple[str, str]], set[str]]:
    return _parse(path.read_text(encoding="utf-8"))


def _parse(text: str) -> tuple[set[tuple[str, str]], set[str]]:
    assigned = {(each[1] or each[3], each[2] or each[4]) for each in _ASSIGNMENT.finditer(text)}
    of_rank = set[str]()
    # A notebook's cell with magics; a generated file that is nested too deeply. Python has warned on import.
    with contextlib.suppress(SyntaxError, ValueError, RecursionError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for node in _assignments(ast.parse(text)):
            words = {getattr(part, key, None) for part in ast.walk(node) for key in ("id", "attr", "value")}
            if not words.isdisjoint(_OF_RANK | of_rank):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                of_rank.update(each.id for each in targets if isinstance(each, ast.Name))
    return assigned, of_rank


def _assignments(node: ast.AST) -> Iterator[ast.Assign | ast.AnnAssign]:
    """Yield the assignments that an import makes: not those in functions."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        yield node
    elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for child in ast.iter_child_nodes(node):
            yield from _assignments(child)


def _own_modules() -> list[types.ModuleType]:
    modules = [(key, each) for key, each in list(sys.modules.items()) if is_a(each, types.ModuleType)]
    return [each for key, each in modules if namespace(each).get("__name__") == key and is_user_code(key)]


def _assigned() -> dict[_Binding, object]:
    """Return what the user's code assigns to variables of modules, and of their classes, from outside of them."""
    found: dict[_Binding, object] = {}
    for module, path, name in [(each, *pair) for each in _own_modules() for pair in _source_of(each)[0]]:
        first, *rest = path.split(".")
        owner: Any = functools.reduce(
            lambda each, part: namespace(each).get(part), rest, namespace(module).get(first, sys.modules.get(first))
        )
        # Setting a variable of a module with a class of its own, as `torch.backends.cudnn` has, calls functions.
        is_class = is_a(owner, type) and _is_imported(owner)
        if (is_class or type(owner) is types.ModuleType) and name in namespace(owner):
            home, prefix = (owner.__module__, f"{owner.__qualname__}.") if is_class else (owner.__name__, "")
            if home.partition(".")[0] not in _OF_PROCESS:
                found[home, prefix + name] = namespace(owner)[name]
    return found


@functools.cache
def _first_seen(path: str) -> float:
    return Path(path).stat().st_mtime


def edited_modules() -> list[str]:
    """Return the files of the user's modules that were edited after the first call of this program."""
    files = [str(namespace(module).get("__file__") or "") for module in _own_modules()]
    return [each for each in files if each and Path(each).exists() and _first_seen(each) != Path(each).stat().st_mtime]
