"""File format of a checkpoint: its layout, how to read and write it, and the errors for unreadable files.

A file is the one that people write with torch.save, with a record of this library beside the state dicts:

    {"model": {...}, "optimizer": {...}, "epoch": 3, "_parallelize": {"format": 2, "digest": ...}}
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint.atomic_write import replace_file
from parallelize.checkpoint.checksum import checksum_of, damaged_error
from parallelize.errors import ConfigError, ParallelizeError
from parallelize.version import __version__

__all__ = [
    "MAIN_FILE",
    "SHARD_PREFIX",
    "Checkpoint",
    "is_incomplete",
    "is_zip_file",
    "new_record",
    "new_shard_folder",
    "read_file",
    "remove_checkpoint",
    "write_error",
    "write_file",
]

MAIN_FILE = "checkpoint.pt"  # name of the main file in the folder of a sharded checkpoint: everything but the tensors
SHARD_PREFIX = "parts-"  # begin of the name of the folder beside it with the shards, another one for each save
_RECORD = "_parallelize"
_FORMAT = 2
_MAGIC = b"PK\x03\x04"
_FOLDER_NAME = re.compile(r"[\w-][\w.-]*")  # no path separators: all files lie in the checkpoint's folder

_CONVERT = (
    "import sys, torch; e = torch.load(sys.argv[1])['content']['entries']; torch.save({n: s['tensors'] if k == 'model' "
    "else s['state'] if k == 'optimizer' else s for n, (k, _, s) in e.items()}, sys.argv[2])"
)


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint, by the user's names; the record is {} in a file of another program."""

    states: dict[str, Any]  # a meta tensor stands for a tensor in the shards
    record: dict[str, Any] = field(default_factory=dict)
    shards: Path | None = None  # folder of the shards

    def digest(self) -> str:
        """Return the checksum of the content."""
        return str(self.record["digest"]) if self.record else checksum_of(self.states)


def new_record(**details: Any) -> dict[str, Any]:
    """Return the record to store beside the states."""
    versions = {"parallelize": __version__, "torch": str(torch.__version__)}
    return {"format": _FORMAT, "versions": versions, **details}


def write_file(path: Path, states: Mapping[str, Any], record: Mapping[str, Any], form: str = "torch") -> None:
    """Write a checkpoint to `path` atomically, in the form "torch" or "safetensors"."""
    content: dict[str, Any] = {**states, _RECORD: dict(record)}
    content[_RECORD]["digest"] = checksum_of(content)

    def write(temporary: Path) -> None:
        with temporary.open("wb", buffering=0) as file:  # given a path, torch.save stores the file name in the file
            torch.save(content, file)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if form == "safetensors":
            from parallelize.checkpoint.safetensors_file import write_weights  # an optional package

            write_weights(path, content, write)
        else:
            replace_file(path, write)
    except (OSError, RuntimeError) as exc:  # torch.save raises RuntimeError when the disk is full
        raise write_error(path, str(exc).partition("\n")[0]) from exc


def write_error(path: Path, why: str) -> ParallelizeError:
    """Build the error for a checkpoint that cannot be written."""
    fix = "free disk space, or choose a folder that every rank may write to; the previous checkpoint is still there"
    return ParallelizeError(f"cannot write {path}", why=why, fix=fix)


def read_file(path: Path) -> Checkpoint:
    """Read and verify a checkpoint, of shards the files' sizes, without running code; its tensors are memory-mapped."""
    if path.is_dir() and not (path / MAIN_FILE).exists():
        raise ConfigError(
            f"no checkpoint in {path}",
            why=f"the folder has no {MAIN_FILE}: another program made it, or the first save was killed",
            fix="pass a path that save() or torch.distributed.checkpoint.save has written",
        )
    path = path / MAIN_FILE if path.is_dir() else path
    if path.suffix == ".safetensors":
        from parallelize.checkpoint.safetensors_file import read_weights  # an optional package

        return _parse(path, read_weights(path, _load))
    return _parse(path, _load(path))


