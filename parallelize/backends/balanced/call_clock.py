"""Clock of one micro-batch: seconds and bytes of each unit call, in forward and backward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm

from parallelize.backends.balanced.hardware import memory_use, synchronized_time
from parallelize.runtime.containers import leaves

__all__ = ["Call", "Clock", "NothingSavedError", "count_saved_bytes"]


class NothingSavedError(Exception):
    """A forward computes gradients, for which `count_saved_bytes` has kept nothing."""


class _Saved(NamedTuple):
    storage: StorageWeakRef
    size: int
    is_after: bool  # whether the unit has returned, so that backward does not recompute it


@dataclass
class Call:
    """Measurements of one unit call."""

    unit: str
    input_bytes: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    working_bytes: float = 0.0
    saved: list[_Saved] = field(default_factory=list)

    def saved_bytes(self, *, without: Collection[Any] = (), after: bool | None = None) -> float:
        """Return the bytes that autograd saves, without given storages; during the call, after it, or both (None)."""
        kept = (each for each in self.saved if each.storage not in without and after in {None, each.is_after})
        return math.fsum(each.size for each in kept)


class Clock:
    """Records when units begin in forward, and when their inputs' gradients are computed in backward."""

    def __init__(self, model: nn.Module, devices: Collection[torch.device]) -> None:
        self.calls: list[Call] = []
        self.output_bytes = 0
        self._names = {id(each): name for name, each in model.named_modules()}
        self._devices = devices
        self._levels = [level for level, _ in memory_use(*devices)]
        self._began = synchronized_time(*devices)
        self.is_after = True  # whether what runs is after the current call's unit, not in it
        self._running: int | None = None  # the call that runs in backward; None: this is forward

    @property
    def units(self) -> list[str]:
        """The names of the called units."""
        return [each.unit for each in self.calls]

    def on_unit(self, module: nn.Module, args: Any) -> None:
        """Begin a unit call: the operations before the first one count as a part of it."""
        if self._running is not None:
            return
        index = len(self.calls)
        if index:
            self.calls[-1].forward_s = self._lap(self.calls[-1])
        self.is_after = isinstance(module, _BatchNorm)  # which is never recomputed
        tensors = [each for each in leaves(args) if isinstance(each, torch.Tensor)]
        self.calls.append(Call(self._names[id(module)], sum(each.numel() * each.element_size() for each in tensors)))
        for each in tensors:
            if each.requires_grad and not each.is_leaf:
                each.register_hook(lambda _, index=index: self.end_backward(index))  # type: ignore[no-untyped-call]  # torch's

    def end_forward(self) -> None:
        """End the last unit call, and begin backward."""
        if self.calls:
            self.calls[-1].forward_s = self._lap(self.calls[-1])
        self._running = len(self.calls) - 1

    def end_backward(self, index: int = 0) -> None:
        """End the backward of a unit call; those of later calls that no gradient has ended are a part of it."""
        if self._running is not None and index <= self._running:
            self.calls[index].backward_s = self._lap(self.calls[index])
            self._running = index - 1

    def end_unit(self, *_: Any) -> None:
        """End the unit of the current call; what follows, up to the next unit, belongs to the call."""
        self.is_after = True

    def _lap(self, call: Call) -> float:
        """Return the seconds since the last lap; add to a call's working bytes what was allocated in between."""
        seconds, used = synchronized_time(*self._devices) - self._began, memory_use(*self._devices)
        before, self._levels = self._levels, [level for level, _ in used]
        # What is there before or afterwards is saved, an output, or a gradient.
        levels = map(max, before, self._levels)
        extra = (peak - level for (_, peak), level in zip(used, levels, strict=True))
        call.working_bytes = max(call.working_bytes, *extra, 0.0)
        self._began = synchronized_time(*self._devices)
        return seconds


@contextlib.contextmanager
def count_saved_bytes(clock: Clock, known: tuple[nn.Module, Any], *, keeps: bool) -> Iterator[None]:
    """Count the bytes that autograd saves in each unit call: each storage once, those of parameters and inputs never.

    Without `keeps`, nothing is saved, and backward is impossible.

    Raises:
        NothingSavedError: a backward needs what was not saved.
    """
    refer: Any = StorageWeakRef
    tensors = (*known[0].parameters(), *(each for each in leaves(known[1]) if isinstance(each, torch.Tensor)))
    seen = {refer(each.untyped_storage()) for each in tensors}

    def pack(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        reference = refer(storage)  # not data_ptr, which the next tensor has if nothing is kept
        if reference not in seen and clock.calls:
            seen.add(reference)
            clock.calls[-1].saved.append(_Saved(reference, storage.nbytes(), clock.is_after))
        return tensor if keeps else None

    def unpack(kept: Any) -> Any:
        if kept is None:
            raise NothingSavedError
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
