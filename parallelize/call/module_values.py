"""Values of the user's modules that travel with a call.

A worker imports modules anew, so it would have the values of the import: not `config.lr = 0.1`,
nor a table that the program has filled. So the variables of the user's modules that the call's
functions mention are pickled with the call: objects that arguments and variables share are shared
in the worker, too. Left to each process: what the import takes from the rank, and data with a
leading underscore, which says what the module itself has set up in its process. A function is set
where the worker has imported another one.

    owner       the module, class or function that has a variable
    reach       code reaches the variables that it mentions, and those of the code in their values
    stateful    a value whose state comes back from the call, as a model's: it is sent at any size
    unsendable  a value that cannot be pickled or is large: a worker keeps what the import has made
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from parallelize.call.importable import is_importable, leads_to
from parallelize.call.pickler import Trial
from parallelize.call.reachable import (
    CODE,
    PROXY,
    Variable,
    is_a,
    is_stateful,
    namespace,
    variables_of,
)
from parallelize.cluster.code_owner import CodeOwner, is_user_module, owner_of_file

# A larger value is data, which the workers read again when they import its module.
_MAX_BYTES = 16 * 2**20
# An assignment that mentions one of these words makes another value in each worker.
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


class _Unsendable(NamedTuple):
    """A variable whose value cannot be pickled, or is too large.

    Args:
        owner: the module, class or function that has it.
        name: its name.
        type_name: name of the value's type.
    """

    owner: Any
    name: str
    type_name: str


@dataclass(frozen=True)
class ModuleValues:
    """Values of variables of importable modules, and of their classes and functions.

    Args:
        values: the variables that are sent.
        unsendable: those that cannot be sent.
    """

    values: tuple[Variable, ...] = ()
    unsendable: tuple[_Unsendable, ...] = ()

    @classmethod
    def of(cls, code: Sequence[Any]) -> ModuleValues:
        """Find the variables that code reaches, and which of them are to be sent.

        Args:
            code: functions and classes. Code that their variables contain is searched, too.
        """
        # Many variables have one home, and a look for a module in the folders of sys.path is slow.
        imports = functools.cache(lambda name: is_importable(sys.modules.get(name)))
        values: list[Variable] = []
        unsendable: list[_Unsendable] = []
        for variable, trial in _reached_variables(code):
            owner, name, value = variable
            if owner is None or not (imports(_home(owner)) and _is_sent(owner, name, value)):
                continue
            # A worker must have, or import, the classes of a value before it can build the value.
            can_be_built = (
                is_stateful(value) or is_a(value, CODE) or all(map(_is_imported, trial.code))
            )
            if can_be_built and trial.error is None:
                values.append(variable)
            else:
                unsendable.append(_Unsendable(owner, name, type(value).__name__))
        return cls(tuple(values), tuple(unsendable))

    def install(self) -> list[str]:
        """Write the values into the modules.

        Returns:
            The variables that the program has set to what cannot be sent, or not be written here.
        """
        problems = []
        for owner, name, value in self.values:
            try:
                imported = getattr(owner, name, None)
                # Not a member of an enumeration, nor what a decorator has returned on import.
                if _identity(value) != _identity(imported):
                    setattr(owner, name, value)
                    _share(imported, value)
            except Exception as exc:  # noqa: BLE001 - a user's property may raise anything
                problems.append(f"{_shown(owner, name)} ({type(exc).__name__})")
        for owner, name, type_name in self.unsendable:
            imported = namespace(owner).get(name)
            if imported is None or is_stateful(imported):
                problems.append(f"{_shown(owner, name)} ({type_name})")
        return problems

    def current(self) -> dict[str, object]:
        """Return what the variables have now, by name as shown to the user."""
        values = {}
        for owner, name, _ in self.values:
            values[_shown(owner, name)] = getattr(owner, name, None)
        return values


def _reached_variables(code: Sequence[Any]) -> Iterator[tuple[Variable, Trial]]:
    """Yield each variable of the user's that code reaches, once, with a trial of its value."""
    pending = list(code)
    # Kept alive, so that no other object gets their ids.
    searched: dict[int, object] = {}
    owners_by_variable: dict[tuple[int, str], object] = {}
    for function_or_class in pending:
        inner = function_or_class
        if is_a(function_or_class, PROXY):
            inner = function_or_class.__wrapped__
        if id(inner) in searched or not is_user_module(getattr(inner, "__module__", None)):
            continue
        searched[id(inner)] = inner
        for variable in variables_of(inner):
            key = (id(variable.owner), variable.name)
            if variable.owner is not None and key in owners_by_variable:
                continue
            owners_by_variable[key] = variable.owner
            at_most = math.inf if is_stateful(variable.value) else _MAX_BYTES
            trial = Trial(variable.value, at_most=at_most)
            # Code that the value contains is searched after the code that is pending.
            pending += trial.code
            yield variable, trial


