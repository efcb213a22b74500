"""One forward of a model, which counts what autograd saves, and leaves nothing behind.

Saved tensors are dropped at once, so that the forward needs little more than the parameters. What
backward takes is computed from them: it frees what is saved in reverse order, while it computes
the gradients of the parameters that it meets.

    saved by forward      a1  w1  a2  w2  a3          activations and weights, in this order
    backward, step 1      a1  w1  a2  w2              a3 is freed
             step 2       a1  w1  a2      + grad w2   with a copy in the message to other ranks
             step 3       a1  w1          + grad w2   a2 is freed
             ...
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelize.backends.auto.model_bytes import bytes_of, release_cache
from parallelize.backends.batches import Batch
from parallelize.backends.model_state import ModelState
from parallelize.backends.saved_tensors import (
    DroppedTensorError,
    StorageKey,
    storage_key,
    watch_saved,
)
from parallelize.plugins.base import Arguments, Inner
from parallelize.run.containers import tensors_in
from parallelize.torch_patches.module_tensors import all_buffers, all_parameters

_NO_MEMORY_OF_CPU = "DefaultCPUAllocator: can't allocate memory"
"""Text of the RuntimeError of torch's allocator of the CPU, which has no class of its own."""

_NO_HOOKS = "don't yet support saved tensor hooks"
"""Text of the RuntimeError of torch.func.grad (torch/_functorch/eager_transforms.py)."""


@dataclass(frozen=True)
class ForwardBytes:
    """What a forward saves; the fields are those of `ModelBytes`."""

    saved: float
    backward: float


class _End(enum.Enum):
    """How a measured forward has ended."""

    COMPLETE = enum.auto()
    """It has returned."""

    NO_MEMORY = enum.auto()
    """It does not fit on the device."""

    NOT_COUNTED = enum.auto()
    """It calls torch.func.grad or the like, in which torch does not tell what is saved."""

    DROPPED = enum.auto()
    """It needs a tensor that was dropped, since it computes gradients itself, such as forces."""


def measure_forward(
    inner: Inner, inputs: Arguments, *, devices: Sequence[torch.device], gradient_copies: int
) -> ForwardBytes:
    """Run a forward, and return what it saves, and what its backward will take.

    Parameters, buffers, attributes of modules, random generators and the inputs stay as they are.

    Args:
        inner: holds the model.
        inputs: arguments of the forward.
        devices: devices of this process.
        gradient_copies: how often a gradient is in memory: twice, if it is sent to other ranks.
    """
    state = ModelState(inner.model, devices)
    try:
        saved = _run(inner, inputs, state, keeps=False)
        if saved.end is _End.DROPPED:
            state.restore()
            saved = _run(inner, inputs, state, keeps=True)
    finally:
        state.restore()
        release_cache(devices[0])
    return saved.bytes_of_backward(gradient_copies)


def _run(inner: Inner, inputs: Arguments, state: ModelState, *, keeps: bool) -> _SavedInOrder:
    """Run a forward on copies of the inputs, and return what it has saved until it ended.

    Args:
        inner: holds the model.
        inputs: arguments of the forward.
        state: what the forward may change, which it watches.
        keeps: whether saved tensors stay alive.
    """
    saved = _SavedInOrder(inner.model)
    args, kwargs = Batch.whole(inputs).trial(1).inputs
    tensors = [*all_parameters(inner.model), *all_buffers(inner.model)]
    try:
        with state.watching(), watch_saved(saved.add, uncounted=tensors, keeps=keeps):
            saved.add_outputs(inner(*args, **kwargs))
    except (MemoryError, RuntimeError) as error:
        end = _end_after(error)
        if end is None:
            raise
        saved.end = end
    return saved


def _end_after(error: Exception) -> _End | None:
    """Return how a forward has ended that has raised an error; None: it is an error of the user."""
    if isinstance(error, DroppedTensorError):
        return _End.DROPPED
    is_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if is_of_memory or _NO_MEMORY_OF_CPU in str(error):
        return _End.NO_MEMORY
    if _NO_HOOKS in str(error):
        return _End.NOT_COUNTED
    return None


class _SavedInOrder:
    """The storages that a forward saves, in their order.

    Args:
        model: the model, whose parameters are not counted, but their gradients are.

    Attributes:
        end: how the forward has ended.
    """

    def __init__(self, model: nn.Module) -> None:
        self.end = _End.COMPLETE
        self._saved: list[tuple[StorageKey, int]] = []
        self._output_bytes = 0
        self._gradient_bytes = Counter[StorageKey]()
        for parameter in all_parameters(model):
            if parameter.requires_grad and parameter.layout is torch.strided:
                self._gradient_bytes[storage_key(parameter)] += parameter.nbytes

    def add(self, key: StorageKey, new_bytes: int) -> None:
        """Note a storage that is saved; it has 0 new bytes if it was saved before."""
        self._saved.append((key, new_bytes))

    def add_outputs(self, outputs: Any) -> None:
        """Note what forward returns: the user's loss saves about as much as that."""
        self._output_bytes = bytes_of(tensors_in(outputs))

    def bytes_of_backward(self, gradient_copies: int) -> ForwardBytes:
        """Return what is saved, and the most that is held at once while backward frees it."""
        sizes = [size for _, size in self._saved]
        # Backward also holds the gradient of one activation, which is as large as that.
        saved = sum(sizes) + self._output_bytes + max([*sizes, self._output_bytes])
        if self.end is _End.NO_MEMORY:
            return ForwardBytes(saved, backward=math.inf)
        held = saved
        most = saved
        missing = Counter(self._gradient_bytes)
        for key, size in reversed(self._saved):
            held += gradient_copies * missing.pop(key, 0)
            most = max(most, held)
            held -= size
        # Forward does not save the parameters of all modules: not the table of an embedding.
        held += gradient_copies * missing.total()
        return ForwardBytes(saved, backward=max(most, held))