def _load(path: Path) -> dict[Any, Any]:
    """Return the dictionary in a file of torch.save."""
    try:
        header = _header(path)
    except OSError as exc:
        is_missing = isinstance(exc, FileNotFoundError)
        raise ConfigError(
            f"no checkpoint {path}" if is_missing else f"cannot read {path}",
            why="no such file on this host" if is_missing else str(exc),
            fix="check the path; with several nodes, use a folder that all of them share"
            if is_missing
            else "let this user read it, and check the disk that it is on",
        ) from exc
    is_zip = header == _MAGIC  # otherwise a file of torch 1.5 or older, or something else
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about older formats
            stored = torch.load(os.fspath(path), map_location="cpu", mmap=is_zip, weights_only=True)
    except Exception as exc:  # on random bytes torch.load may raise anything
        if refused := re.search(r"GLOBAL ([\w.]+)", str(exc)):
            raise ConfigError(
                f"{path} holds {refused[1]}, which is not a safe type",
                why="reading it would run code from the file; save() never writes such types",
                fix="load it only if you trust its author: torch.load(path, weights_only=False), then save() what you "
                "need",
            ) from exc
        if not is_zip:
            raise _not_a_checkpoint(path, f"it begins with {header!r}" if header else "it is empty") from exc
        raise damaged_error(path, exc) from exc
    if not isinstance(stored, dict):
        raise _not_a_checkpoint(path, f"it holds a {type(stored).__name__}, not a dictionary of states")
    return stored


def _not_a_checkpoint(path: Path, why: str) -> ConfigError:
    fix = "pass a file that save() or torch.save has written: a dictionary of state dicts, or one state dict"
    return ConfigError(f"{path} is not a checkpoint", why=why, fix=fix)


def _parse(path: Path, stored: dict[Any, Any]) -> Checkpoint:
    """Return the content of a file after verifying its checksum."""
    if "parallelize checkpoint" in stored:
        fix = f'convert a file with: python -c "{_CONVERT}" old.pt new.pt'
        raise _format_error(path, stored["parallelize checkpoint"], fix)
    if _RECORD not in stored:
        return Checkpoint(stored)
    try:
        record = {**stored[_RECORD]}
        if record["format"] == _FORMAT:
            digest = record.pop("digest")
            if checksum_of({**stored, _RECORD: record}) != digest:
                raise damaged_error(path, "its content does not match its checksum")
            states = {name: each for name, each in stored.items() if name != _RECORD}
            shards = _checked_shards(path, record["shards"]) if "shards" in record else None
            return Checkpoint(states, {**record, "digest": digest}, shards)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as exc:
        raise damaged_error(path, exc) from exc
    fix = f"update parallelize, or remove the key {_RECORD!r} from it: the rest is a dictionary of states"
    raise _format_error(path, record["format"], fix)


def _format_error(path: Path, number: Any, fix: str) -> ConfigError:
    what = f"{path} has format {number!r}, this version reads {_FORMAT}"
    return ConfigError(what, why="another version of parallelize has written it", fix=fix)


def _checked_shards(path: Path, shards: Mapping[str, Any]) -> Path:
    """Return the folder of the shards, after checking that all its files are complete."""
    for name in (shards["folder"], *shards["files"]):
        if name != ".metadata" and _FOLDER_NAME.fullmatch(name) is None:
            raise damaged_error(path, f"{name!r} is not a plain file or folder name")
    folder = path.parent / str(shards["folder"])
    for name, size in shards["files"].items():
        if not (folder / name).is_file():
            raise damaged_error(path, f"{folder.name}/{name} is missing")
        if (folder / name).stat().st_size != size:
            raise damaged_error(path, f"{folder.name}/{name} has {(folder / name).stat().st_size} of {size} bytes")
    return folder


def is_zip_file(path: Path) -> bool:
    """Return whether the file begins like a zip file of torch.save; a file damaged by a crash may not.

    A file that cannot be read, for example without permission, may be one.
    """
    try:
        path = path / MAIN_FILE if path.is_dir() else path
        return path.is_file() and _header(path) == _MAGIC
    except OSError:
        return True


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_MAGIC))


def new_shard_folder(path: Path, *, is_sharded: bool | None, has_shards: bool) -> str:
    """Return the name of a new shard folder in `path`, or "" if the checkpoint is to be a single file."""
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
        return SHARD_PREFIX + secrets.token_hex(4)
    is_folder = is_sharded if is_sharded is not None else has_shards and not path.exists()
    return SHARD_PREFIX + secrets.token_hex(4) if is_folder else ""


def _is_ours(name: str) -> bool:
    return name == MAIN_FILE or name.startswith((SHARD_PREFIX, f".{MAIN_FILE}."))


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
