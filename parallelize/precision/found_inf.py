"""When the loss scale moves, and whose step is left out."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from parallelize.precision.loss_scale import LossScale
from parallelize.precision.unscale import worst

__all__ = ["Rounds"]


class Rounds:
    """A round is what happens from one move of the scale to the next: backwards, then the steps that follow them.

        backward, backward, step A, step B  |  backward, step A  |  backward ...
                                         close                close

    It closes at the first backward after a step, however many optimizers have stepped: like one `GradScaler.update()`.

    Each optimizer is judged by its own gradients, as under GradScaler. They are checked right after backward, before
    the user can clip inf to a number, and nobody has told us then which optimizer holds what. So leaves are checked in
    groups that have the same optimizers as far as steps have shown; in the first round, when none have, one by one.

    Args:
        scale: what is moved.
        agree: makes a flag (0 or 1, without dimensions) the same on all ranks; None: it is so anyway.
    """

    def __init__(self, scale: LossScale, *, agree: Callable[[torch.Tensor], None] | None = None) -> None:
        self._scale = scale
        self._agree = agree
        # Bit n of a leaf's owners: the n-th optimizer that we have seen steps it. By id: tensors compare by value.
        self._owners: dict[int, int] = defaultdict(int)
        self._bits: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._optimizers = 0
        self._flags: dict[int, torch.Tensor] = {}
        self._found: list[torch.Tensor] = []
        self._has_closed = False

    def grouped(self, leaves: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """Leaves by the group in which they are checked for inf and nan."""
        groups: dict[int, list[torch.Tensor]] = defaultdict(list)
        for leaf in leaves:
            owners = self._owners.get(id(leaf), 0)
            groups[owners if owners or self._has_closed else -id(leaf)].append(leaf)
        return groups

    def record(self, groups: Mapping[int, Iterable[torch.Tensor]], found: Mapping[int, torch.Tensor]) -> None:
        """Keep what a backward has found; what earlier ones of the round found is in the gradients still."""
        self._flags = {id(leaf): found[key] for key, leaves in groups.items() if key in found for leaf in leaves}

    def has_judged(self, leaf: torch.Tensor) -> bool:
        """Whether the last backward has scaled the gradient of a leaf."""
        return id(leaf) in self._flags

    def verdict(self, optimizer: torch.optim.Optimizer, leaves: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """1 if the step of an optimizer is to be left out, else 0; the same on all ranks.

        Args:
            optimizer: the one that is about to step.
            leaves: its parameters.

        Returns:
            fp32 without dimensions, on the scale's device; None if no scaled backward has led to these leaves.
        """
        flags = {}
        bit = self._bit_of(optimizer)
        for leaf in leaves:
            self._owners[id(leaf)] |= bit
            flag = self._flags.get(id(leaf))
            if flag is not None:
                flags[id(flag)] = flag
        if not flags and self._agree is None:
            return None
        device = self._scale.device
        found = worst(flags.values(), device=device) if flags else torch.zeros((), device=device)
        if self._agree is not None:
            self._agree(found)
        self._found.append(found)
        return found

    def close(self) -> None:
        """Move the scale if a step has been taken since it moved last."""
        if not self._found:
            return
        self._scale.update(worst(self._found, device=self._scale.device))
        self._found.clear()
        self._has_closed = True

    def forget(self, leaves: Iterable[Any]) -> None:
        """Leaves are no longer the block's."""
        for leaf in leaves:
            self._owners.pop(id(leaf), None)
            self._flags.pop(id(leaf), None)

    def _bit_of(self, optimizer: torch.optim.Optimizer) -> int:
        if optimizer not in self._bits:
            self._bits[optimizer] = 1 << self._optimizers
            self._optimizers += 1
        return self._bits[optimizer]
