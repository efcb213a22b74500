"""The one replacement of torch.autograd.backward: subscribers run around each backward pass.

    loss.backward()
    └── BEGIN              sees the pass as the user has called it, or refuses it
        └── WEIGH              starts the pass from the weight of its targets or its sum
            └── WEIGH_BATCH        ... else from that of its batch, which may be short
                └── SCALE              ... times the loss scale; unscales the gradients at its end
                    └── REDUCE             averages the gradients over the ranks when it has ended
                        └── RECORD             keeps the value of the loss, for train.compare
                            └── torch's own backward

A pass inside another one belongs to that one: a reentrant checkpoint makes such passes, and torch
for a subclass of Tensor.
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
    """When a subscriber runs: lower ones around higher ones, and those of one place as entered."""

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
        roots: the tensors from which it starts.
        gradients: the gradients there; None: 1.
        options: retain_graph, create_graph and inputs of torch.autograd.backward.
        is_weighted: whether a subscriber has weighted the loss.
    """

    roots: Roots
    gradients: Any
    options: dict[str, Any]
    is_weighted: bool = False


Run = Callable[[Pass], None]
"""Goes on with a pass: the subscribers that are left, then torch."""
Subscriber = Callable[[Pass, Run], None]


class _ThreadState(threading.local):
    """What this thread does.

    Attributes:
        is_in_pass: whether it is in a pass that the subscribers see.
    """

    is_in_pass = False


_thread = _ThreadState()
# Global, because torch.autograd.backward belongs to the process.
_subscribers: list[tuple[Order, Subscriber]] = []
# Holds the replacement of torch.autograd.backward while there are subscribers.
_replacement = contextlib.ExitStack()


def _backward_with_subscribers(original: Callable[..., None]) -> Callable[..., None]:
    """Build the function that stands for torch.autograd.backward."""

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
            # Torch reads a generator once, and subscribers read the inputs before it does.
            options["inputs"] = as_roots(inputs)
        is_nested = _thread.is_in_pass or is_in_backward()
        # Torch's error for both names of one argument is better than ours would be.
        is_refused = grad_tensors is not None and grad_variables is not None
        if is_refused or is_nested or not _subscribers:
            original(tensors, grad_tensors, grad_variables=grad_variables, **options)
            return
        gradients = grad_tensors
        if grad_variables is not None:  # the deprecated name
            gradients = grad_variables
        _thread.is_in_pass = True
        try:
            _run_subscribers(original, Pass(as_roots(tensors), gradients, options))
        finally:
            _thread.is_in_pass = False

    return backward


def _run_subscribers(original: Callable[..., None], first_pass: Pass) -> None:
    """Run a pass through the subscribers, one inside the other, and torch inside the last."""
    # One that a subscriber adds or removes meanwhile changes the next pass.
    subscribers = tuple(subscriber for _, subscriber in _subscribers)

    def run_from(position: int, backward_pass: Pass) -> None:
        if position == len(subscribers):
            original(backward_pass.roots, backward_pass.gradients, **backward_pass.options)
        else:
            subscribers[position](backward_pass, functools.partial(run_from, position + 1))

    run_from(0, first_pass)


@contextlib.contextmanager
def subscribed(order: Order, subscriber: Subscriber) -> Iterator[None]:
    """Call `subscriber(pass, run)` for the backward passes in the context; `run` goes on with one.

    Args:
        order: its place among the subscribers.
        subscriber: calls `run` once, with the pass or a changed one.
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
    """Queue a callback for the end of the running backward pass, as DDP's reducer does.

    Outside of a pass, torch raises an error.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def as_roots(tensors: Any) -> Roots:
    """Return the roots of a backward pass as a tuple: torch takes one root, or several."""
    if isinstance(tensors, (torch.Tensor, GradientEdge)):
        return (tensors,)
    return tuple(tensors)
