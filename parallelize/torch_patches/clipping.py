"""The clipping functions of torch.nn.utils, called with other tensors than the user passes.

Apex trains fp32 copies of a model's parameters, its masters. The user's code clips the gradients of
the parameters, which the optimizer does not read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from parallelize.torch_patches.private import replace_attribute

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")


@contextlib.contextmanager
def clipping_instead(
    tensors_for: Callable[[Iterable[torch.Tensor]], list[torch.Tensor]],
) -> Iterator[None]:
    """In the context, let the clipping functions clip the gradients of other tensors.

    Args:
        tensors_for: gets the tensors that the user has passed, and returns the tensors whose
            gradients the optimizer reads.
    """
    with contextlib.ExitStack() as replacements:
        # Users call torch.nn.utils.clip_grad_norm_, and torch.nn.utils.clip_grad.clip_grad_norm_.
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in _FUNCTIONS:
                clip = _clipping(getattr(module, name), tensors_for)
                replacements.enter_context(replace_attribute(module, name, clip))
        yield


def _clipping(
    original: Callable[..., Any],
    tensors_for: Callable[[Iterable[torch.Tensor]], list[torch.Tensor]],
) -> Callable[..., Any]:
    """Build the function that replaces a clipping function of torch."""

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return original(tensors_for(tensors), *args, **kwargs)

    return clip
