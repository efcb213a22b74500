"""Task, a function call sent to the workers, and Outcome, its result on one rank sent back to the caller."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

import torch
from torch import nn

from parallelize.call.module_values import ModuleValues
from parallelize.call.pickling import dump, full_disk_error, load, pickle_by_value_unless_importable
from parallelize.call.random_states import RandomStates
from parallelize.call.reachable import CODE, free_variables, is_a, is_stateful, namespace
from parallelize.call.returned import bytes_of_models, data_of
from parallelize.call.tracebacks import shorten_chain
from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.errors import ParallelizeError, WorkerError

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
        values: variables of modules that are sent with the call.
        stateful: the call's stateful objects; found by `write`, and in the same order by `read`.
        not_set: variables of modules that the program has set to what a worker cannot get; found by `read`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layout: Layout
    all_ranks: bool = False
    # What is found while the attributes above are pickled; pickled last.
    values: ModuleValues = field(default_factory=ModuleValues, compare=False)
    stateful: list[Any] = field(default_factory=list, compare=False)
    not_set: list[str] = field(default_factory=list, compare=False)

    @property
    def name(self) -> str:
        """Return the function's name, for messages."""
        return name_of(self.function)

    def data(self) -> dict[str, object]:
        """Return what the function may change, besides states, by name as shown to the user.

        Attributes of arguments, of variables, and of `self` and stateful objects by their class.
        """
        named = {type(each).__name__: each for each in self.stateful}
        named |= self.values.current()
        inner = inspect.unwrap(self.function)
        if isinstance(inner, FunctionType):
            is_imported = inner.__globals__ is namespace(sys.modules.get(inner.__module__))
            named |= {**({} if is_imported else inner.__globals__), **free_variables(inner)}
        with contextlib.suppress(TypeError, ValueError):  # a built-in function; they do not fit
            named |= inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments
        if "self" in named:
            owner = named.pop("self")
            named[type(owner).__name__] = owner
        found = dict[str, object]()
        for name, item in named.items():
            found |= data_of(name, item)
        return found

    def write(self, path: Path, *, is_local: bool = False) -> None:
        """Write the call to a file for the workers.

        Args:
            path: the file.
            is_local: whether the workers start now on this machine: a np.memmap is the same file there.

        Raises:
            ConfigError: an argument, or a variable that the function uses, cannot be pickled.
            LaunchError: the disk has no space for the call, or for the models that come back.
        """
        parts = {
            f"the function {self.name!r}": self.function,
            **{f"argument {number}": value for number, value in enumerate(self.args)},
            **{f"argument {name!r}": value for name, value in self.kwargs.items()},
            **{f"option {name!r}": value for name, value in vars(self.layout.config).items()},
        }
        call, known = dataclasses.replace(self, values=ModuleValues()), set[int]()
        self.stateful.clear()

        def see(item: object) -> None:
            if is_stateful(item) and id(item) not in known:
                known.update(map(id, item.modules() if isinstance(item, nn.Module) else [item]))
                self.stateful.append(item)
            call.values.code.extend([item] if is_a(item, CODE) else ())

        pickle_by_value_unless_importable(self.function)
        dump(call, path, parts=parts, on_object=see, is_local=is_local)
        size, free = bytes_of_models(self.stateful), shutil.disk_usage(path.parent).free
        if free < size and self.layout.config.update_modules:
            raise full_disk_error(path.parent, f": {free:,} bytes are free, and models of {size:,} bytes come back")

    @classmethod
    def read(cls, path: Path, *, device: torch.device) -> Task:
        """Read the call in a worker; tensors that were on an accelerator are moved to `device`."""
        task: Task = load(path, device=device)
        task.not_set.extend(task.values.install())
        return task


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
        failed_at: time of the exception in seconds since the epoch, taken before any teardown; inf: there was none.
        states: states of what the call trained, by their index in Task.stateful; rank 0 only.
        unreturned: names of other things that the call changed; rank 0 only.
        evaluated: the number that the function returned, as text, if it has evaluated this rank's samples.
        is_interrupted: whether Ctrl-C has interrupted the function, which has then returned; rank 0 only.
        random_states: where the function left the global generators, for the caller's; rank 0 only; None: the call
            leaves the caller's alone.
    """

    rank: int
    host: str
    pid: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    failed_at: float = torch.inf
    states: Mapping[int, Any] = field(default_factory=dict)
    unreturned: Sequence[str] = ()
    evaluated: str | None = None
    is_interrupted: bool = False
    random_states: RandomStates | None = None

    @classmethod
    def returned(cls, world: World, value: object, **others: Any) -> Outcome:
        """Build the outcome of a function that returned, with other attributes."""
        return cls(world.rank, socket.gethostname(), os.getpid(), value=value, **others)

    @classmethod
    def raised(cls, world: World, error: BaseException) -> Outcome:
        """Build the outcome of a function that has just raised `error`."""
        trace, now = error.__traceback__, time.time()
        shorten_chain(error)
        text = format_error(error, error.__traceback__ or trace)
        return cls.returned(world, None, error=error, traceback=text, failed_at=now)

    def write(self, file: Path | io.BytesIO) -> None:
        """Write the outcome; a WorkerError replaces an exception that cannot be pickled.

        Raises:
            WorkerError: the return value cannot be pickled.
        """
        parts = {"the returned value": self.value, "the state of an optimizer": self.states}
        try:
            dump(self, file, parts=parts, raises=WorkerError, fix=_FIX_VALUE)
            if self.error is not None and isinstance(file, Path):
                load(file, device=_CPU)
        except Exception as exc:
            if self.error is None:
                raise
            # A failure must reach the caller whatever its exception is.
            why = f"{type(exc).__name__}: {error_text(exc)}"
            if isinstance(exc, ParallelizeError):
                why = exc.faults[0].why
            error = WorkerError(
                f"{type(self.error).__name__}: {error_text(self.error)}",
                why=f"a worker raised this exception, which cannot be pickled: {why}",
                fix="see the worker's traceback; to catch the exception by its type, keep only "
                "plain values in its attributes",
            )
            dump(dataclasses.replace(self, error=error), file, parts={})

    def dumps(self) -> bytes:
        """Pickle the outcome for another rank of this program; raise the same errors as `write`."""
        buffer = io.BytesIO()
        self.write(buffer)
        return buffer.getvalue()

    @classmethod
    def read(cls, source: Path | bytes, *, device: torch.device = _CPU) -> Outcome:
        """Read an outcome.

        Args:
            source: file that `write` has written, or the bytes of `dumps`.
            device: device for tensors that were not on the CPU.

        Raises:
            WorkerError: the outcome cannot be unpickled in this process.
        """
        try:
            outcome: Outcome = load(source, device=device)
        except Exception as exc:
            raise WorkerError(
                "the return value of a worker cannot be unpickled in the calling process",
                why=f"{type(exc).__name__}: {exc}",
                fix=_FIX_VALUE,
            ) from exc
        return outcome


def format_error(error: BaseException, trace: TracebackType | None) -> str:
    """Return what Python prints for an exception with this traceback, with causes and notes."""
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # noqa: BLE001 - a SyntaxError whose attributes have wrong types
        frames = "".join(traceback.format_tb(trace))
        last = f"{type(error).__name__}: {error_text(error)}"
        return f"Traceback (most recent call last):\n{frames}{last}\n"


def error_text(error: BaseException) -> str:
    """Return str(error), or a placeholder if its `__str__` raises."""
    try:
        return str(error)
    except Exception as exc:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"(no text: its __str__ raised {type(exc).__name__})"


def name_of(function: object) -> str:
    """Return the qualified name of a function or other callable, for messages."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__qualname__", type(inner).__name__)
