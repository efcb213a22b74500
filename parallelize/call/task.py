"""Task, a function call sent to the workers, and Outcome, its result on one rank sent back to the caller."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from parallelize.call.module_values import ModuleValues
from parallelize.call.pickling import dump, dump_for_rank, load, pickling_module_by_value
from parallelize.call.reachable import is_stateful
from parallelize.call.returned import data_of, variables_of
from parallelize.call.tracebacks import shorten_chain
from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.errors import ConfigError, WorkerError

__all__ = ["Outcome", "Task", "error_text", "format_error", "name_of"]

_CPU = torch.device("cpu")
_FIX_VALUE = "return plain values, tensors, modules or state_dicts"


@dataclass(frozen=True)
class Task:
    """One call of a function, to be made by every process of a layout.

    Args:
        function: the user's function.
        args: positional arguments; workers get copies.
        kwargs: keyword arguments; workers get copies.
        layout: number and devices of the processes, and the config.
        all_ranks: whether the caller gets the return values of all ranks; False: only that of rank 0.
        stateful: the call's stateful objects; found by `write`, and in the same order by `read`.
        not_set: variables of modules that the program has set to what a worker cannot get; found by `read`.
        values: variables of modules that are sent with the call.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layout: Layout
    all_ranks: bool = False
    stateful: list[Any] = field(default_factory=list, compare=False)
    not_set: list[str] = field(default_factory=list, compare=False)
    values: ModuleValues = field(default_factory=ModuleValues, compare=False)

    @property
    def name(self) -> str:
        """Return the function's name, for messages."""
        return name_of(self.function)

    def data(self) -> dict[str, object]:
        """Return what the function may change, besides stateful objects, by name as shown to the user.

        Arguments; `self` and stateful objects, by the names of their classes; variables from the caller's modules.
        """
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        names = [] if code is None else code.co_varnames[: code.co_argcount]
        unnamed = [f"argument {index}" for index in range(len(names), len(self.args))]
        named = {**dict(zip((*names, *unnamed), self.args, strict=False)), **self.kwargs}
        own = [(type(each).__name__, each) for each in (named.pop("self", None), *self.stateful)]
        found = {**self.values.current(), **variables_of(self.function)}
        for name, item in (*own, *named.items()):
            found.update(data_of(name, item))
        return found

    def write(self, path: Path) -> None:
        """Write the call to a file for the workers.

        Raises:
            ConfigError: an argument, or a variable that the function uses, cannot be pickled.
        """
        parts = {
            f"the function {self.name!r}": self.function,
            **{f"argument {number}": value for number, value in enumerate(self.args)},
            **{f"argument {name!r}": value for name, value in self.kwargs.items()},
            **{f"option {name!r}": value for name, value in self.layout.config.options().items()},
        }
        call = (self.function, self.args, self.kwargs, self.layout, self.all_ranks)
        self.stateful.clear()
        known = set[int]()

        def add(item: object) -> None:
            if is_stateful(item) and id(item) not in known:
                known.update(map(id, item.modules() if isinstance(item, nn.Module) else [item]))
                self.stateful.append(item)

        with pickling_module_by_value(self.function):
            values = ModuleValues.find(call)
            # The last part is pickled when it is complete.
            dump((values, call, self.stateful), path, parts=parts, on_object=add)

    @classmethod
    def read(cls, path: Path, *, device: torch.device) -> Task:
        """Read the call from a file in a worker; tensors that were on an accelerator are moved to `device`."""
        values, (function, args, kwargs, layout, all_ranks), stateful = load(path, device=device)
        return cls(function, args, kwargs, layout, all_ranks, stateful, values.install(), values)


