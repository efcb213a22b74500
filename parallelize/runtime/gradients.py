"""Helpers for gradients and backward passes: parameters of optimizers, gradient versions, callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from parallelize.torch_private import self_test

__all__ = [
    "Closure",
    "at_end_of_backward",
    "backward_id",
    "change_closure",
    "followed_by",
    "gradient_version",
    "has_sparse_gradient",
    "is_capturing",
    "is_in_backward",
    "parameters_of",
    "require_patchable_backward",
    "unpatched_backward",
]


Closure = Callable[..., Any]
"""Function that computes the gradients of an optimizer's step, and returns the loss."""


def unpatched_backward(root: torch.Tensor) -> None:
    """Run the backward pass of a 0-dim tensor, which patches of torch.autograd.backward do not see."""
    torch.autograd.Variable._execution_engine.run_backward(
        (root,),
        (torch.ones((), device="cpu"),),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@self_test("shard_loader, average= and amp=", instead="average gradients by parallelize.all_reduce")
def require_patchable_backward() -> bool:
    """`Tensor.backward` calls torch.autograd.backward; hooks know the running pass, and can queue its last action."""
    events: list[str] = []
    autograd: Any = torch.autograd
    original = autograd.backward
    leaf: Any = torch.ones((), device="cpu", requires_grad=True)
    loss = leaf * 2

    def patch(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if tensors is not loss:  # a backward pass of another thread
            original(tensors, *args, **kwargs)
            return
        events.append("patch")
        unpatched_backward(loss)  # `original` may be a patch of other code, or one that records losses

    def hook(_: torch.Tensor) -> None:
        events.append("in backward" if is_in_backward() else "outside")
        at_end_of_backward(lambda: events.append("end" if leaf.grad is not None else "too early"))

    leaf.register_hook(hook)
    autograd.backward = patch
    try:
        loss.backward()
    finally:
        if autograd.backward is patch:
            autograd.backward = original
    return events == ["patch", "in backward", "end"] and not is_in_backward()


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield the parameters of an optimizer, param group by param group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def has_sparse_gradient(module: nn.Module) -> bool:
    """Whether the gradient of the module's weight is sparse."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def gradient_version(gradient: torch.Tensor) -> tuple[int, int]:
    """Return (id, version), which changes when `.grad` is replaced or modified in place."""
    return id(gradient), gradient._version


def backward_id() -> int:
    """Return the ID of the backward pass that this thread is running; -1 outside of a backward pass."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, where values cannot be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Queue a callback for the end of the running backward pass, as DDP's reducer does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def change_closure(
    change: Callable[[Closure], Closure], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return (args, kwargs) of an optimizer's `step` with another closure; None if it has no closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": change(closure)}
    return (args[0], change(closure), *args[2:]), kwargs


def followed_by(action: Callable[[], None], closure: Closure) -> Closure:
    """Return a closure that ends by calling `action`."""

    @functools.wraps(closure)
    def extended(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        action()
        return loss

    return extended
