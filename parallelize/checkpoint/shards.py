"""Shards of a checkpoint: a folder of torch.distributed.checkpoint (DCP) with all tensors by their qualified names.

    <path>/parts-<token>/__<rank>_0.distcp    what one rank has written and fsynced
    <path>/parts-<token>/.metadata            DCP's index: a pickle, which is read without running code from it
    <path>/checkpoint.pt                      written last, by rank 0, with an atomic rename; names the folder

A run killed at any moment leaves the old checkpoint or the new one, on any file system with atomic renames. DCP plans
which shards a rank writes and which stored shards it reads. Its collectives are not used: the ranks exchange plans and
results through the store, so that a save can be completed in the background.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import io
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor
from typing_extensions import override

from parallelize.checkpoint.atomic_write import fsync
from parallelize.checkpoint.checksum import checksum_of
from parallelize.checkpoint.file_format import MAIN_FILE, SHARD_PREFIX, read_file, write_error, write_file
from parallelize.checkpoint.rendezvous import Rendezvous
from parallelize.checkpoint.safe_types import is_wrapper
from parallelize.errors import ConfigError, ParallelizeError
from parallelize.runtime.containers import map_leaves

__all__ = ["ShardPlanner", "complete_folder", "keys_of", "main_states", "read_shards", "states_in", "write_shards"]

_METADATA = ".metadata"


class ShardPlanner(DefaultSavePlanner):
    """Plan of what one rank writes, its own shards and on rank 0 all other values, which share memory with the states.

    A planner holds no DTensors, so that another process can write.
    """

    def __init__(self, states: Mapping[str, Any], rank: int) -> None:
        super().__init__()
        self.set_up_planner(dict(states), is_coordinator=rank == 0)
        own = {key: each.to_local() if isinstance(each, DTensor) else each for key, each in self.state_dict.items()}
        if wrapped := [key for key, each in own.items() if is_wrapper(each)]:
            why = "stored shards are parts of dense tensors, which another number of processes can divide otherwise"
            what = f"{wrapped[0]} is of a tensor subclass"
            raise ConfigError(what, why=why, fix="save(..., sharded=False) gathers it on rank 0")
        plan = self.create_local_plan()
        items = [each for each in plan.items if _is_written_here(self.state_dict[each.index.fqn], rank)]
        self.plan, self.rank = dataclasses.replace(plan, items=items), rank
        self._values = {each.index: super(ShardPlanner, self).resolve_data(each) for each in items}
        self.state_dict = {}

    @override
    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._values[write_item.index]

    def checksums(self) -> dict[str, str]:
        """Return the checksum of each value."""
        tensors = {key: value for key, value in self._values.items() if isinstance(value, torch.Tensor)}
        return {_key(key): checksum_of(value) for key, value in tensors.items()}


def _is_written_here(value: Any, rank: int) -> bool:
    """Return whether this rank writes the value: a replicated shard is written only by the first rank that holds it."""
    if not isinstance(value, DTensor):
        return rank == 0
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None or not value.to_local().numel():
        return False
    return all(at == 0 for at, each in zip(coordinate, value.placements, strict=True) if each.is_replicate())


def write_shards(folder: Path, planner: ShardPlanner) -> dict[str, Any]:
    """Write and fsync the file of one rank; return what rank 0 needs to complete the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    results: Any = []
    if planner.plan.items:
        writer = FileSystemWriter(folder)
        # The writer names a file after the position of its plan in the list of all ranks' plans.
        plan = writer.prepare_global_plan([SavePlan([])] * planner.rank + [planner.plan])[-1]
        results = writer.write_data(plan, planner).value()
    host = socket.gethostname()
    return {"plan": planner.plan, "results": results, "checksums": planner.checksums(), "host": host}


