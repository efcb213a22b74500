"""Warnings about the first optimizer step: equal inputs of the ranks, and losses over unequal numbers of targets."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallelize.agreement.fingerprint import fingerprint
from parallelize.agreement.gather import gather_objects
from parallelize.gradients.target_counts import are_equal
from parallelize.run.containers import leaves
from parallelize.run.context import current, is_capturing, is_main, rank
from parallelize.run.user_line import user_stacklevel

__all__ = ["FirstStep"]


class FirstStep:
    """The inputs of a block's forwards until the first optimizer step.

    Args:
        models: the models of the block.
        is_over: whether inputs are not compared.
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

    def compare(self, counts_of_terms: Sequence[float]) -> None:
        """Compare the inputs of the ranks, and the numbers of targets of their losses' terms; empty: not known."""
        self.is_over = True
        inputs = hash(tuple(self._fingerprints)) if self._fingerprints else rank()  # unequal: not known
        all_inputs, counts_of_ranks = zip(*gather_objects((inputs, tuple(counts_of_terms))), strict=True)
        told, is_same = current().loader_warnings, len({*all_inputs}) == 1
        if is_same:
            told.same_inputs_at = told.passes
        if not is_main():
            return
        if is_same and not told.names_loader:
            warnings.warn(
                f"{len(all_inputs)} ranks read the same data: the inputs of "
                f"{' + '.join(type(each).__name__ for each in self._models)} were bitwise equal on all ranks in the "
                "first step. Wrap the loader in shard_loader; if the data is drawn from a generator, seed it "
                "differently on each rank; if equal inputs are intended, call "
                "warnings.filterwarnings('ignore', '.*ranks read the same data')",
                stacklevel=user_stacklevel(),
            )
        _warn_of_unequal_counts(counts_of_ranks)


def _warn_of_unequal_counts(counts_of_ranks: Sequence[tuple[float, ...]]) -> None:
    """Warn if a term of the loss averages over different numbers of targets on the ranks.

    Args:
        counts_of_ranks: for each rank, the numbers of targets of its loss's terms; empty: not known.
    """
    known = [counts for counts in counts_of_ranks if counts]
    # Ranks whose losses have different terms are compared in the terms that all of them have.
    for counts_of_term in zip(*known, strict=False):
        least, most = min(counts_of_term), max(counts_of_term)
        if most > least * (1 + 1e-6):
            has_several_counts = not all(map(are_equal, known))
            advice = _FOR_SEVERAL_COUNTS if has_several_counts else _FOR_ONE_COUNT
            warnings.warn(
                f"losses average over different numbers of targets: {least:g} to {most:g} on different ranks "
                "in the first step. Gradients are averaged with equal weights, so that a target in a small batch "
                f"counts up to {most / max(least, 1):.3g} times as much as another, unlike in one batch of one "
                f"process. {advice}",
                stacklevel=user_stacklevel(),
            )
            return


_FOR_ONE_COUNT = "parallel_model(model, average='tokens') weights them by the number of targets."
_FOR_SEVERAL_COUNTS = (
    "Its terms average over different numbers of targets: divide the sum of each term by its number of targets on all "
    "ranks, per rank, as in term.sum() / parallelize.all_reduce(float(count), 'mean')."
)
