"""A warning of a block with `amp` whose models compute in fp32, because autocast is never entered.

model(x)                   forward: autocast is entered; from here on, nothing is warned of
model.training_step(x)     a method that is not in methods=: autocast is not entered
loss.backward()            the first pass that reaches a model through products in fp32, as if
                           there were no `amp`, is warned of
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence

from torch import nn

from parallelize.gradients.autograd_graph import node_of, nodes_behind
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.backward import Order, Pass, Root, Run, subscribed
from parallelize.torch_patches.module_tensors import all_parameters

# Names of the nodes of operations that autocast runs in half precision.
_PRODUCTS = frozenset(
    {
        "AddmmBackward0",
        "BaddbmmBackward0",
        "BmmBackward0",
        "ConvolutionBackward0",
        "MmBackward0",
    }
)
# Autocast casts the inputs of such an operation by `to`.
_CAST = "ToCopyBackward0"


class UnusedAutocast:
    """Looks for the first backward pass through the models of a block, if no forward came before.

    Args:
        models: the models of the block.
        warns: whether this rank shows the warning.

    Attributes:
        is_over: whether a forward has entered autocast, or the warning was shown. Whoever enters
            autocast sets it.
    """

    def __init__(self, models: Sequence[nn.Module], *, warns: bool) -> None:
        self.is_over = not warns
        self._models = models
        self._watching = contextlib.ExitStack()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watch the backward passes in the context, until it is over."""
        with self._watching:
            self._watching.enter_context(subscribed(Order.BEGIN, self._before_backward))
            yield

    def _before_backward(self, backward_pass: Pass, run: Run) -> None:
        if not self.is_over and self._is_in_fp32(backward_pass.roots):
            self.is_over = True
            _warn(self._models)
        if self.is_over:
            self._watching.close()
        run(backward_pass)

    def _is_in_fp32(self, roots: Sequence[Root]) -> bool:
        """Whether a pass reaches a model through products, and no tensor was cast for them."""
        ids_of_parameters: set[int] = set()
        for model in self._models:
            ids_of_parameters.update(map(id, all_parameters(model)))
        has_product = False
        reaches_model = False
        for node in nodes_behind(map(node_of, roots)):
            if node.name() == _CAST:
                return False
            has_product = has_product or node.name() in _PRODUCTS
            leaf = None
            if not node.next_functions:
                leaf = getattr(node, "variable", None)
            # A DTensor is the shard of a model in the block.
            if id(leaf) in ids_of_parameters or hasattr(leaf, "full_tensor"):
                reaches_model = True
        return has_product and reaches_model


def _warn(models: Sequence[nn.Module]) -> None:
    names = " + ".join(type(model).__name__ for model in models)
    advice = "call the model itself"
    methods = _own_methods(models)
    if methods:
        advice = f"name those that compute the loss, parallel_model(model, methods={methods})"
    warnings.warn(
        f"amp= has no effect on {names}: a loss was computed in fp32, by calls that autocast does "
        "not cover. It covers forward and the methods in methods=, and none of them was called. "
        f"So {advice}; or, if fp32 is intended, call "
        "warnings.filterwarnings('ignore', 'amp= has no effect')",
        stacklevel=user_stacklevel(),
    )


def _own_methods(models: Sequence[nn.Module]) -> list[str]:
    """Return the names of public methods that the classes of models define, besides forward."""
    names: dict[str, None] = {}
    for model in models:
        for name, value in vars(type(model)).items():
            is_public = not name.startswith("_") and not hasattr(nn.Module, name)
            if is_public and inspect.isfunction(value):
                names[name] = None
    return list(names)
