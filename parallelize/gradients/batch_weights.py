"""Weights of batches: a backward pass starts from the weight of its batch instead of 1.

Process `r` of `W` has `c_r` samples, and the gradient `g_r` of their mean loss. Gradients are
averaged over processes, so the weights `w_r` are:

    mean over all samples  =  sum_r c_r g_r / sum_r c_r  =  1/W sum_r w_r g_r
                                                            with  w_r = W c_r / sum_r c_r

Nothing else changes: gradient accumulation, all engines and all optimizers work as before. The mean
of the `w_r` is 1, so that regularization of parameters stays correct. All processes make the same
steps with the same gradients, so they cannot diverge, as they can under torch's `Join`.

Which batch a pass belongs to is the state of the run, in `run/loader_weights.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from parallelize.errors import ConfigError
from parallelize.gradients.autograd_graph import scaled_start
from parallelize.run.loader_weights import LoaderLoop, LoaderWeights
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed

Weight = float | torch.Tensor
"""A number of the host, or one in a 0-dim tensor of the device, which the host does not read."""


def with_weight(backward_pass: Pass, weight: Weight) -> Pass:
    """Return a backward pass with its loss multiplied by a weight.

    Raises:
        ConfigError: the loss has a weight already.
    """
    if backward_pass.is_weighted:
        raise ConfigError(
            "a loss through models of two parallel_model blocks, both with average='sum' or "
            "'tokens'",
            why="each block would weight the loss",
            fix="use one block: parallel_model(first, second, average=...)",
        )
    if isinstance(weight, float) and weight == 1.0:
        return replace(backward_pass, is_weighted=True)

    def factor(gradient: torch.Tensor) -> Weight:
        # A kernel takes a number as an argument. A tensor made of the number would be copied to the
        # device, and the host would wait for all that the device has to do before.
        if not isinstance(weight, torch.Tensor):
            return weight
        return weight.to(gradient.device, gradient.dtype)

    start = scaled_start(backward_pass.roots, backward_pass.gradients, factor)
    return replace(backward_pass, gradients=start, is_weighted=True)


@contextlib.contextmanager
def weighing_loop(weights: LoaderWeights, loop: LoaderLoop) -> Iterator[None]:
    """Start the backward passes in the context from the weight of a loop's latest batch.

    With several loops, each pass comes here once for each of them. That changes nothing: the loops
    of a loss are found once, and a weighted pass is not weighted again.
    """

    def begin(backward_pass: Pass, run: Run) -> None:
        weights.begin_backward()
        run(backward_pass)

    def weigh(backward_pass: Pass, run: Run) -> None:
        weight = weights.weight_of_loss()
        if weight != 1.0 and not backward_pass.is_weighted:
            backward_pass = with_weight(backward_pass, weight)
        run(backward_pass)

    with subscribed(Order.BEGIN, begin), subscribed(Order.WEIGH_BATCH, weigh):
        weights.begin_loop(loop)
        try:
            yield
        finally:
            weights.end_loop(loop)


@contextlib.contextmanager
def refusing_lost_weights(weights: LoaderWeights) -> Iterator[None]:
    """Refuse passes, in the context, of batches whose loop has ended with weights other than 1."""

    def refuse(backward_pass: Pass, run: Run) -> None:
        weights.refuse_lost_weight()
        run(backward_pass)

    with subscribed(Order.BEGIN, refuse):
        yield
