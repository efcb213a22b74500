"""Hash of samples, which ranks compare to detect different data."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from parallelize.runtime.containers import leaves

__all__ = ["sample_fingerprint"]

# Maximum number of elements of an array to hash: enough to distinguish batches, which may take gigabytes.
_MAX_ELEMENTS = 1024


def sample_fingerprint(data: Iterable[Any], *, has_floats: bool = True, are_samples: bool = False) -> str:
    """Return a short hash of the samples; for objects of unknown types, only the name of the type is hashed.

    It is "" if a container cannot be read. If the data contains integer arrays or text, only these are hashed. Floats
    may differ because of augmentation or the device, and a single number beside a batch is often a counter; if the data
    `are_samples`, a single integer counts as an array, because it may be a label.
    """
    try:
        texts = [_hashable_text(leaf, has_labels=are_samples) for leaf in leaves(list(data))]
    except Exception:  # noqa: BLE001 - a container of the user raises an error, or contains itself
        return ""
    identifying = [text for text, is_identifying in texts if is_identifying]
    others = [text for text, _ in texts] if has_floats else []
    return hashlib.blake2b("/".join(identifying or others).encode(), digest_size=4).hexdigest()


def _hashable_text(leaf: Any, *, has_labels: bool) -> tuple[str, bool]:
    """Return the text to hash for a leaf, and whether it identifies the sample."""
    if isinstance(leaf, (str, bytes)):
        return repr(leaf[:_MAX_ELEMENTS]), True
    if isinstance(leaf, (int, float, complex)):
        return repr(leaf), has_labels and isinstance(leaf, int)
    with contextlib.suppress(Exception):  # a class of the user raises an error, or a nested or quantized tensor
        is_tensor = isinstance(leaf, torch.Tensor)
        is_readable = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_meta
        if is_readable or (hasattr(leaf, "reshape") and hasattr(leaf, "tolist") and not is_tensor):
            elements = leaf.reshape(-1)[:_MAX_ELEMENTS].tolist()
            if elements and isinstance(elements[0], (str, bytes, int, float, complex)):
                is_identifying = isinstance(elements[0], (str, bytes, int)) and (has_labels or leaf.ndim > 0)
                return f"{tuple(leaf.shape)}{elements}", is_identifying
    return type(leaf).__qualname__, False
