"""A checksum of nested values, by which tests compare states bitwise."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["checksum_of"]


def checksum_of(value: Any) -> str:
    """Return a checksum of nested containers, numbers, strings and tensors; order and types matter."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts = [value.dtype, tuple(value.shape), bytes(flat.tolist())]
    elif isinstance(value, Mapping):
        parts = [(key, checksum_of(each)) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [type(value) is list, *map(checksum_of, value)]
    else:
        parts = [value]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
