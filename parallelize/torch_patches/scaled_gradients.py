"""What sees gradients in backward, where loss scaling has multiplied them."""

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

    The hook would get, and `retain_grad` would keep, a scaled gradient: a norm that is logged there
    is wrong by the scale, without a word. torch and this package register hooks that know of it.

    Args:
        refusal: returns the error for a method, such as "Tensor.register_hook".
    """
    with contextlib.ExitStack() as replacements:
        for name in _METHODS:
            method = _refusing(getattr(torch.Tensor, name), name, refusal)
            replacements.enter_context(replace_attribute(torch.Tensor, name, method))
        yield


def _refusing(
    method: Callable[..., Any], name: str, refusal: Callable[[str], Exception]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def refuse(tensor: torch.Tensor, *args: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        if caller in {"torch", "parallelize"}:
            return method(tensor, *args)
        raise refusal(f"Tensor.{name}")

    return refuse


@contextlib.contextmanager
def before_grad_scaler(
    see: Callable[[torch.amp.GradScaler, Any], None],
) -> Iterator[None]:
    """In the context, show what a GradScaler of the user's own scales.

    Args:
        see: gets the scaler and its outputs, before it multiplies them.
    """
    original = torch.amp.GradScaler.scale

    @functools.wraps(original)
    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        see(scaler, outputs)
        return original(scaler, outputs)

    with replace_attribute(torch.amp.GradScaler, "scale", scale):
        yield
