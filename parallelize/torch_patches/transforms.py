"""Whether this thread runs inside a transform of torch.func, such as vmap, grad, jvp or jacrev.

A transform wraps the tensors that the user's function gets. Three things that engines do with a
batch go wrong with wrapped tensors:

    reading values      a wrapped tensor may show one sample instead of all
    setting a hook      the hook is lost when the transform unwraps the tensor
    running a thread    the transform is not active in another thread
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from parallelize.errors import ConfigError


def is_in_transform() -> bool:
    """Whether this thread is inside a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_differentiating_forward() -> bool:
    """Whether forward-mode differentiation is on, as by torch.func.jvp or forward_ad.dual_level."""
    return forward_ad._current_level >= 0


def refuse_transform(reason: str, *, fix: str) -> None:
    """Raise an error if this thread is inside a transform of torch.func.

    An engine that cannot run transformed forwards calls this at each forward.

    Args:
        reason: why the engine cannot run such a forward.
        fix: what the user can do.

    Raises:
        ConfigError: this thread is inside a transform.
    """
    if is_in_transform():
        raise ConfigError(
            "a forward of the model inside a transform of torch.func (vmap, grad, jvp, ...)",
            why=reason,
            fix=fix,
        )
