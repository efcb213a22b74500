"""What crosses a process boundary: the function, the call, and what came of it on one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import cloudpickle
import torch
from torch import nn

from parallelize.call.module_sync import tensors_of
from parallelize.call.serialization import pack, unpack
from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.errors import ConfigError, WorkerError

__all__ = ["FunctionRef", "Outcome", "Task", "is_importable", "name_of", "text_of"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class FunctionRef:
    """A function by the name under which a worker finds it, or by value where it has none.

    A decorated function's name leads to its wrapper, and the function is found behind it, `depth` times `__wrapped__`.
    """

    module: str | None
    qualname: str
    depth: int = 0
    value: Callable[..., Any] | None = None

    @classmethod
    def to(cls, function: Callable[..., Any]) -> FunctionRef:
        """By name if the name leads back to this very function in an importable module, else by value."""
        home, qualname = _home(function), getattr(function, "__qualname__", "")
        if home is not None and is_importable(home):
            for depth, found in enumerate(_behind(home, qualname)):
                if found is function:
                    return cls(home.__name__, qualname, depth)
        return cls(None, qualname, value=function)

    def resolve(self) -> Callable[..., Any]:
        """The function, in the process that reads this."""
        if self.module is None:
            assert self.value is not None
            return self.value
        found: Callable[..., Any] = list(_behind(import_module(self.module), self.qualname))[self.depth]
        return found


def _home(function: Callable[..., Any]) -> ModuleType | None:
    return sys.modules.get(getattr(function, "__module__", None) or "")


def is_importable(module: ModuleType) -> bool:
    """Whether another process with our sys.path gets this very module by its name; not so for __main__.

    Nor for one whose import has not ended here: its top level makes the call, and would make it there too.
    """
    own, spec, path = getattr(module, "__spec__", None), None, None
    if own is None or module.__name__ == "__main__":
        return False
    parts = own.name.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        spec = _find_spec(name, path)
        if spec is None or _is_being_imported(name):
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == own.origin


def _is_being_imported(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _find_spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """As importlib.util.find_spec, which would only say what sys.modules holds."""
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)


_by_value = threading.Lock()  # cloudpickle's list of modules is one for all threads


@contextlib.contextmanager
def _traveling_with(function: Callable[..., Any]) -> Iterator[None]:
    """Let what a function's module holds travel by value if workers cannot import the module."""
    home = _home(function)
    if home is None or home.__name__ == "__main__" or is_importable(home):  # cloudpickle knows about __main__
        yield
        return
    with _by_value:
        cloudpickle.register_pickle_by_value(home)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(home)


def _behind(home: object, qualname: str) -> Iterator[Any]:
    """What a dotted name means, then what each wrapper around it wraps."""
    found: Any = home
    for part in qualname.split("."):
        found = getattr(found, part, None)
    while found is not None:
        yield found
        found = getattr(found, "__wrapped__", None)


