"""The one replacement of torch.autograd.backward: subscribers run around each backward pass.

    loss.backward()
    └── weigh          starts the pass from the weight of its loss
        └── scale      ... times the loss scale; unscales the gradients at its end
            └── reduce     averages the gradients over the ranks when the pass has ended
                └── record     keeps the value of the loss, for train.compare
                    └── torch's own backward

A pass inside another one (a reentrant checkpoint, torch for a subclass of Tensor) belongs to that one.
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

__all__ = [
    "Order",
    "Pass",
    "Root",
    "Roots",
    "Run",
    "as_roots",
    "at_end_of_backward",
    "is_in_backward",
    "subscribed",
]

Root = torch.Tensor | GradientEdge
"""Where a backward pass starts."""
Roots = tuple[Root, ...]


class Order(enum.IntEnum):
    """When a subscriber runs: lower ones around higher ones, earlier ones around later ones."""

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
Subscriber = Callable[[Pass, Run], None]


class _Running(threading.local):
    is_patched = False  # whether this thread is in a pass that the subscribers see


_running = _Running()
# Global, because torch.autograd.backward belongs to the process.
_subscribers: list[tuple[Order, Subscriber]] = []
_installed = contextlib.ExitStack()  # holds the replacement while there are subscribers


def _patch(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(  # noqa: PLR0917  # torch's own signature
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,  # noqa: FBT001  # torch's own signature
        create_graph: bool = False,  # noqa: FBT001, FBT002  # torch's own signature
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        given = grad_tensors if grad_variables is None else grad_variables  # the deprecated name
        roots = None if inputs is None else as_roots(inputs)  # a generator is read once
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": roots}
        both = grad_tensors is not None and grad_variables is not None  # torch raises
        if both or not _subscribers or _running.is_patched or is_in_backward():
            original(tensors, grad_tensors, grad_variables=grad_variables, **options)
            return
        found = [each for _, each in _subscribers]

        def run(each: Pass, index: int = 0) -> None:
            if index < len(found):
                found[index](each, functools.partial(run, index=index + 1))
            else:
                original(each.roots, each.gradients, **each.options)

        _running.is_patched = True
        try:
            run(Pass(as_roots(tensors), given, options))
        finally:
            _running.is_patched = False

    return backward


@contextlib.contextmanager
def subscribed(order: Order, subscriber: Subscriber) -> Iterator[None]:
    """Call `subscriber(pass, run)` for the backward passes in the context; `run` goes on with one.

    Args:
        order: its place among the subscribers.
        subscriber: calls `run` once, with the pass or a changed one.
    """
    if not _subscribers:
        _installed.enter_context(
            replace_attribute(torch.autograd, "backward", _patch(torch.autograd.backward))
        )
    entry = (order, subscriber)
    _subscribers.append(entry)
    _subscribers.sort(key=itemgetter(0))
    try:
        yield
    finally:
        _subscribers.remove(entry)
        if not _subscribers:
            _installed.close()


def is_in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Queue a callback for the end of the running backward pass, as DDP's reducer does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def as_roots(tensors: Any) -> Roots:
    """Return the first argument of torch.autograd.backward or grad as a tuple."""
    return (tensors,) if isinstance(tensors, (torch.Tensor, GradientEdge)) else tuple(tensors)
