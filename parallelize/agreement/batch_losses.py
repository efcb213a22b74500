"""A warning about losses that compare the samples of a batch, of which each rank has only a part.

    one process           loss(x[0], x[1], x[2], x[3])
    two ranks             loss(x[0], x[1]) on rank 0, loss(x[2], x[3]) on rank 1: other pairs

The mean of the ranks' losses is that of one process for a mean over samples, and not for CLIP's or
VICReg's loss, or dice over a whole batch. The ranks would train other weights, and nothing else
would say so. The check reads the autograd graphs of the passes up to the first optimizer step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parallelize.agreement.coupled_samples import BATCH_KEY, Batch, coupling_operation
from parallelize.agreement.unsynced_training import collectives_begun
from parallelize.gradients.autograd_graph import node_of
from parallelize.run.containers import leaves
from parallelize.run.context import Runtime, current
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed


class BatchLosses:
    """The check of one block of several ranks.

    Args:
        run: the run in this process.
        adds_up: whether the block says that the losses of the ranks are parts of one loss: with
            another average than "ranks". Otherwise they are if the ranks share each batch.

    Attributes:
        is_over: whether no outputs have to be marked: before the block, and after the first step.
    """

    def __init__(self, run: Runtime, *, adds_up: bool) -> None:
        self._run, self._adds_up = run, adds_up
        # Of the active run, which loaders write to: a block with options has another Runtime.
        self._loaders = current().loaders
        self._has_seen_pass = self._has_stepped = False
        self._collectives_after_forward: int | None = None
        self._watching = contextlib.ExitStack()
        self.is_over = True

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Check the losses in the context, until its first optimizer step."""
        self.is_over = False
        with self._watching:
            self._watching.enter_context(subscribed(Order.BEGIN, self._check))
            yield
        self.is_over = True

    def before_first_step(self) -> None:
        """End the check, unless the step has a closure, whose pass comes later and is the last."""
        self._has_stepped = True
        if self._has_seen_pass:
            self._end()

    def _end(self) -> None:
        self._watching.close()
        self.is_over = True

    def mark(self, nodes: Sequence[Any], inputs: Any) -> None:
        """Note in the nodes of a model's outputs from which batch they were computed."""
        batch = self._batch_of(inputs)
        for node in nodes:
            node.metadata[BATCH_KEY] = batch
        self._collectives_after_forward = collectives_begun()

    def _batch_of(self, inputs: Any) -> Batch:
        """Return the batch of a forward, if an input has a row, or two, for each of its samples."""
        tensors = [leaf for leaf in leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        samples = self._loaders.shared_samples
        if not samples and self._adds_up and tensors:
            samples = len(tensors[0])
        batched = [tensor for tensor in tensors if len(tensor) in {samples, 2 * samples}]
        if not batched:
            return Batch(samples=0)
        # A tensor of (samples, time) and one of (time, samples) look the same if both are 4.
        is_batch_first = any(samples not in tensor.shape[1:] for tensor in batched)
        return Batch(samples, is_batch_first=is_batch_first)

    def _check(self, backward_pass: Pass, run: Run) -> None:
        """Warn if the loss of a pass couples samples; a subscriber of backward passes.

        A collective since the forward may have brought the other ranks' samples: nothing is said.
        """
        self._has_seen_pass = True
        if collectives_begun() == self._collectives_after_forward:
            edges = [(node_of(root), root.output_nr) for root in backward_pass.roots]
            operation = coupling_operation(edges)
            if operation is not None:
                self._end()
                self._warn(operation)
        if self._has_stepped:
            self._end()
        run(backward_pass)

    def _warn(self, operation: str) -> None:
        if not self._run.world.is_main:
            return
        averaged = ", and use average='ranks'" if self._adds_up else ""
        warnings.warn(
            "the loss compares the samples of a batch with each other (torch's operation "
            f"{operation}), and each of {self._run.world.world_size} processes has only its part "
            "of the batch, so that the weights are not those of one process. Gather what the loss "
            "compares, which is differentiable: x = parallelize.all_gather(x).flatten(0, 1)"
            f"{averaged}. If a loss of each part is intended, call "
            "warnings.filterwarnings('ignore', 'the loss compares the samples')",
            stacklevel=user_stacklevel(),
        )
