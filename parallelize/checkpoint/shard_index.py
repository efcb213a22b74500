"""Index of a sharded checkpoint: which file holds which shard of which tensor."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from parallelize.runtime.containers import leaves

__all__ = ["ShardIndex", "StoredShard", "is_placeholder", "placeholders_in"]

_NAME = re.compile(r"[\w-][\w.-]*")  # no path separators: all files lie in the checkpoint's folder


@dataclass(frozen=True)
class StoredShard:
    """One shard of a tensor, and its position in a file.

    Args:
        key: name of the tensor in the index.
        offsets: index of the shard's first element in each dimension of the tensor.
        sizes: shape of the shard.
        file: name of the file in the shard folder.
        start_byte: position in the file.
        num_bytes: length in the file.
        checksum: checksum of the shard's values.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start_byte: int
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class ShardIndex:
    """All shards of a checkpoint.

    Args:
        folder: name of the shard folder, next to the file that holds the index.
        keys: key of the tensor that each placeholder stands for, in the order of the placeholders in the checkpoint.
        by_key: shards of each tensor, by its key.
    """

    folder: str
    keys: tuple[str, ...]
    by_key: Mapping[str, Sequence[StoredShard]]

    @classmethod
    def from_shards(cls, folder: str, keys: Iterable[str], shards: Iterable[StoredShard]) -> ShardIndex:
        """Build the index from shards in any order."""
        by_key: dict[str, list[StoredShard]] = defaultdict(list)
        for each in shards:
            by_key[each.key].append(each)
        return cls(folder, tuple(keys), by_key)

    def to_dict(self) -> dict[str, Any]:
        """Return the index as it is stored."""
        shards = [list(astuple(each)) for of_tensor in self.by_key.values() for each in of_tensor]
        return {"folder": self.folder, "keys": list(self.keys), "pieces": shards}

    @classmethod
    def parse(cls, stored: Mapping[str, Any]) -> ShardIndex:
        """Build the index from its stored form.

        Raises:
            ValueError: a file or folder name is not a plain name.
        """
        shards = [StoredShard(key, tuple(at), tuple(sizes), *rest) for key, at, sizes, *rest in stored["pieces"]]
        for name in (stored["folder"], *(each.file for each in shards)):
            if _NAME.fullmatch(name) is None:
                raise ValueError(f"{name!r} is not a plain file or folder name")
        return cls.from_shards(stored["folder"], stored["keys"], shards)

    def find_damage(self, states: Any, parent: Path) -> Iterator[str]:
        """Yield a phrase for each missing or truncated shard of `states`; checks file sizes, not contents."""
        placeholders = placeholders_in(states)
        if len(placeholders) != len(self.keys):
            yield f"its shard index lists {len(self.keys)} tensors for {len(placeholders)} placeholders"
            return
        for key, placeholder in zip(self.keys, placeholders, strict=True):
            if not _is_covered(tuple(placeholder.shape), self.by_key.get(key, ())):
                yield f"its shard index does not cover all of {key}"
        ends: dict[str, int] = defaultdict(int)
        for each in (shard for of_tensor in self.by_key.values() for shard in of_tensor):
            ends[each.file] = max(ends[each.file], each.start_byte + each.num_bytes)
        for name, end in sorted(ends.items()):
            path = parent / self.folder / name
            if not path.is_file():
                yield f"{self.folder}/{name} is missing"
            elif path.stat().st_size < end:
                yield f"{self.folder}/{name} has {path.stat().st_size} of {end} bytes"


def is_placeholder(value: Any) -> bool:
    """Return whether a value in a checkpoint is the placeholder (a meta tensor) of a sharded tensor."""
    return isinstance(value, torch.Tensor) and value.is_meta


def placeholders_in(states: Any) -> list[torch.Tensor]:
    """Return the placeholders in nested containers, in a fixed order."""
    return [each for each in leaves(states) if is_placeholder(each)]


def _is_covered(shape: tuple[int, ...], shards: Sequence[StoredShard]) -> bool:
    is_inside = all(
        len(each.offsets) == len(each.sizes) == len(shape)
        and all(0 <= at <= at + size <= full for at, size, full in zip(each.offsets, each.sizes, shape, strict=True))
        for each in shards
    )
    return is_inside and sum(math.prod(each.sizes) for each in shards) == math.prod(shape)
