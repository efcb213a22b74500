"""How losses weigh: by rank, as a sum, or by the number of targets that each averages over.

A backward pass has, on rank r of W, a loss that is a mean over c[r] targets, with gradient g[r]:

    average="ranks"     1/W sum_r  g[r]                       as DistributedDataParallel averages
    average="sum"           sum_r  g[r]
    average="tokens"        sum_r  g[r] c[r] / sum_r c[r]     the mean over the targets of all ranks

Each pass is weighted alone, at its start, so that accumulated passes add up as in one process.

A loss of several terms that average over different numbers of targets, such as the classes of
anchors and the positions of boxes, needs a weight for each term, and a pass has one. Its terms are
divided by numbers that are equal on all ranks: with the sum s[r] of a term, and its c[r] targets,

    average="ranks"     1/W sum_r  s[r] / (sum_q c[q] / W)  =  sum_r s[r] / sum_q c[q]

is the gradient of one process for each of them. `sum_q c[q] / W` is all_reduce(c, "mean"). Under
tail="weighted" it is not, where batches have unequal numbers of samples: their weights come on top.
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
from parallelize.run.context import Runtime
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
            are then marked with this object as an owner, so that the graph of a loss shows whether
            the loss is of the block. Under average="ranks", this is over after the first step.
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
        """Look at the loss of each backward pass in the context, and weight it if necessary.

        Where no loss needs a look, the passes run without this object.
        """
        # `end_first_step` may close the subscription before the context ends.
        with self._subscription:
            if self.needs_marks:
                self._subscription.enter_context(subscribed(Order.WEIGH, self._weigh))
            yield

    def loss_weight(self) -> Weight:
        """Return the weight of this rank's latest loss in the mean over the ranks."""
        if self._weight_of_latest_loss is not None:
            return self._weight_of_latest_loss
        return self._batch_weight()

    def end_first_step(self) -> list[float]:
        """Return the numbers of targets of the terms of the first step's latest loss.

        The list is empty if the numbers are not known, or if the average is not by rank. An average
        by rank needs the numbers only for a warning, and looks at no later loss.
        """
        if self._average == "ranks":
            self.needs_marks = False
            self._subscription.close()
        return list(map(float, self._counts_of_latest_loss))

    def _batch_weight(self) -> float:
        return self._run.loader_weights.weight_of_loss()

    def _weigh(self, backward_pass: Pass, run: Run) -> None:
        """Run a pass, and let it start from the weight of its loss if the loss is of the block.

        Under average="ranks", the pass runs as it is, and the numbers of its targets are noted:
        only its batch has a weight then, which `batch_weights.weighing_loop` applies. A subscriber
        of torch_patches.backward.
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
        """Whether a pass reaches a model of the block: through its outputs, or only a parameter.

        A pass reaches only a parameter if the user has called a submodule, or if the loss is a
        penalty on weights. The parameters are gathered for such losses only: with many modules,
        that takes longer than all other steps here.
        """
        leaves = []
        for node in nodes_behind(map(node_of, roots), owner=self):
            if self in marks_of(node):
                return True
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
        so that the ranks are not warned of a difference that the weight makes up for.
        """
        self._counts_of_latest_loss = []
        weight = self._batch_weight()
        # A weight of 0 is that of a repeated batch, which counts for nothing.
        if not weight:
            return
        for count in loss_counts(roots):
            if count.count is not None:
                self._counts_of_latest_loss.append(count.count / weight)

    def _weight_of(self, roots: Roots) -> Weight:
        is_repeated_batch = self._batch_weight() == 0.0
        if self._average == "sum":
            return 0.0 if is_repeated_batch else float(self._size)
        count: Any = 0.0
        if not is_repeated_batch:
            count = required_count(roots).count
        if self._size == 1:
            return 1.0
        with torch.no_grad():
            total = number_on(self._run.device, count)
            # The only communication: one number per backward pass.
            dist.all_reduce(total)
            # The total is 0 if the targets of all ranks are ignored.
            total = total.clamp(min=1e-9)
            if total.device.type == "cpu":
                return float(count) * self._size / total.item()
            # The host does not read the weight on a device, because it would wait.
            weight: torch.Tensor = count * self._size / total
            return weight
