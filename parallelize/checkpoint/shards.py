"""Writes folders: shards in the format of torch.distributed.checkpoint (DCP), and a main file.

    <path>/.checkpoint.pt.<host>.<token>.tmp  made first, by rank 0, and locked: a save is under way
    <path>/parts-<token>/__<rank>_0.distcp    what one rank has written and fsynced
    <path>/parts-<token>/.metadata            DCP's index: see `shard_index`
    <path>/checkpoint.pt                      the temporary file, renamed at the end: the record
                                              with the index and the checksums of the shards, and
                                              the states with a meta tensor for each tensor in the
                                              shards

A run killed at any moment leaves the old checkpoint or the new one. Each item in a .distcp file is
a zip of torch.save, which has checksums, and so has the main file. Of two runs that save at the
same time, neither removes the other's shards: what the main file does not name, and what has no
temporary file, is of an ended save.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from parallelize.call.pickling import cause_of
from parallelize.checkpoint import files
from parallelize.checkpoint.record import RECORD
from parallelize.checkpoint.shard_index import (
    INDEX,
    key_by_tensor,
    placeholder,
    read_index,
    require_plain_name,
)
from parallelize.errors import ParallelizeError
from parallelize.run.containers import map_leaves, tensors_in
from parallelize.torch_patches.whole_file import (
    SUFFIX,
    TemporaryFile,
    fsync,
    remove_unused,
    temporary_file,
)


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
        tensors = tensors_in(content)
        if all(tensor.device.type == "cpu" for tensor in tensors):
            # Nothing is copied from a device. With copies ahead, torch takes a stream of the
            # current device of this thread, and waits for it, on each machine that has a GPU
            # (_OverlappingCpuLoader, in filesystem.py).
            self.per_thread_copy_ahead = 0

    @override
    def prepare_local_plan(self, plan: Any) -> Any:
        # DCP makes the folder here, where no rank waits for another. Without rank 0's temporary
        # file, another run that ends its save would take the folder for one of a killed run.
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
        except RuntimeError as exc:
            # torch.save hides the system's error, as of a full disk.
            raise cause_of(exc) from None


def write_folder(path: Path, name: str, content: dict[str, Any], group: Any, rank: int) -> None:
    """Write a sharded checkpoint, on all ranks of `group`, or on this one alone if it is None.

    Args:
        path: the folder of the checkpoint.
        name: name of the new folder of shards in it.
        content: the states and the record, as for a file.
        group: a group that no other thread uses meanwhile.
        rank: rank of this process.
    """
    folder = path / name
    record = content.pop(RECORD)
    # Of torch, in one process.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    with contextlib.ExitStack() as stack:
        temporaries: list[TemporaryFile] = []

        def begin() -> None:
            path.mkdir(parents=True, exist_ok=True)
            token = name.removeprefix(files.SHARD_PREFIX)
            temporary = stack.enter_context(temporary_file(path / files.MAIN_FILE, token))
            temporaries.append(temporary)

        writer = _Writer(folder, begin, content)
        if rank == 0:
            stack.push(functools.partial(_remove_after_error, folder))
        try:
            save(
                content,
                storage_writer=writer,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=group,
                no_dist=not group,
            )
        except CheckpointException as exc:
            failures = [f"rank {number}: {error}" for number, (error, _) in exc.failures.items()]
            raise files.write_error(path, "; ".join(failures)) from exc
        if rank == 0:
            record["shards"] = _record_of_shards(folder)
            _write_main_file(temporaries[0], content, record)
    if rank == 0:
        _remove_ended(path)


def _write_main_file(
    temporary: TemporaryFile, content: dict[str, Any], record: dict[str, Any]
) -> None:
    """Write the record, and the states with meta tensors for what is in the shards."""
    keys = key_by_tensor(content)

    def without_values(leaf: Any) -> Any:
        if id(leaf) in keys:
            return placeholder(leaf.shape, leaf.dtype)
        return leaf

    states = map_leaves(without_values, content, once=True)
    with files.writing(temporary.target):
        files.write_and_replace(temporary, {**states, RECORD: record})


def _remove_after_error(folder: Path, error: type[BaseException] | None, *_: object) -> None:
    if error is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_ended(path: Path) -> None:
    """Remove the shards of the previous checkpoint and of killed saves, but none in use."""
    remove_unused(path, f".{files.MAIN_FILE}.")
    # Another run may remove the checkpoint meanwhile: the next save removes what stays of it.
    with contextlib.suppress(OSError, ParallelizeError):
        for folder in path.glob(f"{files.SHARD_PREFIX}*"):
            # The order matters. A save that is under way renames its temporary file to the main
            # file. If the former is gone, the latter names this folder, or that of a later save.
            if not _is_under_way(folder) and folder.name != _named_folder(path):
                shutil.rmtree(folder, ignore_errors=True)


def _is_under_way(folder: Path) -> bool:
    """Return whether the save that writes a folder of shards has a temporary file."""
    ending = f".{folder.name.removeprefix(files.SHARD_PREFIX)}{SUFFIX}"
    return any(entry.name.endswith(ending) for entry in folder.parent.iterdir())


def _named_folder(path: Path) -> str:
    """Return the name of the folder of shards that the main file of a checkpoint names."""
    main_file = path / files.MAIN_FILE
    checkpoint = files.read(main_file)
    with files.reading(main_file):
        return require_plain_name(checkpoint.record["shards"]["folder"])


def _record_of_shards(folder: Path) -> dict[str, Any]:
    """Return what the main file says of a folder that has the files of all ranks."""
    fsync(folder)
    index = (folder / INDEX).read_bytes()
    items_by_file: dict[str, list[Any]] = {}
    for item in read_index(index).storage_data.values():
        items_by_file.setdefault(item.relative_path, []).append(item)
    checksums: dict[str, dict[int, str]] = {}
    for name, items in items_by_file.items():
        if not (folder / name).is_file():
            raise files.write_error(
                folder.parent,
                f"a rank has written {name} elsewhere; share the folder, or use sharded=False",
            )
        checksums[name] = {}
        with (folder / name).open("rb") as file:
            for item in items:
                part = _Part(file, item.offset, item.length)
                checksums[name][item.offset] = files.zip_checksum(part, is_verified=False)
    return {"folder": folder.name, "index": index, "checksums": checksums}


class _Part(io.RawIOBase):
    """A part of a file, as a file: of an item only the list of its checksums is read, at its end.

    Args:
        file: the whole file.
        start: where the part begins, in bytes.
        length: size of the part, in bytes.
    """

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

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
        if size < 0 or size > remaining:
            size = remaining
        self._file.seek(self._start + self._position)
        content = self._file.read(size)
        self._position += len(content)
        return content
