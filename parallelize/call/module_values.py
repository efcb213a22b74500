"""Values of the user's modules that travel with a call.

A worker imports modules anew, so it would have the values of the import: not `config.lr = 0.1`, nor
a table that the program has filled. So the variables of the user's modules that the call's functions
mention are pickled with the call: objects that arguments and variables share are shared in the
worker, too. Left to each process: what the import takes from the rank, and data with a leading
underscore, which says what the module itself has set up in its process. A function is set where the
worker has imported another one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
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
    PROXY,
    free_variables,
    global_variables,
    is_a,
    is_stateful,
    is_user_code,
    namespace,
)

__all__ = ["ModuleValues", "edited_modules"]

_MAX_BYTES = 16 * 2**20  # larger values are data, which the workers read again on import
# Each process has its own streams, arguments, handlers and so on; the launcher sends the environment.
_OF_PROCESS = {"logging", "multiprocessing", "os", "signal", "sys", "threading", "warnings"}
# What mentions these is different in each worker.
_OF_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_OF_RANK |= {"get_rank", "get_world_size", "getpid", "gethostname"}
_DESCRIPTORS = (
    classmethod,
    staticmethod,
    property,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)


@dataclass(frozen=True)
class _Unsendable:
    """Stands for a value that cannot be pickled, or is too large."""

    kind: str


@dataclass(frozen=True)
class ModuleValues:
    """Values of variables of importable modules, and of their classes and functions.

    They are found when they are pickled, after the call.

    Attributes:
        code: functions and classes of the call, whose variables are sent.
        values: module, class or function -> name and value of each variable that is sent.
    """

    code: list[Any] = field(default_factory=list)
    values: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __reduce__(self) -> Any:
        imports = functools.cache(lambda name: is_importable(sys.modules.get(name)))
        pending, seen = deque(self.code), dict[Any, object]()
        while pending:
            code = pending.popleft()
            code = code.__wrapped__ if is_a(code, PROXY) else code
            if id(code) in seen or not is_user_code(getattr(code, "__module__", None)):
                continue
            seen[id(code)] = code
            for owner, name, value in _variables(code):
                if owner is None or (id(owner), name) not in seen:
                    seen[id(owner), name] = owner
                    is_found = owner is not None and imports(_home(owner))
                    pending.extend(self._add(owner if is_found else None, name, value))
        return ModuleValues, ([], self.values)

    def _add(self, owner: Any, name: str, value: Any) -> list[Any]:
        """Add a value, unless the worker's own is as good; return the code that it refers to."""
        is_state, is_code = is_stateful(value), is_a(value, CODE)
        trial = Trial(value, at_most=math.inf if is_state else _MAX_BYTES)
        if owner is not None and _is_sent(owner, name, value):
            is_known = is_code or is_state or all(map(_is_imported, trial.code))
            if is_known and trial.error is None:
                self.values.append((owner, name, value))
            elif not is_code:
                self.values.append((owner, name, _Unsendable(type(value).__name__)))
        return trial.code

    def install(self) -> list[str]:
        """Write the values into the modules.

        Returns:
            The variables that the program has set to what cannot be sent, or not be written here.
        """
        problems = []
        for owner, name, value in self.values:
            kind = value.kind if is_a(value, _Unsendable) else ""
            try:
                mine = getattr(owner, name, None)
                is_lost = kind and (mine is None or is_stateful(mine))
                # Not a member of an enumeration, nor what a decorator has returned on import.
                if not kind and _identity(value) != _identity(mine):
                    setattr(owner, name, value)
                    _share(mine, value)
            except Exception as exc:  # noqa: BLE001 - a user's property may raise anything
                is_lost, kind = True, type(exc).__name__
            if is_lost:
                problems.append(f"{_shown(owner, name)} ({kind})")
        return problems

    def current(self) -> dict[str, object]:
        """Return what the variables of the user's modules have now, by name as shown to the user."""
        return {
            _shown(owner, name): getattr(owner, name, None)
            for owner, name, value in self.values
            if not is_a(value, _Unsendable)
        }


def _home(owner: Any) -> str:
    """Return the name of a module, or of that of a class or function."""
    return str(owner.__name__ if is_a(owner, types.ModuleType) else owner.__module__)


def _shown(owner: Any, name: str) -> str:
    parts = [_home(owner), getattr(owner, "__qualname__", ""), name]
    return ".".join(filter(None, parts))


