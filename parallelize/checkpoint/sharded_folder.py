"""Sharded checkpoint: a folder with the shards of every rank and one file that completes it.

    <path>/parts-<token>/    shards; every rank writes and fsyncs its own
    <path>/checkpoint.pt     written last, by rank 0, with an atomic rename; names the folder of its shards

A run killed at any moment leaves the old checkpoint or the new one, on any file system with atomic renames.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallelize.checkpoint.atomic_write import fsync
from parallelize.checkpoint.file_format import MAIN_FILE, Checkpoint, read_file, write_file
from parallelize.checkpoint.rendezvous import Rendezvous, from_bytes, to_bytes
from parallelize.checkpoint.shard_index import ShardIndex, StoredShard
from parallelize.errors import ConfigError, ParallelizeError

if TYPE_CHECKING:
    from parallelize.checkpoint.shard_files import ShardWrite

__all__ = ["FolderWrite", "is_incomplete", "new_shard_folder", "remove_checkpoint", "write_folder"]

_SHARD_PREFIX = "parts-"


@dataclass(frozen=True)
class FolderWrite:
    """The shards and the index keys that one rank writes to a sharded checkpoint.

    Args:
        folder: name of the shard folder, the same on all ranks.
        keys: keys of the placeholders, as in `ShardIndex`.
        shards: shards that this rank writes.
        is_collective: whether every rank writes its shards; False: rank 0 writes alone, and no tensor is sharded.
    """

    folder: str
    keys: tuple[str, ...]
    shards: list[ShardWrite]
    is_collective: bool


def new_shard_folder(path: Path, *, is_sharded: bool | None, has_shards: bool) -> str:
    """Return the name of a new shard folder in `path`, or "" if the checkpoint is to be a single file.

    Args:
        path: path of the checkpoint.
        is_sharded: option `sharded=`; None: keep the form at `path`; for a new path, a folder if ranks hold shards.
        has_shards: whether ranks hold shards.

    Raises:
        ConfigError: `path` is a file or folder that this save must not replace.
    """
    if path.is_file() and is_sharded:
        raise ConfigError(
            f"save({str(path)!r}, sharded=True)",
            why="the path is a file, and a sharded checkpoint is a folder",
            fix="pass the path of a folder, such as last, or remove the file",
        )
    if path.is_dir():
        foreign = [each.name for each in path.iterdir() if not _is_ours(each.name)]
        is_empty = not any(path.iterdir())
        if foreign or is_sharded is False or (is_empty and not (is_sharded or has_shards)):
            raise ConfigError(
                f"save({str(path)!r})",
                why=f"it is a folder that contains {foreign[0]}" if foreign else "it is a folder",
                fix="pass the path of a file in that folder, such as last.pt",
            )
        return _SHARD_PREFIX + secrets.token_hex(4)
    is_folder = is_sharded if is_sharded is not None else has_shards and not path.exists()
    return _SHARD_PREFIX + secrets.token_hex(4) if is_folder else ""


def _is_ours(name: str) -> bool:
    return name == MAIN_FILE or name.startswith((_SHARD_PREFIX, f".{MAIN_FILE}."))


def write_folder(path: Path, checkpoint: Checkpoint, to_write: FolderWrite, rendezvous: Rendezvous) -> None:
    """Write this rank's shards without collectives; rank 0 then waits for the other ranks and completes the checkpoint.

    Raises:
        ParallelizeError: writing failed on this rank or, raised on rank 0, on any rank.
        SyncError: on rank 0: a rank has not written its shards in time.
    """
    if to_write.is_collective:
        try:
            from parallelize.checkpoint.shard_files import write_shards  # takes a second to import: only if sharded

            shards = write_shards(path / to_write.folder, rendezvous.rank, to_write.shards)
            result = {"host": socket.gethostname(), "shards": [list(dataclasses.astuple(each)) for each in shards]}
            rendezvous.post_result(to_bytes(result))
        except (OSError, RuntimeError) as exc:
            reason = str(exc).partition("\n")[0]
            rendezvous.post_result(to_bytes({"failure": f"rank {rendezvous.rank} on {socket.gethostname()}: {reason}"}))
            if rendezvous.rank != 0:
                raise _write_error(path, reason) from exc
    if rendezvous.rank == 0:
        try:
            _finish(path, checkpoint, to_write, rendezvous)
        except BaseException:
            # An exception, such as one for SIGTERM, may be raised after the new checkpoint is complete.
            if not _is_referenced(path, to_write.folder):
                shutil.rmtree(path / to_write.folder, ignore_errors=True)
            raise


def _is_referenced(path: Path, folder: str) -> bool:
    """Return whether the checkpoint at `path` may use this shard folder."""
    if not (path / MAIN_FILE).exists():
        return False
    try:
        index = read_file(path).shard_index
    except ParallelizeError:
        return True
    return index is not None and index.folder == folder


def _finish(path: Path, checkpoint: Checkpoint, to_write: FolderWrite, rendezvous: Rendezvous) -> None:
    results = [from_bytes(each) for each in rendezvous.wait_results()] if to_write.is_collective else []
    failures = [each["failure"] for each in results if "failure" in each]
    if failures:
        raise _write_error(path, "; ".join(failures))
    shards = [[StoredShard(*each) for each in result["shards"]] for result in results]
    for rank, result in enumerate(results):
        for name in {each.file for each in shards[rank]}:
            if not (path / to_write.folder / name).is_file():
                raise ParallelizeError(
                    f"{path} has no shards of rank {rank}",
                    why=f"the rank wrote {name} on {result['host']}, but {socket.gethostname()} has no such file",
                    fix="save to a folder that all nodes share, or use sharded=False: rank 0 then writes one file",
                )
    index = ShardIndex.from_shards(to_write.folder, to_write.keys, itertools.chain(*shards))
    try:
        if to_write.is_collective:
            from parallelize.checkpoint.shard_files import write_torch_metadata  # only if sharded, as above

            write_torch_metadata(path / to_write.folder, checkpoint, index)
            fsync(path / to_write.folder)
            fsync(path)
    except OSError as exc:
        raise _write_error(path, str(exc)) from exc
    write_file(path / MAIN_FILE, dataclasses.replace(checkpoint, shard_index=index))
    for each in path.iterdir():  # shards of the previous checkpoint and of killed writers
        if each.name.startswith(_SHARD_PREFIX) and each.name != to_write.folder:
            shutil.rmtree(each, ignore_errors=True)


def _write_error(path: Path, reason: str) -> ParallelizeError:
    return ParallelizeError(
        f"cannot write {path}",
        why=reason,
        fix="free disk space, or choose a folder that every rank may write to; the previous checkpoint is still there",
    )


def is_incomplete(path: Path) -> bool:
    """Return whether `path` is a sharded checkpoint whose save was never completed."""
    return path.is_dir() and not (path / MAIN_FILE).exists() and all(_is_ours(each.name) for each in path.iterdir())


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint file or folder; in a folder remove the main file first, which invalidates the checkpoint."""
    if path.is_dir():
        (path / MAIN_FILE).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
