"""Pieces of divided tensors in the files of torch.distributed.checkpoint: each rank writes and reads its own.

    <folder>/__<rank>_0.distcp    the pieces of one rank
    <folder>/.metadata            torch's own list, for its tools; a pickle, which nothing here reads

Torch plans which block lies where and which stored blocks a rank needs of it; who has written what is told by the
caller, so that nothing here is a collective and a thread can do it beside the loop.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from typing_extensions import override

from parallelize.checkpoint.atomic_write import writing_out
from parallelize.checkpoint.checksum import digest, without_checksums
from parallelize.checkpoint.shard_index import Piece

__all__ = ["Part", "list_for_torch", "own_parts", "read_pieces", "write_pieces"]


@dataclass(frozen=True)
class Part:
    """What this rank writes of one tensor.

    Args:
        item: which block it is, as torch plans it.
        values: of the block, shared with whoever trains.
    """

    item: WriteItem
    values: torch.Tensor


def own_parts(divided: Mapping[str, DTensor]) -> list[Part]:
    """The blocks that this rank writes; of a block that several ranks hold the first of them writes it."""
    mine = {key: tensor for key, tensor in divided.items() if _is_first(tensor) and tensor.to_local().numel()}
    plan = create_default_local_save_plan(dict(mine), is_coordinator=False)
    return [Part(item, mine[item.index.fqn].to_local().detach()) for item in plan.items]


def _is_first(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(at == 0 for at, each in zip(coordinate, tensor.placements, strict=True) if each.is_replicate())


class _Values(DefaultSavePlanner):
    """Hands torch's writer the values of parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self._of_index = {each.item.index: each.values for each in parts}

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._of_index[write_item.index]


def write_pieces(folder: Path, rank: int, parts: Sequence[Part]) -> list[Piece]:
    """Write this rank's file, forced to the disk.

    Raises:
        OSError, RuntimeError: the file system refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not parts:
        return []
    writer = FileSystemWriter(folder)
    # A file is named for the place of its plan among all ranks'.
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [SavePlan([each.item for each in parts])])[rank]
    with without_checksums(), writing_out(folder / f"__{rank}_0.distcp"):
        results = writer.write_data(plan, _Values(parts)).value()
    values = {each.item.index: each.values for each in parts}
    return [_piece(each, values[each.index]) for each in results]


def _piece(result: WriteResult, values: torch.Tensor) -> Piece:
    stored = result.storage_data
    offsets = tuple(result.index.offset or ())
    fingerprint = digest(values)
    return Piece(
        result.index.fqn, offsets, tuple(values.shape), stored.relative_path, stored.offset, stored.length, fingerprint
    )


def list_for_torch(folder: Path, tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Sequence[Piece]]) -> None:
    """Write the list by which torch.distributed.checkpoint reads the folder; this library does not."""
    metadata = _metadata(tensors, pieces)
    metadata.planner_data = {key: (key,) for key in tensors}
    results = [
        WriteResult(_index(each), each.length, _StorageInfo(each.file, each.start, each.length))
        for of_key in pieces.values()
        for each in of_key
    ]
    FileSystemWriter(folder).finish(metadata, [results])


def read_pieces(folder: Path, pieces: Mapping[str, Sequence[Piece]], targets: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors, of divided ones this rank's part, from the blocks that have something of it.

    Args:
        folder: of the files.
        pieces: of each tensor.
        targets: what is filled, by key; types as they were written.

    Raises:
        OSError: a file is gone.
        ValueError: one is damaged.
    """
    stored = {_index(each): each for of_key in pieces.values() for each in of_key}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), _metadata(targets, pieces))
    plan = planner.create_local_plan().items
    for item in sorted(plan, key=lambda item: (stored[item.storage_index].file, stored[item.storage_index].start)):
        values = _read(folder, stored[item.storage_index])
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        planner.resolve_tensor(item).detach().copy_(values)


def _read(folder: Path, piece: Piece) -> torch.Tensor:
    with (folder / piece.file).open("rb") as file:
        file.seek(piece.start)
        content = file.read(piece.length)
    try:
        values: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        is_intact = tuple(values.shape) == piece.sizes and digest(values) == piece.fingerprint
    except Exception as exc:  # random bytes lead torch's reader anywhere
        raise ValueError(f"{folder.name}{os.sep}{piece.file} does not hold {piece.key}: {exc}") from exc
    if not is_intact:
        raise ValueError(f"{folder.name}{os.sep}{piece.file} does not hold {piece.key} as it was written")
    return values  # type: ignore[no-any-return]  # a tensor, by its digest


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.key, piece.offsets)


def _metadata(tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Sequence[Piece]]) -> Metadata:
    def chunks(key: str) -> Iterator[ChunkStorageMetadata]:
        for each in pieces.get(key, ()):
            yield ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))

    listed: Any = {
        key: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), list(chunks(key)))
        for key, tensor in tensors.items()
    }
    return Metadata(listed)
