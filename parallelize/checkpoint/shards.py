"""Folders of checkpoints: the shards in a folder of torch.distributed.checkpoint (DCP), and a main file beside it.

    <path>/parts-<token>/__<rank>_0.distcp    what one rank has written and fsynced
    <path>/parts-<token>/.metadata            DCP's index: a pickle, which is read without running code from it
    <path>/checkpoint.pt                      written last, with an atomic rename: the record, the index, and the
                                              states with a meta tensor for each tensor that is in the shards

A run killed at any moment leaves the old checkpoint or the new one. Each tensor in a .distcp file is a zip of
torch.save, whose checksums are verified; so are those of the main file, with its copy of the index.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import operator
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from parallelize.call.pickling import cause_of
from parallelize.checkpoint import files
from parallelize.checkpoint.states import Named
from parallelize.runtime.containers import map_leaves

__all__ = ["read_folder", "write_folder"]

_INDEX = ".metadata"
_LIGHTNING = "meta.pt"  # what Lightning saves beside the shards
_MODULES = ("torch", "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_CLASSES = [
    "Size",
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_StorageInfo",
    "_MEM_FORMAT_ENCODING",
]
"""What an index consists of, and torch's dtypes."""


class _Writer(FileSystemWriter):
    """Raises the system's error on a full disk, which torch.save hides."""

    @override
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as exc:
            raise cause_of(exc) from None


def write_folder(path: Path, name: str, content: dict[str, Any], group: Any, rank: int) -> None:
    """Write a sharded checkpoint, on all ranks of `group`, or on this one alone if it is None.

    Args:
        path: the folder of the checkpoint.
        name: of the new folder of shards in it.
        content: the states and the record, as for a file.
        group: not used by any other thread meanwhile.
        rank: of this process.
    """
    folder, record = path / name, content.pop(files.RECORD)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        save(content, storage_writer=_Writer(folder), planner=planner, process_group=group, no_dist=not group)
        if rank == 0:
            record["shards"] = {"folder": name, "index": _finished(folder)}
    except BaseException as exc:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(exc, CheckpointException):
            raise
        failures = [f"rank {rank}: {error}" for rank, (error, _) in exc.failures.items()]
        raise files.write_error(path, "; ".join(failures)) from exc
    if rank == 0:
        keys = _keys(content)
        main = map_leaves(lambda each: _placeholder(each.shape, each.dtype) if id(each) in keys else each, content)
        files.write(path / files.MAIN_FILE, {**main, files.RECORD: record})
        for each in path.glob(f"{files.SHARD_PREFIX}*"):  # of the previous checkpoint and of killed writers
            if each != folder:
                shutil.rmtree(each, ignore_errors=True)


def _placeholder(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _finished(folder: Path) -> bytes:
    """Return the index of a folder that has the files of all ranks."""
    files.fsync(folder)
    content = (folder / _INDEX).read_bytes()
    for each in _index(content).storage_data.values():
        if not (folder / each.relative_path).is_file():
            why = f"a rank has written {each.relative_path} elsewhere; share the folder, or use sharded=False"
            raise files.write_error(folder.parent, why)
    return content


def _keys(states: Named) -> dict[int, str]:
    """Return DCP's key of each tensor in nested states, by id; one in a tuple has no key."""
    flat, _ = flatten_state_dict(dict(states))
    return {id(value): key for key, value in flat.items() if isinstance(value, torch.Tensor)}


def _filled(folder: Path, index: Any, keys: Mapping[int, str], part: Any, targets: Mapping[int, Any]) -> Any:
    """Return a part of the states with stored tensors in place of the meta tensors.

    No collective is used: each rank reads the stored shards that overlap its own.

    Args:
        folder: with the shards.
        index: of the folder.
        keys: of the meta tensors in the states, by id.
        part: of the states.
        targets: by the id of a meta tensor, the DTensor whose shard of this rank takes its place.
    """
    filled: dict[str, Any] = {}

    def fill(leaf: Any) -> Any:
        if id(leaf) not in keys:
            return leaf
        target = targets.get(id(leaf))
        like = leaf if target is None else target.shard.detach()
        # On the CPU: a device may have no memory for a second copy of its shards.
        return filled.setdefault(keys[id(leaf)], torch.empty_like(like, dtype=leaf.dtype, device="cpu"))

    part = map_leaves(fill, part)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(filled, index)
    for item in planner.create_local_plan().items:
        values = _item(folder, index.storage_data[item.storage_index])
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        planner.resolve_tensor(item).detach().copy_(values)
    return part


def _item(folder: Path, info: Any) -> Any:
    """Return a stored shard or value after verifying its checksum."""
    with files.reading(folder / info.relative_path):
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            content = io.BytesIO(file.read(info.length))
        files.crcs(content)
        content.seek(0)
        return torch.load(content, map_location="cpu", weights_only=True)


def read_folder(path: Path) -> files.Checkpoint:
    """Read and verify the main file of a folder, or the index in a folder of another program."""
    main, folder = path / files.MAIN_FILE, path
    if main.exists():
        checkpoint = files.read(main)
        with files.reading(main):
            shards = checkpoint.record["shards"]
            folder, index = path / _plain(shards["folder"]), _index(shards["index"])
    else:
        with files.reading(path / _INDEX):
            index = _index((path / _INDEX).read_bytes())
            checkpoint = files.Checkpoint(_foreign_states(path, index), {})
    fill = functools.partial(_filled, folder, index, _keys(checkpoint.states))
    return dataclasses.replace(checkpoint, fill=fill)


def _foreign_states(path: Path, index: Any) -> dict[str, Any]:
    found = {}
    for key, each in index.state_dict_metadata.items():
        if hasattr(each, "chunks"):
            found[key] = _placeholder(each.size, each.properties.dtype)
        else:
            found[key] = _item(path, next(info for at, info in index.storage_data.items() if at.fqn == key))
    states = unflatten_state_dict(found, index.planner_data or {key: (key,) for key in found})
    if (path / _LIGHTNING).is_file():
        states.update(files.read(path / _LIGHTNING).states)
    return states


class _IndexUnpickler(pickle.Unpickler):
    """Calls nothing but DCP's dataclasses and torch's sizes."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.serialization":
            return str  # instead of torch's function from the name of a layout, which is not used here
        if module.partition(".")[0] == "pathlib":  # Python 3.13 names a part of it
            return PurePath  # of the folder when it was written
        if (module, name) == ("builtins", "getattr"):
            return operator.getitem  # of torch's memory formats, an enum, as some releases of Python pickle them
        found: Any = super().find_class(module, name) if module in _MODULES and "." not in name else None
        if name in _CLASSES or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _index(content: bytes) -> Any:
    """Return an index whose files lie in its folder, and whose shards make up each tensor."""
    index = _IndexUnpickler(io.BytesIO(content)).load()
    for each in index.storage_data.values():
        _plain(each.relative_path)
    for key, each in index.state_dict_metadata.items():
        # Else the rest of the tensor would be uninitialized.
        if hasattr(each, "chunks") and sum(at.sizes.numel() for at in each.chunks) != each.size.numel():
            raise ValueError(f"its shards do not cover all of {key}")
    return index


def _plain(name: Any) -> Any:
    """Return the name of a file or folder after checking that it is no path."""
    if type(name) is not str or Path(name).name != name:
        raise ValueError(f"{name!r} is not a plain file or folder name")
    return name
