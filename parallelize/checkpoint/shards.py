"""Shards of a checkpoint, in the format of torch.distributed.checkpoint (DCP): all tensors by their qualified names.

    <folder>/__<rank>_0.distcp    what one rank has written
    <folder>/.metadata            DCP's index: a pickle, which is read without running code from it

DCP plans which shards a rank writes and which stored shards it reads. DCP's collectives are not used: the ranks
exchange plans and results through the store, so that a save can be completed in the background.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import io
import os
import pickle
import socket
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from typing_extensions import override

from parallelize.checkpoint.atomic_write import early_writeback
from parallelize.checkpoint.checksum import checksum_of
from parallelize.errors import ConfigError

__all__ = [
    "LocalShards",
    "WrittenShards",
    "empty_target",
    "finish_folder",
    "keys_of",
    "local_shards",
    "read_shards",
    "states_in",
    "write_shards",
]

_METADATA = ".metadata"
_SAFE_MODULES = {"torch", "torch.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.metadata"}


@dataclasses.dataclass(frozen=True)
class LocalShards:
    """What one rank writes.

    Args:
        plan: DCP's plan.
        values: tensors, and values as bytes, in the order of the plan; they share memory with the live tensors.
    """

    plan: SavePlan
    values: list[Any]


@dataclasses.dataclass(frozen=True)
class WrittenShards:
    """What one rank has written: its plan, DCP's results, the checksum of each item, and the host for errors."""

    plan: SavePlan
    results: list[WriteResult]
    checksums: dict[str, str]
    host: str


def local_shards(states: Mapping[str, Any], *, rank: int) -> LocalShards:
    """Plan what this rank writes: its own shards of DTensors; rank 0 also writes all other tensors and values."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(states), is_coordinator=rank == 0)
    plan = planner.create_local_plan()
    items = [each for each in plan.items if _is_written_here(planner.state_dict[each.index.fqn], rank)]
    values = [planner.resolve_data(each) for each in items]
    return LocalShards(dataclasses.replace(plan, items=items), values)


def _is_written_here(value: Any, rank: int) -> bool:
    """Return whether this rank writes the value: a replicated shard is written only by the first rank that holds it."""
    if not isinstance(value, DTensor):
        return rank == 0
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None or not value.to_local().numel():
        return False
    return all(at == 0 for at, each in zip(coordinate, value.placements, strict=True) if each.is_replicate())


class _Planner(DefaultSavePlanner):
    """Save planner that passes given values to DCP's writer."""

    def __init__(self, shards: LocalShards) -> None:
        super().__init__()
        self._values = {each.index: value for each, value in zip(shards.plan.items, shards.values, strict=True)}

    @override
    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self._values[write_item.index]
        return value if isinstance(value, torch.Tensor) else io.BytesIO(value.getvalue())


def write_shards(folder: Path, rank: int, shards: LocalShards) -> WrittenShards:
    """Write and fsync the file of one rank.

    Raises:
        OSError, RuntimeError: writing failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results: list[WriteResult] = []
    if shards.plan.items:
        writer = FileSystemWriter(folder)
        # The writer names a file after the position of its plan in the list of all ranks' plans.
        plan = writer.prepare_global_plan([SavePlan([])] * rank + [shards.plan])[rank]
        with early_writeback(folder / f"__{rank}_0.distcp"):
            results = list(writer.write_data(plan, _Planner(shards)).value())
    values = zip(shards.plan.items, shards.values, strict=True)
    checksums = {_key(each.index): checksum_of(value) for each, value in values if isinstance(value, torch.Tensor)}
    return WrittenShards(shards.plan, results, checksums, socket.gethostname())


def finish_folder(folder: Path, written: list[WrittenShards]) -> dict[str, Any]:
    """Write `.metadata` and return what the main file records: the files with their sizes, and all checksums."""
    _, metadata = DefaultSavePlanner().create_global_plan([each.plan for each in written])
    FileSystemWriter(folder).finish(metadata, [each.results for each in written])
    checksums = {key: checksum for each in written for key, checksum in each.checksums.items()}
    files = {each.name: each.stat().st_size for each in sorted(folder.iterdir())}
    return {"folder": folder.name, "files": files, "checksums": checksums, "index": _digest(folder)}


def read_shards(folder: Path, targets: Mapping[str, torch.Tensor], shards: Mapping[str, Any] | None) -> None:
    """Fill each target from the stored shards that overlap it; of a DTensor, fill this rank's shard.

    Args:
        folder: folder of the shards.
        targets: tensors to fill, by key.
        shards: what `finish_folder` has returned; None: another program has written the folder.

    Raises:
        OSError: a file is missing.
        ValueError: a file is damaged.
    """
    if shards is not None and _digest(folder) != shards["index"]:
        raise ValueError(f"{folder.name}{os.sep}{_METADATA} does not match its checksum")
    metadata = _read_metadata(folder)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), metadata)
    plan = planner.create_local_plan().items
    stored: Mapping[Any, Any] = metadata.storage_data
    for item in sorted(
        plan, key=lambda each: (stored[each.storage_index].relative_path, stored[each.storage_index].offset)
    ):
        checksum = None if shards is None else shards["checksums"][_key(item.storage_index)]
        values = _read_shard(folder, item.storage_index.fqn, stored[item.storage_index], checksum)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        planner.resolve_tensor(item).detach().copy_(values)


def keys_of(states: Any, *path: Any) -> dict[int, str]:
    """Return DCP's key of each placeholder in nested states, by id."""
    if isinstance(states, torch.Tensor):
        return {id(states): ".".join(map(str, path))} if states.is_meta else {}
    items = (
        states.items() if isinstance(states, dict) else enumerate(states) if isinstance(states, (list, tuple)) else ()
    )
    return {place: key for name, each in items for place, key in keys_of(each, *path, name).items()}


