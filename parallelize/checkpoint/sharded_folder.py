"""Sharded checkpoint: a folder with the shards of every rank and one file that completes it.

    <path>/parts-<token>/    a folder of torch.distributed.checkpoint; every rank writes and fsyncs its file
    <path>/checkpoint.pt     written last, by rank 0, with an atomic rename; names the folder of its shards

A run killed at any moment leaves the old checkpoint or the new one, on any file system with atomic renames.
"""

from __future__ import annotations

import pickle
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallelize.checkpoint.atomic_write import fsync
from parallelize.checkpoint.file_format import MAIN_FILE, read_file, write_file
from parallelize.checkpoint.rendezvous import Rendezvous
from parallelize.errors import ConfigError, ParallelizeError

__all__ = ["complete_folder", "is_incomplete", "new_shard_folder", "remove_checkpoint"]

_SHARD_PREFIX = "parts-"


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


def complete_folder(
    path: Path,
    folder: str,
    write: Callable[[], Any],
    main: tuple[dict[str, Any], dict[str, Any]],
    rendezvous: Rendezvous,
    *,
    is_collective: bool,
) -> None:
    """Write this rank's shards without collectives; rank 0 then waits for the other ranks and completes the checkpoint.

    Args:
        path: folder of the checkpoint.
        folder: name of the shard folder in it.
        write: writes this rank's shards, or waits until they are written.
        main: states, with placeholders, and record of the main file.
        rendezvous: rendezvous of the call.
        is_collective: whether all ranks write.

    Raises:
        ParallelizeError: writing failed on this rank or, raised on rank 0, on any rank.
        SyncError: on rank 0: a rank has not written its shards in time.
    """
    written: Any = None
    failure: ParallelizeError | None = None
    try:
        written = write()
    except (OSError, RuntimeError, ParallelizeError) as exc:
        reason = str(exc).partition("\n")[0]
        written, failure = f"rank {rendezvous.rank} on {socket.gethostname()}: {reason}", _write_error(path, reason)
        failure.__cause__ = exc
    if is_collective:
        rendezvous.post(pickle.dumps(written), "result")
    if rendezvous.rank != 0:
        if failure is not None:
            raise failure
        return
    try:
        results = [pickle.loads(each) for each in rendezvous.results()] if is_collective else [written]
        _finish(path, folder, results, main)
    except BaseException:
        # An exception, such as one for SIGTERM, may be raised after the new checkpoint is complete.
        if not _is_referenced(path, folder):
            shutil.rmtree(path / folder, ignore_errors=True)
        raise


def _is_referenced(path: Path, folder: str) -> bool:
    """Return whether the checkpoint at `path` may use this shard folder."""
    if not (path / MAIN_FILE).exists():
        return False
    try:
        shards = read_file(path).shards
    except ParallelizeError:
        return True
    return shards is not None and shards.name == folder


def _finish(path: Path, folder: str, results: list[Any], main: tuple[dict[str, Any], dict[str, Any]]) -> None:
    from parallelize.checkpoint.shards import finish_folder  # only if sharded, as above

    failures = [each for each in results if isinstance(each, str)]
    if failures:
        raise _write_error(path, "; ".join(failures))
    for rank, each in enumerate(results):
        if any(not (path / folder / result.storage_data.relative_path).is_file() for result in each.results):
            raise ParallelizeError(
                f"{path} has no shards of rank {rank}",
                why=f"the rank wrote its shards on {each.host}, but {socket.gethostname()} has no such file",
                fix="save to a folder that all nodes share, or use sharded=False: rank 0 then writes one file",
            )
    try:
        shards = finish_folder(path / folder, results)
        fsync(path / folder)
        fsync(path)
    except OSError as exc:
        raise _write_error(path, str(exc)) from exc
    states, record = main
    write_file(path / MAIN_FILE, states, {**record, "shards": shards})
    for each in path.iterdir():  # shards of the previous checkpoint and of killed writers
        if each.name.startswith(_SHARD_PREFIX) and each.name != folder:
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
