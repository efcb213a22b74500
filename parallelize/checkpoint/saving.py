"""save: the state of a run, in one file or in a file of every rank."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint.file_format import Checkpoint, Entry, write
from parallelize.checkpoint.rendezvous import ALONE_S, LATE_S, Meeting
from parallelize.checkpoint.rng_state import take_generators
from parallelize.checkpoint.safe_types import plain, plain_names
from parallelize.checkpoint.sharded_folder import Share, folder_for, packed, unpacked, write_folder
from parallelize.checkpoint.state_dicts import VALUE, needs_all_ranks, state_of
from parallelize.errors import ConfigError, SyncError
from parallelize.runtime import context

__all__ = ["completed", "line_of", "save", "take", "write_taken"]

_log = logging.getLogger("parallelize")


def save(path: str | os.PathLike[str], /, *, sharded: bool | None = None, **things: Any) -> None:
    """Write the state of a run, which any backend in a world of any size can load.

        save("last.pt", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, epoch=epoch)

    Call it between steps, on every rank. Where no rank holds only a part (all backends but fsdp), rank 0 writes one
    file, and may also call it alone: the random generators of the others are then not in it, which the log says. Under
    fsdp `path` becomes a folder, in which every rank writes its parts by torch.distributed.checkpoint.

    A kill at any moment leaves what was there or the new checkpoint. When it returns, the new one is on the disk, for
    every rank that has called it.

    Args:
        path: a file or, sharded, a folder; the folder around it is made.
        sharded: whether to write a folder; with several nodes one that all of them share. False: rank 0 gathers what is
            in parts, in the memory of its CPU, and writes one file. None: as it is at `path` already, else a folder
            where ranks hold parts.
        **things: models (weights under the names that they have without this library, and the loss scale if they are in
            a block with `amp=`), optimizers, what `shard_loader` returns (epoch and position), all that has
            `state_dict()` and `load_state_dict()`, and plain values: numbers, texts, tensors and containers of them.
            The random generators of every rank go with them.

    Raises:
        ConfigError: nothing to save, something that could be read back only by running code from the file, or something
            else at `path`.
        SyncError: a rank that has to take part does not come, or saves something else; rank 0 could not write.
        ParallelizeError: the file system refuses.
    """
    meeting = Meeting.of(f"save at {line_of(sys._getframe(1))}")
    together_s = ALONE_S if any(map(needs_all_ranks, things.values())) else None
    with completed(meeting):
        at = Path(path)
        taken = take(at, things, meeting, named=at, together_s=together_s, sharded=sharded)
        write_taken(at, *taken, meeting)


def line_of(frame: Any) -> str:
    """Where in the user's program a call is: the same on all ranks."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def write_taken(path: Path, checkpoint: Checkpoint, share: Share | None, meeting: Meeting) -> None:
    """Write what `take` has taken.

    Raises:
        ParallelizeError: the file system refuses.
        SyncError: on rank 0, a rank that has not written its parts in time.
    """
    if share is not None:
        write_folder(path, checkpoint, share, meeting)
    elif meeting.rank == 0:
        write(path, checkpoint)


def take(
    path: Path,
    things: Mapping[str, Any],
    meeting: Meeting,
    *,
    named: Path,
    together_s: float | None,
    sharded: bool | None,
) -> tuple[Checkpoint, Share | None]:
    """What is to be written, in tensors that the things share; nothing is written yet.

    Args:
        path: where it will be written.
        things: as for `save`.
        meeting: the call.
        named: the path in the user's words, compared with the other ranks': nodes may see one folder at two places.
        together_s: how long all ranks are waited for, which have to come; None: rank 0 may be alone.
        sharded: as for `save`.

    Returns:
        The checkpoint, empty on all ranks but 0, and this rank's share where it becomes a folder.

    Raises:
        ConfigError: nothing to save, something that is no plain value, or something else at `path`.
        SyncError: a rank that has to take part does not come, or saves something else.
    """
    if not things:
        raise ConfigError(
            f"save({str(named)!r})", why="there is nothing to save", fix="name it: save(path, model=model)"
        )
    things = plain_names(things)
    kinds = [(name, state_of(thing)) for name, thing in things.items()]
    told = f"{named}: " + ", ".join(f"{name} ({VALUE if state is None else state.kind})" for name, state in kinds)
    is_common = any(map(needs_all_ranks, things.values()))
    folder = _bring(path, told, meeting, is_sharded=sharded, in_parts=is_common)
    if together_s is not None:
        meeting.require_all(
            together_s,
            why="every rank has a part of what is saved, or its random generators",
            fix="call it on all ranks, without `if is_main()`",
        )
        _refuse_others(meeting, told)  # they would gather other things
        folder = unpacked(meeting.brought(0) or b"")["folder"] if meeting.rank else folder
    apart = _Apart()
    entries: dict[str, Entry] = {}
    if meeting.rank == 0 or together_s is not None:  # parts are gathered by all ranks, or written by each
        whole = apart if folder else _gathering(meeting.rank)
        entries = {name: _entry(name, thing, whole) for name, thing in things.items()}
    share = apart.share(folder, is_common=is_common) if folder and (meeting.rank == 0 or is_common) else None
    if meeting.rank != 0:
        return Checkpoint(meeting.world_size, {}, ()), share
    generators = _generators(meeting, told, is_certain=together_s is not None)
    return Checkpoint(meeting.world_size, entries, generators), share


