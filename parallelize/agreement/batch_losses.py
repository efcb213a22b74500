"""A warning about losses that compare the samples of a batch, of which each rank has only a part.

    one process           loss(x[0], x[1], x[2], x[3])
    two ranks             loss(x[0], x[1]) on rank 0, loss(x[2], x[3]) on rank 1: other pairs

The mean of the ranks' losses is the loss of one process if that is a mean over samples. It is not
for the losses of CLIP and VICReg, or dice over a whole batch: the ranks would train other weights
than one process, and nothing else would say so.

    each forward          `mark`: the nodes of the model's outputs get the batch
    each backward pass    `_check`: the graph is searched from the loss down to these nodes
    first optimizer step  the check ends
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
        adds_up: whether the block says that the losses of the ranks are parts of one loss, by an
            `average` other than "ranks". If not, they are parts of one only if the ranks share each
            batch, as a loader has noted.

    Attributes:
        is_over: whether outputs need no marks: before the block has begun, and after the check.
    """

    def __init__(self, run: Runtime, *, adds_up: bool) -> None:
        self._run, self._adds_up = run, adds_up
        # A block with options has a Runtime of its own, and loaders write to the active one.
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
        """End the check; called before the first optimizer step of the block.

        If no pass was seen yet, the step has a closure, which makes one. The check ends with it.
        """
        self._has_stepped = True
        if self._has_seen_pass:
            self._end()

    def _end(self) -> None:
        """Check no more passes; it may be called twice."""
        self._watching.close()
        self.is_over = True

    def mark(self, nodes: Sequence[Any], inputs: Any) -> None:
        """Note in the nodes of a forward's outputs from which batch they were computed.

        Args:
            nodes: nodes of the outputs in the autograd graph.
            inputs: arguments of the forward.
        """
        batch = self._batch_of(inputs)
        for node in nodes:
            node.metadata[BATCH_KEY] = batch
        self._collectives_after_forward = collectives_begun()

    def _batch_of(self, inputs: Any) -> Batch:
        """Return the batch of a forward; `samples` is 0 if no input has all samples.

        An input with two rows for each sample is of two views of the samples.
        """
        tensors = [leaf for leaf in leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        samples = self._loaders.shared_samples
        if not samples and self._adds_up and tensors:
            # No loader has noted the number: the first input is taken for the samples.
            samples = len(tensors[0])
        batched = [tensor for tensor in tensors if len(tensor) in {samples, 2 * samples}]
        if not batched:
            return Batch(samples=0)
        # A tensor of (samples, time) and one of (time, samples) look the same if both are 4.
        is_batch_first = any(samples not in tensor.shape[1:] for tensor in batched)
        return Batch(samples, is_batch_first=is_batch_first)

    def _check(self, backward_pass: Pass, run: Run) -> None:
        """Warn if the loss of a pass couples samples, and run the pass; a subscriber of backward.

        A collective since the latest forward may have brought the samples of the other ranks, as
        the warning advises. Then nothing is said.
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
        """Warn on rank 0 of an operation by which the loss couples samples."""
        if not self._run.world.is_main:
            return
        # With gathered samples, each rank has the whole loss, and not a part that adds up.
        advice_on_average = ", and use average='ranks'" if self._adds_up else ""
        warnings.warn(
            "the loss compares the samples of a batch with each other (torch's operation "
            f"{operation}), and each of {self._run.world.world_size} processes has only its part "
            "of the batch, so that the weights are not those of one process. Gather what the loss "
            "compares, which is differentiable: x = parallelize.all_gather(x).flatten(0, 1)"
            f"{advice_on_average}. If a loss of each part is intended, call "
            "warnings.filterwarnings('ignore', 'the loss compares the samples')",
            stacklevel=user_stacklevel(),
        )
