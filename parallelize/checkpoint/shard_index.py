"""Where the values of divided tensors lie in the files that the ranks have written."""

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

__all__ = ["Piece", "Pieces", "is_divided"]

_NAME = re.compile(r"[\w-][\w.-]*")  # of a file or a folder that lies where the checkpoint is, and nowhere else


@dataclass(frozen=True)
class Piece:
    """A block of one tensor, in one file.

    Args:
        key: the tensor.
        offsets: where the block begins, in each dimension of the tensor.
        sizes: of the block.
        file: its name in the folder of the pieces.
        start: where in the file it begins, in bytes.
        length: in bytes.
        fingerprint: of its values.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    fingerprint: str


@dataclass(frozen=True)
class Pieces:
    """All pieces of a checkpoint.

    Args:
        folder: its name, beside the file that lists the pieces.
        keys: which tensor stands in the place of each tensor without values, in their order in the checkpoint.
        of_key: the blocks of each tensor.
    """

    folder: str
    keys: tuple[str, ...]
    of_key: Mapping[str, Sequence[Piece]]

    @classmethod
    def of(cls, folder: str, keys: Iterable[str], pieces: Iterable[Piece]) -> Pieces:
        """From pieces in any order."""
        of_key: dict[str, list[Piece]] = defaultdict(list)
        for each in pieces:
            of_key[each.key].append(each)
        return cls(folder, tuple(keys), of_key)

    def as_plain(self) -> dict[str, Any]:
        """In plain containers."""
        pieces = [list(astuple(each)) for of_key in self.of_key.values() for each in of_key]
        return {"folder": self.folder, "keys": list(self.keys), "pieces": pieces}

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Pieces:
        """From plain containers.

        Raises:
            ValueError: names that lead elsewhere.
        """
        pieces = [Piece(key, tuple(at), tuple(sizes), *rest) for key, at, sizes, *rest in plain["pieces"]]
        for name in (plain["folder"], *(each.file for each in pieces)):
            if _NAME.fullmatch(name) is None:
                raise ValueError(f"{name!r} is no name of a file beside it")
        return cls.of(plain["folder"], plain["keys"], pieces)

    def faults(self, states: Any, beside: Path) -> Iterator[str]:
        """What is missing of the tensors without values in `states`, by the files' sizes; nothing is read."""
        divided = [each for each in leaves(states) if is_divided(each)]
        if len(divided) != len(self.keys):
            yield f"it lists {len(self.keys)} divided tensors and has places for {len(divided)}"
            return
        for key, tensor in zip(self.keys, divided, strict=True):
            if not _is_covered(tuple(tensor.shape), self.of_key.get(key, ())):
                yield f"it does not list all pieces of {key}"
        ends: dict[str, int] = defaultdict(int)
        for each in (piece for pieces in self.of_key.values() for piece in pieces):
            ends[each.file] = max(ends[each.file], each.start + each.length)
        for name, end in sorted(ends.items()):
            path = beside / self.folder / name
            if not path.is_file():
                yield f"{self.folder}/{name} is not there"
            elif path.stat().st_size < end:
                yield f"{self.folder}/{name} has {path.stat().st_size} bytes of {end}"


def is_divided(value: Any) -> bool:
    """Whether a value in a checkpoint stands for a tensor whose values lie in pieces."""
    return isinstance(value, torch.Tensor) and value.is_meta


def _is_covered(shape: tuple[int, ...], pieces: Sequence[Piece]) -> bool:
    inside = all(
        len(each.offsets) == len(each.sizes) == len(shape)
        and all(0 <= at <= at + size <= whole for at, size, whole in zip(each.offsets, each.sizes, shape, strict=True))
        for each in pieces
    )
    return inside and sum(math.prod(each.sizes) for each in pieces) == math.prod(shape)
