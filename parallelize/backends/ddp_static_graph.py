"""The first iteration of DistributedDataParallel(static_graph=True), in which the reducer records the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel, distributed

from parallelize.runtime.autograd_graph import grad_fns_of
from parallelize.runtime.gradients import at_end_of_backward, backward_id
from parallelize.torch_private import self_test

__all__ = ["FirstIteration"]


@self_test("static_graph=True", instead="drop static_graph=True")
def _require_flag() -> bool:
    """DistributedDataParallel's backward reads the flag that tells it not to enqueue the first all-reduce."""
    return "_static_graph_delay_allreduce_enqueued" in distributed._DDPSink.backward.__code__.co_names


class FirstIteration:
    """Hooks that delay the first all-reduce of a static graph to the first backward that accumulates gradients.

    torch itself all-reduces all buckets at the end of the first backward pass through the outputs, and records the
    graph then. If that pass is torch.autograd.grad for an input, no gradient accumulates, and none is ever averaged.

        prehook of a grad_fn    a backward pass begins; set torch's flag, so that torch enqueues no all-reduce itself
        hooks of parameters     record that gradients accumulate, maybe in a nested backward pass
        end of that pass        all-reduce; if no gradient accumulated, reset the flag for the next backward pass

    Args:
        module: DistributedDataParallel(static_graph=True).

    Attributes:
        is_over: whether the reducer has recorded the graph.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        _require_flag()
        self._module = module
        self.is_over = False
        self._backward_id = -1
        self._has_gradient = False
        trained: list[Any] = [each for each in module.parameters() if each.requires_grad]
        self._handles = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in trained]
        self._handles.append(module.register_forward_hook(self._on_forward))

    def remove_hooks(self) -> None:
        """Remove the hooks from the module and its parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        for node in grad_fns_of(output):
            node.register_prehook(self._on_backward)

    def _on_gradient(self, _: torch.Tensor) -> None:
        self._has_gradient = True

    def _on_backward(self, _: tuple[torch.Tensor, ...]) -> None:
        current = backward_id()
        if self.is_over or current == self._backward_id:
            return
        self._backward_id = current
        self._has_gradient = False
        self._module._static_graph_delay_allreduce_enqueued = True
        at_end_of_backward(self._on_backward_end)

    def _on_backward_end(self) -> None:
        if self._has_gradient and self._handles:
            reducer: Any = self._module.reducer
            reducer._delay_all_reduce()
            self.is_over = True
            self.remove_hooks()
        else:
            self._module._static_graph_delay_allreduce_enqueued = False
