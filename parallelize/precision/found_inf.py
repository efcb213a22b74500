"""Inf and nan checks: which optimizer steps are skipped, and when the loss scale is updated."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from parallelize.precision.loss_scale import LossScale
from parallelize.precision.unscale import max_flag

__all__ = ["FoundInf"]


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
