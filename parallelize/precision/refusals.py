"""What cannot be done under loss scaling: each refusal with its reason and its fix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from parallelize.errors import ConfigError

__all__ = ["closure", "cuda_graph", "half_parameter", "optimizer_in_backward", "own_scaler", "unknown_parameters"]

_BF16 = "amp='bf16', which needs no loss scaling"


def closure(optimizer: torch.optim.Optimizer) -> ConfigError:
    """`step(closure)`."""
    return ConfigError(
        f"{type(optimizer).__name__}.step(closure) under loss scaling",
        why="the step calls backward itself, several times, and only it would know whether a gradient was inf",
        fix=f"call backward before step(), or use {_BF16}",
    )


def optimizer_in_backward(optimizer: torch.optim.Optimizer) -> ConfigError:
    """A step taken by a hook while backward runs."""
    return ConfigError(
        f"{type(optimizer).__name__}.step() inside backward, under loss scaling",
        why="gradients are true, and known to be finite, only when backward has ended",
        fix=f"call step() after backward(), or use {_BF16}",
    )


def unknown_parameters(optimizer: torch.optim.Optimizer, unknown: Sequence[tuple[str, torch.Tensor]]) -> ConfigError:
    """An optimizer with parameters of no model of the block.

    Args:
        optimizer: the user's.
        unknown: where each lies in the optimizer, and the parameter.
    """
    place, first = unknown[0]
    return ConfigError(
        f"{type(optimizer).__name__} holds {len(unknown)} parameter(s) that no model of the block has: "
        f"{place} of shape {tuple(first.shape)}",
        why="nobody makes their gradients equal on all ranks, and the loss scale covers the block's models only",
        fix="give their module to the block too: parallel_model(model, criterion); or step them with an own optimizer, "
        "from a loss of their own",
    )


def own_scaler() -> ConfigError:
    """The user's own GradScaler."""
    return ConfigError(
        "a torch.amp.GradScaler of your own with amp='fp16'",
        why="backward scales the loss already, so it would be scaled twice",
        fix="delete the scaler: call loss.backward() and optimizer.step(); or drop amp= and keep your own autocast",
    )


def cuda_graph() -> ConfigError:
    """Capture of a CUDA graph."""
    return ConfigError(
        "a CUDA graph is being captured under loss scaling",
        why="whether a step is left out is decided anew each time, and a graph replays one decision",
        fix=f"capture outside of the block, or use {_BF16}",
    )


def half_parameter(name: str, parameter: nn.Parameter) -> ConfigError:
    """A parameter that is in fp16 before the block begins."""
    return ConfigError(
        f"parameter {name!r} is in {parameter.dtype} already",
        why="gradients have the type of their parameter, and divided by the loss scale they underflow in fp16",
        fix="give the model in fp32, without .half(): amp='O2' computes with weights in half, amp='O3' keeps them so",
    )
