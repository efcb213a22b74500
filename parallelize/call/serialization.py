"""Pickling of arbitrary objects to a file for another process of the same run; tensors are memory-mapped, not copied.

`torch.save` writes the file with cloudpickle as its pickler: functions and classes of `__main__` are pickled by value,
and tied tensors stay tied. The reader maps the file copy-on-write: pages are read on first access, and each process has
private tensors. (In shared memory, all ranks would train the same tensors.) The file may be deleted while it is mapped.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from parallelize.errors import ConfigError

__all__ = ["dump", "load"]

_FIX = "create it inside the function, or pass the values it is built from (a path, a size, a seed)"
_HEAPTYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for classes made by a class statement, not for built-in exceptions


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler, extended to exceptions whose `__init__` does not accept `args`; rejects open text files.

    An object whose `__class__` differs from its type, such as a decorated function, is pickled by its own
    `__reduce_ex__`; cloudpickle would pickle it as a plain function.
    """

    def reducer_override(self, obj: Any) -> Any:
        if "__reduce_ex__" in vars(type(obj)) and obj.__class__ is not type(obj):
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, BaseException) and _is_reduced_by_default(type(obj)):
            reduced: Any = obj.__reduce__()
            return _rebuild_exception, (type(obj), reduced[1]), *reduced[2:]
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would pickle a copy of the file's current content.
            raise TypeError(f"cannot pickle {type(obj).__name__!r} object: an open file")
        return super().reducer_override(obj)


class _PickleModule:
    """The `pickle_module` argument of `torch.save`, which uses only this attribute."""

    Pickler = _Pickler


def _is_reduced_by_default(kind: type[BaseException]) -> bool:
    return kind.__reduce__ is _builtin(kind).__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__


def _builtin(kind: type[BaseException]) -> Any:
    """Return the nearest built-in base of an exception class, such as OSError, which also stores a filename."""
    return next(each for each in kind.__mro__ if not each.__flags__ & _HEAPTYPE)


def _rebuild_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Rebuild an exception from `args` with the `__init__` of its built-in base; its own may take other arguments."""
    builtin = _builtin(kind)
    error: BaseException = builtin.__new__(kind, *args)
    builtin.__init__(error, *args)
    return error


def dump(obj: object, path: Path, *, parts: Mapping[str, object]) -> None:
    """Pickle `obj` to `path`, atomically.

    Args:
        obj: object that cloudpickle can pickle; CUDA tensors are written by value.
        path: a file in a folder that only this user can read.
        parts: name -> part of `obj`; an error names the part that cannot be pickled.

    Raises:
        ConfigError: `obj` cannot be pickled; names the variable, item or attribute that is the cause.
    """
    partial = path.with_name(path.name + ".part")
    try:
        torch.save(obj, partial, pickle_module=_PickleModule, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as exc:  # a user's __reduce__ may raise anything
        partial.unlink(missing_ok=True)
        name, reason = _find_unpicklable(parts) or ("the call", exc)
        raise ConfigError(f"{name} cannot be pickled", why=_first_line(reason), fix=_FIX) from exc
    partial.replace(path)


def load(path: Path, *, device: torch.device) -> Any:
    """Unpickle the object in `path`; its tensors are private to this process.

    Args:
        path: a file that `dump` wrote in a process of the same run; must be trusted, because unpickling runs code.
        device: device for tensors that were not on the CPU.
    """

    def map_location(storage: Any, saved_on: str) -> Any:
        return storage if saved_on == "cpu" else storage.to(device=device)

    return torch.load(path, mmap=True, weights_only=False, map_location=map_location)


def _first_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else 'no reason given'}"


def _find_unpicklable(parts: Mapping[str, object], seen: tuple[int, ...] = ()) -> tuple[str, Exception] | None:
    """Return the name and error of the innermost object that cannot be pickled; None if all parts can be pickled."""
    for name, part in parts.items():
        reason = None if id(part) in seen else _pickle_error(part)
        if reason is not None:
            return _find_unpicklable(_members(name, part), (*seen, id(part))) or (name, reason)
    return None


def _pickle_error(obj: object) -> Exception | None:
    try:
        _Pickler(io.BytesIO()).dump(obj)
    except Exception as exc:  # noqa: BLE001 - a user's __reduce__ may raise anything
        return exc
    return None


def _members(name: str, obj: object) -> dict[str, object]:
    """Return the objects that a method, function, container or instance refers to, by name as shown to the user."""
    if isinstance(obj, types.MethodType):
        return {f"self of {name}": obj.__self__}
    if isinstance(obj, types.FunctionType):
        return _variables_of(obj)
    if isinstance(obj, Mapping):
        return {f"{name}[{key!r}]": value for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return {f"{name}[{index}]": value for index, value in enumerate(obj)}
    if isinstance(obj, type):
        return {}
    return {f"{name}.{attribute}": value for attribute, value in getattr(obj, "__dict__", {}).items()}


def _variables_of(function: types.FunctionType) -> dict[str, object]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    free = {f"the variable {name!r}": cell.cell_contents for name, cell in cells if _is_bound(cell)}
    global_ = {
        f"the global variable {name!r}": function.__globals__[name]
        for name in function.__code__.co_names
        if name in function.__globals__
    }
    return {**free, **global_}


def _is_bound(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - only reading a cell shows whether it is empty
    except ValueError:
        return False
    return True
