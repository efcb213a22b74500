"""Whether two processes hold the same data, told from a few characters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from parallelize.runtime.containers import leaves

__all__ = ["likeness"]

# Of an array. Enough to tell batches apart; a batch may lie on an accelerator, and have gigabytes.
_ELEMENTS = 1024


def likeness(data: Iterable[Any]) -> str:
    """Differs, but for chance, where the data do; of objects that nobody knows only the types count.

    Arrays of whole numbers and text tell by themselves which samples these are. Other numbers are looked at where there
    are none: fractions may have been augmented, or computed by another device, and a number beside a batch counts it.

    Args:
        data: batches or indices; only read.
    """
    exact: list[str] = []
    vague: list[str] = []
    for leaf in leaves(list(data)):
        text, is_exact = _described(leaf)
        (exact if is_exact else vague).append(text)
    return hashlib.blake2b("/".join(exact or vague).encode(), digest_size=4).hexdigest()


def _described(leaf: Any) -> tuple[str, bool]:
    """What can be compared of a leaf, and whether it is exact."""
    if isinstance(leaf, (str, bytes)):
        return repr(leaf[:_ELEMENTS]), True
    if isinstance(leaf, (int, float, complex)):
        return repr(leaf), False
    is_tensor = isinstance(leaf, torch.Tensor)
    is_readable = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_meta
    if is_readable or (hasattr(leaf, "reshape") and hasattr(leaf, "tolist") and not is_tensor):
        elements = leaf.reshape(-1)[:_ELEMENTS].tolist()
        if elements and isinstance(elements[0], (str, bytes, int, float, complex)):
            return f"{tuple(leaf.shape)}{elements}", leaf.ndim > 0 and isinstance(elements[0], (str, bytes, int))
    return type(leaf).__qualname__, False
