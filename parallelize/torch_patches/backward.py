"""The one replacement of torch.autograd.backward: subscribers run around each backward pass.

    loss.backward()
    └── BEGIN              sees the pass as the user has called it, or refuses it
        └── WEIGH              average="sum", "tokens": multiplies the loss by its weight
            └── WEIGH_BATCH        multiplies a loss without a weight by that of its batch
                └── SCALE              fp16: multiplies the loss by the loss scale, and divides the
                    │                  gradients by it after the pass
                    └── REDUCE             averages the gradients over the ranks
                        └── RECORD             reads the loss: train.compare keeps its value, and
                            │                  `logical=` looks for what has no parts in its graph
                            └── torch's own backward

The subscribers do not see a pass that starts inside another pass: its gradients are part of the
outer pass. A reentrant checkpoint starts such passes, and so does torch for subclasses of Tensor.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from parallelize.torch_patches.private import replace_attribute

Root = torch.Tensor | GradientEdge
"""Where a backward pass starts."""
Roots = tuple[Root, ...]


class Order(enum.IntEnum):
    """The place of a subscriber: one with a lower number runs around those with a higher one.

    Of two subscribers with one place, that which was entered first runs around the other.
    """

    BEGIN = 0
    WEIGH = 1
    WEIGH_BATCH = 2
    SCALE = 3
    REDUCE = 4
    RECORD = 5


@dataclass(frozen=True, eq=False)
class Pass:
    """A backward pass that the user has called.

    Args:
        roots: the tensors from which it starts, such as the loss.
        gradients: the gradients of the roots, one tensor or several; None: 1.
        options: retain_graph, create_graph and inputs of torch.autograd.backward.
        is_weighted: whether a subscriber has multiplied the loss by a weight. Only one may.
    """

    roots: Roots
    gradients: Any
    options: dict[str, Any]
    is_weighted: bool = False


Run = Callable[[Pass], None]
"""Runs the rest of a pass: the subscribers that come later, and torch inside them."""
Subscriber = Callable[[Pass, Run], None]


class _ThreadState(threading.local):
    """What this thread is doing.

    Attributes:
        is_in_pass: whether the subscribers, or torch inside them, run in this thread.
    """

    is_in_pass = False


_thread = _ThreadState()
# Global, because torch.autograd.backward belongs to the process.
_subscribers: list[tuple[Order, Subscriber]] = []
# Holds the replacement of torch.autograd.backward while there are subscribers.
_replacement = contextlib.ExitStack()


def _backward_with_subscribers(original: Callable[..., None]) -> Callable[..., None]:
    """Build the function that replaces torch.autograd.backward while there are subscribers."""

    @functools.wraps(original)
    def backward(  # noqa: PLR0917  # torch's own signature
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,  # noqa: FBT001  # torch's own signature
        create_graph: bool = False,  # noqa: FBT001, FBT002  # torch's own signature
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        options: dict[str, Any] = {"retain_graph": retain_graph, "create_graph": create_graph}
        options["inputs"] = None
        if inputs is not None:
            # The inputs may be a generator, which can be read only once. Subscribers read the
            # inputs before torch does.
            options["inputs"] = as_roots(inputs)
        is_nested = _thread.is_in_pass or is_in_backward()
        # `grad_variables` is the deprecated name of `grad_tensors`. A call with both goes to torch,
        # which raises a clear error.
        is_refused = grad_tensors is not None and grad_variables is not None
        if is_refused or is_nested or not _subscribers:
            original(tensors, grad_tensors, grad_variables=grad_variables, **options)
            return
        gradients = grad_tensors
        if grad_variables is not None:
            gradients = grad_variables
        _thread.is_in_pass = True
        try:
            _run_subscribers(original, Pass(as_roots(tensors), gradients, options))
        finally:
            _thread.is_in_pass = False

    return backward


def _run_subscribers(original: Callable[..., None], first_pass: Pass) -> None:
    """Run a pass through the subscribers, one inside the other, and torch inside the last."""
    # A copy, because a subscriber may add or remove subscribers: that counts from the next pass on.
    subscribers = [subscriber for _, subscriber in _subscribers]

    def run_from(position: int, backward_pass: Pass) -> None:
        if position == len(subscribers):
            original(backward_pass.roots, backward_pass.gradients, **backward_pass.options)
        else:
            subscribers[position](backward_pass, functools.partial(run_from, position + 1))

    run_from(0, first_pass)


@contextlib.contextmanager
def subscribed(order: Order, subscriber: Subscriber) -> Iterator[None]:
    """Call `subscriber(backward_pass, run)` for each backward pass in the context.

    Args:
        order: the place of the subscriber.
        subscriber: calls `run` once, with the pass or a changed pass, and may work before and after
            that. If it raises before that, the pass is refused.
    """
    if not _subscribers:
        backward = _backward_with_subscribers(torch.autograd.backward)
        _replacement.enter_context(replace_attribute(torch.autograd, "backward", backward))
    entry = (order, subscriber)
    _subscribers.append(entry)
    _subscribers.sort(key=itemgetter(0))
    try:
        yield
    finally:
        _subscribers.remove(entry)
        if not _subscribers:
            _replacement.close()


def is_in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Let torch call a function when the running backward pass has computed all gradients.

    Raises:
        RuntimeError: no backward pass runs in this thread.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def as_roots(tensors: Any) -> Roots:
    """Return an argument of torch.autograd, which may be one root or several, as a tuple."""
    if isinstance(tensors, (torch.Tensor, GradientEdge)):
        return (tensors,)
    return tuple(tensors)
