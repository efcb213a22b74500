"""Shard files of a sharded checkpoint, in the format of torch.distributed.checkpoint (DCP).

    <folder>/__<rank>_0.distcp    the shards written by one rank
    <folder>/.metadata            DCP's index, for other tools; a pickle, which this library does not read

DCP plans which shards a rank writes and which stored shards it reads. DCP's collectives are not used: the callers of
this module exchange the shard index, so that a background thread can write.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator, Mapping, Sequence
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

from parallelize.checkpoint.atomic_write import early_writeback
from parallelize.checkpoint.checksum import checksum_of, without_zip_crc32
from parallelize.checkpoint.file_format import Checkpoint, damaged_error
from parallelize.checkpoint.shard_index import ShardIndex, StoredShard, is_placeholder, placeholders_in
from parallelize.checkpoint.state_dicts import VALUE, StateHandler
from parallelize.runtime.containers import map_leaves

__all__ = ["ShardWrite", "load_shards", "shards_to_write", "write_shards", "write_torch_metadata"]


@dataclasses.dataclass(frozen=True)
class ShardWrite:
    """A shard that this rank writes.

    Args:
        item: DCP's write item for the shard.
        values: values of the shard, sharing memory with the live tensor.
    """

    item: WriteItem
    values: torch.Tensor


def shards_to_write(dtensors: Mapping[str, DTensor]) -> list[ShardWrite]:
    """Return the shards that this rank writes; a replicated shard is written only by the first rank that holds it."""
    own = {key: tensor for key, tensor in dtensors.items() if _is_first(tensor) and tensor.to_local().numel()}
    plan = create_default_local_save_plan(dict(own), is_coordinator=False)
    return [ShardWrite(item, own[item.index.fqn].to_local().detach()) for item in plan.items]


def _is_first(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(at == 0 for at, each in zip(coordinate, tensor.placements, strict=True) if each.is_replicate())


class _ShardPlanner(DefaultSavePlanner):
    """Save planner that passes the values of given shards to DCP's writer."""

    def __init__(self, shards: Sequence[ShardWrite]) -> None:
        super().__init__()
        self._values = {each.item.index: each.values for each in shards}

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._values[write_item.index]


