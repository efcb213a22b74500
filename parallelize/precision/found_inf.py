"""Inf and nan checks: which optimizer steps are skipped, and when the loss scale is updated."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from parallelize.precision.loss_scale import LossScale, max_flag
from parallelize.torch_patches.step import parameters_of

__all__ = ["FoundInf", "SkippedSteps"]


class FoundInf:
    """The found_inf flag of each optimizer, and the update of the scale once per iteration.

        backward, backward, step A, step B  |  backward, step A  |  backward ...
                                       update               update

    The scale is updated by the first backward after a step, however many optimizers have stepped; this corresponds to
    one call of `GradScaler.update()`.

    A step is skipped if the optimizer's own gradients have inf or nan, as under GradScaler. Gradients are checked right
    after backward, before user code can clip inf to a finite number. At that time it is unknown which optimizers will
    step a leaf. So leaves are checked in groups: each group is the leaves that the same optimizers have stepped so far.
    Before the first update of the scale, each leaf is a separate group.

    Args:
        scale: the loss scale to update.
        all_reduce_flag: all-reduces a 0-dim flag (0 or 1) to its maximum, in place; None: ranks have equal flags.
    """

    def __init__(self, scale: LossScale, *, all_reduce_flag: Callable[[torch.Tensor], None] | None = None) -> None:
        self._scale = scale
        self._all_reduce_flag = all_reduce_flag
        # id of a leaf (tensors compare by value) -> bit mask of the optimizers that have stepped it.
        self._owners: dict[int, int] = defaultdict(int)
        self._bits: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._num_optimizers = 0
        self._flags: dict[int, torch.Tensor] = {}
        self._step_flags: list[torch.Tensor] = []
        self._has_updated = False

    def group_leaves(self, leaves: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """Return the groups in which leaves are checked for inf and nan: group key -> leaves."""
        groups: dict[int, list[torch.Tensor]] = defaultdict(list)
        for leaf in leaves:
            owners = self._owners.get(id(leaf), 0)
            groups[owners if owners or self._has_updated else -id(leaf)].append(leaf)
        return groups

    def record(self, groups: Mapping[int, Iterable[torch.Tensor]], flags: Mapping[int, torch.Tensor]) -> None:
        """Store the flags of a backward pass, which include inf accumulated by earlier passes of the iteration."""
        self._flags = {id(leaf): flags[key] for key, leaves in groups.items() if key in flags for leaf in leaves}

    def has_checked(self, leaf: torch.Tensor) -> bool:
        """Return whether the most recent scaled backward checked the gradient of `leaf`."""
        return id(leaf) in self._flags

    def for_optimizer(self, optimizer: torch.optim.Optimizer, leaves: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return 1 if the step of `optimizer` must be skipped, else 0; equal on all ranks.

        Args:
            optimizer: the optimizer that is about to step.
            leaves: its parameters.

        Returns:
            0-dim fp32 tensor on the scale's device; None if no scaled backward has reached these leaves.
        """
        flags = {}
        bit = self._bit_of(optimizer)
        for leaf in leaves:
            self._owners[id(leaf)] |= bit
            flag = self._flags.get(id(leaf))
            if flag is not None:
                flags[id(flag)] = flag
        if not flags and self._all_reduce_flag is None:
            return None
        device = self._scale.device
        found_inf = max_flag(flags.values(), device=device) if flags else torch.zeros((), device=device)
        if self._all_reduce_flag is not None:
            self._all_reduce_flag(found_inf)
        self._step_flags.append(found_inf)
        return found_inf

    def update_scale(self) -> None:
        """Update the scale if an optimizer has stepped since the previous update."""
        if not self._step_flags:
            return
        self._scale.update(max_flag(self._step_flags, device=self._scale.device))
        self._step_flags.clear()
        self._has_updated = True

    def forget(self, leaves: Iterable[Any]) -> None:
        """Remove leaves that are no longer parameters of the block."""
        for leaf in leaves:
            self._owners.pop(id(leaf), None)
            self._flags.pop(id(leaf), None)

    def _bit_of(self, optimizer: torch.optim.Optimizer) -> int:
        if optimizer not in self._bits:
            self._bits[optimizer] = 1 << self._num_optimizers
            self._num_optimizers += 1
        return self._bits[optimizer]


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
        copied: torch.optim.Optimizer = object.__new__(type(optimizer))
        copied.__dict__.update(optimizer.__dict__)
        copied.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
        copied.state = defaultdict(dict)
        return copied

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the gradients if the step of this optimizer was skipped."""
        if self._hidden and self._hidden[-1][0] is optimizer:
            self._restore_last()

    def restore_all(self) -> None:
        """Restore the gradients of every skipped step for which `finish` was not called, because the step raised."""
        while self._hidden:
            self._restore_last()

    def _restore_last(self) -> None:
        for parameter, gradient in self._hidden.pop()[1]:
            parameter.grad = gradient