@dataclass(frozen=True)
class Outcome:
    """The result of a call on one rank: a value or an error.

    Args:
        rank: global rank.
        host: host name of the worker.
        pid: process ID of the worker.
        value: the function's return value.
        error: the exception that the function raised, or a WorkerError that replaces it; None: the function returned.
        traceback: the worker's traceback as text; "" if the function returned.
        failed_at: time of the exception in seconds since the epoch, taken before any teardown.
        states: states of what the call trained, by their index in Task.stateful; rank 0 only.
        unreturned: names of other things that the call changed; rank 0 only.
    """

    rank: int
    host: str
    pid: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    failed_at: float | None = None
    states: Mapping[int, Any] = field(default_factory=dict)
    unreturned: Sequence[str] = ()

    @classmethod
    def returned(cls, world: World, value: object, **changes: Any) -> Outcome:
        """Build the outcome of a function that returned `value`; `changes` are the last two attributes."""
        return cls(world.rank, socket.gethostname(), os.getpid(), value=value, **changes)

    @classmethod
    def raised(cls, world: World, error: BaseException) -> Outcome:
        """Build the outcome of a function that has just raised `error`."""
        trace = error.__traceback__
        shorten_chain(error)
        text = format_error(error, error.__traceback__ or trace)
        host, pid = socket.gethostname(), os.getpid()
        return cls(world.rank, host, pid, error=error, traceback=text, failed_at=time.time())

    def write(self, path: Path) -> None:
        """Write the outcome to a file for the caller; a WorkerError replaces an exception that cannot be pickled.

        Raises:
            WorkerError: the return value cannot be pickled.
        """
        if self.error is None:
            with _value_not_pickled():
                dump(self, path, parts={"the returned value": self.value, "the state of an optimizer": self.states})
            return
        try:
            dump(self, path, parts={})
            load(path, device=_CPU)
        except Exception as exc:  # noqa: BLE001 - a failure must reach the caller whatever its exception is
            dump(dataclasses.replace(self, error=_picklable_error(self.error, exc)), path, parts={})

    def dumps(self) -> bytes:
        """Serialize the outcome of a function that returned for another rank of this program.

        Raises:
            WorkerError: the return value cannot be pickled.
        """
        with _value_not_pickled():
            return dump_for_rank(self, parts={"the returned value": self.value})

    @classmethod
    def read(cls, source: Path | bytes, *, device: torch.device = _CPU) -> Outcome:
        """Read an outcome from a file, or from the bytes of `dumps`.

        Args:
            source: path of the file, or the bytes.
            device: device for tensors that were not on the CPU.

        Raises:
            WorkerError: the outcome cannot be unpickled in this process.
        """
        try:
            outcome: Outcome = load(io.BytesIO(source) if isinstance(source, bytes) else source, device=device)
        except Exception as exc:
            raise WorkerError(
                "the return value of a worker cannot be unpickled in the calling process",
                why=f"{type(exc).__name__}: {exc}",
                fix=_FIX_VALUE,
            ) from exc
        return outcome


@contextlib.contextmanager
def _value_not_pickled() -> Iterator[None]:
    try:
        yield
    except ConfigError as exc:
        raise WorkerError(exc.faults[0].what, why=exc.faults[0].why, fix=_FIX_VALUE) from exc


def format_error(error: BaseException, trace: TracebackType | None) -> str:
    """Return what Python prints for an exception with this traceback, causes and notes included."""
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # noqa: BLE001 - formatting a SyntaxError fails if its attributes have wrong types
        frames = "".join(traceback.format_tb(trace))
        return f"Traceback (most recent call last):\n{frames}{type(error).__name__}: {error_text(error)}\n"


def error_text(error: BaseException) -> str:
    """Return str(error), or a placeholder if its `__str__` raises."""
    try:
        return str(error)
    except Exception as exc:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"(no text: its __str__ raised {type(exc).__name__})"


def _picklable_error(error: BaseException, reason: Exception) -> WorkerError:
    why = reason.faults[0].why if isinstance(reason, ConfigError) else f"{type(reason).__name__}: {error_text(reason)}"
    return WorkerError(
        f"{type(error).__name__}: {error_text(error)}",
        why=f"a worker raised this exception, which cannot be pickled: {why}",
        fix="see the worker's traceback; to catch the exception by its type, keep only plain values in its attributes",
    )


def name_of(function: object) -> str:
    """Return the qualified name of a function or other callable, for messages."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__qualname__", type(inner).__name__)
