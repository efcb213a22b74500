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
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch.optim import Optimizer

from parallelize.call.function_ref import is_importable
from parallelize.call.reachable import is_user_code, members
from parallelize.errors import ConfigError

__all__ = ["dump", "dump_for_rank", "dumps", "is_copyable", "is_picklable", "load"]

_FIX = "create it inside the function, or pass the values it is built from (a path, a size, a seed)"
_HEAPTYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for classes made by a class statement, not for built-in exceptions


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler, extended to exceptions with an `__init__` of their own and to subclasses of optimizers.

    Modules of every class, such as `torch.backends.cudnn`, and operators of `torch.ops` are pickled by name. Open text
    files are rejected.

    An object whose `__class__` differs from its type, such as a decorated function, is pickled by its own
    `__reduce_ex__`; cloudpickle would pickle it as a plain function.

    Attributes:
        on_object: called with each object.
    """

    on_object: Any = id  # does nothing

    def reducer_override(self, obj: Any) -> Any:
        self.on_object(obj)
        if "__reduce_ex__" in vars(type(obj)) and obj.__class__ is not type(obj):
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, types.CodeType):  # cloudpickle 3.1.3 leaves out the file, which tracebacks name
            kind, args = self.dispatch_table[types.CodeType](obj)
            return kind, tuple(obj.co_filename if each == "<dynamic-code>" else each for each in args)
        name = _name_of_module(obj)
        if name is not None:
            return _resolve, name
        if isinstance(obj, Optimizer) and type(obj).__getstate__ is Optimizer.__getstate__:
            return _reduce_optimizer(obj)
        if isinstance(obj, BaseException) and _is_reduced_by_default(type(obj)):
            reduced: Any = obj.__reduce__()
            return _rebuild_exception, (type(obj), reduced[1]), *reduced[2:]
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would pickle a copy of the file's current content.
            raise TypeError(f"cannot pickle {type(obj).__name__!r} object: an open file")
        return super().reducer_override(obj)


class _RankPickler(_Pickler):
    """Pickles classes and functions of `__main__` by name where that has them: all ranks run the same script."""

    def reducer_override(self, obj: Any) -> Any:
        is_main = isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__"
        if is_main and _is_found(obj, "__main__", obj.__qualname__):
            return _resolve, ("__main__", obj.__qualname__)
        return super().reducer_override(obj)


def _name_of_module(obj: Any) -> tuple[str, str] | None:
    """Return the name of an imported module, and a dotted name in it, that refer to a module object or an operator.

    None for modules whose class is that of Python's own, which cloudpickle handles, and for all other objects.
    """
    is_operator = type(obj).__module__ == "torch._ops"
    if not is_operator and (type(obj) is types.ModuleType or not issubclass(type(obj), types.ModuleType)):
        return None
    aliases = (name for name, module in list(sys.modules.items()) if module is obj)
    full = obj.__name__ if isinstance(obj, types.ModuleType) else f"torch.ops.{obj}"
    for name in (full, *aliases):
        module = name
        while module and module not in sys.modules:
            module = module.rpartition(".")[0]
        if module and _is_found(obj, module, name[len(module) + 1 :]):
            return module, name[len(module) + 1 :]
    return None


def _is_found(obj: object, module: str, name: str) -> bool:
    try:
        return _resolve(module, name) is obj
    except (AttributeError, ImportError):
        return False


def _resolve(module: str, name: str) -> Any:
    """Import a module and return an attribute of it; "" is the module itself."""
    found: Any = import_module(module)
    return attrgetter(name)(found) if name else found


def _reduce_optimizer(optimizer: Optimizer) -> Any:
    """Reduce an optimizer with all its own attributes: `Optimizer.__getstate__` drops those of subclasses."""
    of_torch = vars(torch.optim.SGD([torch.zeros(1)]))
    own = {name: value for name, value in vars(optimizer).items() if name not in of_torch and name != "step"}
    return object.__new__, (type(optimizer),), {**own, **optimizer.__getstate__()}


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


def dump(obj: object, path: Path, *, parts: Mapping[str, object], on_object: Callable[[Any], object] = id) -> None:
    """Pickle `obj` to `path`, atomically.

    Args:
        obj: object that cloudpickle can pickle; CUDA tensors are written by value.
        path: a file in a folder that only this user can read.
        parts: name -> part of `obj`; an error names the part that cannot be pickled.
        on_object: called with each object when it is pickled; not with strings, numbers and built-in containers.

    Raises:
        ConfigError: `obj` cannot be pickled; names the variable, item or attribute that is the cause.
    """
    partial = path.with_name(path.name + ".part")
    try:
        _save(obj, partial, parts, type("Pickler", (_Pickler,), {"on_object": staticmethod(on_object)}))
    except ConfigError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def dump_for_rank(obj: object, *, parts: Mapping[str, object]) -> bytes:
    """Pickle `obj` for another process of the same script, in which each class of `__main__` exists already.

    Raises:
        ConfigError: as `dump`.
    """
    buffer = io.BytesIO()
    _save(obj, buffer, parts, _RankPickler)
    return buffer.getvalue()


def _save(obj: object, file: Path | io.BytesIO, parts: Mapping[str, object], pickler: type[_Pickler]) -> None:
    module = types.SimpleNamespace(Pickler=pickler, __name__=__name__)
    try:
        torch.save(obj, file, pickle_module=module, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as exc:  # a user's __reduce__ may raise anything
        name, reason = _find_unpicklable(parts) or ("the call", exc)
        raise ConfigError(f"{name} cannot be pickled", why=_first_line(reason), fix=_FIX) from exc


def load(source: Path | io.BytesIO, *, device: torch.device) -> Any:
    """Unpickle an object; its tensors are private to this process.

    Args:
        source: what `dump` or `dump_for_rank` wrote in a process of the same run; must be trusted, because unpickling
            runs code.
        device: device for tensors that were not on the CPU.
    """
    return torch.load(
        source,
        mmap=isinstance(source, Path),
        weights_only=False,
        map_location=lambda storage, saved_on: (
            storage if saved_on == "cpu" else storage.to(device=device)  # type: ignore[attr-defined]  # not in torch's types
        ),
    )


def _first_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else 'no reason given'}"


def _find_unpicklable(parts: Mapping[str, object], seen: tuple[int, ...] = ()) -> tuple[str, Exception] | None:
    """Return the name and error of the innermost object that cannot be pickled; None if all parts can be pickled."""
    for name, part in parts.items():
        reason = None if id(part) in seen else _pickle_error(part)
        if reason is not None:
            return _find_unpicklable(_named_members(name, part), (*seen, id(part))) or (name, reason)
    return None


def is_picklable(obj: object) -> bool:
    """Whether an object can be pickled; pickles it."""
    return _pickle_error(obj) is None


def is_copyable(obj: object, *, at_most: int) -> bool:
    """Whether an object can be pickled, to at most so many bytes, and unpickled in a process that imports modules anew.

    It is pickled and unpickled, except for tensors, which are only counted.
    """
    tensors: list[torch.Tensor] = []
    buffer = _Buffer(at_most)
    try:
        _TrialPickler(buffer, tensors).dump(obj)
        buffer.seek(0)
        _TrialUnpickler(buffer, tensors).load()
    except Exception:  # noqa: BLE001 - a user's __reduce__, __setstate__ or __getattr__ may raise anything
        return False
    return True


class _Buffer(io.BytesIO):
    """File in memory that raises an OverflowError after a number of bytes."""

    def __init__(self, at_most: int) -> None:
        self._left = at_most

    def write(self, data: Any) -> int:
        self.count(memoryview(data).nbytes)
        return super().write(data)

    def count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise OverflowError("too large")


class _TrialPickler(_Pickler):
    def __init__(self, buffer: _Buffer, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._buffer, self._tensors = buffer, tensors

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout is not torch.strided or vars(obj):
            return None
        self._buffer.count(obj.nbytes)
        self._tensors.append(obj)
        return len(self._tensors) - 1


class _TrialUnpickler(pickle.Unpickler):
    def __init__(self, buffer: _Buffer, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]

    def find_class(self, module: str, name: str) -> Any:
        loaded = sys.modules.get(module)
        if is_user_code(module) and not (loaded and is_importable(loaded)):
            raise ImportError(f"no other process can import {module}")
        return super().find_class(module, name)


def dumps(obj: object) -> bytes:
    """Pickle an object to bytes, which `pickle.loads` reads."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


def _pickle_error(obj: object) -> Exception | None:
    try:
        dumps(obj)
    except Exception as exc:  # noqa: BLE001 - a user's __reduce__ may raise anything
        return exc
    return None


def _named_members(name: str, item: object) -> dict[str, object]:
    """Return what an object refers to, without what is private to a library; says which are variables of a function."""
    found = {} if isinstance(item, type) else members(name, item)
    if not isinstance(item, types.FunctionType):
        is_own = is_user_code(type(item).__module__)
        return {key: value for key, value in found.items() if is_own or not key.startswith(f"{name}._")}
    free = item.__code__.co_freevars
    variables = found if is_user_code(item.__module__) else {}
    return {f"the {'' if key in free else 'global '}variable {key!r}": value for key, value in variables.items()}