def write_shards(folder: Path, rank: int, shards: Sequence[ShardWrite]) -> list[StoredShard]:
    """Write and fsync this rank's shard file; return the index entries of its shards.

    Raises:
        OSError, RuntimeError: writing failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not shards:
        return []
    writer = FileSystemWriter(folder)
    # The writer names a file after the position of its plan in the list of all ranks' plans.
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [SavePlan([each.item for each in shards])])[rank]
    with without_zip_crc32(), early_writeback(folder / f"__{rank}_0.distcp"):
        results = writer.write_data(plan, _ShardPlanner(shards)).value()
    values = {each.item.index: each.values for each in shards}
    return [_stored_shard(each, values[each.index]) for each in results]


def _stored_shard(result: WriteResult, values: torch.Tensor) -> StoredShard:
    stored = result.storage_data
    offsets = tuple(result.index.offset or ())
    checksum = checksum_of(values)
    return StoredShard(
        result.index.fqn, offsets, tuple(values.shape), stored.relative_path, stored.offset, stored.length, checksum
    )


def write_torch_metadata(folder: Path, checkpoint: Checkpoint, index: ShardIndex) -> None:
    """Write `.metadata`, so that torch.distributed.checkpoint can load the folder; this library never reads it."""
    tensors = dict(zip(index.keys, placeholders_in(checkpoint.states()), strict=True))
    metadata = _torch_metadata(tensors, index.by_key)
    metadata.planner_data = {key: (key,) for key in tensors}
    results = [
        WriteResult(_metadata_index(each), each.num_bytes, _StorageInfo(each.file, each.start_byte, each.num_bytes))
        for of_tensor in index.by_key.values()
        for each in of_tensor
    ]
    FileSystemWriter(folder).finish(metadata, [results])


def load_shards(
    path: Path, checkpoint: Checkpoint, objects: Mapping[str, Any], handlers: Mapping[str, StateHandler]
) -> Checkpoint:
    """Return the checkpoint reduced to plain values and the entries of `objects`, with stored values for placeholders.

    A placeholder that is loaded into a DTensor is replaced by this rank's shard of that DTensor, any other placeholder
    by the full tensor. No collective is used: each rank reads the stored shards that overlap its own shards.

    Raises:
        ParallelizeError: a shard file is missing or damaged.
    """
    index = checkpoint.shard_index
    assert index is not None
    key_of = dict(zip(map(id, placeholders_in(checkpoint.states())), index.keys, strict=True))
    entries = {name: each for name, each in checkpoint.entries.items() if name in handlers or each.kind == VALUE}
    dtensors: dict[int, DTensor] = {}
    for name, handler in handlers.items():
        dtensors |= {id(value): each for value, each in handler.shard_targets(objects[name], entries[name].state)}
    targets: dict[str, torch.Tensor] = {}
    for each in placeholders_in([entry.state for entry in entries.values()]):
        targets.setdefault(key_of[id(each)], _empty(each, dtensors.get(id(each))))
    folder = path / index.folder if path.is_dir() else path.parent / index.folder
    try:
        _read_shards(folder, {key: index.by_key.get(key, ()) for key in targets}, targets)
    except (OSError, ValueError) as exc:
        raise damaged_error(path, str(exc)) from exc

    def value(leaf: Any) -> Any:
        return targets[key_of[id(leaf)]] if is_placeholder(leaf) else leaf

    loaded = {name: dataclasses.replace(each, state=map_leaves(value, each.state)) for name, each in entries.items()}
    return dataclasses.replace(checkpoint, entries=loaded)


def _empty(placeholder: torch.Tensor, target: DTensor | None) -> torch.Tensor:
    if target is None:
        return torch.empty(placeholder.shape, dtype=placeholder.dtype)
    return torch.empty_like(target.detach(), dtype=placeholder.dtype)


def _read_shards(
    folder: Path, shards: Mapping[str, Sequence[StoredShard]], targets: Mapping[str, torch.Tensor]
) -> None:
    """Fill each target from the stored shards that overlap it; of a DTensor, fill this rank's shard.

    Args:
        folder: folder of the shard files.
        shards: stored shards of each tensor, by key.
        targets: tensors to fill, by key, with the dtypes that were stored.

    Raises:
        OSError: a file is missing.
        ValueError: a file is damaged.
    """
    stored = {_metadata_index(each): each for of_tensor in shards.values() for each in of_tensor}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), _torch_metadata(targets, shards))
    plan = planner.create_local_plan().items
    for item in sorted(plan, key=lambda item: (stored[item.storage_index].file, stored[item.storage_index].start_byte)):
        values = _read_shard(folder, stored[item.storage_index])
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        planner.resolve_tensor(item).detach().copy_(values)


def _read_shard(folder: Path, shard: StoredShard) -> torch.Tensor:
    with (folder / shard.file).open("rb") as file:
        file.seek(shard.start_byte)
        content = file.read(shard.num_bytes)
    try:
        values: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        is_intact = tuple(values.shape) == shard.sizes and checksum_of(values) == shard.checksum
    except Exception as exc:  # on random bytes torch.load may raise anything
        raise ValueError(f"{folder.name}{os.sep}{shard.file} does not hold {shard.key}: {exc}") from exc
    if not is_intact:
        raise ValueError(f"{folder.name}{os.sep}{shard.file} does not hold {shard.key} as it was written")
    return values  # type: ignore[no-any-return]  # a tensor: its checksum matches


def _metadata_index(shard: StoredShard) -> MetadataIndex:
    return MetadataIndex(shard.key, shard.offsets)


def _torch_metadata(tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Sequence[StoredShard]]) -> Metadata:
    def chunks(key: str) -> Iterator[ChunkStorageMetadata]:
        for each in shards.get(key, ()):
            yield ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))

    by_key: Any = {
        key: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), list(chunks(key)))
        for key, tensor in tensors.items()
    }
    return Metadata(by_key)
