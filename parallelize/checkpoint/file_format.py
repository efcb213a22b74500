"""File format of a checkpoint: its content, how to read and write it, and the errors for unreadable files."""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint.atomic_write import replace_file
from parallelize.checkpoint.checksum import checksum_of, without_zip_crc32
from parallelize.checkpoint.shard_index import ShardIndex, placeholders_in
from parallelize.errors import ConfigError, ParallelizeError

__all__ = ["MAIN_FILE", "Checkpoint", "Entry", "damaged_error", "is_zip_file", "read_file", "write_file"]

MAIN_FILE = "checkpoint.pt"
"""Name of the main file in the folder of a sharded checkpoint; it holds everything but the shards."""

_FORMAT = 1
_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True)
class Entry:
    """The saved state of one object.

    Args:
        kind: kind of the `StateHandler` that made the state, or "value".
        class_name: class name of the object.
        state: the state, which consists of safe types.
    """

    kind: str
    class_name: str
    state: Any


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file.

    Args:
        world_size: number of processes of the run that wrote it.
        entries: state by the user's name for the object.
        rng_states: RNG states of each rank, as `rng_state` returns them; None for a rank that did not take part.
        checksum: checksum of all other fields; "" before the checkpoint is written.
        shard_index: location of the shards that the placeholders (meta tensors) stand for; None: nothing is sharded.
    """

    world_size: int
    entries: Mapping[str, Entry]
    rng_states: tuple[Any, ...]
    checksum: str = ""
    shard_index: ShardIndex | None = None

    def states(self) -> list[Any]:
        """Return the states of all entries."""
        return [each.state for each in self.entries.values()]

    def to_dict(self) -> dict[str, Any]:
        """Return the content in its stored form."""
        entries = {name: [each.kind, each.class_name, each.state] for name, each in self.entries.items()}
        index = {} if self.shard_index is None else {"pieces": self.shard_index.to_dict()}
        return {"world_size": self.world_size, "entries": entries, "generators": list(self.rng_states), **index}

    @classmethod
    def parse(cls, content: Mapping[str, Any], checksum: str) -> Checkpoint:
        """Build a checkpoint from stored content whose checksum has been verified."""
        entries = {name: Entry(*each) for name, each in content["entries"].items()}
        shard_index = ShardIndex.parse(content["pieces"]) if "pieces" in content else None
        return cls(content["world_size"], entries, tuple(content["generators"]), checksum, shard_index)


def write_file(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to `path` atomically.

    Raises:
        ParallelizeError: writing failed; the previous file is still at `path`.
    """
    content = checkpoint.to_dict()
    stored = {"parallelize checkpoint": _FORMAT, "fingerprint": checksum_of(content), "content": content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with without_zip_crc32():
            replace_file(path, lambda temporary: torch.save(stored, os.fspath(temporary)))
    except (OSError, RuntimeError) as exc:  # torch.save raises RuntimeError when the disk is full
        raise ParallelizeError(
            f"cannot write {path}",
            why=str(exc).partition("\n")[0],
            fix="free disk space, or choose a folder that this process may write to; the previous file is still there",
        ) from exc


def read_file(path: Path) -> Checkpoint:
    """Read and verify the checkpoint at `path`, without running code from it; its tensors are memory-mapped.

    In a sharded checkpoint only the sizes of the shard files are verified; reading a shard verifies its checksum.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint, or holds unsafe types.
        ParallelizeError: the file is damaged, or shards are missing.
    """
    path = _main_file(path)
    _check_header(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about other formats, which are rejected below
            stored = torch.load(os.fspath(path), map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as exc:
        raise _unpickling_error(path, exc) from exc
    except Exception as exc:  # on random bytes torch.load may raise anything
        raise damaged_error(path, f"{type(exc).__name__}: {exc}".partition("\n")[0]) from exc
    if not isinstance(stored, dict) or "parallelize checkpoint" not in stored:
        raise _not_a_checkpoint(path, "torch.save wrote it, but it holds something else")
    if stored["parallelize checkpoint"] != _FORMAT:
        raise ConfigError(
            f"{path} has format {stored['parallelize checkpoint']!r}, this version reads {_FORMAT}",
            why="another version of parallelize has written it",
            fix="load it with that version and save it again, or update",
        )
    try:
        checksum = checksum_of(stored["content"])
        if checksum != stored["fingerprint"]:
            raise damaged_error(path, "its content does not match its checksum")
        return _check_shards(path, Checkpoint.parse(stored["content"], checksum))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as exc:
        raise damaged_error(path, f"{type(exc).__name__}: {exc}".partition("\n")[0]) from exc


def _main_file(path: Path) -> Path:
    """Return the file to read first: `path`, or the main file in a folder."""
    if not path.is_dir():
        return path
    if not (path / MAIN_FILE).exists():
        is_written_by_torch = (path / ".metadata").exists()
        raise ConfigError(
            f"no checkpoint in {path}",
            why="torch.distributed.checkpoint wrote this folder"
            if is_written_by_torch
            else f"the folder has no {MAIN_FILE}: another program made it, or the first save was killed",
            fix="load it with torch.distributed.checkpoint.load, if you trust its author: .metadata is a pickle"
            if is_written_by_torch
            else "pass a path that save() has written",
        )
    return path / MAIN_FILE


def _check_shards(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint after checking that all its shards are present."""
    if checkpoint.shard_index is not None:
        for each in checkpoint.shard_index.find_damage(checkpoint.states(), path.parent):
            raise damaged_error(path, each)
    elif placeholders_in(checkpoint.states()):
        raise damaged_error(path, "it has sharded tensors and no shard index")
    return checkpoint


def is_zip_file(path: Path) -> bool:
    """Return whether the file begins like a zip file of torch.save; a file damaged by a crash may not."""
    path = path / MAIN_FILE if path.is_dir() else path
    return path.is_file() and _header(path) == _MAGIC


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_MAGIC))


def _check_header(path: Path) -> None:
    try:
        header = _header(path)
    except FileNotFoundError as exc:
        raise ConfigError(
            f"no checkpoint {path}",
            why="no such file on this host",
            fix="check the path; with several nodes, use a folder that all of them share",
        ) from exc
    except OSError as exc:
        raise ConfigError(f"cannot read {path}", why=str(exc), fix="pass a path that save() has written") from exc
    if header != _MAGIC:
        raise _not_a_checkpoint(path, f"it begins with {header!r}" if header else "it is empty")


def _unpickling_error(path: Path, exc: Exception) -> ParallelizeError:
    refused = re.search(r"GLOBAL ([\w.]+)", str(exc))
    if refused is None:
        return damaged_error(path, str(exc).partition("\n")[0])
    return ConfigError(
        f"{path} holds {refused[1]}, which is not a safe type",
        why="reading it would run code from the file; save() never writes such types",
        fix="load it only if you trust its author: torch.load(path, weights_only=False), then save() what you need",
    )


def _not_a_checkpoint(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a checkpoint of parallelize.save",
        why=why,
        fix="load weights from torch.save with model.load_state_dict(torch.load(path, weights_only=True))",
    )


def damaged_error(path: Path, why: str) -> ParallelizeError:
    """Build the error for a damaged checkpoint."""
    return ParallelizeError(
        f"{path} is damaged",
        why=why,
        fix="load another checkpoint; nothing was loaded from this one",
    )
