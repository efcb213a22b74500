"""How gradients travel, if otherwise than as they are: DistributedDataParallel's hooks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from parallelize.errors import ConfigError
from parallelize.runtime.gradients import has_sparse_gradient

__all__ = ["COMPRESSING", "HOOKS", "CommHook", "hook_for"]

CommHook = Literal["fp16", "bf16", "powersgd"] | tuple[object, Callable[..., Any]]

HOOKS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook,
}
COMPRESSING = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def hook_for(model: nn.Module, hook: CommHook | str) -> tuple[object, Callable[..., Any]]:
    """The state and the function that `DistributedDataParallel.register_comm_hook` takes.

    Raises:
        ConfigError: a named hook, and gradients that it cannot take or would take a part of.
    """
    if isinstance(hook, str):
        _refuse_gradients(model, hook)
    state, function = hook if isinstance(hook, tuple) else (None, HOOKS[hook])
    if hook == "powersgd":
        state = PowerSGDState(None, start_powerSGD_iter=2)

    # Without annotations and name: DDP compares the former as objects, which they are not where annotations are
    # postponed, and refuses bf16 by the latter on gloo, which has it.
    def run(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # see above
        return function(state, bucket)

    return state, run


def _refuse_gradients(model: nn.Module, hook: str) -> None:
    """Complex ones, whose imaginary parts a cast to a real type drops without a word; sparse ones."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise _refused(hook, f"{name} of {type(model).__name__}, which is {parameter.dtype}")
    for name, module in model.named_modules():
        if has_sparse_gradient(module) and module.weight.requires_grad:
            raise _refused(hook, f"{name or type(model).__name__}, which has sparse=True")


def _refused(hook: str, what: str) -> ConfigError:
    return ConfigError(
        f"gradients that travel by {hook!r} with {what}",
        why="it compresses dense gradients of real numbers",
        fix="drop comm_hook= and communication_dtype=, bring a hook of your own, comm_hook=(state, hook), or freeze it",
    )
