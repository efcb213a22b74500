"""A step of an optimizer that runs and changes nothing."""

from __future__ import annotations

from collections import defaultdict

import torch

from parallelize.runtime.gradients import parameters_of

__all__ = ["Skips", "stand_in"]


class Skips:
    """Steps that are being left out, with what has to come back after each.

    torch has a hook before a step, and none that could prevent it. The hook may exchange the arguments, and the first
    of them is the optimizer: a stand-in without parameters takes the step instead. Whoever counts steps (schedulers
    do) has seen one; the optimizer's state is untouched, whatever its step counts or keeps.

    Gradients are hidden for as long, for optimizers with a list of parameters of their own.
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]]] = []

    @property
    def is_inside(self) -> bool:
        """Whether a step is being left out now: then so are the steps it takes inside (optimizers that wrap others)."""
        return bool(self._hidden)

    def begin(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Hide the gradients of an optimizer; returns who takes the step instead of it."""
        held = [(each, each.grad) for each in parameters_of(optimizer) if each.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        self._hidden.append((optimizer, held))
        return stand_in(optimizer)

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients back if the step of this optimizer was left out."""
        if self._hidden and self._hidden[-1][0] is optimizer:
            self._bring_back(self._hidden.pop()[1])

    def give_up(self) -> None:
        """Bring everything back: a step has ended by an exception, and nobody came to `end` it."""
        while self._hidden:
            self._bring_back(self._hidden.pop()[1])

    @staticmethod
    def _bring_back(held: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for parameter, gradient in held:
            parameter.grad = gradient


def stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A twin of an optimizer that has its class, its attributes and its options, and neither parameters nor state."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    return twin
