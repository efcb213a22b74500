"""Task: a function call that is sent to the workers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from parallelize.call.annotations import readable_annotations
from parallelize.call.module_values import ModuleValues
from parallelize.call.object_states import bytes_of_models
from parallelize.call.pickling import dump, full_disk_error, load, pickle_by_value_unless_importable
from parallelize.call.reachable import CODE, free_variables, is_a, is_stateful, namespace
from parallelize.call.unreturned import data_of
from parallelize.config.layout import Layout


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
        # A built-in function has no signature, and arguments may not fit.
        with contextlib.suppress(TypeError, ValueError), readable_annotations(inner):
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
            raise full_disk_error(
                path.parent, f": {free:,} bytes are free, and models of {size:,} bytes come back"
            )

    @classmethod
    def read(cls, path: Path, *, device: torch.device) -> Task:
        """Read the call in a worker; tensors that were on an accelerator are moved to `device`."""
        task: Task = load(path, device=device)
        task.not_set.extend(task.values.install())
        return task


def name_of(function: object) -> str:
    """Return the qualified name of a function or other callable, for messages."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__qualname__", type(inner).__name__)
