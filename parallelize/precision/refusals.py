"""Errors and a warning for operations that loss scaling does not support."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from parallelize.errors import ConfigError

__all__ = [
    "UNSCALED_BACKWARD",
    "closure",
    "cuda_graph",
    "half_parameter",
    "name_overflow",
    "optimizer_in_backward",
    "own_scaler",
    "unknown_parameters",
]

UNSCALED_BACKWARD = (
    "a backward pass ran without loss scaling, so small fp16 gradients may be zero and inf is not checked: it was "
    "called by a function imported before the block (from torch.autograd import backward, grad); call "
    "loss.backward() or torch.autograd.grad(...) instead"
)
_BF16 = "amp='bf16', which needs no loss scaling"


def closure(optimizer: torch.optim.Optimizer) -> ConfigError:
    """Build the error for `step(closure)`."""
    return ConfigError(
        f"{type(optimizer).__name__}.step(closure) under loss scaling",
        why="the step calls backward several times, and uses the gradients before they can be checked for inf",
        fix=f"call backward before step(), or use {_BF16}",
    )


def optimizer_in_backward(optimizer: torch.optim.Optimizer) -> ConfigError:
    """Build the error for a step that a hook takes inside backward."""
    return ConfigError(
        f"{type(optimizer).__name__}.step() inside backward, under loss scaling",
        why="gradients are unscaled and checked for inf only when backward has ended",
        fix=f"call step() after backward(), or use {_BF16}",
    )


def unknown_parameters(optimizer: torch.optim.Optimizer, unknown: Sequence[tuple[str, torch.Tensor]]) -> ConfigError:
    """Build the error for an optimizer with parameters that no model of the block has.

    Args:
        optimizer: the user's optimizer.
        unknown: such parameters, as (position in the optimizer, parameter).
    """
    place, first = unknown[0]
    return ConfigError(
        f"{type(optimizer).__name__} holds {len(unknown)} parameter(s) that no model of the block has: "
        f"{place} of shape {tuple(first.shape)}",
        why="their gradients are not averaged over the ranks, and the loss scale covers the block's models only",
        fix="pass their module to the block too: parallel_model(model, criterion); or train them by a separate loss "
        "and optimizer",
    )


def own_scaler() -> ConfigError:
    """Build the error for a torch.amp.GradScaler of the user."""
    return ConfigError(
        "a torch.amp.GradScaler of your own with amp='fp16'",
        why="backward scales the loss already: it would be scaled twice",
        fix="delete the scaler: call loss.backward() and optimizer.step(); or drop amp= and keep your own autocast",
    )


def cuda_graph() -> ConfigError:
    """Build the error for a backward while a CUDA graph is captured."""
    return ConfigError(
        "a CUDA graph is being captured under loss scaling",
        why="each iteration decides anew whether to skip the step, and a graph replays one decision",
        fix=f"capture outside of the block, or use {_BF16}",
    )


def half_parameter(name: str, parameter: nn.Parameter) -> ConfigError:
    """Build the error for a parameter that is in fp16 before the block begins."""
    return ConfigError(
        f"parameter {name!r} is in {parameter.dtype} already",
        why="its gradient has the same dtype, and unscaled gradients underflow in fp16",
        fix="pass the model in fp32, without .half(): amp='O2' computes with weights in half, amp='O3' stores them so",
    )


@contextlib.contextmanager
def name_overflow(*, is_repeated: bool) -> Iterator[None]:
    """Name the cause of an error, if a pass of torch.autograd.grad inside the context repeats one that overflowed."""
    try:
        yield
    except Exception as exc:
        if not is_repeated:
            raise
        raise ConfigError(
            "torch.autograd.grad: gradients overflow with the loss scale, and a second pass with a smaller one fails",
            why=f"the graph supports one backward pass only: {exc}",
            fix=f"differentiate a smaller loss, or use {_BF16}",
        ) from exc
