"""A fingerprint of a checkpoint's content, that a damaged file does not have.

It is made for accidents, at the speed of memory: whoever can write the file can write the fingerprint too.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["digest", "without_checksums"]

_BLOCK = 1 << 15  # words of 8 bytes: sums of 256 KiB


def digest(content: Any) -> str:
    """The fingerprint of plain values: containers, numbers, texts and dense tensors, in their order.

    Any change of one value changes it, and any other places of values more than 256 KiB apart.
    """
    state = hashlib.blake2b(digest_size=16)
    _add(state, content)
    return state.hexdigest()


def _add(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        state.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        if not value.is_meta:  # its values lie elsewhere, and have a fingerprint there
            state.update(_sums(value))
    elif isinstance(value, Mapping):
        state.update(f"mapping {len(value)}".encode())
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
    """Sums of the words of each block, wrapping around, and the bytes behind the last whole one."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words, rest = flat[:whole].view(torch.int64), flat[whole:]
    blocks = words.numel() // _BLOCK * _BLOCK
    sums = [words[:blocks].view(-1, _BLOCK).sum(dim=1), words[blocks:], rest.long()]
    found = torch.cat([each.cpu() for each in sums])
    return ctypes.string_at(found.data_ptr(), found.nbytes)  # .numpy() would need NumPy, which torch does not


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """torch.save leaves out the archive's own: the fingerprint says more, and torch.load does not look at them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
