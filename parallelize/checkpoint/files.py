"""Files of checkpoints: those that people write with torch.save, with a record of this library beside the states.

    {"model": {...}, "optimizer": {...}, "epoch": 3, "_parallelize": {"format": 2, ...}}

    .last.pt.<host>.<token>.tmp    written by rank 0 for this save alone, locked, and fsynced
    last.pt                        the same file after a rename

A run killed at any moment leaves the old file or the new one, and perhaps a temporary one, which the
next save of this path removes. Of two runs that save one path, each save is one whole file.

The zip format of torch.save has a CRC-32 of each entry. torch.load does not look at it: `crcs` does.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from parallelize.call.pickling import cause_of
from parallelize.checkpoint.record import check_record
from parallelize.errors import ConfigError, MissingDependencyError, ParallelizeError
from parallelize.torch_patches.whole_file import TemporaryFile, fsync, temporary_file

__all__ = [
    "MAIN_FILE",
    "RECORD",
    "SAFETENSORS",
    "SHARD_PREFIX",
    "Checkpoint",
    "crcs",
    "new_shard_folder",
    "read",
    "reading",
    "remove",
    "replace",
    "write",
    "write_error",
    "writing",
]

MAIN_FILE = "checkpoint.pt"  # in the folder of a sharded checkpoint: the record, and which folder has the shards
SHARD_PREFIX = "parts-"  # begin of that folder's name, another one for each save
RECORD = "_parallelize"
SAFETENSORS = ".safetensors"
_MAX_READS = 100  # of a file that another run replaces meanwhile


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint, by the user's names."""

    states: dict[str, Any]
    """The states; a meta tensor stands for a tensor in the shards."""
    record: dict[str, Any]
    """What `save` recorded; {} in a file of another program."""
    digest: str = ""
    """Equal for equal files."""
    fill: Callable[[Any, Mapping[int, Any]], Any] = lambda part, _targets: part
    """Returns a part of the states with tensors in place of meta tensors; of some, by their ids, there are DTensors."""


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace a file, or what a link points to, by one of a dictionary that is written beside it."""
    target = path.resolve()
    if target.exists() and not target.is_file():  # such as /dev/null
        raise write_error(path, "it is not a file, and must not be replaced")
    with writing(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(target) as temporary:
            replace(temporary, content)


def replace(temporary: TemporaryFile, content: dict[str, Any]) -> None:
    """Write a dictionary to a temporary file, flush it to disk, and let it replace its target."""
    target = temporary.target
    if target.suffix == SAFETENSORS:
        tensors = _only_tensors(target, content)
        # Hugging Face requires the metadata.
        _safetensors().torch.save_file(tensors, temporary.path, {"format": "pt"})
    else:
        # Given a path, torch.save stores the name of the file in the file.
        torch.save(content, temporary.file)
        temporary.file.flush()
    fsync(temporary.path)
    temporary.replace_target()
    fsync(target.parent)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an error of this library for whatever is raised while a checkpoint is written."""
    try:
        yield
    except ParallelizeError:
        raise
    except Exception as exc:
        raise write_error(path, cause_of(exc)) from exc


def _only_tensors(path: Path, content: dict[str, Any]) -> dict[str, torch.Tensor]:
    states = [each for name, each in content.items() if name != RECORD]
    values: Any = states[0] if len(states) == 1 and isinstance(states[0], dict) else {"": None}
    if not all(isinstance(each, torch.Tensor) for each in values.values()):
        raise ConfigError(
            f"save({str(path)!r}) of {', '.join(content)}",
            why="a file of safetensors holds the tensors of one state dict",
            fix="save(path, model=model) alone; all that a run needs to go on fits into a file such as last.pt",
        )
    # Clones, because such a file holds no storage twice.
    return {key: each.cpu().clone(memory_format=torch.contiguous_format) for key, each in values.items()}


