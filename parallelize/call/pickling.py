"""Pickling of arbitrary objects for another process of the same run; tensors are memory-mapped, not copied.

`torch.save` writes a file with cloudpickle as its pickler: functions and classes that cannot be imported are pickled by
value, and tied tensors stay tied. The reader maps the file copy-on-write: pages are read on first access, and each
process has private tensors. (In shared memory, all ranks would train the same tensors.) The file may be deleted while
it is mapped.

A worker runs no script, so the functions and classes of its `__main__` come from the pickled task (`populate_main`).
Its child processes, mostly DataLoader workers, get them by value.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import hashlib
import inspect
import io
import pickle
import pkgutil
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch.optim import Optimizer

from parallelize.call.reachable import (
    CONTAINERS,
    PROXY,
    free_variables,
    global_variables,
    is_a,
    is_user_code,
)
from parallelize.errors import ConfigError

__all__ = [
    "Trial",
    "check_is_plain_function",
    "dump",
    "dump_for_rank",
    "is_found",
    "is_importable",
    "load",
    "pickle_main_by_value",
    "pickling_module_by_value",
    "populate_main",
]

_FIX = "create it inside the function, or pass the values it is built from (a path, a size, a seed)"
_HEAPTYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for classes made by a class statement, not for built-in exceptions
_MAX_DECORATORS = 9
_MAX_WHOLE = 8192  # elements of a tensor that is compared as a whole; of a larger one, a sample is
_SAMPLE_SIZE = 64


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler, extended to exceptions with an `__init__` of their own and to subclasses of optimizers.

    Modules of every class, such as `torch.backends.cudnn`, operators of `torch.ops` and functions below decorators are
    pickled by name. Open text files are rejected.

    Attributes:
        on_object: called with each object.
    """

    on_object: Any = id  # does nothing

    def reducer_override(self, obj: Any) -> Any:
        self.on_object(obj)
        kind = type(obj)
        if "__reduce_ex__" in vars(kind) and obj.__class__ is not kind:  # cloudpickle would see a plain function
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if kind is types.CodeType:  # cloudpickle 3.1.3 leaves out the file, which tracebacks name
            make, args = self.dispatch_table[types.CodeType](obj)
            return make, tuple(obj.co_filename if each == "<dynamic-code>" else each for each in args)
        name = _name_of(obj)
        if name is not None:
            return pkgutil.resolve_name, (name,)
        if isinstance(obj, Optimizer) and kind.__getstate__ is Optimizer.__getstate__:
            # Optimizer.__getstate__ drops the attributes of subclasses.
            of_torch = vars(torch.optim.SGD([torch.zeros(1)]))
            own = {key: value for key, value in vars(obj).items() if key not in of_torch and key != "step"}
            return object.__new__, (kind,), {**own, **obj.__getstate__()}
        if isinstance(obj, BaseException) and _is_reduced_by_default(kind, _builtin(kind)):
            reduced: Any = obj.__reduce__()
            return _rebuild_exception, (kind, reduced[1]), *reduced[2:]
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            raise TypeError(f"cannot pickle {kind.__name__!r} object: an open file")  # cloudpickle copies its content
        if hasattr(kind, "__getattr__") and _has_plain_state(obj):
            # Looking for __setstate__ calls __getattr__, which may need the attributes.
            return copyreg.__newobj__, (kind,), vars(obj), None, None, _set_attributes  # type: ignore[attr-defined]  # not in typeshed
        return super().reducer_override(obj)


class _RankPickler(_Pickler):
    """Pickles classes and functions of `__main__` by name where that has them: all ranks run the same script."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            path = f"__main__:{obj.__qualname__}"
            if is_found(obj, path):
                return pkgutil.resolve_name, (path,)
        return super().reducer_override(obj)


def _name_of(obj: Any) -> str | None:
    """Return the path of a module of an unusual class, an operator, or a function below decorators."""
    kind = type(obj)
    if kind is types.FunctionType or kind.__module__ == "functools":
        module, path = sys.modules.get(obj.__module__), f"{obj.__module__}:{getattr(obj, '__qualname__', '')}"
        if module is None or is_found(obj, path):
            return None
        paths = [path + ".__wrapped__" * depth for depth in range(1, _MAX_DECORATORS)]
        name = next((each for each in paths if is_found(obj, each)), None)
        return name if name and is_importable(module) else None
    if kind.__module__ != "torch._ops" and (kind is types.ModuleType or not issubclass(kind, types.ModuleType)):
        return None  # cloudpickle knows modules of Python's own class
    aliases = (name for name, module in list(sys.modules.items()) if module is obj)
    full = obj.__name__ if isinstance(obj, types.ModuleType) else f"torch.ops.{obj}"
    return next((name for name in (full, *aliases) if is_found(obj, name)), None)


def is_found(obj: object, path: str) -> bool:
    """Whether a path, "package.module:name.attribute", leads to this object."""
    try:
        return pkgutil.resolve_name(path) is obj
    except (AttributeError, ImportError, ValueError):
        return False


def _is_reduced_by_default(kind: Any, base: Any = object) -> bool:
    return kind.__reduce__ is base.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__


def _has_plain_state(obj: Any) -> bool:
    """Whether the state of an object of the user's class is its attributes."""
    kind: Any = type(obj)
    has_own = kind.__new__ is not object.__new__ or hasattr(kind, "__setstate__") or hasattr(kind, "__slots__")
    is_default = getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
    return not has_own and is_default and _is_reduced_by_default(kind) and is_user_code(kind.__module__)


