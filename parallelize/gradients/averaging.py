"""How losses weigh: by rank, as a sum, or by the number of targets that each averages over.

A backward pass has, on rank r of W, a loss that is a mean over c[r] targets, with gradient g[r]:

    average="ranks"     1/W sum_r  g[r]                       as DistributedDataParallel averages
    average="sum"           sum_r  g[r]
    average="tokens"        sum_r  g[r] c[r] / sum_r c[r]     the mean over the targets of all ranks

Each pass is weighted alone, at its start, so that accumulated passes add up as in one process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from parallelize.gradients.autograd_graph import MODELS_KEY, mark_outputs, node_of, nodes_behind
from parallelize.gradients.batch_weights import Weight, with_weight
from parallelize.gradients.target_counts import loss_counts, number_on, required_count
from parallelize.run.context import Runtime
from parallelize.torch_patches.backward import Order, Pass, Roots, Run, subscribed
from parallelize.torch_patches.module_tensors import all_parameters

__all__ = ["Average", "Averaging"]

Average = Literal["ranks", "sum", "tokens"]


class Averaging:
    """Weights the backward passes of one block.

    Args:
        average: the option of the block.
        run: the run in this process.
        models: the models of the block.

    Attributes:
        marks: whether outputs of models are marked, so that the losses computed from them are known.
    """

    def __init__(self, average: Average, *, run: Runtime, models: Sequence[nn.Module]) -> None:
        self._average, self._run, self._models = average, run, models
        self._size = run.world.world_size
        self.marks = self._size > 1 or average == "tokens"
        self._subscription = contextlib.ExitStack()
        self._weight: Weight | None = None  # of the latest loss
        self._count: Any = math.nan  # of the first step's latest loss, for average="ranks"

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Weight backward passes in the context."""
        with self._subscription:
            if self.marks:
                self._subscription.enter_context(subscribed(Order.WEIGH, self._weigh))
            yield

    def mark(self, output: Any, inputs: Any) -> list[Any]:
        """Store in the graph of a forward's output that it is one of this block; return the output's nodes."""
        return mark_outputs(output, inputs=inputs, key=MODELS_KEY, owner=self)

    def loss_weight(self) -> Weight:
        """Return the weight of this rank's latest loss in the mean over the ranks."""
        return self._run.loader_weights.weight_of_loss() if self._weight is None else self._weight

    def _weigh(self, each: Pass, run: Run) -> None:
        self._weight = None
        if not self._is_of_block(each.roots):
            run(each)
        elif self._average == "ranks":
            counts: list[Any] = [found.count for found in loss_counts(each.roots) if found.count is not None]
            weight = self._run.loader_weights.weight_of_loss()  # that of a batch makes up for a smaller count
            self._count = counts[0] / weight if counts and weight else math.nan
            run(each)
        else:
            self._weight = self._weight_of(each.roots)
            run(with_weight(each, self._weight))

    def _is_of_block(self, roots: Roots) -> bool:
        parameters = {id(each) for model in self._models for each in all_parameters(model)}
        return any(
            # By a parameter, e.g. of a submodule: the search goes through the whole graph.
            self in node.metadata.get(MODELS_KEY, ()) or id(getattr(node, "variable", None)) in parameters
            for node in nodes_behind(map(node_of, roots), key=MODELS_KEY, owner=self)
        )

    def _weight_of(self, roots: Roots) -> Weight:
        if self._average == "sum":
            return float(self._size) if self._run.loader_weights.weight_of_loss() else 0.0
        with torch.no_grad():
            count: Any = required_count(roots).count if self._run.loader_weights.weight_of_loss() else 0.0
            if self._size == 1:
                return 1.0
            total = number_on(self._run.device, count)
            dist.all_reduce(total)  # the only communication: one number per backward pass
            # The total is 0 if the targets of all ranks are ignored.
            weight: torch.Tensor = count * self._size / total.clamp(min=1e-9)
            return weight

    def end_first_step(self) -> float:
        """Return the number of targets of the first step's latest loss if ranks weigh equally; nan: not known."""
        if self._average == "ranks":
            self.marks = False
            self._subscription.close()
        return float(self._count)
