"""Gradients that blocks have left as each rank's own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallelize.inplace.local_gradients import Own
from parallelize.runtime.gradients import parameters_of

__all__ = ["claim", "leave_behind"]


class _Leftovers:
    """Refuses to step on gradients that a block has left, until they are thrown away or another block claims them.

    Args:
        own: what is left.
    """

    def __init__(self, own: Sequence[Own]) -> None:
        # Weakly: nothing here is a reason to keep a model. With the last of the gradients this goes too.
        self._left = {
            id(each.parameter): (
                weakref.ref(each.parameter.grad, functools.partial(self._forget, id(each.parameter))),
                each.name,
                each.why,
            )
            for each in own
        }
        self._handle = register_optimizer_step_pre_hook(self._on_step)

    def take(self, parameter: torch.Tensor) -> Own | None:
        """What is known of a parameter's gradient, if it is still the one that was left; forgotten here."""
        own = self._known(parameter)
        self._forget(id(parameter))
        return own

    def _known(self, parameter: torch.Tensor) -> Own | None:
        gradient, name, why = self._left.get(id(parameter), (None, "", ""))
        is_left = gradient is not None and parameter.grad is not None and gradient() is parameter.grad
        return Own(parameter, name, why) if is_left else None

    def _on_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for each in parameters_of(optimizer):
            own = self._known(each)
            if own is not None and own.matters:
                raise own.refusal()

    def _forget(self, parameter: int, _: Any = None) -> None:
        self._left.pop(parameter, None)
        if not self._left:
            self._handle.remove()


# Gradients belong to the process, not to a context or a thread: so does the knowledge of what they are.
_open: weakref.WeakSet[_Leftovers] = weakref.WeakSet()


def leave_behind(own: Sequence[Own]) -> None:
    """Let no optimizer step, after their block, on gradients that are this rank's own."""
    held = [each for each in own if each.parameter.grad is not None]
    if held:
        _open.add(_Leftovers(held))


def claim(model: nn.Module) -> list[Own]:
    """The gradients of a model that earlier blocks have left; from now on the caller's matter."""
    found = [each.take(parameter) for each in tuple(_open) for parameter in model.parameters()]
    return [own for own in found if own is not None]
