"""Pickling of objects for another process of the same run; tensors and large arrays are mapped.

`torch.save` writes a file with cloudpickle as its pickler: functions and classes that cannot be
imported are pickled by value, and tied tensors stay tied. The reader maps the file copy-on-write:
pages are read on first access, and each process has private tensors. (In shared memory, all ranks
would train the same tensors.) The file may be deleted while it is mapped. NumPy's arrays travel as
tensors over their memory; `arrays` says how.

A worker runs no script, so the functions and classes of its `__main__` come from the pickled task
(`populate_main`). Its spawned children, such as DataLoader workers, get them by value, too.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import math
import os
import pickle
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.optim import Optimizer

from parallelize.call.annotations import readable_annotations
from parallelize.call.arrays import (
    Mappings,
    bytes_of,
    has_plain_elements,
    reduce_array,
    reduce_memmap,
)
from parallelize.call.reachable import (
    CONTAINERS,
    PROXY,
    is_a,
    namespace,
    variables_of,
)
from parallelize.cluster.code_owner import CodeOwner, is_user_module, owner_of_module
from parallelize.errors import ConfigError, LaunchError, ParallelizeError

_FIX = "create it inside the function, or pass the values it is built from (a path, a size, a seed)"
_MAX_DECORATORS = 9
# Objects that consist of others, or are too small to be weighed.
_WEIGHTLESS = frozenset(
    {bool, complex, dict, float, frozenset, int, list, set, tuple, types.NoneType},
)
_CACHED: Any = type(functools.lru_cache(id))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler, extended to what programs pass that it refuses, or loses a part of.

    Attributes:
        on_object: called with each object.
        for_rank: whether the reader runs the same script: its `__main__` has the same classes.
        maps_arrays: whether large arrays are pickled as tensors, for torch.save.
        mappings: the files that this process has mapped, for a reader on the same machine; None:
            arrays of files are pickled by value.
    """

    on_object: Any = id  # does nothing
    for_rank = False
    maps_arrays = False
    mappings: Mappings | None = None

    def reducer_override(self, obj: Any) -> Any:
        self.on_object(obj)
        kind: Any = type(obj)
        if "__reduce_ex__" in vars(kind) and obj.__class__ is not kind:
            return obj.__reduce_ex__(None)  # of a decorated function
        path = self._path_of(obj)
        if path is not None:
            return pkgutil.resolve_name, (path,)
        if (path := _path_in_library(obj)) is not None:
            return _from_library, (path, kind)
        if kind is _CACHED and self._is_by_value(
            obj.__wrapped__
        ):  # whose own reduction is its name
            return _rebuild_cached, (obj.cache_parameters(), obj.__wrapped__)
        if kind is types.CodeType:  # cloudpickle leaves out the file, which tracebacks name
            make, args = self.dispatch_table[types.CodeType](obj)
            return make, tuple(obj.co_filename if x == "<dynamic-code>" else x for x in args)
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would send a copy of its content.
            raise TypeError(f"cannot pickle {kind.__name__!r} object: an open file")
        if isinstance(obj, Optimizer) and kind.__getstate__ is Optimizer.__getstate__:
            # It drops the attributes of subclasses. Hooks, and a scheduler's mark, are the process's own.
            own = [key for key in vars(obj) if not key.endswith(("pre_hooks", "post_hooks"))]
            return object.__new__, (kind,), {key: vars(obj)[key] for key in own if key != "step"}
        if (
            kind is torch.Generator and obj.device.type != "cpu"
        ):  # on the reader's own device, which `load` sets
            return kind, (obj.device.type,), obj.get_state(), None, None, kind.set_state
        if is_a(obj, np.ndarray) and (mapped := self._reduce_mapped(obj)) is not None:
            return mapped
        if isinstance(obj, BaseException) and kind.__reduce__ is _builtin_base(kind).__reduce__:
            reduced: Any = obj.__reduce__()
            return _rebuild_exception, (kind, reduced[1]), *reduced[2:]
        if hasattr(kind, "__getattr__") and not (hasattr(kind, "__setstate__") or is_a(obj, type)):
            # Unpickled without a look at its attributes: __getattr__ may need others.
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            has_attributes = any(type(each) is dict for each in reduced[2:3])
            return (*(*reduced, None, None)[:5], _set_attributes) if has_attributes else reduced
        with readable_annotations(obj):
            return super().reducer_override(obj)

    def _reduce_mapped(self, array: Any) -> Any:
        by_path = reduce_memmap(array, self.mappings) if self.mappings is not None else None
        if by_path is not None:
            return by_path
        return reduce_array(array) if self.maps_arrays else None

    def _is_by_value(self, function: Any) -> bool:
        module = sys.modules.get(getattr(function, "__module__", ""))
        return not is_importable(module) and not (
            self.for_rank and function.__module__ == "__main__"
        )

    def _path_of(self, obj: Any) -> str | None:
        """Return the path of an object with a name that cloudpickle does not find.

        Modules of every class (`torch.backends.cudnn`), operators, functions below decorators.
        """
        kind = type(obj)
        if kind.__module__ == "torch._ops" or is_a(obj, types.ModuleType):
            name = obj.__name__ if is_a(obj, types.ModuleType) else f"torch.ops.{obj}"
            return name if kind is not types.ModuleType and is_found(obj, name) else None
        if not (is_a(obj, (types.FunctionType, type)) or kind.__module__ == "functools"):
            return None
        module = sys.modules.get(obj.__module__)
        if module is None:
            return None
        own = f"{obj.__module__}:{getattr(obj, '__qualname__', '')}"
        paths = (own + ".__wrapped__" * depth for depth in range(_MAX_DECORATORS))
        path = next((each for each in paths if is_found(obj, each)), None)
        # cloudpickle finds its own name, but sends what has one in __main__ by value.
        is_shared = self.for_rank and obj.__module__ == "__main__"
        is_needed = path not in (None, own) and is_importable(module)
        return path if is_shared or is_needed else None