def write_error(path: Path, why: object) -> ParallelizeError:
    """Build the error for a checkpoint that cannot be written."""
    fix = "free disk space, or choose a folder that every rank may write to; the previous checkpoint is still there"
    return ParallelizeError(f"cannot write {path}", why=str(why).partition("\n")[0], fix=fix)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise an error of this library for whatever is raised on a file of other bytes than save() has written."""
    try:
        yield
    except ParallelizeError:
        raise
    except OSError as exc:
        fix = "check the path, and let this user read it; with several nodes, use a folder that all of them share"
        raise ConfigError(f"cannot read {path}", why=str(exc), fix=fix) from exc
    except Exception as exc:
        if refused := re.search(r"GLOBAL ([\w.]+)", str(exc)):
            raise ConfigError(
                f"{path} holds {refused[1]}, which is not a safe type",
                why="reading it would run code from the file; save() never writes such types",
                fix="load it only if you trust its author: torch.load(path, weights_only=False), then save() "
                "what you need",
            ) from exc
        raise ParallelizeError(
            f"{path} is damaged, or not a checkpoint",
            why=f"{type(exc).__name__}: {exc}".rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0],
            fix="load another checkpoint: one that save() has written, or a dictionary that torch.save has written",
        ) from exc


def read(path: Path) -> Checkpoint:
    """Read and verify a file of torch.save or safetensors without running code.

    Tensors are memory-mapped.
    """
    with reading(path):
        if path.suffix == SAFETENSORS:
            return Checkpoint(_safetensors().torch.load_file(path), {})
        stored, digest = _read_one(path)
    record = stored.pop(RECORD, {})
    check_record(path, record, stored)
    return Checkpoint(stored, record, digest)


def _read_one(path: Path) -> tuple[dict[Any, Any], str]:
    """Return the dictionary in a file, and its digest, both of one save."""
    for _ in range(_MAX_READS):
        with contextlib.suppress(_Replaced), _unreplaced(path) as file:
            return _stored(path, file)
    raise ConfigError(
        f"{path} is replaced while it is read, {_MAX_READS} times",
        why="another run saves to this path all the time",
        fix="give each run a path of its own",
    )


def _stored(path: Path, file: IO[bytes]) -> tuple[dict[Any, Any], str]:
    is_zip = file.read(2) == b"PK"  # otherwise a file of torch 1.5 or older, or something else
    digest = crcs(file) if is_zip else ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about older formats
        # With mmap=True, torch.load opens the path twice: for the pickle, and again for the tensors.
        # If another run saves in between, values of one save would get the tensors of another.
        content = torch.load(os.fspath(path), map_location="cpu", mmap=is_zip, weights_only=True)
    return dict(content), digest


class _Replaced(Exception):  # noqa: N818 - it is caught here, and no error
    """Another run has replaced the file that was being read."""


@contextlib.contextmanager
def _unreplaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a file; raise `_Replaced`, whatever the block does, if it is no longer at its path."""
    with path.open("rb") as file:
        try:
            yield file
        finally:
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                raise _Replaced


def crcs(file: Any, *, is_verified: bool = True) -> str:
    """Return a checksum of the checksums of all entries of a zip file.

    Args:
        file: a file of torch.save, or a path.
        is_verified: whether the entries are read, to compare them with their checksums.
    """
    with zipfile.ZipFile(file) as archive:
        if is_verified and (wrong := archive.testzip()):
            raise zipfile.BadZipFile(f"its entry {wrong} does not match its checksum")
        checksums = [(entry.filename, entry.CRC) for entry in archive.infolist()]
    return f"{zlib.crc32(str(checksums).encode()):08x}"


def new_shard_folder(path: Path, *, sharded: bool | None, has_shards: bool) -> str:
    """Return the name of a new shard folder in `path`, or "" if the checkpoint is to be a single file."""
    found = [each.name for each in path.iterdir()] if path.is_dir() else []
    # Without `sharded`, a checkpoint keeps its form.
    is_folder = bool(found) or (has_shards and not path.is_file()) if sharded is None else sharded
    ours = (MAIN_FILE, SHARD_PREFIX, f".{MAIN_FILE}.")
    foreign = [f" that contains {each}" for each in found if not each.startswith(ours)]
    if foreign or (path.exists() and is_folder != path.is_dir()):
        kind = "folder" if path.is_dir() else "file"
        raise ConfigError(
            f"save({str(path)!r})",
            why=f"the path is that of a {kind}{''.join(foreign[:1])}",
            fix="pass the path of a file, such as runs/last.pt; for shards, that of a new folder, such as runs/last",
        )
    return SHARD_PREFIX + secrets.token_hex(4) if is_folder else ""


def remove(path: Path) -> None:
    """Remove a checkpoint file or folder; in a folder first the main file, without which there is no checkpoint."""
    if path.is_dir():
        (path / MAIN_FILE).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as exc:
        raise MissingDependencyError(
            "safetensors is not installed",
            why="files of weights that end in .safetensors are read and written with it",
            fix="pip install 'parallelize[safetensors]'",
        ) from exc
    return safetensors
