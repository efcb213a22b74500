"""Weights of batches: a backward pass starts from the weight of its batch instead of 1.

The batch of process `r` of `W` has `c_r` samples, and `g_r` is the gradient of their mean loss.
Gradients are averaged over the processes, so the weight `w_r` of a batch is:

    mean over all samples  =  sum_r c_r g_r / sum_r c_r  =  1/W sum_r w_r g_r
                                                            with  w_r = W c_r / sum_r c_r

Nothing else changes: gradient accumulation, all engines and all optimizers work as before. The mean
of the `w_r` is 1, so that a penalty on weights in the loss counts as in one process. All processes
make the same steps with the same gradients. They cannot diverge, as they can under torch's `Join`.

`run/loader_weights.py` knows which batch a pass belongs to.
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
    """Return a pass that starts from a weight, as if the loss were multiplied by the weight.

    A pass of weight 1 counts as weighted, too: `weighing_loop` must not weight it by its samples
    after a block has weighted it by its targets.

    Raises:
        ConfigError: the pass is weighted already.
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
        # device, and the host would wait until the device has done all its earlier work.
        if not isinstance(weight, torch.Tensor):
            return weight
        return weight.to(gradient.device, gradient.dtype)

    start = scaled_start(backward_pass.roots, backward_pass.gradients, factor)
    return replace(backward_pass, gradients=start, is_weighted=True)


@contextlib.contextmanager
def weighing_loop(weights: LoaderWeights, loop: LoaderLoop) -> Iterator[None]:
    """Start the backward passes in the context from the weight of a loop's latest batch.

    Where loops are nested or zipped, a pass runs through the subscribers of every loop. This
    changes nothing: the first `begin` finds all loops of the loss, and `weigh` leaves a weighted
    pass as it is.
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
    """Refuse a pass in the context if its batch may be of a loop that has ended.

    The weight of the batch has ended with the loop. Without this, the pass would have the weight 1.
    """

    def refuse(backward_pass: Pass, run: Run) -> None:
        weights.refuse_lost_weight()
        run(backward_pass)

    with subscribed(Order.BEGIN, refuse):
        yield
