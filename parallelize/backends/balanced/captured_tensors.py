"""Gradients from outside: a loss on a tensor that a hook has taken out of a micro-batch.

    segment      [ a ──> z ──> b ]     z, as a hook has seen it, is a segment's: its history ends at stand-ins for
                   ^     ^             parameters and for tensors of other segments, which nobody asks for gradients
    stand-in       x     │             but the segment's own backward: x is an error, where they would be lost
    the user's        loss(z)

Both are closed: the stand-ins, and z, since a loss on it frees what the segment's backward needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from parallelize.backends.balanced import refusals

__all__ = ["closed", "within"]

# Of the thread, and of those that autograd's engine works in for it: a device has one of its own.
_IS_WITHIN = "parallelize.balanced.backward"


@contextlib.contextmanager
def within() -> Iterator[None]:
    """The backward of a segment."""
    torch._C._stash_obj_in_tls(_IS_WITHIN, True)  # noqa: FBT003  # a value, not an option
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_IS_WITHIN, False)  # noqa: FBT003  # as above


def closed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which now takes gradients from backwards of segments only."""
    tensor.register_hook(_refuse_strangers)  # type: ignore[no-untyped-call]  # torch's
    return tensor


def _refuse_strangers(_gradient: torch.Tensor) -> None:
    if not (torch._C._is_key_in_tls(_IS_WITHIN) and torch._C._get_obj_in_tls(_IS_WITHIN)):
        raise refusals.escaped()
