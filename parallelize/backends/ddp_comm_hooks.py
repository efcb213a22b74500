"""Communication hooks that compress the gradients sent by DistributedDataParallel, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from parallelize.errors import ConfigError
from parallelize.runtime.gradients import has_sparse_gradient

__all__ = ["HOOKS", "HOOK_OF_DTYPE", "CommHook", "build_comm_hook"]

CommHook = Literal["fp16", "bf16", "powersgd"] | tuple[object, Callable[..., Any]]


def _powersgd_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run torch's PowerSGD, without what an overflow has left in its memory.

    Under fp16 loss scaling, gradients are inf from time to time, and that step is skipped. PowerSGD would add the inf
    in its error feedback to all later gradients, and multiply them by nan factors.
    """
    error, factor = (memory.get(bucket.index()) for memory in (state.error_dict, state.q_memory_dict))
    if error is not None:
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    if factor is not None:  # equal on all ranks; zeros could not be orthogonalized
        start = torch.arange(factor.numel(), dtype=factor.dtype, device=factor.device).cos().view_as(factor)
        factor.copy_(torch.where(factor.isfinite(), factor, start))
    return powerSGD_hook(state, bucket)


HOOKS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": _powersgd_hook,
}
HOOK_OF_DTYPE = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def build_comm_hook(
    model: nn.Module, hook: CommHook | str, *, powersgd_rank: int, powersgd_start: int
) -> tuple[object, Callable[..., Any]]:
    """Return the state and the function for `DistributedDataParallel.register_comm_hook`.

    Args:
        model: the model whose gradients are sent.
        hook: a name, or the user's state and function.
        powersgd_rank: rank of PowerSGD's factors.
        powersgd_start: backward pass from which PowerSGD compresses.

    Raises:
        ConfigError: complex or sparse gradients, which a named hook does not support.
    """
    if isinstance(hook, str):
        _refuse_unsupported_gradients(model, hook)
    state, function = hook if isinstance(hook, tuple) else (None, HOOKS[hook])
    if hook == "powersgd":
        state = PowerSGDState(None, powersgd_rank, powersgd_start)

    # No annotations: DDP compares them with types, and in this module they would be strings. Another name: DDP refuses
    # torch's bf16 hook by name on gloo, although gloo supports bf16.
    def hook_without_annotations(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # see above
        return function(state, bucket)

    return state, hook_without_annotations


def _refuse_unsupported_gradients(model: nn.Module, hook: str) -> None:
    """Refuse sparse gradients, and complex ones: a cast to a real dtype would drop their imaginary parts."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise _unsupported_error(hook, f"{name} of {type(model).__name__}, which is {parameter.dtype}")
    for name, module in model.named_modules():
        if has_sparse_gradient(module) and module.weight.requires_grad:
            raise _unsupported_error(hook, f"{name or type(model).__name__}, which has sparse=True")


def _unsupported_error(hook: str, what: str) -> ConfigError:
    return ConfigError(
        f"gradients compressed by {hook!r} with {what}",
        why="the hook compresses only dense gradients of real numbers",
        fix="drop comm_hook= and communication_dtype=, pass your own comm_hook=(state, hook), or freeze the parameter",
    )