# Owners and values


def _home(owner: Any) -> str:
    """Return the name of a module, or of that of a class or function."""
    return str(owner.__name__ if is_a(owner, types.ModuleType) else owner.__module__)


def _shown(owner: Any, name: str) -> str:
    """Return a variable's path as warnings show it: "config.Options.lr"."""
    parts = [_home(owner), getattr(owner, "__qualname__", ""), name]
    return ".".join(filter(None, parts))


def _identity(value: Any) -> Any:
    """Return the home and name of a function or class, which each process makes by its import."""
    return (value.__module__, value.__qualname__) if is_a(value, CODE) else id(value)


def _is_imported(code: Any) -> bool:
    """Whether a worker finds a function or class where the caller has it."""
    return code.__module__ == "__main__" or leads_to(f"{code.__module__}:{code.__qualname__}", code)


def _share(imported: Any, value: Any) -> None:
    """Give the object that the import has made the contents of `value`: others may refer to it."""
    if type(imported) is not type(value) or is_a(value, CODE):
        return
    pairs: Any = ((imported, value), (namespace(imported), namespace(value)))
    for old, new in pairs:
        if is_a(new, dict):
            items = dict(new)
            dict.clear(old)
            dict.update(old, items)
        elif is_a(new, list):
            list.__setitem__(old, slice(None), new)


def _is_sent(owner: Any, name: str, value: Any) -> bool:
    """Whether a worker gets the caller's value of a variable.

    If not, the worker keeps the value that its own import has made.
    """
    value_type = type(value)
    if is_a(value, (PROXY, types.ModuleType)) or (is_a(owner, type) and not _is_imported(owner)):
        return False
    if is_a(value, CODE):
        is_sendable = value_type is types.FunctionType or _is_imported(value)
        return is_sendable and is_user_module(value.__module__)
    if name.startswith("_") and not name.startswith("__") and not is_stateful(value):
        return False
    is_of_rank = name in _set_from_rank(_file(sys.modules[_home(owner)]))
    return not (
        (is_of_rank and not hasattr(value_type, "state_dict"))
        # A sentinel, `object()`, is compared by `is`: a copy would be another one.
        or value_type is object
        # A manager's proxy, or sys.version_info: a worker cannot unpickle it.
        or value_type.__module__.partition(".")[0] in ("multiprocessing", "sys")
    )


# Source code


def _file(module: object) -> Path:
    """Return the path of a module's file; "None", which does not exist, if it has none."""
    return Path(str(namespace(module).get("__file__")))


@functools.cache
def _set_from_rank(path: Path) -> set[str]:
    """Return the variables that a module sets from the rank: they are different in each worker."""
    names: set[str] = set()
    # It may be no file of Python code, or nested too deeply. Python has warned on import.
    problems = (OSError, SyntaxError, ValueError, RecursionError)
    with contextlib.suppress(*problems), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue  # an import does not run its body
            nodes += ast.iter_child_nodes(node)
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                names |= _names_if_from_rank(node, _OF_RANK | names)
    return names


def _names_if_from_rank(assignment: ast.AST, of_rank: set[str]) -> set[str]:
    """Return the variables of an assignment if it mentions a word of the rank, else none."""
    names: set[str] = set()
    words = set(re.findall(r"\w+", ast.unparse(assignment)))
    if words.isdisjoint(of_rank):
        return names
    for node in ast.walk(assignment):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


class ImportedFiles:
    """Files of the user's modules, as the first call of a program has found them.

    A worker imports a module anew, and so runs the new code of a file that was edited after this
    program has imported it, where this program runs the old code.
    """

    def __init__(self) -> None:
        self._files_of_modules: dict[str, _ImportedFile] = {}

    def edited(self) -> list[str]:
        """Return files that were edited after the first call, and were not reloaded since."""
        edited = set()
        for name, module in list(sys.modules.items()):
            # By the file, whose owner is remembered: each call looks at all modules.
            file = namespace(module).get("__file__")
            if not isinstance(file, str) or owner_of_file(file) is not CodeOwner.USER:
                continue
            path = Path(file)
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
