"""The iteration from which a static graph is learnt."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallelize.backends.origins import origins
from parallelize.runtime.gradients import at_end_of_backward

__all__ = ["FirstIteration"]


class FirstIteration:
    """The first iteration of a static graph, which averages at the very end of its backward, once for all parameters.

    torch takes for it the first backward through the outputs, also one that brings no parameter a gradient, as that of
    torch.autograd.grad for an input: it would average nothing then, and never again. Here it is the first that does.

        hook of an output       a backward begins; torch is told that it has begun to average, so that it does not
        hooks of parameters     gradients arrive, maybe in other backwards nested in this one
        end of that backward    averages them; if there are none, the next backward is looked at

    Args:
        module: promises a static graph.

    Attributes:
        is_over: whether torch knows the graph.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module
        self.is_over = False
        self._backward = -1
        self._has_arrived = False
        trained: list[Any] = [each for each in module.parameters() if each.requires_grad]
        self._handles = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in trained]
        self._handles.append(module.register_forward_hook(self._on_forward))

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        for node in origins(output):
            node.register_prehook(self._on_backward)

    def _on_gradient(self, _: torch.Tensor) -> None:
        self._has_arrived = True

    def _on_backward(self, _: tuple[torch.Tensor, ...]) -> None:
        backward = torch._C._current_graph_task_id()
        if self.is_over or backward == self._backward:
            return
        self._backward = backward
        self._has_arrived = False
        self._module._static_graph_delay_allreduce_enqueued = True
        at_end_of_backward(self._on_end)

    def _on_end(self) -> None:
        if self._has_arrived and self._handles:
            reducer: Any = self._module.reducer
            reducer._delay_all_reduce()
            self.is_over = True
            self.stop()
        else:
            self._module._static_graph_delay_allreduce_enqueued = False
