"""Code of the user that would see scaled gradients, under loss scaling in fp16.

From the start of backward to its end, gradients are multiplied by the loss scale.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parallelize.torch_patches.private import replace_attribute

_METHODS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")


@contextlib.contextmanager
def refusing_tensor_hooks(refusal: Callable[[str], Exception]) -> Iterator[None]:
    """In the context, refuse the user's calls of the methods that hook the gradient of a tensor.

    The hook would get a scaled gradient, and `retain_grad` would keep one. A norm that the user
    logs from it would be wrong, and nothing would say so. Hooks of torch and of this package are
    allowed, because they expect scaled gradients.

    Args:
        refusal: gets the name of a method, such as "Tensor.register_hook", and returns the error.
    """
    with contextlib.ExitStack() as replacements:
        for name in _METHODS:
            method = _refusing(getattr(torch.Tensor, name), name, refusal)
            replacements.enter_context(replace_attribute(torch.Tensor, name, method))
        yield


def _refusing(
    method: Callable[..., Any], name: str, refusal: Callable[[str], Exception]
) -> Callable[..., Any]:
    """Build the function that replaces a method of torch.Tensor."""

    @functools.wraps(method)
    def refuse(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The top-level package of the module that calls the method.
        caller = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        if caller in {"torch", "parallelize"}:
            return method(tensor, *args, **kwargs)
        raise refusal(f"Tensor.{name}")

    return refuse


@contextlib.contextmanager
def before_grad_scaler(
    see: Callable[[torch.amp.GradScaler, Any], None],
) -> Iterator[None]:
    """In the context, call `see` before a GradScaler of the user multiplies a loss.

    The session of fp16 ends its own loss scaling then, because a loss must not be scaled twice.

    Args:
        see: gets the scaler and the tensors that it is going to multiply.
    """
    original = torch.amp.GradScaler.scale

    @functools.wraps(original)
    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        see(scaler, outputs)
        return original(scaler, outputs)

    with replace_attribute(torch.amp.GradScaler, "scale", scale):
        yield
