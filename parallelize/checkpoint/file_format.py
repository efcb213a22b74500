"""One checkpoint as it lies on the disk: what is in it, and everything that can be wrong with one."""

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
from parallelize.checkpoint.checksum import digest, without_checksums
from parallelize.checkpoint.shard_index import Pieces, is_divided
from parallelize.errors import ConfigError, ParallelizeError
from parallelize.runtime.containers import leaves

__all__ = ["MAIN", "Checkpoint", "Entry", "damaged", "is_archive", "read", "write"]

MAIN = "checkpoint.pt"
"""The file in a checkpoint that is a folder."""

_FORMAT = 1
_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True)
class Entry:
    """The state of one thing.

    Args:
        kind: which of `states` has taken it.
        name_of_class: of the thing.
        state: plain values.
    """

    kind: str
    name_of_class: str
    state: Any


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds.

    Args:
        world_size: processes of the run that wrote it.
        entries: name -> state.
        generators: those of each rank, as `randomness` has taken them; None for a rank that did not take part.
        fingerprint: of all that; "" before it is written.
        pieces: where the values of divided tensors lie, which are meta tensors in the entries; None: there are none.
    """

    world_size: int
    entries: Mapping[str, Entry]
    generators: tuple[Any, ...]
    fingerprint: str = ""
    pieces: Pieces | None = None

    def states(self) -> list[Any]:
        """What was taken of each thing."""
        return [each.state for each in self.entries.values()]

    def as_plain(self) -> dict[str, Any]:
        """In plain containers."""
        entries = {name: [each.kind, each.name_of_class, each.state] for name, each in self.entries.items()}
        listed = {} if self.pieces is None else {"pieces": self.pieces.as_plain()}
        return {"world_size": self.world_size, "entries": entries, "generators": list(self.generators), **listed}

    @classmethod
    def parse(cls, content: Mapping[str, Any], fingerprint: str) -> Checkpoint:
        """From plain containers whose fingerprint is right."""
        entries = {name: Entry(*each) for name, each in content["entries"].items()}
        pieces = Pieces.parse(content["pieces"]) if "pieces" in content else None
        return cls(content["world_size"], entries, tuple(content["generators"]), fingerprint, pieces)


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Put a checkpoint at `path`, whole or not at all.

    Raises:
        ParallelizeError: the file system refuses; what was at `path` is still there.
    """
    content = checkpoint.as_plain()
    whole = {"parallelize checkpoint": _FORMAT, "fingerprint": digest(content), "content": content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with without_checksums():
            replace_file(path, lambda beside: torch.save(whole, os.fspath(beside)))
    except (OSError, RuntimeError) as exc:  # torch's writer raises the latter when the disk is full
        raise ParallelizeError(
            f"cannot write {path}",
            why=str(exc).partition("\n")[0],
            fix="make room, or choose a folder that this process may write to; what was there before is still there",
        ) from exc


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, checked; its tensors are pages of the file, read when they are used.

    Nothing in it is run, whoever wrote it. Of a folder the parts are there in full length; who reads them checks them.

    Raises:
        ConfigError: no file, a file that is no checkpoint, or one that holds more than plain values.
        ParallelizeError: a damaged file, or parts that are missing.
    """
    path = _main(path)
    _look(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other formats, which are refused below
            whole = torch.load(os.fspath(path), map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as exc:
        raise _of_unpickling(path, exc) from exc
    except Exception as exc:  # random bytes lead torch's reader anywhere
        raise damaged(path, f"{type(exc).__name__}: {exc}".partition("\n")[0]) from exc
    if not isinstance(whole, dict) or "parallelize checkpoint" not in whole:
        raise _foreign(path, "it is a file of torch.save with something else in it")
    if whole["parallelize checkpoint"] != _FORMAT:
        raise ConfigError(
            f"{path} has format {whole['parallelize checkpoint']!r}, this version reads {_FORMAT}",
            why="another version of parallelize has written it",
            fix="load it with that version and save it again, or update",
        )
    try:
        fingerprint = digest(whole["content"])
        if fingerprint != whole["fingerprint"]:
            raise damaged(path, "its content does not have the fingerprint that was written with it")
        return _complete(path, Checkpoint.parse(whole["content"], fingerprint))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as exc:
        raise damaged(path, f"{type(exc).__name__}: {exc}".partition("\n")[0]) from exc


def _main(path: Path) -> Path:
    """The file to begin with."""
    if not path.is_dir():
        return path
    if not (path / MAIN).exists():
        is_torchs = (path / ".metadata").exists()
        raise ConfigError(
            f"no checkpoint in {path}",
            why="torch.distributed.checkpoint has written this folder"
            if is_torchs
            else f"there is no {MAIN} in this folder: another program's, or its first writer was killed",
            fix="load it with torch.distributed.checkpoint.load, if you know who wrote it: its .metadata is a pickle"
            if is_torchs
            else "give what save() has written",
        )
    return path / MAIN


def _complete(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    """The same, if all that it lists is there."""
    if checkpoint.pieces is not None:
        for each in checkpoint.pieces.faults(checkpoint.states(), path.parent):
            raise damaged(path, each)
    elif any(map(is_divided, leaves(checkpoint.states()))):
        raise damaged(path, "it has tensors without values")
    return checkpoint


def is_archive(path: Path) -> bool:
    """Whether it begins as a file of torch.save does: what is refused then is not what a kill or a full disk leaves."""
    path = path / MAIN if path.is_dir() else path
    return path.is_file() and _start(path) == _MAGIC


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_MAGIC))


def _look(path: Path) -> None:
    try:
        start = _start(path)
    except FileNotFoundError as exc:
        raise ConfigError(
            f"no checkpoint {path}",
            why="there is no such file on this host",
            fix="check the path; with several nodes it has to be in a folder that all of them share",
        ) from exc
    except OSError as exc:
        raise ConfigError(f"cannot read {path}", why=str(exc), fix="give the file that save() has written") from exc
    if start != _MAGIC:
        raise _foreign(path, "it is empty" if not start else f"it begins with {start!r}")


def _of_unpickling(path: Path, exc: Exception) -> ParallelizeError:
    refused = re.search(r"GLOBAL ([\w.]+)", str(exc))
    if refused is None:
        return damaged(path, str(exc).partition("\n")[0])
    return ConfigError(
        f"{path} holds {refused[1]}, which is no plain value",
        why="reading it would run code from the file, and save() writes nothing of the kind",
        fix="do not load it unless you know who wrote it; then read it with torch.load(path, weights_only=False), and "
        "save() what you need of it",
    )


def _foreign(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is no checkpoint of parallelize.save",
        why=why,
        fix="load weights that torch.save has written by model.load_state_dict(torch.load(path, weights_only=True))",
    )


def damaged(path: Path, why: str) -> ParallelizeError:
    """The error for a checkpoint that is not what was written."""
    return ParallelizeError(
        f"{path} is damaged",
        why=why,
        fix="load another checkpoint; nothing has been changed by this one",
    )