@dataclass(frozen=True)
class Task:
    """One call, for every process of a layout.

    Args:
        function: what is called.
        args: positional arguments; copies arrive.
        kwargs: keyword arguments; copies arrive.
        layout: the processes, and the request behind them.
        all_ranks: whether every rank's value is wanted in the caller, or rank 0's alone.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layout: Layout
    all_ranks: bool = False

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return name_of(self.function)

    def write(self, path: Path) -> None:
        """Put the call into a file for the workers.

        Raises:
            ConfigError: an argument, or a variable that the function uses, cannot travel.
        """
        function = FunctionRef.to(self.function)
        shipped = {f"the function {self.name!r}": function.value} if function.value is not None else {}
        parts = {
            **shipped,
            **{f"argument {number}": value for number, value in enumerate(self.args)},
            **{f"argument {name!r}": value for name, value in self.kwargs.items()},
            **{f"option {name!r}": value for name, value in self.layout.config.options().items()},
        }
        call = (function, self.args, self.kwargs, self.layout, self.all_ranks)
        with _traveling_with(self.function):
            pack(call, path, parts=parts)

    @classmethod
    def read(cls, path: Path, *, device: torch.device) -> Task:
        """The call in a file, in a worker; tensors that were on an accelerator go to `device`."""
        function, args, kwargs, layout, all_ranks = unpack(path, device=device)
        return cls(function.resolve(), args, kwargs, layout, all_ranks)


@dataclass(frozen=True)
class Outcome:
    """What came of a call on one rank: a value, or an error.

    Args:
        rank: global rank.
        host: its host's name.
        pid: its process.
        value: what the function returned.
        error: what it raised, or a WorkerError that stands for it; None: it returned.
        traceback: the worker's traceback as text; "" if it returned.
        failed_at: when it raised, seconds since the epoch, taken before anything was torn down.
        trained: tensors by name of each module among the arguments, rank 0 only.
    """

    rank: int
    host: str
    pid: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    failed_at: float | None = None
    trained: Sequence[Mapping[str, torch.Tensor]] = field(default=())

    @classmethod
    def returned(cls, world: World, value: object, modules: Sequence[nn.Module] = ()) -> Outcome:
        """The function returned `value`, and `modules` were among its arguments."""
        trained = [tensors_of(module) for module in modules]
        return cls(world.rank, socket.gethostname(), os.getpid(), value=value, trained=trained)

    @classmethod
    def raised(cls, world: World, error: BaseException) -> Outcome:
        """The function raised `error`, just now."""
        cause = error.__cause__
        if cause is not None:  # an error that another one explains, where it was raised, has the same traceback
            is_same = cause.__traceback__ is error.__traceback__
            # Not set as an attribute, which a frozen dataclass refuses.
            BaseException.with_traceback(cause, None if is_same else _from_function(cause.__traceback__))
        text = _formatted(error, _from_function(error.__traceback__))
        host, pid = socket.gethostname(), os.getpid()
        return cls(world.rank, host, pid, error=error, traceback=text, failed_at=time.time())

    def write(self, path: Path) -> None:
        """Put it into a file for the caller; an exception that cannot travel is replaced by one that says so.

        Raises:
            WorkerError: the value cannot travel.
        """
        if self.error is None:
            self._write_value(path)
            return
        try:
            pack(self, path, parts={})
            unpack(path, device=_CPU)
        except Exception as exc:  # noqa: BLE001 - the caller must hear of this rank whatever is wrong with its exception
            pack(dataclasses.replace(self, error=_stand_in(self.error, exc)), path, parts={})

    def _write_value(self, path: Path) -> None:
        try:
            pack(self, path, parts={"the returned value": self.value})
        except ConfigError as exc:
            what, why = exc.faults[0].what, exc.faults[0].why
            raise WorkerError(what, why=why, fix="return plain values, tensors, modules or state_dicts") from exc

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """The outcome in a file; tensors are on the CPU.

        Raises:
            WorkerError: what the worker left cannot be rebuilt in this process.
        """
        try:
            outcome: Outcome = unpack(path, device=_CPU)
        except Exception as exc:
            raise WorkerError(
                "what a worker returned cannot be rebuilt in the calling process",
                why=f"{type(exc).__name__}: {exc}",
                fix="return plain values, tensors, modules or state_dicts",
            ) from exc
        return outcome


def _from_function(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that starts in the user's function; all of it if it never came so far."""
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__name__", "").startswith("parallelize."):
        inner = inner.tb_next
    return inner or trace


def _formatted(error: BaseException, trace: TracebackType | None) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # noqa: BLE001 - Python reads attributes of some errors, which a user's class fills as it likes
        frames = "".join(traceback.format_tb(trace))
        return f"Traceback (most recent call last):\n{frames}{type(error).__name__}: {text_of(error)}\n"


def text_of(error: BaseException) -> str:
    """What an error says, if its class is able to say it."""
    try:
        return str(error)
    except Exception as exc:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"(its text cannot be had: __str__ raised {type(exc).__name__})"


def _stand_in(error: BaseException, reason: Exception) -> WorkerError:
    why = reason.faults[0].why if isinstance(reason, ConfigError) else f"{type(reason).__name__}: {text_of(reason)}"
    return WorkerError(
        f"{type(error).__name__}: {text_of(error)}",
        why=f"a worker raised it, and as an object it cannot travel to the caller: {why}",
        fix="see the worker's traceback; to catch it by its type, let it hold plain values",
    )


def name_of(function: object) -> str:
    """The name under which a user knows a function, or whatever else can be called."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__qualname__", type(inner).__name__)
