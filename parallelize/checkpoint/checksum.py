"""Checksum of a checkpoint's content, to detect accidental damage; it is fast and not cryptographic."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint.safe_types import is_wrapper
from parallelize.errors import ParallelizeError

__all__ = ["checksum_of", "damaged_error"]

_BLOCK = 1 << 15  # 8-byte words per block of 256 KiB


def checksum_of(content: Any) -> str:
    """Return the checksum of nested containers, numbers, strings and dense tensors; their order matters.

    The checksum changes if any single value changes, or if two values more than 256 KiB apart are swapped.
    """
    state = hashlib.blake2b(digest_size=16)
    _add(state, content)
    return state.hexdigest()


def _add(state: Any, value: Any) -> None:
    if is_wrapper(value):
        names, context = value.__tensor_flatten__()
        _add(state, [type(value).__qualname__, repr(context), *(getattr(value, name) for name in names)])
    elif isinstance(value, torch.Tensor):
        state.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        if not value.is_meta:  # a placeholder: its shards have their own checksums
            state.update(_sums(value))
    elif isinstance(value, Mapping):
        state.update(f"mapping {len(value)} {getattr(value, '_metadata', None)}".encode())
        for key, each in value.items():
            state.update(repr(key).encode())
            _add(state, each)
    elif isinstance(value, (list, tuple)):
        state.update(f"{'list' if isinstance(value, list) else 'tuple'} {len(value)}".encode())
        for each in value:
            _add(state, each)
    elif isinstance(value, set):
        _add(state, sorted(map(repr, value)))
    else:
        state.update(repr(value).encode())


def _sums(tensor: torch.Tensor) -> bytes:
    """Return the wrapping sum of the 8-byte words of each block, followed by the remaining words and bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    num_word_bytes = flat.numel() // 8 * 8
    words, rest = flat[:num_word_bytes].view(torch.int64), flat[num_word_bytes:]
    num_block_words = words.numel() // _BLOCK * _BLOCK
    sums = [words[:num_block_words].view(-1, _BLOCK).sum(dim=1), words[num_block_words:], rest.long()]
    joined = torch.cat([each.cpu() for each in sums])
    return ctypes.string_at(joined.data_ptr(), joined.nbytes)  # .numpy() requires NumPy, which is optional


def damaged_error(path: Path, why: Any) -> ParallelizeError:
    """Build the error for a damaged checkpoint."""
    return ParallelizeError(
        f"{path} is damaged",
        why=f"{type(why).__name__}: {why}".partition("\n")[0] if isinstance(why, BaseException) else why,
        fix="load another checkpoint; nothing was loaded from this one. (If you have edited it, remove its key "
        "'_parallelize'.)",
    )
