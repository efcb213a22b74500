"""Any object as a file that another process of the same run reads back, tensors mapped rather than copied.

A payload is what `torch.save` writes with cloudpickle for its pickler: functions and classes of `__main__` travel by
value, aliased and tied tensors stay aliased. The reader maps the file privately: every process has the tensors at
once, pages come as they are touched, and a write stays with the process that made it. (Tensors in shared memory would
be one storage for all ranks, into which all of them train.) The file may be deleted while it is mapped.
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

__all__ = ["pack", "unpack"]

_FIX = "make it inside the function, or pass what it is made from (a path, a size, a seed)"
_IS_PYTHON_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not part of the interpreter


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, but exceptions whose `__init__` takes other arguments than `args` travel, and open files do not.

    A decorated function stays one: cloudpickle takes whatever calls itself a function for a plain one.
    """

    def reducer_override(self, obj: Any) -> Any:
        if "__reduce_ex__" in vars(type(obj)) and obj.__class__ is not type(obj):
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, BaseException) and _is_reduced_by_default(type(obj)):
            reduced: Any = obj.__reduce__()
            return _rebuilt, (type(obj), reduced[1]), *reduced[2:]
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would send a copy of what the file holds now.
            raise TypeError(f"cannot pickle {type(obj).__name__!r} object: an open file")
        return super().reducer_override(obj)


class _Pickling:
    """What `torch.save` looks for in a pickle module."""

    Pickler = _Pickler


def _is_reduced_by_default(kind: type[BaseException]) -> bool:
    return kind.__reduce__ is _builtin(kind).__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__


def _builtin(kind: type[BaseException]) -> Any:
    """The innermost class that is the interpreter's own, such as OSError, which also keeps a file's name."""
    return next(each for each in kind.__mro__ if not each.__flags__ & _IS_PYTHON_CLASS)


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """The exception with its `args`, not by its own `__init__`, which may want something else."""
    builtin = _builtin(kind)
    error: BaseException = builtin.__new__(kind, *args)
    builtin.__init__(error, *args)
    return error


def pack(obj: object, path: Path, *, parts: Mapping[str, object]) -> None:
    """Write `obj` to `path`, at once or not at all.

    Args:
        obj: anything cloudpickle takes; CUDA tensors are written as their values.
        path: a file in a folder that only this user can read.
        parts: the named pieces of `obj`, among which the one that cannot travel is looked for.

    Raises:
        ConfigError: something in it cannot travel; names the part, and the variable inside where there is one.
    """
    partial = path.with_name(path.name + ".part")
    try:
        torch.save(obj, partial, pickle_module=_Pickling, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as exc:  # whatever a user's __reduce__ raises is the reason why it cannot travel
        partial.unlink(missing_ok=True)
        name, reason = _culprit(parts) or ("the call", exc)
        raise ConfigError(f"{name} cannot travel to another process", why=_short(reason), fix=_FIX) from exc
    partial.replace(path)


def unpack(path: Path, *, device: torch.device) -> Any:
    """The object written to `path`; its tensors are private to this process.

    Args:
        path: a file written by `pack` in a process of the same run: it is unpickled, so it must be trusted.
        device: where tensors go that were not on the CPU.
    """

    def place(storage: Any, written_from: str) -> Any:
        return storage if written_from == "cpu" else storage.to(device=device)

    return torch.load(path, mmap=True, weights_only=False, map_location=place)


def _short(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else 'no reason given'}"


def _culprit(parts: Mapping[str, object], seen: tuple[int, ...] = ()) -> tuple[str, Exception] | None:
    """The innermost named thing that does not pickle: a part, then what it holds or closes over."""
    for name, part in parts.items():
        reason = None if id(part) in seen else _refusal(part)
        if reason is not None:
            return _culprit(_inside(name, part), (*seen, id(part))) or (name, reason)
    return None


def _refusal(obj: object) -> Exception | None:
    try:
        _Pickler(io.BytesIO()).dump(obj)
    except Exception as exc:  # noqa: BLE001 - as in `pack`
        return exc
    return None


def _inside(name: str, obj: object) -> dict[str, object]:
    """What a function closes over or reads, what a container or an object holds: by the names a user knows."""
    if isinstance(obj, types.MethodType):
        return {f"self of {name}": obj.__self__}
    if isinstance(obj, types.FunctionType):
        return _of_function(obj)
    if isinstance(obj, Mapping):
        return {f"{name}[{key!r}]": value for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return {f"{name}[{index}]": value for index, value in enumerate(obj)}
    if isinstance(obj, type):
        return {}
    return {f"{name}.{attribute}": value for attribute, value in getattr(obj, "__dict__", {}).items()}


def _of_function(function: types.FunctionType) -> dict[str, object]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed = {f"the variable {name!r}": cell.cell_contents for name, cell in cells if _is_filled(cell)}
    read = {
        f"the global variable {name!r}": function.__globals__[name]
        for name in function.__code__.co_names
        if name in function.__globals__
    }
    return {**closed, **read}


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading it is the only way to ask
    except ValueError:
        return False
    return True