def complete_folder(
    folder: Path, write: Callable[[], Any], main: tuple[Any, Any], rendezvous: Rendezvous, *, is_collective: bool
) -> None:
    """Write this rank's shards without collectives; rank 0 then waits for the other ranks and completes the checkpoint.

    `write` calls `write_shards` or waits for its result; `main` are the states, with placeholders, and the record of
    the main file; `is_collective` tells whether all ranks write.
    """
    path = folder.parent
    written: Any = None
    failure: ParallelizeError | None = None
    try:
        written = write()
    except (OSError, RuntimeError, ParallelizeError) as exc:
        reason = str(exc).partition("\n")[0]
        written, failure = f"rank {rendezvous.rank} on {socket.gethostname()}: {reason}", write_error(path, reason)
        failure.__cause__ = exc
    if is_collective:
        rendezvous.post(written, "result")
    if rendezvous.rank != 0:
        if failure is not None:
            raise failure
        return
    try:
        results = rendezvous.results() if is_collective else [written]
        shards = _finish(folder, results)
        write_file(path / MAIN_FILE, main[0], {**main[1], "shards": shards})
    except BaseException:
        # An exception, such as one for SIGTERM, may be raised after the new checkpoint is complete.
        if not _is_referenced(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    for each in path.glob(f"{SHARD_PREFIX}*"):  # shards of the previous checkpoint and of killed writers
        if each != folder:
            shutil.rmtree(each, ignore_errors=True)


def _finish(folder: Path, results: list[Any]) -> dict[str, Any]:
    """Write `.metadata` and return what the main file records: the files with their sizes, and all checksums."""
    if failures := [each for each in results if isinstance(each, str)]:
        raise write_error(folder.parent, "; ".join(failures))
    for rank, each in enumerate(results):
        if any(not (folder / result.storage_data.relative_path).is_file() for result in each["results"]):
            raise ParallelizeError(
                f"{folder.parent} has no shards of rank {rank}",
                why=f"the rank wrote its shards on {each['host']}, but {socket.gethostname()} has no such file",
                fix="save to a folder that all nodes share, or use sharded=False: rank 0 then writes one file",
            )
    try:
        _, metadata = DefaultSavePlanner().create_global_plan([each["plan"] for each in results])
        FileSystemWriter(folder).finish(metadata, [each["results"] for each in results])
        fsync(folder)
        fsync(folder.parent)
        files = {each.name: each.stat().st_size for each in sorted(folder.iterdir())}
    except OSError as exc:
        raise write_error(folder.parent, str(exc)) from exc
    checksums = {key: checksum for each in results for key, checksum in each["checksums"].items()}
    return {"folder": folder.name, "files": files, "checksums": checksums, "index": _digest(folder)}


def _is_referenced(folder: Path) -> bool:
    """Return whether the checkpoint may use this folder of shards."""
    try:
        return (folder.parent / MAIN_FILE).exists() and read_file(folder.parent).shards == folder
    except ParallelizeError:
        return True


def keys_of(states: Mapping[str, Any]) -> dict[int, str]:
    """Return DCP's key of each tensor in nested states, by id; one in a tuple has no key."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(states))
    return {id(value): key for key, value in planner.state_dict.items() if isinstance(value, torch.Tensor)}


def main_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the main file: a meta tensor for each tensor with a key, and no memory of other tensors."""
    keys = keys_of(states)

    def replace(value: Any) -> Any:
        if id(value) in keys:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return value.clone() if isinstance(value, torch.Tensor) else value

    replaced: dict[str, Any] = map_leaves(replace, dict(states))
    return replaced


def read_shards(folder: Path, targets: Mapping[str, torch.Tensor], shards: Mapping[str, Any] | None) -> None:
    """Fill targets from the stored shards; of a DTensor, this rank's shard. `shards`: what the main file records."""
    if shards is not None and _digest(folder) != shards["index"]:
        raise ValueError(f"{folder.name}{os.sep}{_METADATA} does not match its checksum")
    metadata = _read_metadata(folder)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), metadata)
    stored: Mapping[Any, Any] = metadata.storage_data
    in_order = [(stored[each.storage_index], each) for each in planner.create_local_plan().items]
    for info, item in sorted(in_order, key=lambda each: (each[0].relative_path, each[0].offset)):
        checksum = None if shards is None else shards["checksums"][_key(item.storage_index)]
        values = _read_shard(folder, item.storage_index.fqn, info, checksum)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        planner.resolve_tensor(item).detach().copy_(values)


def _read_shard(folder: Path, key: str, info: Any, checksum: str | None) -> Any:
    what = f"{folder.name}{os.sep}{info.relative_path} does not hold {key}"
    try:
        values = _read_item(folder, info)
        is_intact = isinstance(values, torch.Tensor) and checksum in (None, checksum_of(values))
    except Exception as exc:  # on random bytes torch.load may raise anything
        raise ValueError(f"{what}: {exc}") from exc
    if not is_intact:
        raise ValueError(f"{what} as it was written")
    return values


def _read_item(folder: Path, info: Any) -> Any:
    with (folder / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)


def states_in(folder: Path) -> dict[str, Any]:
    """Return the states in a folder of another program, with meta tensors for the tensors."""
    try:
        metadata = _read_metadata(folder)
        stored: Mapping[Any, Any] = metadata.storage_data
        found: dict[str, Any] = {}
        for key, each in metadata.state_dict_metadata.items():
            if isinstance(each, TensorStorageMetadata):
                value: Any = torch.empty(each.size, dtype=each.properties.dtype, device="meta")
            else:
                value = _read_item(folder, next(info for index, info in stored.items() if index.fqn == key))
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
        dcp = "torch.distributed.checkpoint."
        is_known = module in ("torch", f"{dcp}metadata", f"{dcp}filesystem") and "." not in name
        found: Any = super().find_class(module, name) if is_known else None
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
