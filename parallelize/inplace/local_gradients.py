"""Local gradients, computed on this rank only and not averaged: optimizer steps on them are refused."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallelize.errors import SyncError
from parallelize.runtime.gradients import parameters_of

__all__ = ["BYPASSED", "INCOMPLETE", "UNDER_NO_SYNC", "LocalGradient", "claim_gradients", "refuse_steps_after_block"]

BYPASSED = "it was computed from this rank's batch alone: a submodule or a method other than forward was called, the \
model was used functionally, or backward ran more often than the model's forward"
UNDER_NO_SYNC = "it was accumulated under no_sync, and no backward outside of no_sync has averaged it since"
INCOMPLETE = "its backward gave other parameters no gradient, so the averaging was never completed"

_FIXES = {
    BYPASSED: "call the model itself; name other methods, as in parallel_model(model, methods=['encode']); for "
    "several forwards call backward once, on the sum of their losses",
    UNDER_NO_SYNC: "run forward and backward of the last micro-batch outside of no_sync, with every parameter in use",
    INCOMPLETE: "use backend=DDPBackend(find_unused_parameters=True), or call zero_grad before the next backward",
}


@dataclass(frozen=True)
class LocalGradient:
    """A parameter whose `.grad` was computed on this rank only.

    Args:
        parameter: the parameter.
        name: name of the parameter and its model, for the error.
        why: BYPASSED, UNDER_NO_SYNC or INCOMPLETE.
    """

    parameter: torch.Tensor
    name: str
    why: str

    @property
    def is_nonzero(self) -> bool:
        """Whether the gradient exists and has a nonzero element; steps on other gradients are not refused."""
        gradient = self.parameter.grad
        if gradient is None:
            return False
        return bool((gradient._values() if gradient.is_sparse else gradient).count_nonzero())

    def error(self) -> SyncError:
        """Build the error for an optimizer that would step on this gradient."""
        return SyncError(
            f"the gradient of {self.name} is not averaged over the ranks", why=self.why, fix=_FIXES[self.why]
        )


class _AfterBlock:
    """Optimizer hook that refuses steps on local gradients of an ended block, until they are freed or claimed.

    Args:
        gradients: the local gradients at the end of the block.
    """

    def __init__(self, gradients: Sequence[LocalGradient]) -> None:
        # Weak references keep no gradient alive; once all gradients are freed, the hook removes itself.
        self._gradients = {
            id(each.parameter): (
                weakref.ref(each.parameter.grad, functools.partial(self._forget, id(each.parameter))),
                each.name,
                each.why,
            )
            for each in gradients
        }
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def take(self, parameter: torch.Tensor) -> LocalGradient | None:
        """Stop checking a parameter; return its local gradient, or None if that was replaced or freed."""
        local = self._find(parameter)
        self._forget(id(parameter))
        return local

    def _find(self, parameter: torch.Tensor) -> LocalGradient | None:
        gradient, name, why = self._gradients.get(id(parameter), (None, "", ""))
        is_same = gradient is not None and parameter.grad is not None and gradient() is parameter.grad
        return LocalGradient(parameter, name, why) if is_same else None

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for each in parameters_of(optimizer):
            local = self._find(each)
            if local is not None and local.is_nonzero:
                raise local.error()

    def _forget(self, parameter_id: int, _: Any = None) -> None:
        self._gradients.pop(parameter_id, None)
        if not self._gradients:
            self._handle.remove()


# Global, because gradients belong to the process, not to a context or a thread.
_active: weakref.WeakSet[_AfterBlock] = weakref.WeakSet()


def refuse_steps_after_block(gradients: Sequence[LocalGradient]) -> None:
    """Refuse optimizer steps on local gradients after the end of the block that computed them."""
    held = [each for each in gradients if each.parameter.grad is not None]
    if held:
        _active.add(_AfterBlock(held))


def claim_gradients(model: nn.Module) -> list[LocalGradient]:
    """Return the local gradients of a model from earlier blocks, and stop checking them: the caller does so now."""
    found = [each.take(parameter) for each in tuple(_active) for parameter in model.parameters()]
    return [local for local in found if local is not None]
