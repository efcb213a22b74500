"""Warnings about the first optimizer step: equal inputs of the ranks, and unequal target counts.

    each forward           `FirstStep.add`: the inputs are hashed
    first optimizer step   `FirstStep.compare`: the ranks exchange the hash of their inputs, and how
                           many targets their losses average over
    from then on           nothing is done

Ranks that read the same data do the work of one rank, and no result shows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallelize.agreement.fingerprint import comparison_group, fingerprint
from parallelize.agreement.gather import gather_objects
from parallelize.gradients.target_counts import are_equal
from parallelize.run.containers import leaves
from parallelize.run.context import current, is_capturing, is_main, rank
from parallelize.run.user_line import user_stacklevel

_ROUNDING = 1e-6
"""Relative difference of two numbers of targets that are equal but for rounding."""


class FirstStep:
    """The inputs of a block's forwards until the first optimizer step.

    Args:
        models: the models of the block.
        is_over: whether inputs are not compared, as on one rank.

    Attributes:
        is_over: whether no inputs are added any more.
    """

    def __init__(self, models: Sequence[nn.Module], *, is_over: bool) -> None:
        self._models = models
        self._fingerprints: list[int] = []
        self.is_over = is_over

    def add(self, inputs: Any) -> None:
        """Hash the tensors of a forward's inputs; called before each forward until the first step.

        Inputs whose tensors have one element each are not hashed: a step counter is equal on all
        ranks, and says nothing of the data.
        """
        tensors = [leaf for leaf in leaves(inputs) if type(leaf) is torch.Tensor]
        has_data = any(tensor.numel() > 1 for tensor in tensors)
        if not has_data or is_capturing() or torch.compiler.is_compiling():
            return
        try:
            self._fingerprints.append(int(fingerprint(tensors)))
        except RuntimeError:
            # Some tensors have no values to read, such as those inside of torch.func.vmap.
            self.is_over = True

    def compare(self, counts_of_terms: Sequence[float]) -> None:
        """Compare the inputs of the ranks, and their numbers of targets; a collective.

        Rank 0 warns of equal inputs, and of unequal numbers.

        Args:
            counts_of_terms: for each term of this rank's loss, the number of targets that it
                averages over; empty: not known.
        """
        self.is_over = True
        hash_of_inputs = hash(tuple(self._fingerprints))
        if not self._fingerprints:
            # Nothing is known of the inputs: another number on each rank makes them count as
            # different.
            hash_of_inputs = rank()
        sent = hash_of_inputs, tuple(counts_of_terms)
        replies = gather_objects(sent, group=comparison_group())
        distinct_inputs, counts_of_ranks = set(), []
        run = current()
        # The ranks that hold one tensor parallel model read equal inputs.
        for rank_of_world in run.data_ranks.ranks:
            hash_of_rank, counts_of_rank = replies[rank_of_world]
            distinct_inputs.add(hash_of_rank)
            counts_of_ranks.append(counts_of_rank)
        loader_warnings = run.loader_warnings
        has_equal_inputs = len(distinct_inputs) == 1 and len(counts_of_ranks) > 1
        if has_equal_inputs:
            # The check of loops over a DataLoader then does not warn of the same step again.
            loader_warnings.same_inputs_at = loader_warnings.passes
        if not is_main():
            return
        # A warning that names the line of the loader has said the same, and more.
        if has_equal_inputs and not loader_warnings.names_loader:
            _warn_of_equal_inputs(self._models, len(counts_of_ranks))
        _warn_of_unequal_counts(counts_of_ranks)


def _warn_of_equal_inputs(models: Sequence[nn.Module], ranks: int) -> None:
    """Warn that the ranks do the work of one.

    Args:
        models: the models of the block.
        ranks: number of ranks.
    """
    names = " + ".join(type(model).__name__ for model in models)
    warnings.warn(
        f"{ranks} ranks read the same data: the inputs of {names} were bitwise equal on all ranks "
        "in the first step. Wrap the loader in shard_loader; if the data is drawn from a "
        "generator, seed it differently on each rank; if equal inputs are intended, call "
        "warnings.filterwarnings('ignore', '.*ranks read the same data')",
        stacklevel=user_stacklevel(),
    )


def _warn_of_unequal_counts(counts_of_ranks: Sequence[tuple[float, ...]]) -> None:
    """Warn of the first term of the loss that averages over different numbers of targets.

    Args:
        counts_of_ranks: for each rank, the number of targets of each term of its loss. A rank with
            an empty tuple does not know the numbers, and is not compared.
    """
    known_counts = [counts for counts in counts_of_ranks if counts]
    # Ranks whose losses have different terms are compared in the terms that all of them have.
    for counts_of_term in zip(*known_counts, strict=False):
        least, most = min(counts_of_term), max(counts_of_term)
        if most > least * (1 + _ROUNDING):
            # average='tokens' has one weight for the whole loss of a rank. The weight is right for
            # all terms only if these average over equal numbers of targets.
            advice = _FOR_ONE_COUNT
            if not all(map(are_equal, known_counts)):
                advice = _FOR_SEVERAL_COUNTS
            warnings.warn(
                f"losses average over different numbers of targets: {least:g} to {most:g} on "
                "different ranks in the first step. Gradients are averaged with equal weights, so "
                f"that a target in a small batch counts up to {most / max(least, 1):.3g} times as "
                f"much as another, unlike in one batch of one process. {advice}",
                stacklevel=user_stacklevel(),
            )
            return


_FOR_ONE_COUNT = "parallel_model(model, average='tokens') weights them by the number of targets."
_FOR_SEVERAL_COUNTS = (
    "Its terms average over different numbers of targets: divide the sum of each term by its mean "
    "number of targets over the ranks, as in term.sum() / parallelize.all_reduce(float(count), "
    "'mean')."
)
