"""Picklers: one that writes a pickle, and two that only find out what a pickle would contain.

Pickler     cloudpickle's, with the cases of `pickle_cases`
Survey      which code and which stateful objects are pickled; it copies no large memory
Trial       whether an object can be pickled, what it weighs, and whether it has changed
"""

from __future__ import annotations

import hashlib
import math
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import nn

from parallelize.call.annotations import readable_annotations
from parallelize.call.arrays import bytes_of, has_plain_elements
from parallelize.call.pickle_cases import Case, Context, Reader, Reduction, cases_of
from parallelize.call.reachable import CODE, PROXY, is_a, is_stateful

# Objects that consist of others, or are too small to be weighed.
_WEIGHTLESS = frozenset(
    {bool, complex, dict, float, frozenset, int, list, set, tuple, types.NoneType},
)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler, extended to what programs pass that it refuses, or loses a part of.

    It has no arguments of its own: torch.save makes it of the class alone.

    Attributes:
        reader: the process that reads the pickle; of the class.
    """

    reader = Reader()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._context = Context(self.reader)
        self._cases_of_types: dict[type[Any], tuple[Case, ...]] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled; pickle asks for each one but built-in values."""
        object_type = type(obj)
        cases = self._cases_of_types.get(object_type)
        if cases is None:
            cases = cases_of(object_type)
            self._cases_of_types[object_type] = cases
        for case in cases:
            reduction = case.reduce(obj, self._context)
            if reduction is not None:
                return reduction
        with readable_annotations(obj):
            return super().reducer_override(obj)


class _NoFile:
    """A file that keeps nothing."""

    def write(self, data: Any) -> None:
        """Drop a part of a pickle."""


class Survey(Pickler):
    """What a pickle would contain: code, and objects with a state.

    Elements of tensors and arrays are not copied: a survey of large ones costs nothing.

    Attributes:
        code: functions and classes, and decorated functions.
        stateful: objects that come back from a call; a module without the modules inside of it.
    """

    def __init__(self) -> None:
        super().__init__(_NoFile())
        self.code: list[Any] = []
        self.stateful: list[Any] = []
        self._ids_of_stateful: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        """Note an object, and return how it is pickled."""
        if is_a(obj, CODE):
            self.code.append(obj)
        elif _has_only_elements(obj):
            return _NOTHING
        elif is_stateful(obj) and id(obj) not in self._ids_of_stateful:
            self.stateful.append(obj)
            parts = obj.modules() if is_a(obj, nn.Module) else [obj]
            self._ids_of_stateful.update(map(id, parts))
        return super().reducer_override(obj)


_NOTHING: Reduction = (types.NoneType, ())


def _has_only_elements(obj: Any) -> bool:
    """Whether an object is a tensor, storage or array that refers to no objects."""
    if type(obj) in (torch.Tensor, nn.Parameter):
        return not vars(obj) and not obj._backward_hooks
    return torch.is_storage(obj) or has_plain_elements(obj)


class _Budget:
    """A file that counts and hashes what is written, up to a number of bytes.

    Args:
        at_most: number of bytes.
    """

    def __init__(self, at_most: float) -> None:
        self.bytes_left = at_most
        self.hash = hashlib.blake2b()

    def spend(self, number_of_bytes: int) -> None:
        """Count bytes.

        Raises:
            OverflowError: there are too many.
        """
        self.bytes_left -= number_of_bytes
        if self.bytes_left < 0:
            raise OverflowError("too large")

    def write(self, data: Any) -> None:
        """Count and hash a part of a pickle."""
        self.spend(memoryview(data).nbytes)
        self.hash.update(data)


class Trial(Pickler):
    """Pickles an object without keeping the result.

    Args:
        obj: any object.
        at_most: number of bytes. An object that weighs more is not pickled to find that out.
        stand_in: returns what is pickled in place of an object; None: the object itself. By default
            an id stands for a tensor or array, which weighs its bytes unless it is trained.

    Attributes:
        code: the functions and classes that were pickled, and decorated functions; no built-in
            functions.
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
        self._budget = _Budget(at_most)
        super().__init__(self._budget)
        self._stand_in = stand_in or self._weigh_elements
        self.code: list[Any] = []
        self.error: Exception | None = None
        self.digest = b""
        try:
            self.dump(obj)
            self.digest = self._budget.hash.digest()
        except Exception as exc:  # noqa: BLE001 - a user's __reduce__ may raise anything
            self.error = exc
        self.clear_memo()

    def reducer_override(self, obj: Any) -> Any:
        """Note code, and return how an object is pickled."""
        # Not CODE: a built-in function, such as `torch.tanh`, may not tell its path, and
        # ModuleValues would take it for code that a worker cannot import.
        if is_a(obj, (types.FunctionType, type, PROXY)):
            self.code.append(obj)
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> object:
        """Return what stands for an object; refuse one that weighs too much before it is copied."""
        if type(obj) in _WEIGHTLESS:
            return None
        stand_in = self._stand_in(obj)
        if stand_in is None and bytes_of(obj) > self._budget.bytes_left:
            raise OverflowError("too large")
        return stand_in

    def _weigh_elements(self, obj: Any) -> object:
        """Return the id of a tensor or array, whose bytes are counted; None for other objects."""
        is_tensor = is_a(obj, torch.Tensor)
        if not (is_tensor or has_plain_elements(obj)):
            return None
        if not (is_tensor and obj.requires_grad):
            self._budget.bytes_left -= bytes_of(obj)
        return id(obj)