def _identity(value: Any) -> Any:
    """Return the home and name of a function or class, which each process makes by its import."""
    return (value.__module__, value.__qualname__) if is_a(value, CODE) else id(value)


def _is_imported(code: Any) -> bool:
    """Whether a worker finds a function or class where the caller has it."""
    return code.__module__ == "__main__" or is_found(code, f"{code.__module__}:{code.__qualname__}")


def _share(mine: Any, value: Any) -> None:
    """Give the object that the import has made the contents of `value`: others may refer to it."""
    if type(mine) is not type(value) or is_a(value, CODE):
        return
    pairs: Any = ((mine, value), (namespace(mine), namespace(value)))
    for old, new in pairs:
        if is_a(new, dict):
            items = dict(new)
            dict.clear(old)
            dict.update(old, items)
        elif is_a(new, list):
            list.__setitem__(old, slice(None), new)


def _variables(code: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, value) of what a function mentions or a class has.

    The owner is a module, class or function; None if workers do not find it.
    """
    if is_a(code, types.FunctionType):
        yield from global_variables(code)
        yield from ((None, name, value) for name, value in free_variables(code).items())
        for name in ("__defaults__", "__kwdefaults__"):
            value = getattr(code, name)
            each = value.values() if is_a(value, dict) else value or ()
            if "<locals>" not in code.__qualname__ and any(map(is_stateful, each)):
                yield code, name, value
    elif is_a(code, type):
        yield from ((None, "", base) for base in code.__bases__)
        for name, value in list(vars(code).items()):
            if is_a(value, types.FunctionType) or not name.startswith("__"):
                yield code if _is_imported(code) else None, name, value


def _is_sent(owner: Any, name: str, value: Any) -> bool:
    """Whether the caller's value counts: it may be what the import makes, or the process's own."""
    kind = type(value)
    if is_a(value, CODE):
        is_own = _shown(owner, name) == f"{value.__module__}.{value.__qualname__}"
        is_sendable = kind is types.FunctionType or _is_imported(value)
        return is_sendable and not is_own and is_user_code(value.__module__)
    is_private = name.startswith("_") and not name.startswith("__") and not is_stateful(value)
    return not (
        kind is object
        or is_private
        or is_a(value, (PROXY, types.ModuleType, *_DESCRIPTORS))
        or kind.__module__.partition(".")[0] in _OF_PROCESS
        or (name in _set_from_rank(_file(sys.modules[_home(owner)])) and not hasattr(kind, "state_dict"))
    )


# Source code


def _file(module: object) -> Path:
    return Path(str(namespace(module).get("__file__")))


def _set_from_rank(path: Path) -> set[str]:
    """Return the variables that a module sets from the rank: they are different in each worker."""
    return _read_set_from_rank(path, path.stat().st_mtime_ns) if path.is_file() else set()


@functools.cache
def _read_set_from_rank(path: Path, _changed_at: int) -> set[str]:
    found = set[str]()
    # A generated file may be nested too deeply. Python has warned on import.
    with contextlib.suppress(SyntaxError, ValueError, RecursionError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = _WithoutFunctions().visit(ast.parse(path.read_text(encoding="utf-8")))
        assignments = (ast.Assign, ast.AnnAssign)
        for node in (each for each in ast.walk(tree) if isinstance(each, assignments)):
            parts = list(ast.walk(node))
            words = {getattr(part, key, None) for part in parts for key in ("id", "attr", "value")}
            names = {each for each in parts if isinstance(each, ast.Name)}
            if not words.isdisjoint(_OF_RANK | found):
                found |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return found


class _WithoutFunctions(ast.NodeTransformer):
    """Removes what an import does not run."""

    def visit_FunctionDef(self, _node: ast.FunctionDef) -> None: ...

    def visit_AsyncFunctionDef(self, _node: ast.AsyncFunctionDef) -> None: ...


@functools.cache
def _first_seen(path: Path) -> float:
    return path.stat().st_mtime


def edited_modules() -> list[str]:
    """Return the files of the user's modules that were edited after this program's first call."""
    modules = [each for name, each in list(sys.modules.items()) if is_user_code(name)]
    files = {path for path in map(_file, modules) if path.is_file()}
    return sorted(str(each) for each in files if _first_seen(each) != each.stat().st_mtime)
