"""Skipping of optimizer steps after inf or nan: the step still runs, but on a copy without parameters."""

from __future__ import annotations

from collections import defaultdict

import torch

from parallelize.runtime.gradients import parameters_of

__all__ = ["SkippedSteps", "without_parameters"]


class SkippedSteps:
    """The steps that are being skipped, with the gradients to restore after each step.

    A step pre-hook cannot cancel the step, but it can replace the step's first argument, the optimizer, by a copy
    without parameters. Schedulers still count the step, and the state of the optimizer is unchanged.

    During the step `.grad` is None, because some optimizers keep a separate list of parameters.
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]]] = []

    @property
    def is_skipping(self) -> bool:
        """Whether a step is being skipped; steps inside it (by optimizers that wrap others) are skipped too."""
        return bool(self._hidden)

    def skip(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Set the gradients of an optimizer to None, and return the copy of the optimizer that steps instead."""
        gradients = [(each, each.grad) for each in parameters_of(optimizer) if each.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        self._hidden.append((optimizer, gradients))
        return without_parameters(optimizer)

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the gradients if the step of this optimizer was skipped."""
        if self._hidden and self._hidden[-1][0] is optimizer:
            self._restore(self._hidden.pop()[1])

    def restore_all(self) -> None:
        """Restore the gradients of every skipped step for which `finish` was not called, because the step raised."""
        while self._hidden:
            self._restore(self._hidden.pop()[1])

    @staticmethod
    def _restore(gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with its class, attributes and options, but no parameters and no state."""
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    copied.state = defaultdict(dict)
    return copied
