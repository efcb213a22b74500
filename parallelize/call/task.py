"""A call on its way to the workers: what is called, and what is sent with it.

Call            what the caller asks for: function, arguments, layout
  │ Task.of     1. Survey: what is pickled with it, code and stateful objects
  │             2. ModuleValues.of: variables of modules that this code mentions
  ▼
Task            the call, the values, the stateful objects
  │ write       3. one pickle, in which all of them share what they share in the caller
  ▼
file ── read ── Task in a worker, which has the values in its modules
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from parallelize.call.annotations import readable_annotations
from parallelize.call.importable import pickle_by_value_unless_importable
from parallelize.call.module_values import ModuleValues
from parallelize.call.object_states import bytes_of_models
from parallelize.call.pickle_cases import LOCKS
from parallelize.call.pickler import Survey
from parallelize.call.pickling import dump, full_disk_error, load
from parallelize.call.reachable import free_variables, is_a, namespace
from parallelize.call.unpicklable import Part, error_of
from parallelize.call.unreturned import data_of
from parallelize.config.layout import Layout
from parallelize.errors import ConfigError

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


@dataclass(frozen=True)
class Call:
    """One call of a function, to be made by every process of a layout.

    Args:
        function: the user's function.
        args: positional arguments; workers get copies.
        kwargs: keyword arguments; workers get copies.
        layout: number and devices of the processes, and the config.
        all_ranks: whether the caller gets the return values of all ranks; False: that of rank 0.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layout: Layout
    all_ranks: bool = False

    @property
    def name(self) -> str:
        """Return the function's name, for messages."""
        return name_of(self.function)


@dataclass(frozen=True)
class Task(Call):
    """A call with what else it reaches, as it is sent to the workers.

    Args:
        values: variables of the user's modules.
        stateful: objects of the call whose states come back; the worker's copies have the order of
            the caller's objects.
        not_set: in a worker: variables of modules that the program has set to what cannot be sent.
    """

    values: ModuleValues = field(kw_only=True)
    stateful: tuple[Any, ...] = field(kw_only=True)
    not_set: tuple[str, ...] = ()

    @classmethod
    def of(cls, call: Call) -> Task:
        """Find what a call reaches, and return what is sent; nothing large is copied.

        Raises:
            ConfigError: an argument, or a variable that the function uses, cannot be pickled.
        """
        pickle_by_value_unless_importable(call.function)
        survey = Survey()
        try:
            _refuse_locks(call)
            survey.dump(call)
        except ConfigError:
            raise
        except Exception as exc:  # a user's __reduce__ may raise anything
            raise error_of(_parts_of(call), exc) from exc
        values = ModuleValues.of(survey.code)
        # The survey goes on: what the values share with the call is not looked at a second time.
        survey.dump(values)
        return cls(**vars(call), values=values, stateful=tuple(survey.stateful))

    def renewed(self) -> Task:
        """Return the task for modules that are pickled by value since it was made.

        Their functions bring their variables with them. The stateful objects stay in the order in
        which the caller gets the states back.
        """
        call = Call(self.function, self.args, self.kwargs, self.layout, self.all_ranks)
        return dataclasses.replace(Task.of(call), stateful=self.stateful)

    def write(self, path: Path, *, is_local: bool = False) -> None:
        """Write the task to a file for the workers.

        Args:
            path: the file.
            is_local: whether the workers start now on this machine: a np.memmap is the same file
                there.

        Raises:
            LaunchError: the disk has no space for the task, or for the models that come back.
        """
        dump(self, path, is_local=is_local)
        size = bytes_of_models(self.stateful)
        free = shutil.disk_usage(path.parent).free
        if free < size and self.layout.config.update_modules:
            raise full_disk_error(
                path.parent, f": {free:,} bytes are free, and models of {size:,} bytes come back"
            )

    @classmethod
    def read(cls, path: Path, *, device: torch.device) -> Task:
        """Read a task in a worker, and write its values into the modules.

        Args:
            path: the file.
            device: gets the tensors that were on an accelerator.
        """
        task: Task = load(path, device=device)
        return dataclasses.replace(task, not_set=tuple(task.values.install()))

    def data(self) -> dict[str, object]:
        """Return what the function may change, besides states, by name as shown to the user.

        Attributes of arguments, of variables, and of `self` and stateful objects by their class.
        """
        named: dict[str, object] = {}
        for item in self.stateful:
            named[type(item).__name__] = item
        named |= self.values.current()
        named |= self._variables()
        # A built-in function has no signature, and arguments may not fit.
        inner = inspect.unwrap(self.function)
        with contextlib.suppress(TypeError, ValueError), readable_annotations(inner):
            named |= inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments
        if "self" in named:
            owner = named.pop("self")
            named[type(owner).__name__] = owner
        data: dict[str, object] = {}
        for name, item in named.items():
            data |= data_of(name, item)
        return data

    def _variables(self) -> dict[str, object]:
        """Return the function's variables, without those of an imported module."""
        inner = inspect.unwrap(self.function)
        if not isinstance(inner, FunctionType):
            return {}
        variables: dict[str, object] = {}
        if inner.__globals__ is not namespace(sys.modules.get(inner.__module__)):
            variables |= inner.__globals__
        return variables | free_variables(inner)


def name_of(function: object) -> str:
    """Return the qualified name of a function or other callable, for messages."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__qualname__", type(inner).__name__)


def _parts_of(call: Call) -> Iterator[Part]:
    """Yield the parts of a call, as errors name them."""
    yield Part(f"the function {call.name!r}", call.function)
    yield from _arguments_of(call)
    for name, value in vars(call.layout.config).items():
        yield Part(f"option {name!r}", value)


def _arguments_of(call: Call) -> Iterator[Part]:
    """Yield the arguments as parts that name their parameters: "argument 'loader' (second)"."""
    # The decorator has made `self` of a bound method the first argument.
    parameters: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):  # a built-in function has no signature
        parameters = list(inspect.signature(call.function).parameters.values())
    has_self = bool(parameters) and parameters[0].name == "self"
    for index, value in enumerate(call.args):
        place = index - has_self
        if place < 0:
            yield Part("self", value)
        elif index < len(parameters) and parameters[index].kind < inspect.Parameter.VAR_POSITIONAL:
            name = f"argument {parameters[index].name!r}"
            yield Part(f"{name} ({_ordinal(place)})", value, prefix=name)
        else:
            yield Part(f"{_ordinal(place)} argument", value)
    for name, value in call.kwargs.items():
        yield Part(f"argument {name!r}", value)


def _ordinal(place: int) -> str:
    """Return the name of a place among arguments, which are counted from 0 here."""
    return _ORDINALS[place] if place < len(_ORDINALS) else f"{place + 1}th"


def _refuse_locks(call: Call) -> None:
    """Refuse a lock that is an argument: it would keep no rank from doing what another one does.

    Raises:
        ConfigError: an argument is a lock.
    """
    for argument in _arguments_of(call):
        if is_a(argument.value, LOCKS):
            type_name = type(argument.value).__name__
            raise ConfigError(
                f"{argument.name} cannot be pickled",
                why=f"a {type_name!r} object is for the threads of one process: each rank would "
                "have its own",
                fix="create it inside the function; main_first() lets rank 0 go before the others",
            )
