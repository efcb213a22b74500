"""How losses weigh: by rank, as a sum, or by the number of targets that a loss averages over.

The loss of a backward pass on rank r of W is a mean over c[r] targets, and g[r] is its gradient.
The gradient that parameters get is:

    average="ranks"     1/W sum_r  g[r]                       as DistributedDataParallel averages
    average="sum"           sum_r  g[r]
    average="tokens"        sum_r  g[r] c[r] / sum_r c[r]     the mean over the targets of all ranks

Gradients are averaged over the ranks in all three cases. "sum" and "tokens" let a pass start from a
weight, W or W c[r] / sum_r c[r]. Each pass has its own weight, so that accumulated passes add up as
in one process.

The terms of a loss may average over different numbers of targets, such as the classes of anchors
and the positions of boxes. Each term would need a weight, and a pass has only one. The user then
divides the sum s[r] of a term with c[r] targets by a number that is equal on all ranks, the mean of
the c[r], which is all_reduce(c, "mean"):

    average="ranks"     1/W sum_r  s[r] / (sum_q c[q] / W)  =  sum_r s[r] / sum_q c[q]

This is the term of one process. It is not where batches of tail="weighted" have unequal numbers of
samples: the weights of the batches come on top.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from parallelize.gradients.autograd_graph import marks_of, node_of, nodes_behind
from parallelize.gradients.batch_weights import Weight, with_weight
from parallelize.gradients.target_counts import loss_counts, number_on, required_count
from parallelize.run.context import Runtime, active_or
from parallelize.torch_patches.backward import Order, Pass, Roots, Run, subscribed
from parallelize.torch_patches.module_tensors import all_parameters

Average = Literal["ranks", "sum", "tokens"]


class Averaging:
    """Weights the backward passes of one block.

    Args:
        average: the option of the block.
        run: the run in this process.
        models: the models of the block.

    Attributes:
        needs_marks: whether this object still looks at losses. The outputs of the block's models
            are then marked with this object as an owner (see `autograd_graph`), so that the graph
            of a loss shows whether the loss is of the block. Under average="ranks", False after the
            first step.
    """

    def __init__(self, average: Average, *, run: Runtime, models: Sequence[nn.Module]) -> None:
        self._average = average
        self._run = run
        self._models = models
        self._size = run.world.world_size
        self.needs_marks = self._size > 1 or average == "tokens"
        self._subscription = contextlib.ExitStack()
        self._weight_of_latest_loss: Weight | None = None
        self._counts_of_latest_loss: list[Any] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Weight the backward passes in the context; under average="ranks", look at their losses.

        On one rank, only average="tokens" looks at losses.
        """
        # `end_first_step` may close the subscription before the context ends.
        with self._subscription:
            if self.needs_marks:
                self._subscription.enter_context(subscribed(Order.WEIGH, self._weigh))
            yield

    def loss_weight(self) -> Weight:
        """Return the weight of this rank's latest loss in the mean over the ranks.

        If the loss has no weight of this object, the weight is that of its batch.
        """
        if self._weight_of_latest_loss is not None:
            return self._weight_of_latest_loss
        return self._batch_weight()

    def end_first_step(self) -> list[float]:
        """Return the number of targets of each term of the latest loss, for a warning.

        The list is empty if no number is known, or if the average is not by rank. An average by
        rank needs the numbers for this warning only, so this object looks at no later loss.
        """
        if self._average == "ranks":
            self.needs_marks = False
            self._subscription.close()
        return list(map(float, self._counts_of_latest_loss))

    def _batch_weight(self) -> float:
        """Return the weight of the loss's batch by its samples; 0 for a repeated batch.

        A process that has run out of batches repeats one, so that all make equally many steps.
        """
        return self._run.loader_weights.weight_of_loss()

    def _weigh(self, backward_pass: Pass, run: Run) -> None:
        """Run a backward pass, weighted if its loss is of the block.

        Under average="ranks", note the number of targets, and leave the pass as it is: only its
        batch has a weight, which `batch_weights.weighing_loop` applies. A subscriber of
        torch_patches.backward.
        """
        self._weight_of_latest_loss = None
        if self._is_of_block(backward_pass.roots):
            if self._average == "ranks":
                self._note_counts(backward_pass.roots)
            else:
                weight = self._weight_of(backward_pass.roots)
                self._weight_of_latest_loss = weight
                backward_pass = with_weight(backward_pass, weight)
        run(backward_pass)

    def _is_of_block(self, roots: Roots) -> bool:
        """Whether a pass reaches an output or a parameter of a model of the block.

        A pass reaches a parameter and no output if the user has called a submodule, or if the loss
        is a penalty on weights. Only for such losses, the parameters of the models are gathered:
        with many modules, this takes longer than all other steps here.
        """
        leaves = []
        for node in nodes_behind(map(node_of, roots), owner=self):
            if self in marks_of(node):
                return True
            # Only an AccumulateGrad has a variable: the leaf whose gradient it accumulates.
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves.append(leaf)
        if not leaves:
            return False
        parameters = set[int]()
        for model in self._models:
            parameters.update(map(id, all_parameters(model)))
        return not parameters.isdisjoint(map(id, leaves))

    def _note_counts(self, roots: Roots) -> None:
        """Keep the numbers of targets of a loss, for the warning of the first step.

        A short batch has fewer targets, and a lower weight. The numbers are divided by the weight,
        so that there is no warning of a difference that the weight makes up for.
        """
        self._counts_of_latest_loss = []
        weight = self._batch_weight()
        # A repeated batch has the weight 0. Its targets count for nothing.
        if not weight:
            return
        for count in loss_counts(roots):
            if count.count is not None:
                self._counts_of_latest_loss.append(count.count / weight)

    def _weight_of(self, roots: Roots) -> Weight:
        """Return the weight from which a pass starts; under average="tokens", a collective.

        The formulas are at the top of the file. A rank with a repeated batch joins the collective,
        too, with 0 targets: otherwise the other ranks would wait for it.

        Raises:
            ConfigError: the number of targets is not known, or terms of the loss have several.
        """
        is_repeated_batch = self._batch_weight() == 0.0
        if self._average == "sum":
            return 0.0 if is_repeated_batch else float(active_or(self._run).data_ranks.size)
        count: Any = 0.0
        if not is_repeated_batch:
            # On one rank, this only refuses a loss that several ranks could not average.
            count = required_count(roots).count
        if self._size == 1:
            return 1.0
        with torch.no_grad():
            total = number_on(self._run.device, count)
            # The only communication: one number per backward pass. The ranks that hold one tensor
            # parallel model all add the count of its batch, and all count in the size.
            dist.all_reduce(total)
            # The total is 0 if the targets of all ranks are ignored.
            total = total.clamp(min=1e-9)
            if total.device.type == "cpu":
                return float(count) * self._size / total.item()
            # The host does not read the weight on a device, because it would wait.
            weight: torch.Tensor = count * self._size / total
            return weight
