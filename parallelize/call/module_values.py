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
import re
import sys
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from parallelize.call.pickling import Trial, is_found, is_importable
from parallelize.call.reachable import (
    CODE,
    PROXY,
    is_a,
    is_stateful,
    namespace,
    variables_of,
)
from parallelize.cluster.code_owner import is_user_module

_MAX_BYTES = 16 * 2**20  # larger values are data, which the workers read again on import
# What mentions these is different in each worker.
_OF_RANK = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "get_rank",
    "get_world_size",
    "getpid",
    "gethostname",
}


@dataclass(frozen=True)
class ModuleValues:
    """Values of variables of importable modules, and of their classes and functions.

    They are found when they are pickled, after the call.

    Attributes:
        code: functions and classes of the call, whose variables are sent.
        values: module, class or function -> name and value of each variable that is sent.
        unsendable: the same of those that cannot be pickled or are too large, with their type.
    """

    code: list[Any] = field(default_factory=list)
    values: list[tuple[Any, str, Any]] = field(default_factory=list)
    unsendable: list[tuple[Any, str, str]] = field(default_factory=list)

    def __reduce__(self) -> Any:
        imports = functools.cache(lambda name: is_importable(sys.modules.get(name)))
        reached, seen = list(self.code), dict[Any, object]()
        for each in reached:
            code = each.__wrapped__ if is_a(each, PROXY) else each
            if id(code) in seen or not is_user_module(getattr(code, "__module__", None)):
                continue
            seen[id(code)] = code
            for owner, name, value in variables_of(code):
                if owner is not None and (id(owner), name) in seen:
                    continue
                seen[id(owner), name] = owner
                is_state = is_stateful(value)
                trial = Trial(value, at_most=math.inf if is_state else _MAX_BYTES)
                reached += trial.code
                if owner is None or not (imports(_home(owner)) and _is_sent(owner, name, value)):
                    continue
                is_known = is_state or is_a(value, CODE) or all(map(_is_imported, trial.code))
                if is_known and trial.error is None:
                    self.values.append((owner, name, value))
                else:
                    self.unsendable.append((owner, name, type(value).__name__))
        return ModuleValues, ([], self.values, self.unsendable)

    def install(self) -> list[str]:
        """Write the values into the modules.

        Returns:
            The variables that the program has set to what cannot be sent, or not be written here.
        """
        problems = []
        for owner, name, value in self.values:
            try:
                mine = getattr(owner, name, None)
                # Not a member of an enumeration, nor what a decorator has returned on import.
                if _identity(value) != _identity(mine):
                    setattr(owner, name, value)
                    _share(mine, value)
            except Exception as exc:  # noqa: BLE001 - a user's property may raise anything
                problems.append(f"{_shown(owner, name)} ({type(exc).__name__})")
        for owner, name, kind in self.unsendable:
            mine = namespace(owner).get(name)
            if mine is None or is_stateful(mine):
                problems.append(f"{_shown(owner, name)} ({kind})")
        return problems

    def current(self) -> dict[str, object]:
        """Return what the variables of the user's modules have now, by name as shown to the user."""
        return {_shown(owner, name): getattr(owner, name, None) for owner, name, _ in self.values}


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


def _is_sent(owner: Any, name: str, value: Any) -> bool:
    """Whether the caller's value counts: it may be what the import makes, or the process's own."""
    kind = type(value)
    if is_a(value, (PROXY, types.ModuleType)) or (is_a(owner, type) and not _is_imported(owner)):
        return False
    if is_a(value, CODE):
        is_sendable = kind is types.FunctionType or _is_imported(value)
        return is_sendable and is_user_module(value.__module__)
    is_private = name.startswith("_") and not name.startswith("__") and not is_stateful(value)
    is_of_rank = name in _set_from_rank(_file(sys.modules[_home(owner)]))
    return not (
        is_private
        or (is_of_rank and not hasattr(kind, "state_dict"))
        or kind is object  # which is compared by `is`
        # As a manager's proxy, or sys.version_info, which a worker cannot unpickle.
        or kind.__module__.partition(".")[0] in ("multiprocessing", "sys")
    )


# Source code


def _file(module: object) -> Path:
    return Path(str(namespace(module).get("__file__")))


@functools.cache
def _set_from_rank(path: Path) -> set[str]:
    """Return the variables that a module sets from the rank: they are different in each worker."""
    found = set[str]()
    # It may be no file of Python code, or nested too deeply. Python has warned on import.
    problems = (OSError, SyntaxError, ValueError, RecursionError)
    with contextlib.suppress(*problems), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue  # an import does not run its body
            nodes += ast.iter_child_nodes(node)
            is_assignment = isinstance(node, (ast.Assign, ast.AnnAssign))
            words = set(re.findall(r"\w+", ast.unparse(node) if is_assignment else ""))
            if words & (_OF_RANK | found):
                names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
                found |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return found


class ImportedFiles:
    """Files of the user's modules, as the first call of a program has found them.

    A worker imports a module anew, and so runs the new code of a file that was edited after this program has imported
    it, where this program runs the old code.
    """

    def __init__(self) -> None:
        self._files_of_modules: dict[str, _ImportedFile] = {}

    def edited(self) -> list[str]:
        """Return the files that were edited after the program's first call, and whose modules were not reloaded."""
        edited = set()
        for name, module in list(sys.modules.items()):
            if not is_user_module(name):
                continue
            path = _file(module)
            if not path.is_file():
                continue
            current = _ImportedFile(namespace(module).get("__spec__"), path.stat().st_mtime)
            first = self._files_of_modules.setdefault(name, current)
            if first.spec is not current.spec:
                self._files_of_modules[name] = current
            elif first.edited_s != current.edited_s:
                edited.add(str(path))
        return sorted(edited)


class _ImportedFile(NamedTuple):
    """The file of an imported module.

    Args:
        spec: the module's spec, which a reload replaces.
        edited_s: when the file was edited.
    """

    spec: object
    edited_s: float
