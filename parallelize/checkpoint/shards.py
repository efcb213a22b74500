"""Folders of checkpoints: the shards in a folder of torch.distributed.checkpoint (DCP), and a main file beside it.

    <path>/.checkpoint.pt.<host>.<token>.tmp  made first, by rank 0, and locked: the save is under way
    <path>/parts-<token>/__<rank>_0.distcp    what one rank has written and fsynced
    <path>/parts-<token>/.metadata            DCP's index: a pickle, which is read without running code from it
    <path>/checkpoint.pt                      the temporary file, renamed at the end: the record with the index and
                                              the checksums of the shards, and the states with a meta tensor for
                                              each tensor that is in the shards

A run killed at any moment leaves the old checkpoint or the new one. Each tensor in a .distcp file is a zip of
torch.save, whose checksums are verified; so are those of the main file. A shard is of this save if its checksum
is that in the main file. Of two runs that save at the same time, neither removes the other's shards: what the
main file does not name, and what has no temporary file, is of an ended save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import operator
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO

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
from parallelize.errors import ConfigError, ParallelizeError
from parallelize.run.containers import is_entangled, leaves, map_leaves
from parallelize.torch_patches.whole_file import (
    SUFFIX,
    TemporaryFile,
    fsync,
    remove_unused,
    temporary_file,
)

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
    """Writes the shards of this rank.

    Args:
        folder: of the shards.
        begin: rank 0 calls it before any rank makes the folder.
        content: what is written.
    """

    def __init__(self, folder: Path, begin: Callable[[], object], content: dict[str, Any]) -> None:
        super().__init__(folder)
        self._begin = begin
        tensors = [leaf for leaf in leaves(content) if isinstance(leaf, torch.Tensor)]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            # Nothing is copied from a device. With copies ahead, torch takes a stream of the current device of this
            # thread, and waits for it, on each machine that has a GPU (_OverlappingCpuLoader, in filesystem.py).
            self.per_thread_copy_ahead = 0

    @override
    def prepare_local_plan(self, plan: Any) -> Any:
        # DCP makes the folder here, where no rank waits for another. Without rank 0's temporary file,
        # another run that ends its save would take the folder for one of a killed run.
        return plan

    @override
    def prepare_global_plan(self, plans: Any) -> Any:
        self._begin()
        return super().prepare_global_plan(plans)

    @override
    def write_data(self, plan: Any, planner: Any) -> Any:
        self.fs.mkdir(self.path)
        try:
            return super().write_data(plan, planner)
        except RuntimeError as exc:  # torch.save hides the system's error, as of a full disk
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
    main_file = path / files.MAIN_FILE
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with contextlib.ExitStack() as stack:
        temporaries: list[TemporaryFile] = []

        def begin() -> None:
            path.mkdir(parents=True, exist_ok=True)
            token = name.removeprefix(files.SHARD_PREFIX)
            temporaries.append(stack.enter_context(temporary_file(main_file, token)))

        writer = _Writer(folder, begin, content)
        if rank == 0:
            stack.push(functools.partial(_remove_after_error, folder))
        try:
            save(content, storage_writer=writer, planner=planner, process_group=group, no_dist=not group)
        except CheckpointException as exc:
            failures = [f"rank {rank}: {error}" for rank, (error, _) in exc.failures.items()]
            raise files.write_error(path, "; ".join(failures)) from exc
        if rank == 0:
            record["shards"] = {"folder": name, **_finished(folder)}
            keys = _keys(content)
            main = map_leaves(
                lambda leaf: _placeholder(leaf.shape, leaf.dtype) if id(leaf) in keys else leaf,
                content,
                once=True,
            )
            with files.writing(main_file):
                files.replace(temporaries[0], {**main, files.RECORD: record})
    if rank == 0:
        _remove_ended(path)


def _remove_after_error(folder: Path, error: type[BaseException] | None, *_: object) -> None:
    if error is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_ended(path: Path) -> None:
    """Remove the shards of the previous checkpoint and of killed saves, and none that are in use."""
    remove_unused(path, f".{files.MAIN_FILE}.")
    # Another run may remove the checkpoint meanwhile: the next save removes what is left of it.
    with contextlib.suppress(OSError, ParallelizeError):
        for folder in path.glob(f"{files.SHARD_PREFIX}*"):
            # The order matters. A save that is under way renames its temporary file to the main
            # file. If the former is gone, the latter names this folder, or that of a later save.
            token = folder.name.removeprefix(files.SHARD_PREFIX)
            is_under_way = any(file.name.endswith(f".{token}{SUFFIX}") for file in path.iterdir())
            if not is_under_way and folder.name != _named_folder(path):
                shutil.rmtree(folder, ignore_errors=True)


def _named_folder(path: Path) -> str:
    """Return the name of the folder of shards that the main file of a checkpoint names."""
    main_file = path / files.MAIN_FILE
    checkpoint = files.read(main_file)
    with files.reading(main_file):
        name: str = _plain(checkpoint.record["shards"]["folder"])
    return name


def _placeholder(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _finished(folder: Path) -> dict[str, Any]:
    """Return the index of a folder that has the files of all ranks, and the checksums of its items."""
    fsync(folder)
    content = (folder / _INDEX).read_bytes()
    offsets_by_file: dict[str, list[tuple[int, int]]] = {}
    for item in _index(content).storage_data.values():
        offsets_by_file.setdefault(item.relative_path, []).append((item.offset, item.length))
    checksums = {}
    for name, parts in offsets_by_file.items():
        if not (folder / name).is_file():
            why = f"a rank has written {name} elsewhere; share the folder, or use sharded=False"
            raise files.write_error(folder.parent, why)
        with (folder / name).open("rb") as file:
            checksums[name] = {
                offset: files.crcs(_Part(file, offset, length), is_verified=False) for offset, length in parts
            }
    return {"index": content, "checksums": checksums}


class _Part(io.RawIOBase):
    """A part of a file, as a file: of an item only the list of its checksums is read, at its end."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}
        self._position = max(0, origins[whence] + offset)
        return self._position

    @override
    def read(self, size: int = -1) -> bytes:
        remaining = max(0, self._length - self._position)
        self._file.seek(self._start + self._position)
        content = self._file.read(remaining if size < 0 else min(size, remaining))
        self._position += len(content)
        return content


