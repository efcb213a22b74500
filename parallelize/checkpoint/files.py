"""Files of checkpoints: those of torch.save, with a record of this library beside the states.

    {"model": {...}, "optimizer": {...}, "epoch": 3, "_parallelize": {"format": 2, ...}}

    .last.pt.<host>.<token>.tmp    written by rank 0 for this save alone, locked, and fsynced
    last.pt                        the same file after a rename

A run killed at any moment leaves the old file or the new one, and perhaps a temporary one, which
the next save of this path removes. Of two runs that save one path, each save is one whole file.

The zip format of torch.save has a CRC-32 of each entry. torch.load does not look at it: it is
verified here. The ranks of a node that load a file together divide its entries, so that each byte
is verified once. What each of them loads is mapped into memory, which they share.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from parallelize.call.pickling import cause_of
from parallelize.checkpoint.record import RECORD, check_record
from parallelize.errors import ConfigError, MissingDependencyError, ParallelizeError
from parallelize.torch_patches.whole_file import TemporaryFile, fsync, temporary_file

MAIN_FILE = "checkpoint.pt"
"""In the folder of a sharded checkpoint: the states, and the record, which names the shards."""

SHARD_PREFIX = "parts-"
"""Beginning of the name of the folder of shards, which has another name for each save."""

SAFETENSORS = ".safetensors"
_MAX_READS = 100
"""How often a file is read that another run replaces meanwhile."""


_BYTES_AT_ONCE = 1024 * 1024
_MAX_THREADS = 4
"""How many threads of a rank verify files: zlib computes checksums without Python's lock."""


def _without_shards(part: Any, _targets: Mapping[int, Any]) -> Any:
    return part


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint, by the user's names.

    Args:
        states: the states; a meta tensor stands for a tensor in the shards.
        record: what `save` recorded; {} in a file of another program.
        digest: equal for equal files; "" for a file without checksums.
        fill: returns a part of the states with tensors in place of meta tensors. The second
            argument: id of a meta tensor -> the DTensor whose shard of this rank takes its place.
        is_mapped: whether what `fill` returns is in a memory-mapped file, and not in memory.
    """

    states: dict[str, Any]
    record: dict[str, Any]
    digest: str = ""
    fill: Callable[[Any, Mapping[int, Any]], Any] = _without_shards
    is_mapped: bool = True


@dataclass(frozen=True)
class Readers:
    """The ranks that read one file of one machine together, as this rank sees them.

    Args:
        count: number of ranks.
        position: number of this rank among them, from 0.
    """

    count: int = 1
    position: int = 0

    def own_entries(self, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
        """Return the entries that this rank verifies: about as many bytes as each other rank."""
        bytes_of_readers = [0] * self.count
        own_entries = []
        for entry in sorted(archive.infolist(), key=_size, reverse=True):
            position = bytes_of_readers.index(min(bytes_of_readers))
            bytes_of_readers[position] += entry.file_size
            if position == self.position:
                own_entries.append(entry)
        return own_entries


def _size(entry: zipfile.ZipInfo) -> int:
    return entry.file_size


ONE_READER = Readers()


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace a file, or what a link points to, by one that is written beside it."""
    target = path.resolve()
    # Such as /dev/null.
    if target.exists() and not target.is_file():
        raise write_error(path, "it is not a file, and must not be replaced")
    with writing(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(target) as temporary:
            write_and_replace(temporary, content)


def write_and_replace(temporary: TemporaryFile, content: dict[str, Any]) -> None:
    """Write a dictionary to a temporary file, flush it to disk, and let it replace its target."""
    target = temporary.target
    if target.suffix == SAFETENSORS:
        tensors = _only_tensors(target, content)
        # Hugging Face requires the metadata.
        _safetensors().torch.save_file(tensors, temporary.path, {"format": "pt"})
    else:
        # Given a path, torch.save would store the name of the temporary file in the file.
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


def write_error(path: Path, why: object) -> ParallelizeError:
    """Return the error for a checkpoint that cannot be written."""
    return ParallelizeError(
        f"cannot write {path}",
        why=str(why).partition("\n")[0],
        fix="free disk space, or choose a folder that every rank may write to; the previous "
        "checkpoint is still there",
    )


def _only_tensors(path: Path, content: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of the one state in a content, as a file of safetensors holds them."""
    states = [state for name, state in content.items() if name != RECORD]
    holds_one_state = len(states) == 1 and isinstance(states[0], dict)
    if not holds_one_state or not _are_tensors(states[0]):
        raise ConfigError(
            f"save({str(path)!r}) of {', '.join(content)}",
            why="a file of safetensors holds the tensors of one state dict",
            fix="save(path, model=model) alone; all that a run needs to go on fits into a file "
            "such as last.pt",
        )
    tensors = {}
    for name, tensor in states[0].items():
        # Such a file holds no storage twice, so that each tensor is a copy.
        tensors[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
    return tensors


def _are_tensors(state: Mapping[Any, Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in state.values())


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise an error of this library for whatever is raised while a checkpoint is read.

    Raises:
        ConfigError: the file cannot be opened, or holds a type that is not safe.
        ParallelizeError: its bytes are not those that save() has written.
    """
    try:
        yield
    except ParallelizeError:
        raise
    except OSError as exc:
        raise ConfigError(
            f"cannot read {path}",
            why=str(exc),
            fix="check the path, and let this user read it; with several nodes, use a folder that "
            "all of them share",
        ) from exc
    except Exception as exc:
        # In the words of torch's unpickler, and of the one of an index.
        refused = re.search(r"GLOBAL ([\w.]+)", str(exc))
        if refused:
            raise ConfigError(
                f"{path} holds {refused[1]}, which is not a safe type",
                why="reading it would run code from the file; save() never writes such types",
                fix="load it only if you trust its author: torch.load(path, weights_only=False), "
                "then save() what you need",
            ) from exc
        reason = f"{type(exc).__name__}: {exc}".rpartition("WeightsUnpickler error: ")[2]
        raise ParallelizeError(
            f"{path} is damaged, or not a checkpoint",
            why=reason.strip().partition("\n")[0],
            fix="load another checkpoint: one that save() has written, or a dictionary that "
            "torch.save has written",
        ) from exc


def read(path: Path, readers: Readers = ONE_READER) -> Checkpoint:
    """Read and verify a file of torch.save or safetensors, without running code from it.

    Tensors are memory-mapped.

    Args:
        path: the file.
        readers: the ranks that verify a file of torch.save together. The file is right if none of
            them raises, and their digests are equal.
    """
    with reading(path):
        if path.suffix == SAFETENSORS:
            tensors = _safetensors().torch.load_file(path)
            return Checkpoint(states=tensors, record={})
        states, digest = _read_one_save(path, readers)
    record = states.pop(RECORD, {})
    check_record(path, record, states)
    return Checkpoint(states, record, digest)


def _read_one_save(path: Path, readers: Readers) -> tuple[dict[Any, Any], str]:
    """Return the dictionary in a file, and its digest, both of one save."""
    for _ in range(_MAX_READS):
        with contextlib.suppress(_Replaced), _unreplaced(path) as file:
            return _read_open(path, file, readers)
    raise ConfigError(
        f"{path} is replaced while it is read, {_MAX_READS} times",
        why="another run saves to this path all the time",
        fix="give each run a path of its own",
    )


def _read_open(path: Path, file: IO[bytes], readers: Readers) -> tuple[dict[Any, Any], str]:
    # What is no zip file comes from torch 1.5 or older, or is no checkpoint.
    is_zip = file.read(2) == b"PK"
    digest = ""
    if is_zip:
        with zipfile.ZipFile(file) as archive:
            _verify(archive, readers.own_entries(archive))
            digest = _checksum(archive)
    with warnings.catch_warnings():
        # torch warns about older formats.
        warnings.simplefilter("ignore")
        # With mmap=True, torch.load opens the path twice: for the pickle, and again for the
        # tensors. If another run saved in between, values of one save would get the tensors of
        # another one: `_unreplaced` finds that.
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
            opened = os.fstat(file.fileno())
            if not path.exists() or not os.path.samestat(path.stat(), opened):
                raise _Replaced


def _verify(archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo]) -> None:
    """Raise BadZipFile if an entry does not match its checksum."""
    names = [entry.filename for entry in entries]
    call_in_threads(functools.partial(_verify_entry, archive), names)


def call_in_threads(verify: Callable[[Any], None], parts: Iterable[Any]) -> None:
    """Call a function for each part of a file, in a few threads; raise the error of the first part.

    After an error, parts that no thread has begun are left out.
    """
    with ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="parallelize-verify") as executor:
        for _ in executor.map(verify, parts):
            pass