def _path_in_library(obj: object) -> str | None:
    """Return the path of an object that cannot be pickled, and that its library makes on import: `loguru.logger`."""
    home = type(obj).__module__
    top = home.partition(".")[0]
    if top == "numpy" or owner_of_module(home) is not CodeOwner.INSTALLED:
        return None
    variables = list(namespace(sys.modules.get(top)).items())
    path = next((f"{top}:{name}" for name, value in variables if value is obj), None)
    if path is not None:
        with contextlib.suppress(Exception):  # a library's __reduce__ may raise anything
            cloudpickle.dumps(obj)
            return None
    return path


def _from_library(path: str, kind: type) -> object:
    found = pkgutil.resolve_name(path)
    if type(found) is not kind:
        raise TypeError(
            f"{path} is a {type(found).__name__} in a worker: make the {kind.__name__} in the function"
        )
    return found


def is_found(obj: object, path: str) -> bool:
    """Whether a path, "package.module:name.attribute", leads to this object."""
    try:
        return pkgutil.resolve_name(path) is obj
    except (AttributeError, ImportError, ValueError):
        return False


def _rebuild_cached(parameters: dict[str, Any], function: Callable[..., Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    vars(obj).update(attributes)


def _builtin_base(kind: type[BaseException]) -> Any:
    """Return the nearest built-in base of an exception class, such as OSError with its filename."""
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")


def _rebuild_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Rebuild an exception without its own `__init__`, which may take other arguments."""
    base = _builtin_base(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)
    return error


class _Unpickler(pickle.Unpickler):
    """Leaves the classes of this process as they are: another one sends its instances with its state of the class.

    Attributes:
        known: classes of this process that were sent to others by value.
    """

    known: Any = frozenset()

    def find_class(self, module: str, name: str) -> Any:
        found: Any = super().find_class(module, name)
        if name != "_class_setstate":
            return found
        return lambda kind, state: kind if kind in self.known else found(kind, state)


# Files and bytes


def dump(
    obj: object,
    file: Path | io.BytesIO,
    *,
    parts: Mapping[str, object],
    on_object: Callable[[Any], object] = id,
    raises: type[ParallelizeError] = ConfigError,
    fix: str = _FIX,
    is_local: bool = False,
) -> None:
    """Pickle `obj` to a file, atomically.

    Args:
        obj: object that cloudpickle can pickle; CUDA tensors are written by value.
        file: path in a folder that only this user can read; or buffer, for another rank of the same
            script, where each class of `__main__` exists.
        parts: name -> part of `obj`; an error names the part that cannot be pickled.
        on_object: called with each object but strings, numbers and built-in containers.
        raises: class of the exception, which names the variable, item or attribute that cannot be
            pickled.
        fix: how the user fixes that.
        is_local: whether only processes of this machine read it, at once: an np.memmap is sent as
            the path of its file.

    Raises:
        LaunchError: there is no space for the file.
    """
    attributes = {
        "on_object": staticmethod(on_object),
        "for_rank": not isinstance(file, Path),
        "maps_arrays": True,
        "mappings": Mappings() if is_local else None,
    }
    pickler: Any = type("Pickler", (_Pickler,), attributes)
    module = types.SimpleNamespace(Pickler=pickler, __name__=__name__)
    written = file.with_name(f"{file.name}.part") if isinstance(file, Path) else file
    # Not torch.save, which in a run asks the store of the ranks: that may be lost by now.
    options: Any = {"pickle_module": module, "pickle_protocol": pickle.HIGHEST_PROTOCOL}
    save: Any = functools.partial(torch.serialization.save, **options)
    try:
        try:
            save(obj, written)
        except RuntimeError as exc:
            # torch.save refuses memory of which it gets tensors of two types, as of an array and
            # its view: such arrays are copied into the pickle.
            pickler.maps_arrays = "as different types" not in str(exc)
            if pickler.maps_arrays and not isinstance(written, Path):
                raise
            # Else it may be a full disk. This is slower, and raises the system's error.
            with _opened(written) as opened:
                save(obj, opened)
    except Exception as exc:  # a user's __reduce__ may raise anything
        if isinstance(written, Path):
            with contextlib.suppress(
                OSError
            ):  # torch keeps the file open as long as its error lives
                os.truncate(written, 0)
            written.unlink(missing_ok=True)
            if getattr(cause_of(exc), "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise full_disk_error(written.parent) from None
        name, reason = _find_unpicklable(parts) or ("the call", exc)
        if "get_ipython" in name:
            fix = "a line with ! or % is the notebook's own: write subprocess.run(...) in the function"
        text = f"{reason}".strip().partition("\n")[0] or "no reason given"
        why = f"{type(reason).__name__}: {text}"
        raise raises(f"{name} cannot be pickled", why=why, fix=fix) from exc
    if isinstance(file, Path) and isinstance(written, Path):
        written.replace(file)


@contextlib.contextmanager
def _opened(file: Path | io.BytesIO) -> Iterator[Any]:
    """Open a file, or empty a buffer, to write it anew."""
    if isinstance(file, Path):
        with file.open("wb") as opened:
            yield opened
    else:
        file.seek(0)
        file.truncate()
        yield file


def full_disk_error(folder: Path, what: str = "") -> LaunchError:
    """Return the error for a folder whose disk has no space for a call, or for what comes back from it."""
    return LaunchError(
        f"the disk of {folder} is full{what}",
        why="calls, and what they return, are sent in files in the temporary folder",
        fix="free some space there, or set TMPDIR to a folder on another disk",
    )


def cause_of(exc: BaseException) -> BaseException:
    """Return the system's error, during which torch.save has raised one about positions in the file."""
    return exc.__context__ or exc if isinstance(exc, RuntimeError) else exc


def load(source: Path | bytes, *, device: torch.device) -> Any:
    """Unpickle an object; its tensors are private to this process.

    Args:
        source: file or bytes that `dump` wrote in a process of the same run; must be trusted,
            because unpickling runs code.
        device: device for tensors and generators that were not on the CPU.
    """

    def locate(storage: Any, saved_on: str) -> Any:
        return storage if saved_on == "cpu" else storage.to(device=device)

    file = source if isinstance(source, Path) else io.BytesIO(source)
    known = set(
        cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
    )  # those of this process, by value
    unpickler = type("Unpickler", (_Unpickler,), {"known": known})
    module: Any = types.SimpleNamespace(Unpickler=unpickler, __name__=__name__)
    with torch.accelerator.device_index(device.index):
        return torch.load(file, locate, module, mmap=file is source, weights_only=False)


def _find_unpicklable(
    parts: Mapping[str, object], seen: tuple[int, ...] = ()
) -> tuple[str, Exception] | None:
    """Return the name and error of the innermost object that cannot be pickled, if there is one."""
    for name, part in parts.items():
        error = None if id(part) in seen else Trial(part).error
        if error is not None:
            inner = None
            with contextlib.suppress(Exception):  # of an attribute or a key that is read
                inner = _find_unpicklable(_members(name, part), (*seen, id(part)))
            return inner or (name, error)
    return None


def _members(name: str, item: Any) -> dict[str, object]:
    """Return what an object refers to, but not what is private to a library, by shown name."""
    if is_a(item, types.MethodType):
        return {f"self of {name}": item.__self__}
    if is_a(item, CONTAINERS):
        pairs = dict.items(item) if is_a(item, dict) else enumerate(item)
        return {f"{name}[{key!r}]": value for key, value in pairs}
    if is_a(item, types.FunctionType):
        module = sys.modules.get(item.__module__)
        variables = variables_of(item) if is_user_module(item.__module__) else ()
        own = {key: value for at, key, value in variables if at in (None, module)}
        return {f"the variable {key!r}": value for key, value in own.items()}
    is_own = is_user_module(type(item).__module__)
    members = {**vars(item), **vars(item).get("_modules", {})}
    shown = {key: value for key, value in members.items() if is_own or not key.startswith("_")}
    return {f"{name}.{key}": value for key, value in shown.items()}


# Trials


class Trial(_Pickler):
    """Pickles an object without keeping the result.

    Args:
        obj: any object.
        at_most: number of bytes. An object that weighs more is not pickled to find that out.
        stand_in: returns what is pickled in place of an object; None: the object itself. By default
            an id stands for a tensor or array, which weighs its bytes unless it is trained.

    Attributes:
        code: the functions and classes that were pickled, and decorated functions.
        error: why the object cannot be pickled, or that it is too large.
        digest: differs if the object has changed; empty after an error.
    """

    def __init__(
        self,
        obj: object,
        *,
        at_most: float = math.inf,
        stand_in: Callable[[Any], object] | None = None,
    ) -> None:
        super().__init__(self)  # this object is the file, too
        self._left = at_most
        self._stand_in = stand_in or self._weigh_elements
        self._hash = hashlib.blake2b()
        self.code: list[Any] = []
        self.error: Exception | None = None
        self.digest = b""
        try:
            self.dump(obj)
            self.digest = self._hash.digest()
        except Exception as exc:  # noqa: BLE001 - a user's __reduce__ may raise anything
            self.error = exc
        self.clear_memo()

    def write(self, data: Any) -> None:
        """Count and hash a part of the pickle."""
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise OverflowError("too large")
        self._hash.update(data)

    def on_object(self, obj: object) -> None:
        """Note code."""
        if is_a(obj, (types.FunctionType, type, PROXY)):
            self.code.append(obj)

    def persistent_id(self, obj: Any) -> object:
        """Return what stands for an object; refuse one that weighs too much before it is copied."""
        if type(obj) in _WEIGHTLESS:
            return None
        stand_in = self._stand_in(obj)
        if stand_in is None and bytes_of(obj) > self._left:
            raise OverflowError("too large")
        return stand_in

    def _weigh_elements(self, obj: Any) -> object:
        is_tensor = is_a(obj, torch.Tensor)
        if not (is_tensor or has_plain_elements(obj)):
            return None
        if not (is_tensor and obj.requires_grad):
            self._left -= bytes_of(obj)
        return id(obj)


# Functions and modules


def is_importable(module: types.ModuleType | None) -> bool:
    """Whether another process with the same sys.path would import the same module by its name.

    False for `__main__`, and for a module that is still being imported: every worker that imports
    the module would repeat a call at its top level.
    """
    spec = getattr(module, "__spec__", None)
    if spec is None or module is sys.modules["__main__"] or getattr(spec, "_initializing", False):
        return False
    if spec.name in cloudpickle.list_registry_pickle_by_value():
        return False
    package = sys.modules.get(spec.name.rpartition(".")[0])
    if "." in spec.name and not is_importable(package):
        return False
    # importlib.util.find_spec would return the spec of the loaded module.
    path = getattr(package, "__path__", None)
    specs = (finder.find_spec(spec.name, path) for finder in sys.meta_path)
    found = next(filter(None, specs), None)
    return found is not None and found.origin == spec.origin


def pickle_by_value_unless_importable(function: Any) -> None:
    """Let cloudpickle pickle a function's module by value if workers cannot import the module."""
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    if module not in (None, sys.modules["__main__"]) and not is_importable(module):
        cloudpickle.register_pickle_by_value(module)


@contextlib.contextmanager
def pickled_by_value(names: Iterable[str]) -> Iterator[None]:
    """Let cloudpickle pickle the functions and classes of modules by value, and of what is below packages."""
    with contextlib.ExitStack() as registered:
        for module in [sys.modules[name] for name in names]:
            cloudpickle.register_pickle_by_value(module)
            registered.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def populate_main(function: Any) -> None:
    """Copy a function's globals, and unpickled classes of the caller's `__main__`, into `__main__`.

    torch.save(model), DataLoader workers and all_gather_object look them up there.

    Args:
        function: function or class unpickled by value, such as the task's function.
    """
    names = vars(sys.modules["__main__"])
    for name, value in getattr(function, "__globals__", {}).items():
        if not name.startswith("__"):
            names.setdefault(name, value)
    for kind in list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()):
        if kind.__module__ == "__main__" and "." not in kind.__qualname__:
            names.setdefault(kind.__name__, kind)


def pickle_main_by_value(folder: Path) -> None:
    """Let this process send functions and classes of `__main__` to spawned children: each in a file, by value, once.

    This begins with the first child that is spawned, since children that are forked have them.

    Args:
        folder: gets the files.
    """
    module: Any = reduction
    dump, owner, written = module.dump, os.getpid(), dict[int, tuple[Path, object]]()

    def reduce(_pickler: object, obj: Any) -> Any:
        is_sent = isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__"
        if not is_sent or os.getpid() != owner:
            return NotImplemented
        if id(obj) not in written:
            buffer = io.BytesIO()
            _Pickler(buffer).dump(obj)
            path = folder / f"main.{owner}.{len(written)}"
            path.write_bytes(buffer.getvalue())
            written[id(obj)] = path, obj
        return _load_in_child, (str(written[id(obj)][0]),)

    def dump_for_child(*args: Any) -> None:
        module.ForkingPickler.reducer_override = reduce
        dump(*args)

    module.dump = dump_for_child


@functools.cache
def _load_in_child(path: str) -> Any:
    """Unpickle an object in a child process, and let the child pickle its instances."""
    loaded = cloudpickle.loads(Path(path).read_bytes())
    populate_main(loaded)
    return loaded