def _bring(path: Path, told: str, meeting: Meeting, *, is_sharded: bool | None, in_parts: bool) -> str:
    """Tell the others what this rank has; rank 0 tells, too, whether a folder is to be written, and its answer."""
    brought = {"told": told, "generators": take_generators(context.current().devices), "folder": ""}
    try:
        if meeting.rank == 0:
            brought["folder"] = folder_for(path, is_sharded=is_sharded, in_parts=in_parts)
    finally:  # also where it refuses: the others do not wait for it in vain
        meeting.bring(packed(brought))
    return str(brought["folder"])


@contextlib.contextmanager
def completed(meeting: Meeting) -> Iterator[None]:
    """The work of a call: rank 0 tells the others how the block went, they wait at its end until it has.

    Raises:
        SyncError: on the others, that rank 0 has failed or not come.
    """
    if meeting.rank != 0:
        yield
        failure = meeting.outcome()
        if failure:
            what = f"{meeting.what} failed on rank 0: {failure}"
            raise SyncError(what, why="it writes for all", fix="see its error", is_echo=True)
        return
    outcome = "it ended by an exception"
    try:
        yield
        outcome = ""
    except Exception as exc:
        outcome = f"{type(exc).__name__}: {exc}"
        raise
    finally:
        meeting.tell(outcome)


def _entry(name: str, thing: Any, whole: Callable[[Any, str], Any]) -> Entry:
    state = state_of(thing)
    taken = thing if state is None else state.take(thing)
    return Entry(VALUE if state is None else state.kind, type(thing).__name__, plain(taken, where=name, whole=whole))


class _Apart:
    """Puts a tensor without values in the place of each part, which stays where it is."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._divided: dict[str, Any] = {}
        self._seen: dict[Any, str] = {}  # tied weights are one part under several names

    def __call__(self, part: Any, where: str) -> torch.Tensor:
        local = part.to_local()
        identity = (local.data_ptr(), local.shape, part.placements) if local.numel() else where
        key = self._seen.setdefault(identity, where)
        self._divided.setdefault(key, part)
        self._keys.append(key)
        return torch.empty(part.shape, dtype=part.dtype, device="meta")

    def share(self, folder: str, *, is_common: bool) -> Share:
        """What this rank writes of what it was called with."""
        if not is_common:
            return Share(folder, (), [], is_common=False)
        from parallelize.checkpoint.shard_files import own_parts  # a second to import: only where there are parts

        return Share(folder, tuple(self._keys), own_parts(self._divided), is_common=True)


def _gathering(rank: int) -> Callable[[Any, str], Any]:
    """Makes whole tensors of parts, one at a time: rank 0 keeps them in the memory of the CPU, the others none."""
    kept: dict[int, Any] = {}  # tied weights are one part under several names

    def whole(part: Any, _where: str) -> Any:
        from parallelize.backends import sharded_tensors  # half a second to import: only where there are parts

        if id(part) not in kept:
            tensor = sharded_tensors.full_tensor(part)
            kept[id(part)] = part, tensor.cpu() if rank == 0 else None
        return kept[id(part)][1]

    return whole


def _generators(meeting: Meeting, told: str, *, is_certain: bool) -> tuple[Any, ...]:
    """Those of all ranks that have come; rank 0 waits a little for the others, unless they left it alone before."""
    if meeting.world_size == 1:
        return (take_generators(context.current().devices),)
    patience_s = LATE_S if meeting.number == 0 or meeting.came_late() else 0.0
    if not is_certain and not meeting.all_come(patience_s):
        _log.warning(
            "%s was called by %d of %d ranks: the random generators of the others are not in the file",
            meeting.what,
            meeting.world_size - len(meeting.absent()),
            meeting.world_size,
        )
    _refuse_others(meeting, told)
    brought = map(meeting.brought, range(meeting.world_size))
    return tuple(None if each is None else unpacked(each)["generators"] for each in brought)


def _refuse_others(meeting: Meeting, told: str) -> None:
    for rank in meeting.compared():
        brought = meeting.brought(rank)
        theirs = told if brought is None else unpacked(brought)["told"]
        if theirs != told:
            other, its, main = (rank, theirs, told) if meeting.rank == 0 else (meeting.rank, told, theirs)
            raise SyncError(
                f"rank {other} saves {its}; rank 0 saves {main}",
                why="one file is written, by rank 0, for all",
                fix="give save() the same path and the same names on every rank",
            )