def _verify_entry(archive: zipfile.ZipFile, name: str) -> None:
    try:
        with archive.open(name) as entry:
            # At the end of an entry, zipfile compares its checksum.
            while entry.read(_BYTES_AT_ONCE):
                pass
    except zipfile.BadZipFile as exc:
        raise zipfile.BadZipFile(f"its entry {name} does not match its checksum") from exc


def zip_checksum(file: Any, *, is_verified: bool = True) -> str:
    """Return a checksum of the checksums of all entries of a zip file.

    Args:
        file: an item in a file of shards.
        is_verified: whether the entries are read, to compare them with their checksums.
    """
    with zipfile.ZipFile(file) as archive:
        if is_verified:
            for entry in archive.infolist():
                _verify_entry(archive, entry.filename)
        return _checksum(archive)


def _checksum(archive: zipfile.ZipFile) -> str:
    checksums = [(entry.filename, entry.CRC) for entry in archive.infolist()]
    return f"{zlib.crc32(str(checksums).encode()):08x}"


def new_shard_folder(path: Path, *, sharded: bool | None, has_shards: bool) -> str:
    """Return the name of a new folder of shards in `path`, or "" for a checkpoint in one file.

    Args:
        path: of the checkpoint.
        sharded: as for `save`; None: a checkpoint that exists keeps its form.
        has_shards: whether objects have shards, so that a new checkpoint is a folder.
    """
    names = []
    if path.is_dir():
        names = [entry.name for entry in path.iterdir()]
    for name in names:
        if not name.startswith((MAIN_FILE, SHARD_PREFIX, f".{MAIN_FILE}.")):
            raise _path_error(path, f"folder that contains {name}")
    is_folder = sharded
    if is_folder is None:
        # An empty folder holds no checkpoint, whose form would be kept.
        is_folder = (has_shards or bool(names)) and not path.is_file()
    if path.exists() and not path.is_dir() and is_folder:
        raise _path_error(path, "file")
    if path.is_dir() and not is_folder:
        raise _path_error(path, "folder")
    if not is_folder:
        return ""
    return SHARD_PREFIX + secrets.token_hex(4)


def _path_error(path: Path, form: str) -> ConfigError:
    return ConfigError(
        f"save({str(path)!r})",
        why=f"the path is that of a {form}",
        fix="pass the path of a file, such as runs/last.pt; for shards, that of a new folder, such "
        "as runs/last",
    )


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or a folder.

    In a folder, the main file goes first: without it, the folder holds no checkpoint.
    """
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
