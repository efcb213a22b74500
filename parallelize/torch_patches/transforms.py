"""Whether this thread runs inside a transform of torch.func, such as vmap, grad, jvp or jacrev.

There, tensors are wrapped, once for each transform around them. Three things that an engine does
with a batch mean something else: the values of a wrapped tensor are not those of all samples,
a hook on it is lost when the transform unwraps it, and a thread of its own sees no transform.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from parallelize.errors import ConfigError

__all__ = ["is_differentiating_forward", "is_in_transform", "refuse_transform"]


def is_in_transform() -> bool:
    """Whether a transform of torch.func is running on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_differentiating_forward() -> bool:
    """Whether forward-mode differentiation is on, as by torch.func.jvp or forward_ad.dual_level."""
    return forward_ad._current_level >= 0


def refuse_transform(reason: str, *, fix: str) -> None:
    """Refuse a forward that torch.func transforms.

    Args:
        reason: why the engine cannot run it.
        fix: what to do instead.

    Raises:
        ConfigError: this thread is inside a transform.
    """
    if is_in_transform():
        raise ConfigError(
            "a forward of the model inside a transform of torch.func (vmap, grad, jvp, ...)",
            why=reason,
            fix=fix,
        )
