"""Hash of samples, which ranks compare to detect different data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from parallelize.runtime.containers import leaves

__all__ = ["sample_fingerprint"]

# Maximum number of elements of an array to hash: enough to distinguish batches, which may take gigabytes.
_MAX_ELEMENTS = 1024


def sample_fingerprint(data: Iterable[Any], *, has_floats: bool = True) -> str:
    """Return a short hash of the samples; for objects of unknown types, only the name of the type is hashed.

    If the data contains integer arrays or text, only these are hashed. Floats may differ because of augmentation or
    the device, and a single number beside a batch is often a counter.
    """
    identifying: list[str] = []
    others: list[str] = []
    for leaf in leaves(list(data)):
        text, is_identifying = _hashable_text(leaf)
        (identifying if is_identifying else others).append(text)
    return hashlib.blake2b("/".join(identifying or others * has_floats).encode(), digest_size=4).hexdigest()


def _hashable_text(leaf: Any) -> tuple[str, bool]:
    """Return the text to hash for a leaf, and whether it identifies the sample."""
    if isinstance(leaf, (str, bytes)):
        return repr(leaf[:_MAX_ELEMENTS]), True
    if isinstance(leaf, (int, float, complex)):
        return repr(leaf), False
    is_tensor = isinstance(leaf, torch.Tensor)
    is_readable = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_meta
    if is_readable or (hasattr(leaf, "reshape") and hasattr(leaf, "tolist") and not is_tensor):
        elements = leaf.reshape(-1)[:_MAX_ELEMENTS].tolist()
        if elements and isinstance(elements[0], (str, bytes, int, float, complex)):
            return f"{tuple(leaf.shape)}{elements}", leaf.ndim > 0 and isinstance(elements[0], (str, bytes, int))
    return type(leaf).__qualname__, False
