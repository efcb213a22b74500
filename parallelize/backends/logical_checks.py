"""Warnings of `logical=`: what makes the weights depend on the number of processes.

    in the first forwards with gradients     `before_forward`: were random numbers drawn since the
    of a block                               latest forward, perhaps for each sample?
    in the first forward of each model       `compare_again`: does forward return the same bits if
                                             its first part runs again?
    in the first backward passes that        `before_backward`: does the loss use a parameter
    reach a model of the block               outside of a forward, is it a sum over samples, or
                                             does it compare the samples of a batch?

These are properties of a program, and the later steps of most programs are as the first ones.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelize.gradients.autograd_graph import mark_outputs, marks_of, node_of, nodes_behind
from parallelize.gradients.target_counts import loss_counts
from parallelize.run.containers import leaves
from parallelize.run.context import Runtime
from parallelize.run.generators import RNGState
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.backward import Root, Roots
from parallelize.torch_patches.module_tensors import all_named_parameters

_CHECKED_PASSES = 2
"""Number of backward passes whose losses are checked: a GAN has two losses."""

_CHECKED_FORWARDS = 8
"""Number of forwards before which the random numbers of the loop are checked."""


@dataclass(frozen=True)
class _Output:
    """An output of a forward, with rows of several parts.

    Args:
        tensor: of shape (N, *S), with one row for each sample.
        first_rows: number of rows of the first part.
    """

    tensor: torch.Tensor
    first_rows: int


class LogicalChecks:
    """The checks of one block.

    Args:
        run: the run in this process.
    """

    def __init__(self, run: Runtime) -> None:
        self._run = run
        self._passes_to_check = _CHECKED_PASSES
        self._forwards_to_check = _CHECKED_FORWARDS
        self._names_of_parameters: dict[int, str] = {}
        # Those of the forwards since the latest backward pass.
        self._outputs: list[_Output] = []
        # After the latest forward; None: after a forward without gradients, or before the first.
        self._generators: RNGState | None = None
        self._passes_of_loaders = 0

    def add(self, model: nn.Module) -> None:
        """Learn the names of a model's parameters."""
        for name, parameter in all_named_parameters(model):
            self._names_of_parameters[id(parameter)] = name

    def before_forward(self) -> None:
        """Check the random numbers that were drawn since the latest forward."""
        # A pass over a loader draws its order, which all processes do alike.
        passes_before = self._passes_of_loaders
        self._passes_of_loaders = self._run.loaders.passes
        if self._forwards_to_check == 0:
            return
        self._forwards_to_check -= 1
        is_same_pass = self._passes_of_loaders == passes_before
        if is_same_pass and self._generators is not None and self._generators.has_changed():
            self._warn("random numbers were drawn between two forwards, perhaps for each sample")

    def after_forward(self, generators: RNGState) -> None:
        """Note the states of the generators after a forward with gradients."""
        self._generators = generators

    def after_evaluation(self) -> None:
        """Note that a forward without gradients has run: a loop may draw around it."""
        self._generators = None

    def compare_again(self, output: Any, output_again: Any) -> None:
        """Compare the output of a part with the output of the same part when it ran again."""
        for leaf, leaf_again in zip(leaves(output), leaves(output_again), strict=True):
            if isinstance(leaf, torch.Tensor) and not torch.equal(leaf, leaf_again):
                self._warn("forward has returned other bits when a part of a batch ran again")
                return

    def note_outputs(self, output: Any, *, inputs: Any, first_rows: int) -> None:
        """Note the output of a forward with gradients, for the check of the loss.

        Args:
            output: of all parts of this process.
            inputs: the arguments of the forward.
            first_rows: number of samples in the first part.
        """
        if self._passes_to_check == 0:
            return
        # The block marks outputs, too, but not of one process, and not in each forward.
        mark_outputs(output, inputs=inputs, owners=[self])
        for leaf in leaves(output):
            has_gradient = isinstance(leaf, torch.Tensor) and leaf.requires_grad
            if has_gradient and leaf.ndim and len(leaf) > first_rows:
                self._outputs.append(_Output(leaf, first_rows))

    def before_backward(self, roots: Roots) -> None:
        """Check the loss of a pass, which starts at `roots`."""
        if self._passes_to_check:
            nodes = list(nodes_behind(map(node_of, roots), owner=self))
            if any(self in marks_of(node) for node in nodes):
                self._passes_to_check -= 1
                self._check_loss(roots, nodes)
        self._outputs.clear()

    def _check_loss(self, roots: Roots, nodes: list[Any]) -> None:
        """Warn of the first fault of a loss.

        Args:
            roots: where the pass starts.
            nodes: the nodes of the graph outside of the models.
        """
        for node in nodes:
            parameter = getattr(node, "variable", None)
            name = self._names_of_parameters.get(id(parameter))
            if name is not None:
                self._warn(f"{name} is used outside of a forward")
                return
        for count in loss_counts(roots):
            if count.count is None:
                self._warn(f"the loss is a {count.operation}, and no mean over samples")
                return
        if self._compares_samples(roots):
            self._warn("the loss compares samples of a batch with each other")

    def _compares_samples(self, roots: Roots) -> bool:
        """Whether the gradient by the first part's outputs depends on the outputs of other parts.

        A mean over samples is a sum of functions of one sample each. Its gradient by the outputs of
        one part is a function of these outputs alone: the derivative by other rows is zero.
        """
        losses: list[Any] = [root for root in roots if _is_scalar(root)]
        tensors = [output.tensor for output in self._outputs]
        if not tensors or not losses:
            return False
        # torch raises this error for an operation that cannot be differentiated twice.
        with contextlib.suppress(RuntimeError):
            # One gradient of shape (N, *S) for each output.
            gradients: Any = torch.autograd.grad(
                losses, tensors, create_graph=True, allow_unused=True
            )
            scalars = []
            for output, gradient in zip(self._outputs, gradients, strict=True):
                if gradient is not None and gradient.requires_grad:
                    scalars.append(_weighted_sum(gradient[: output.first_rows]))
            if not scalars:
                return False
            seconds: Any = torch.autograd.grad(
                scalars, tensors, retain_graph=True, allow_unused=True
            )
            for output, second in zip(self._outputs, seconds, strict=True):
                if second is not None and bool(second[output.first_rows :].any()):
                    return True
        return False

    def _warn(self, fault: str) -> None:
        warnings.warn(
            f"logical={self._run.config.logical}: {fault}, so that the weights depend on the "
            "number of processes",
            stacklevel=user_stacklevel(),
        )


def _is_scalar(root: Root) -> bool:
    return isinstance(root, torch.Tensor) and root.numel() == 1


def _weighted_sum(values: torch.Tensor) -> torch.Tensor:
    """Return a sum with other weights for each column, so that derivatives do not cancel out.

    The gradients of a softmax over the columns, say, add up to zero.
    """
    columns = values.shape[-1]
    weights = torch.linspace(1, 2, columns, device=values.device, dtype=values.dtype)
    return (values * weights).sum()