def empty_target(placeholder: torch.Tensor, dtensor: DTensor | None) -> torch.Tensor:
    """Return the tensor to fill for a placeholder: a full one, or this rank's shard of a DTensor."""
    if dtensor is None:
        return torch.empty(placeholder.shape, dtype=placeholder.dtype)
    return torch.empty_like(dtensor.detach(), dtype=placeholder.dtype)


def states_in(folder: Path) -> dict[str, Any]:
    """Return the states in a folder of another program, with meta tensors for the tensors.

    Raises:
        ConfigError: the folder's index or a value in it is not of a safe type.
    """
    try:
        metadata = _read_metadata(folder)
        stored: Mapping[Any, Any] = metadata.storage_data
        found: dict[str, Any] = {}
        for key, each in metadata.state_dict_metadata.items():
            if isinstance(each, TensorStorageMetadata):
                value: Any = torch.empty(each.size, dtype=each.properties.dtype, device="meta")
            else:
                info = next(info for index, info in stored.items() if index.fqn == key)
                value = torch.load(_slice(folder, info), map_location="cpu", weights_only=True)
            _insert(found, (metadata.planner_data or {}).get(key, (key,)), value)
    except (pickle.UnpicklingError, ValueError, OSError) as exc:
        raise ConfigError(
            f"cannot read {folder}",
            why=str(exc).partition("\n")[0],
            fix="load it with torch.distributed.checkpoint.load, if you trust its author",
        ) from exc
    return found


def _insert(nested: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set a value in nested dictionaries and lists; DCP's paths are in their order."""
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(nested, list) and key == len(nested):
            nested.append(None)
        is_known = nested[key] is not None if isinstance(nested, list) else key in nested
        if following is None:
            nested[key] = value
        elif not is_known:
            nested[key] = [] if key == "param_groups" else {}
        nested = nested[key]


def _read_shard(folder: Path, key: str, info: Any, checksum: str | None) -> Any:
    try:
        values = torch.load(_slice(folder, info), map_location="cpu", weights_only=True)
        is_intact = isinstance(values, torch.Tensor) and checksum in (None, checksum_of(values))
    except Exception as exc:  # on random bytes torch.load may raise anything
        raise ValueError(f"{folder.name}{os.sep}{info.relative_path} does not hold {key}: {exc}") from exc
    if not is_intact:
        raise ValueError(f"{folder.name}{os.sep}{info.relative_path} does not hold {key} as it was written")
    return values


def _slice(folder: Path, info: Any) -> io.BytesIO:
    with (folder / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return io.BytesIO(file.read(info.length))


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that calls nothing but DCP's dataclasses and torch's dtypes and sizes."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.serialization":
            return str  # instead of torch's function from the name of a layout, which is not used here
        if module == "pathlib":
            return PurePath  # of the folder when it was written
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # of torch's memory formats, as some releases of Python pickle them
        is_known = module in (
            "torch",
            "torch.distributed.checkpoint.metadata",
            "torch.distributed.checkpoint.filesystem",
        )
        found: Any = super().find_class(module, name) if is_known and "." not in name else None
        is_dataclass = isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == module
        is_enum = module.endswith(".metadata") and name.endswith("ENCODING")
        if is_dataclass or is_enum or found is torch.Size or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"its index holds {module}.{name}, which is not a safe type")


def _enum_member(kind: Any, name: str) -> enum.Enum:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"its index reads {name} of an object that is not an enumeration")
    return kind[name]


def _read_metadata(folder: Path) -> Metadata:
    with (folder / _METADATA).open("rb") as file:
        try:
            metadata: Any = _MetadataUnpickler(file).load()
            _check(metadata)
        except (OSError, pickle.UnpicklingError):
            raise
        except Exception as exc:  # on random bytes anything may be raised
            raise ValueError(f"its index {_METADATA} is damaged: {exc}") from exc
    return metadata  # type: ignore[no-any-return]  # a Metadata: it has been checked


def _check(metadata: Metadata) -> None:
    """Raise if a file lies elsewhere, or stored shards do not make up a tensor, whose rest would be uninitialized."""
    stored: Mapping[Any, Any] = metadata.storage_data
    for each in stored.values():
        if type(each.relative_path) is not str or Path(each.relative_path).name != each.relative_path:
            raise ValueError(f"{each.relative_path!r} is not a plain file name")
    for key, each in metadata.state_dict_metadata.items():
        if isinstance(each, TensorStorageMetadata) and sum(at.sizes.numel() for at in each.chunks) != each.size.numel():
            raise ValueError(f"its shards do not cover all of {key}")


def _key(index: Any) -> str:
    return f"{index.fqn} {tuple(index.offset or ())}"


def _digest(folder: Path) -> str:
    return hashlib.blake2b((folder / _METADATA).read_bytes(), digest_size=16).hexdigest()
