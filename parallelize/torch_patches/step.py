"""The hooks before and after the steps of all optimizers, which no other file registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["Closure", "StepCount", "after_step", "before_step", "change_closure", "parameters_of"]

Closure = Callable[..., Any]
"""Function that computes the gradients of an optimizer's step, and returns the loss."""

# Each calls hook(optimizer, args, kwargs), in the order of registration, until the returned handle is removed;
# a hook before a step may return other (args, kwargs), where args[0] is the optimizer.
before_step = register_optimizer_step_pre_hook
after_step = register_optimizer_step_post_hook


class StepCount:
    """A hook after steps that counts them: `number`."""

    number = 0

    def __call__(self, *_: Any) -> None:
        """Count a step."""
        self.number += 1


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of an optimizer, param group by param group."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        found += group["params"]
    return found


def change_closure(
    change: Callable[[Closure], Closure], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return (args, kwargs) of an optimizer's `step` with another closure; None: it has none."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": change(closure)}
    return (args[0], change(closure), *args[2:]), kwargs
