"""A checkpoint as a folder: the parts of every rank, then one file that says that they are all there.

    <path>/parts-<token>/    by every rank, forced to the disk
    <path>/checkpoint.pt     by rank 0 at last, with a rename: it names the parts, the old ones or the new

So a kill at any moment leaves the old checkpoint or the new one, on any file system that renames files.
"""

from __future__ import annotations

import dataclasses
import io
import secrets
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parallelize.checkpoint.atomic_write import force
from parallelize.checkpoint.file_format import MAIN, Checkpoint, read, write
from parallelize.checkpoint.rendezvous import Meeting
from parallelize.checkpoint.shard_index import Piece, Pieces, is_divided
from parallelize.errors import ConfigError, ParallelizeError
from parallelize.runtime.containers import leaves

if TYPE_CHECKING:
    from parallelize.checkpoint.shard_files import Part

__all__ = ["Share", "folder_for", "is_broken_off", "packed", "remove", "unpacked", "write_folder"]

_PARTS = "parts-"


@dataclass(frozen=True)
class Share:
    """What one rank has to do with a checkpoint in a folder.

    Args:
        folder: the name of the folder of parts, the same on all ranks.
        keys: as `Pieces` has them.
        parts: what this rank writes.
        is_common: whether every rank has a share; False: rank 0 has all.
    """

    folder: str
    keys: tuple[str, ...]
    parts: list[Part]
    is_common: bool


def folder_for(path: Path, *, is_sharded: bool | None, in_parts: bool) -> str:
    """The name of a new folder of parts at `path`; "": one file is to be written there.

    Args:
        path: as the user gave it.
        is_sharded: what she asked for; None: as it is there already, else a folder if ranks hold parts.
        in_parts: whether ranks hold parts.

    Raises:
        ConfigError: what is there is something else.
    """
    if path.is_file() and is_sharded:
        raise ConfigError(
            f"save({str(path)!r}, sharded=True)",
            why="a file is there, and a sharded checkpoint is a folder",
            fix="name a folder, as last, or remove the file",
        )
    if path.is_dir():
        foreign = [each.name for each in path.iterdir() if not _is_own(each.name)]
        is_empty = not any(path.iterdir())
        if foreign or is_sharded is False or (is_empty and not (is_sharded or in_parts)):
            raise ConfigError(
                f"save({str(path)!r})",
                why=f"it is a folder, with {foreign[0]} in it" if foreign else "it is a folder",
                fix="name a file in it, as last.pt",
            )
        return _PARTS + secrets.token_hex(4)
    is_folder = is_sharded if is_sharded is not None else in_parts and not path.exists()
    return _PARTS + secrets.token_hex(4) if is_folder else ""


def _is_own(name: str) -> bool:
    return name == MAIN or name.startswith((_PARTS, f".{MAIN}."))


def write_folder(path: Path, checkpoint: Checkpoint, share: Share, meeting: Meeting) -> None:
    """Write this rank's parts; rank 0 waits for all ranks' and completes the checkpoint. No collective.

    Raises:
        ParallelizeError: the file system refuses, on this rank or, as rank 0 sees it, on another.
        SyncError: on rank 0, a rank that has not written its parts in time.
    """
    if share.is_common:
        try:
            _hand_in(path, share, meeting)
        except (OSError, RuntimeError) as exc:
            reason = str(exc).partition("\n")[0]
            meeting.hand_in(packed({"failure": f"rank {meeting.rank} on {socket.gethostname()}: {reason}"}))
            if meeting.rank != 0:
                raise _unwritable(path, reason) from exc
    if meeting.rank == 0:
        try:
            _complete(path, checkpoint, share, meeting)
        except BaseException:
            # It may also come, as SIGTERM does, when the new checkpoint is complete already.
            if not _is_named(path, share.folder):
                shutil.rmtree(path / share.folder, ignore_errors=True)
            raise


def _is_named(path: Path, folder: str) -> bool:
    """Whether the checkpoint that is there may need these parts."""
    if not (path / MAIN).exists():
        return False
    try:
        pieces = read(path).pieces
    except ParallelizeError:
        return True
    return pieces is not None and pieces.folder == folder


def _hand_in(path: Path, share: Share, meeting: Meeting) -> None:
    from parallelize.checkpoint.shard_files import write_pieces  # a second to import: only where there are parts

    pieces = write_pieces(path / share.folder, meeting.rank, share.parts)
    told = {"host": socket.gethostname(), "pieces": [list(dataclasses.astuple(each)) for each in pieces]}
    meeting.hand_in(packed(told))


def _complete(path: Path, checkpoint: Checkpoint, share: Share, meeting: Meeting) -> None:
    told = [unpacked(each) for each in meeting.handed_in()] if share.is_common else []
    failures = [each["failure"] for each in told if "failure" in each]
    if failures:
        raise _unwritable(path, "; ".join(failures))
    for rank, each in enumerate(told):
        for name in {piece[3] for piece in each["pieces"]}:
            if not (path / share.folder / name).is_file():
                raise ParallelizeError(
                    f"{path} has no parts of rank {rank}",
                    why=f"it has written {name} on {each['host']}, where {socket.gethostname()} does not see it",
                    fix="save to a folder that all nodes share, or use sharded=False: rank 0 then writes one file",
                )
    pieces = Pieces.of(share.folder, share.keys, (Piece(*each) for of_rank in told for each in of_rank["pieces"]))
    try:
        if share.is_common:
            _list(path / share.folder, checkpoint, pieces)
            force(path / share.folder)
            force(path)
    except OSError as exc:
        raise _unwritable(path, str(exc)) from exc
    write(path / MAIN, dataclasses.replace(checkpoint, pieces=pieces))
    for each in path.iterdir():  # of the checkpoint before, and of writers that were killed
        if each.name.startswith(_PARTS) and each.name != share.folder:
            shutil.rmtree(each, ignore_errors=True)


def _list(folder: Path, checkpoint: Checkpoint, pieces: Pieces) -> None:
    from parallelize.checkpoint.shard_files import list_for_torch  # as above

    divided = [each for each in leaves(checkpoint.states()) if is_divided(each)]
    list_for_torch(folder, dict(zip(pieces.keys, divided, strict=True)), pieces.of_key)


def _unwritable(path: Path, reason: str) -> ParallelizeError:
    return ParallelizeError(
        f"cannot write {path}",
        why=reason,
        fix="make room, or choose a folder that every rank may write to; what was there before is still there",
    )


def is_broken_off(path: Path) -> bool:
    """Whether it is the folder of a checkpoint that was never completed."""
    return path.is_dir() and not (path / MAIN).exists() and all(_is_own(each.name) for each in path.iterdir())


def remove(path: Path) -> None:
    """Remove a checkpoint of either form; one that is broken off in the middle is none."""
    if path.is_dir():
        (path / MAIN).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def packed(value: Mapping[str, Any]) -> bytes:
    """Plain values as bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(value: bytes) -> Any:
    """Plain values of bytes; nothing in them is run."""
    return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