def _set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    vars(obj).update(attributes)


def _builtin(kind: type[BaseException]) -> Any:
    """Return the nearest built-in base of an exception class, such as OSError, which also stores a filename."""
    return next(each for each in kind.__mro__ if not each.__flags__ & _HEAPTYPE)


def _rebuild_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Rebuild an exception from `args` with the `__init__` of its built-in base; its own may take other arguments."""
    builtin = _builtin(kind)
    error: BaseException = builtin.__new__(kind, *args)
    builtin.__init__(error, *args)
    return error


# Files and bytes


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
        # Not torch.save, which in a run asks the store of the ranks: an outcome is written when that is lost, too.
        torch.serialization.save(obj, file, pickle_module=module, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as exc:  # a user's __reduce__ may raise anything
        name, reason = _find_unpicklable(parts) or ("the call", exc)
        text = f"{reason}".strip().partition("\n")[0] or "no reason given"
        raise ConfigError(f"{name} cannot be pickled", why=f"{type(reason).__name__}: {text}", fix=_FIX) from exc


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


def _find_unpicklable(parts: Mapping[str, object], seen: tuple[int, ...] = ()) -> tuple[str, Exception] | None:
    """Return the name and error of the innermost object that cannot be pickled; None if all parts can be pickled."""
    for name, part in parts.items():
        try:
            _dumps(None if id(part) in seen else part)
        except Exception as exc:  # noqa: BLE001 - a user's __reduce__ may raise anything
            return _find_unpicklable(_named_members(name, part), (*seen, id(part))) or (name, exc)
    return None


def _dumps(obj: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


def _named_members(name: str, item: Any) -> dict[str, object]:
    """Return what an object refers to, without what is private to a library, by name as shown to the user."""
    try:
        return dict(_members(name, item))
    except Exception:  # noqa: BLE001 - a user's attribute or key may raise anything when it is read
        return {}


def _members(name: str, item: Any) -> Iterator[tuple[str, object]]:
    if is_a(item, types.MethodType):
        yield f"self of {name}", item.__self__
    elif is_a(item, functools.partial):
        yield from {name: item.func, f"{name}.args": item.args, f"{name}.keywords": item.keywords}.items()
    elif is_a(item, types.FunctionType):
        for key, value in free_variables(item) if is_user_code(item.__module__) else ():
            yield f"the variable {key!r}", value
        for key, value, _ in global_variables(item) if is_user_code(item.__module__) else ():
            yield f"the global variable {key!r}", value
    elif is_a(item, CONTAINERS):
        pairs = dict.items(item) if is_a(item, dict) else enumerate(item)
        yield from ((f"{name}[{key!r}]", each) for key, each in pairs)
    elif not is_a(item, type):
        is_own = is_user_code(type(item).__module__)
        children = dict(item.named_children()) if is_a(item, torch.nn.Module) else {}
        for key, value in {**vars(item), **children}.items():
            if is_own or not key.startswith("_"):
                yield f"{name}.{key}", value


# Trials


class Trial(NamedTuple):
    """What pickling an object shows, without keeping the result.

    Attributes:
        code: the functions and classes that were pickled, and decorated functions.
        is_whole: whether the object can be pickled, and is not too large.
        digest: differs if an object that is whole has changed.
    """

    code: list[Any]
    is_whole: bool = True
    digest: bytes = b""

    @classmethod
    def of(
        cls, obj: object, *, at_most: float, skips: Callable[[object], bool] = lambda _: False, compares: bool = False
    ) -> Trial:
        """Pickle an object.

        Args:
            obj: any object.
            at_most: number of bytes, with those of the tensors that are not trained.
            skips: whether an object is not entered.
            compares: whether the digest is needed.
        """
        pickler = _TrialPickler(_Sink(at_most, hashlib.blake2b() if compares else None), skips)
        try:
            pickler.dump(obj)
        except Exception:  # noqa: BLE001 - a user's __reduce__ may raise anything
            return cls(pickler.code, is_whole=False)
        return cls(pickler.code, digest=pickler.sink.hash.digest() if pickler.sink.hash else b"")


@dataclass
class _Sink:
    """A file that keeps a hash of what is written, and refuses to grow beyond a size."""

    left: float
    hash: Any

    def write(self, data: Any) -> None:
        self.count(memoryview(data).nbytes)
        if self.hash is not None:
            self.hash.update(data)

    def count(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise OverflowError("too large")


class _TrialPickler(_Pickler):
    def __init__(self, sink: _Sink, skips: Callable[[object], bool]) -> None:
        super().__init__(sink)
        self.sink, self._skips, self.code = sink, skips, list[Any]()

    def on_object(self, obj: object) -> None:
        if is_a(obj, (types.FunctionType, type, PROXY)):
            self.code.append(obj)

    def persistent_id(self, obj: Any) -> object:
        if self._skips(obj):
            return id(obj)
        if not is_a(obj, torch.Tensor):
            return None
        self.sink.count(0 if obj.requires_grad else obj.nbytes)
        return id(obj) if self.sink.hash is None else _sample(obj)


def _sample(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return shape, version and elements: writes through `.data`, as in an EMA, do not change the version."""
    shape, version = tuple(tensor.shape), -1 if tensor.is_inference() else tensor._version
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return str(tensor.dtype), shape, version
    step = 1 if tensor.numel() <= _MAX_WHOLE else tensor.numel() // _SAMPLE_SIZE
    elements = tensor.detach().view(-1)[::step].contiguous().view(torch.uint8)
    return str(tensor.dtype), shape, version, elements.cpu().numpy().tobytes()


