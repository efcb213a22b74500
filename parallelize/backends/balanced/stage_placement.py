"""Parameters, buffers, gradients and optimizer state on the devices of their stages, and back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallelize.backends.balanced.segment import Stage

__all__ = ["Placement"]


class Placement:
    """Where the tensors of a model are, from the entry of a block to its end.

    Parameters stay the objects they are, so that optimizers made before the block go on. What an optimizer keeps for a
    parameter follows it at the next step.

    Args:
        model: whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._former = [(tensor, tensor.device) for tensor in _tensors(model)]
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let optimizers' state follow the parameters while this lasts; at the end all go back where they were."""
        handle = register_optimizer_step_pre_hook(self._before_step)
        try:
            yield
        finally:
            handle.remove()
            for tensor, device in self._former:
                _move(tensor, device)
            for optimizer in self._optimizers:
                _follow(optimizer)

    def put(self, homes: Sequence[tuple[nn.Module, int]], stages: Sequence[Stage]) -> None:
        """Move every tensor to the stage of the first module that holds it.

        Args:
            homes: modules with their stages, in the order in which they are called as far as it is known.
            stages: with their devices.
        """
        seen: set[int] = set()
        for module, stage in sorted(homes, key=lambda home: home[1]):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    _move(tensor, stages[stage].device)

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        _follow(optimizer)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@torch.no_grad()
def _move(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device == device:
        return
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(device)
    tensor.grad = None if gradient is None else gradient.to(device)


def _follow(optimizer: torch.optim.Optimizer) -> None:
    """Bring what an optimizer keeps for each parameter to that parameter; counters stay where they are."""
    state: dict[Any, Any] = optimizer.state
    for parameter, kept in state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(kept, dict):
            continue
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device:
                kept[name] = value.to(parameter.device)