def _keys(states: Named) -> dict[int, str]:
    """Return DCP's key of each tensor in nested states, by id; one in a tuple has no key."""
    if is_entangled(states):
        raise ConfigError(
            "a folder of lists that are in each other, many times over",
            why="torch.distributed.checkpoint writes a list once for each place that it is in",
            fix="save them with sharded=False, or as separate flat lists",
        )
    flat, _ = flatten_state_dict(dict(states))
    return {id(value): key for key, value in flat.items() if isinstance(value, torch.Tensor)}


@dataclasses.dataclass(frozen=True)
class _Shards:
    """Stored tensors, which take the place of meta tensors in the states.

    Attributes:
        folder: with the shards.
        index: of the folder.
        checksums: of the items, by file and offset; {} if the main file has none.
        keys: of the meta tensors in the states, by id.
    """

    folder: Path
    index: Any
    checksums: Mapping[str, Mapping[int, str]]
    keys: Mapping[int, str]

    def fill(self, part: Any, targets: Mapping[int, Any]) -> Any:
        """Return a part of the states with stored tensors in place of the meta tensors.

        No collective is used: each rank reads the stored shards that overlap its own.

        Args:
            part: of the states.
            targets: by the id of a meta tensor, the DTensor whose shard of this rank takes its place.
        """
        filled: dict[str, Any] = {}

        def fill_leaf(leaf: Any) -> Any:
            if id(leaf) not in self.keys:
                return leaf
            target = targets.get(id(leaf))
            like = leaf if target is None else target.shard.detach()
            # On the CPU: a device may have no memory for a second copy of its shards.
            empty = torch.empty_like(like, dtype=leaf.dtype, device="cpu")
            return filled.setdefault(self.keys[id(leaf)], empty)

        part = map_leaves(fill_leaf, part, once=True)
        with files.reading(self.folder):
            self._read_into(filled)
        return part

    def _read_into(self, tensors: dict[str, Any]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, self.index)
        for item in planner.create_local_plan().items:
            values = self._item(self.index.storage_data[item.storage_index])
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                values = values.narrow(dim, start, length)
            planner.resolve_tensor(item).detach().copy_(values)

    def _item(self, info: Any) -> Any:
        return _item(self.folder, info, self.checksums)


def _item(folder: Path, info: Any, checksums: Mapping[str, Mapping[int, str]]) -> Any:
    """Return a stored shard or value after verifying its checksum."""
    path = folder / info.relative_path
    with files.reading(path):
        with path.open("rb") as file:
            file.seek(info.offset)
            content = io.BytesIO(file.read(info.length))
        checksum = files.crcs(content)
        expected = checksums[path.name][info.offset] if checksums else checksum
        if checksum != expected:
            raise ConfigError(
                f"{path} is damaged, or a file of another save",
                why=f"what it holds at byte {info.offset} has another checksum than "
                f"{folder.parent / files.MAIN_FILE} says: the tensors would be of two saves",
                fix="copy the folder as a whole from where it was saved, or load another checkpoint",
            )
        content.seek(0)
        return torch.load(content, map_location="cpu", weights_only=True)


def read_folder(path: Path) -> files.Checkpoint:
    """Read and verify the main file of a folder, or the index in a folder of another program."""
    main_file, folder = path / files.MAIN_FILE, path
    checksums: Any = {}
    if main_file.exists():
        checkpoint = files.read(main_file)
        with files.reading(main_file):
            shards = checkpoint.record["shards"]
            folder, index = path / _plain(shards["folder"]), _index(shards["index"])
            checksums = shards.get("checksums", {})  # earlier versions wrote none
            if not all(isinstance(offsets, dict) for offsets in dict(checksums).values()):
                raise ValueError("the checksums of its shards are not by file and offset")
    else:
        with files.reading(path / _INDEX):
            index = _index((path / _INDEX).read_bytes())
            checkpoint = files.Checkpoint(_foreign_states(path, index), {})
    with files.reading(main_file):
        keys = _keys(checkpoint.states)
    shards_of_path = _Shards(folder, index, checksums, keys)
    return dataclasses.replace(checkpoint, fill=shards_of_path.fill)


def _foreign_states(path: Path, index: Any) -> dict[str, Any]:
    found = {}
    for key, each in index.state_dict_metadata.items():
        if hasattr(each, "chunks"):
            found[key] = _placeholder(each.size, each.properties.dtype)
        else:
            infos = (info for at, info in index.storage_data.items() if at.fqn == key)
            found[key] = _item(path, next(infos), {})
    paths = index.planner_data or {key: (key,) for key in found}
    for key, keys in paths.items():
        # A list is made as long as its largest index says, however few items there are.
        if any(type(at) is int and not 0 <= at < len(paths) for at in keys):
            raise ValueError(f"{key} is at {keys}, beyond the {len(paths)} items of the index")
    states = unflatten_state_dict(found, paths)
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
