"""File format of a checkpoint: its layout, how to read and write it, and the errors for unreadable files.

A file is the one that people write with torch.save, with a record of this library beside the state dicts:

    {"model": {...}, "optimizer": {...}, "epoch": 3, "_parallelize": {"format": 2, "digest": ...}}
"""

from __future__ import annotations

import os
import re
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

__all__ = ["MAIN_FILE", "Checkpoint", "is_zip_file", "new_record", "read_file", "write_file"]

MAIN_FILE = "checkpoint.pt"
"""Name of the main file in the folder of a sharded checkpoint; it holds everything but the tensors."""

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
    """The content of a checkpoint.

    Args:
        states: state dicts and plain values by the user's name; a meta tensor stands for a tensor in the shards.
        record: what this library has recorded: RNG states, the kind of each state; {} in a file of another program.
        shards: folder of the shards; None: nothing is sharded.
    """

    states: dict[str, Any]
    record: dict[str, Any] = field(default_factory=dict)
    shards: Path | None = None

    def digest(self) -> str:
        """Return the checksum of the content."""
        return str(self.record["digest"]) if self.record else checksum_of(self.states)

    def kind(self, name: str) -> str | None:
        """Return the kind of the state that was saved under a name; None in a file of another program."""
        return self.record["objects"][name]["kind"] if self.record else None


def new_record(*, world_size: int, rng_states: list[Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record to store beside the states."""
    return {
        "format": _FORMAT,
        "versions": {"parallelize": __version__, "torch": str(torch.__version__)},
        "world_size": world_size,
        "rng": rng_states,
        "objects": dict(objects),
    }


def write_file(path: Path, states: Mapping[str, Any], record: Mapping[str, Any], form: str = "torch") -> None:
    """Write a checkpoint to `path` atomically, in the form "torch" or "safetensors".

    Raises:
        ParallelizeError: writing failed; the previous file is still at `path`.
    """
    content = {**states, _RECORD: dict(record)}
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
    if path.is_dir() and not (path / MAIN_FILE).exists():
        return _read_foreign_folder(path)
    path = path / MAIN_FILE if path.is_dir() else path
    if path.suffix == ".safetensors":
        from parallelize.checkpoint.safetensors_file import read_weights  # an optional package

        return _parse(path, read_weights(path, _load))
    return _parse(path, _load(path))


def _load(path: Path) -> dict[Any, Any]:
    """Return the dictionary in a file of torch.save."""
    header = _checked_header(path)
    is_zip = header == _MAGIC  # otherwise a file of torch 1.5 or older, or something else
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about older formats
            stored = torch.load(os.fspath(path), map_location="cpu", mmap=is_zip, weights_only=True)
    except Exception as exc:  # on random bytes torch.load may raise anything
        if refused := re.search(r"GLOBAL ([\w.]+)", str(exc)):
            raise _unsafe_type_error(path, refused[1]) from exc
        if not is_zip:
            raise _not_a_checkpoint(path, f"it begins with {header!r}") from exc
        raise damaged_error(path, f"{type(exc).__name__}: {exc}".partition("\n")[0]) from exc
    if not isinstance(stored, dict):
        raise _not_a_checkpoint(path, f"it holds a {type(stored).__name__}, not a dictionary of states")
    return stored


def _parse(path: Path, stored: dict[Any, Any]) -> Checkpoint:
    if "parallelize checkpoint" in stored:
        raise ConfigError(
            f"{path} has format {stored['parallelize checkpoint']!r}, this version reads {_FORMAT}",
            why="an earlier version of parallelize has written it",
            fix=f'convert a file with: python -c "{_CONVERT}" old.pt new.pt',
        )
    if _RECORD not in stored:
        return Checkpoint(stored)
    try:
        record = {**stored[_RECORD]}
        if record["format"] != _FORMAT:
            raise ConfigError(
                f"{path} has format {record['format']!r}, this version reads {_FORMAT}",
                why="another version of parallelize has written it",
                fix=f"update parallelize, or remove the key {_RECORD!r} from it: the rest is a dictionary of states",
            )
        digest = record.pop("digest")
        if checksum_of({**stored, _RECORD: record}) != digest:
            raise damaged_error(path, "its content does not match its checksum")
        states = {name: each for name, each in stored.items() if name != _RECORD}
        shards = _checked_shards(path, record["shards"]) if "shards" in record else None
        return Checkpoint(states, {**record, "digest": digest}, shards)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as exc:
        if isinstance(exc, ConfigError):
            raise
        raise damaged_error(path, f"{type(exc).__name__}: {exc}".partition("\n")[0]) from exc


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


def _read_foreign_folder(path: Path) -> Checkpoint:
    """Read a folder that torch.distributed.checkpoint has written."""
    if not (path / ".metadata").exists():
        raise ConfigError(
            f"no checkpoint in {path}",
            why=f"the folder has no {MAIN_FILE}: another program made it, or the first save was killed",
            fix="pass a path that save() or torch.distributed.checkpoint.save has written",
        )
    from parallelize.checkpoint.shards import states_in  # takes a second to import: only if sharded

    return Checkpoint(states_in(path), {}, path)


def is_zip_file(path: Path) -> bool:
    """Return whether the file begins like a zip file of torch.save; a file damaged by a crash may not."""
    path = path / MAIN_FILE if path.is_dir() else path
    return path.is_file() and _header(path) == _MAGIC


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_MAGIC))


def _checked_header(path: Path) -> bytes:
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
    if not header:
        raise _not_a_checkpoint(path, "it is empty")
    return header


def _unsafe_type_error(path: Path, name: str) -> ConfigError:
    return ConfigError(
        f"{path} holds {name}, which is not a safe type",
        why="reading it would run code from the file; save() never writes such types",
        fix="load it only if you trust its author: torch.load(path, weights_only=False), then save() what you need",
    )


def _not_a_checkpoint(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a checkpoint",
        why=why,
        fix="pass a file that save() or torch.save has written: a dictionary of state dicts, or one state dict",
    )
