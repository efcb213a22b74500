"""One checkpoint as a file: what is in it, and everything that can be wrong with one."""

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

from parallelize.checkpoint.atomic import replace_file
from parallelize.checkpoint.digest import digest
from parallelize.errors import ConfigError, ParallelizeError

__all__ = ["Checkpoint", "Entry", "read", "write"]

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
    """

    world_size: int
    entries: Mapping[str, Entry]
    generators: tuple[Any, ...]
    fingerprint: str = ""

    def as_plain(self) -> dict[str, Any]:
        """In plain containers."""
        entries = {name: [each.kind, each.name_of_class, each.state] for name, each in self.entries.items()}
        return {"world_size": self.world_size, "entries": entries, "generators": list(self.generators)}

    @classmethod
    def parse(cls, content: Mapping[str, Any], fingerprint: str) -> Checkpoint:
        """From plain containers whose fingerprint is right."""
        entries = {name: Entry(*each) for name, each in content["entries"].items()}
        return cls(content["world_size"], entries, tuple(content["generators"]), fingerprint)


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Put a checkpoint at `path`, whole or not at all.

    Raises:
        ParallelizeError: the file system refuses; what was at `path` is still there.
    """
    content = checkpoint.as_plain()
    whole = {"parallelize checkpoint": _FORMAT, "fingerprint": digest(content), "content": content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda beside: _save(whole, beside))
    except (OSError, RuntimeError) as exc:  # torch's writer raises the latter when the disk is full
        raise ParallelizeError(
            f"cannot write {path}",
            why=str(exc).partition("\n")[0],
            fix="make room, or choose a folder that this process may write to; what was there before is still there",
        ) from exc


def _save(whole: Mapping[str, Any], path: Path) -> None:
    # The fingerprint says more than the checksums of the archive, which torch.load does not look at.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save(whole, os.fspath(path))
    finally:
        torch.serialization.set_crc32_options(before)


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, checked; its tensors are pages of the file, read when they are used.

    Nothing in the file is run, whoever wrote it.

    Raises:
        ConfigError: no file, a file that is no checkpoint, or one that holds more than plain values.
        ParallelizeError: a damaged file.
    """
    _look(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other formats, which are refused below
            whole = torch.load(os.fspath(path), map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as exc:
        raise _of_unpickling(path, exc) from exc
    except Exception as exc:  # random bytes lead torch's reader anywhere
        raise _damaged(path, f"{type(exc).__name__}: {exc}".partition("\n")[0]) from exc
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
            raise _damaged(path, "its content does not have the fingerprint that was written with it")
        return Checkpoint.parse(whole["content"], fingerprint)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as exc:
        raise _damaged(path, f"{type(exc).__name__}: {exc}".partition("\n")[0]) from exc


def _look(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
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
        return _damaged(path, str(exc).partition("\n")[0])
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


def _damaged(path: Path, why: str) -> ParallelizeError:
    return ParallelizeError(
        f"{path} is damaged",
        why=why,
        fix="load another checkpoint; nothing has been changed by this one",
    )