# Functions and modules


def check_is_plain_function(function: object) -> None:
    """Raise ConfigError for an object whose call returns no value from another process: a class, a generator, ..."""
    inner = inspect.unwrap(function) if callable(function) else function
    inner = inner.__func__ if isinstance(inner, (classmethod, staticmethod)) else inner
    kinds = {
        "an async function": inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner),
        "a generator function": inspect.isgeneratorfunction(inner),
        "a class": inspect.isclass(inner),
        f"a {type(inner).__name__}": not callable(inner),
    }
    for kind, is_so in kinds.items():
        if is_so:
            raise ConfigError(
                f"@distributed on {kind}: {getattr(inner, '__qualname__', inner)!r}",
                why="a call must run to completion in another process and return one value",
                fix="decorate a plain function (def) that returns its result",
            )


def is_importable(module: types.ModuleType) -> bool:
    """Whether another process with the same sys.path would import the same module under this name.

    False for `__main__`, and for a module that is still being imported: every worker that imports the module would
    repeat a call at its top level.
    """
    current, spec, path = getattr(module, "__spec__", None), None, None
    if current is None or module.__name__ == "__main__":
        return False
    parts = current.name.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        # importlib.util.find_spec would return the spec of the loaded module.
        found = (each.find_spec(name, path) for each in sys.meta_path if hasattr(each, "find_spec"))
        spec = next(filter(None, found), None)
        loaded = getattr(sys.modules.get(name), "__spec__", None)
        if spec is None or getattr(loaded, "_initializing", False):
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == current.origin


_by_value_lock = threading.Lock()  # all threads share cloudpickle's registry of modules


@contextlib.contextmanager
def pickling_module_by_value(function: Any) -> Iterator[None]:
    """Make cloudpickle pickle the globals of a function's module by value if workers cannot import the module."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or is_importable(module):  # cloudpickle handles __main__
        yield
        return
    with _by_value_lock:
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def populate_main(function: Any) -> None:
    """Copy a function's globals, and the unpickled classes of the caller's `__main__`, into this process's `__main__`.

    torch.save(model), DataLoader workers and all_gather_object look up functions and classes there.

    Args:
        function: function or class unpickled by value, such as the task's function; `__globals__` holds its globals.
    """
    names = vars(sys.modules["__main__"])
    for name, value in getattr(function, "__globals__", {}).items():
        if not name.startswith("__"):
            names.setdefault(name, value)
    for kind in list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()):
        if kind.__module__ == "__main__" and "." not in kind.__qualname__:
            names.setdefault(kind.__name__, kind)


def pickle_main_by_value() -> None:
    """Make multiprocessing pickle the functions and classes of `__main__` by value for spawned child processes."""
    module: Any = reduction
    module.dump = lambda obj, file, protocol=None: _ChildPickler(file, protocol).dump(obj)


class _ChildPickler(reduction.ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            return _load_in_child, (_dumps(obj),)
        return NotImplemented


def _load_in_child(data: bytes) -> Any:
    """Unpickle an object in a child process and populate `__main__`, so that the child can pickle its instances."""
    loaded = cloudpickle.loads(data)
    populate_main(loaded)
    return loaded
