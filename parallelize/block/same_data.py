"""Warning for ranks that read the same data: their inputs are compared once, at the first optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.runtime.containers import leaves
from parallelize.runtime.context import is_capturing
from parallelize.runtime.fingerprint import differences, fingerprint
from parallelize.runtime.user_line import user_stacklevel

__all__ = ["SameData"]


class SameData:
    """The inputs of a block's forwards until the first optimizer step.

    Args:
        models: the models of the block.
        is_over: whether nothing is compared.
    """

    def __init__(self, models: Sequence[nn.Module], *, is_over: bool) -> None:
        self._models, self._fingerprints = models, list[int]()
        self.is_over = is_over

    def add(self, inputs: Any) -> None:
        """Hash the tensors of a forward's inputs, of which any has more than one element."""
        tensors = [each for each in leaves(inputs) if type(each) is torch.Tensor]
        if is_capturing() or torch.compiler.is_compiling() or not any(each.numel() > 1 for each in tensors):
            return
        try:
            self._fingerprints.append(int(fingerprint(tensors)))
        except RuntimeError:  # e.g. a tensor inside torch.func.vmap
            self.is_over = True

    def compare(self) -> None:
        """Warn if all inputs of the first step are equal on all ranks; a collective of 16 bytes."""
        self.is_over = True
        total = hash(tuple(self._fingerprints)) if self._fingerprints else dist.get_rank()  # unequal: not known
        if any(differences([torch.tensor(total)])):
            return
        warnings.warn(
            f"{dist.get_world_size()} ranks read the same data: the inputs of "
            f"{' + '.join(type(each).__name__ for each in self._models)} were bitwise equal on all ranks in the first "
            "step. Wrap the loader in shard_loader; if the data is drawn from a generator, seed it differently on each "
            "rank; if equal inputs are intended, call warnings.filterwarnings('ignore', '.*ranks read the same data')",
            stacklevel=user_stacklevel(),
        )
