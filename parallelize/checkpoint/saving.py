"""save: the state of a run in one file."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from parallelize import runtime
from parallelize.checkpoint.archive import Checkpoint, Entry, write
from parallelize.checkpoint.meeting import ALONE_S, LATE_S, Meeting
from parallelize.checkpoint.plain import plain
from parallelize.checkpoint.randomness import take_generators
from parallelize.checkpoint.states import VALUE, needs_all_ranks, state_of
from parallelize.errors import ConfigError, SyncError

__all__ = ["completed", "line_of", "save", "take"]

_log = logging.getLogger("parallelize")


def save(path: str | os.PathLike[str], /, **things: Any) -> None:
    """Write the state of a run to one file, which any backend in a world of any size can load.

        save("last.pt", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, epoch=epoch)

    Call it between steps, on every rank; rank 0 writes. Where no rank holds only a part (all backends but fsdp), rank 0
    may also call it alone: the random generators of the others are then not in it, which the log says.

    A kill at any moment leaves the file that was there or the new one. When it returns, the new one is on the disk, for
    every rank that has called it.

    Args:
        path: a file; its folder is made.
        **things: models (weights under the names that they have without this library, and the loss scale if they are in
            a block with `amp=`), optimizers, what `shard_loader` returns (epoch and position), all that has
            `state_dict()` and `load_state_dict()`, and plain values: numbers, texts, tensors and containers of them.
            The random generators of every rank go with them.

    Raises:
        ConfigError: nothing to save, or something that could be read back only by running code from the file.
        SyncError: a rank that has to take part does not come, or saves something else; rank 0 could not write.
        ParallelizeError: the file system refuses.
    """
    meeting = Meeting.of(f"save at {line_of(sys._getframe(1))}")
    together_s = ALONE_S if any(map(needs_all_ranks, things.values())) else None
    with completed(meeting):
        checkpoint = take(Path(path), things, meeting, together_s=together_s)
        if meeting.rank == 0:
            write(Path(path), checkpoint)


def line_of(frame: Any) -> str:
    """Where in the user's program a call is: the same on all ranks."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def take(path: Path, things: Mapping[str, Any], meeting: Meeting, *, together_s: float | None) -> Checkpoint:
    """What is to be written, in tensors that the things share; nothing is written yet.

    Args:
        path: where it will be written, compared with the other ranks'.
        things: as for `save`.
        meeting: the call.
        together_s: how long all ranks are waited for, which have to come; None: rank 0 may be alone.

    Returns:
        On rank 0 a checkpoint; on the others a part of one, which nobody writes.

    Raises:
        ConfigError: nothing to save, or something that is no plain value.
        SyncError: a rank that has to take part does not come, or saves something else.
    """
    _refuse_nothing(path, things)
    kinds = [(name, state_of(thing)) for name, thing in things.items()]
    told = f"{path}: " + ", ".join(f"{name} ({VALUE if state is None else state.kind})" for name, state in kinds)
    meeting.bring(_packed({"told": told, "generators": take_generators(runtime.current().devices)}))
    if together_s is not None:
        meeting.require_all(
            together_s,
            why="every rank has a part of what is saved, or its random generators",
            fix="call it on all ranks, without `if is_main()`",
        )
        _refuse_others(meeting, told)  # they would gather other things
    entries: dict[str, Entry] = {}
    if meeting.rank == 0 or together_s is not None:  # parts are gathered by all ranks
        whole = _gathering(meeting.rank)
        entries = {name: _entry(name, thing, whole) for name, thing in things.items()}
    is_certain = together_s is not None
    generators = _generators(meeting, told, is_certain=is_certain) if meeting.rank == 0 else ()
    return Checkpoint(meeting.world_size, entries, generators)


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
            raise SyncError(f"{meeting.what} failed on rank 0: {failure}", why="it writes for all", fix="see its error")
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


def _refuse_nothing(path: Path, things: Mapping[str, Any]) -> None:
    if not things:
        raise ConfigError(
            f"save({str(path)!r})", why="there is nothing to save", fix="name it: save(path, model=model)"
        )
    if path.is_dir():
        raise ConfigError(f"save({str(path)!r})", why="it is a folder", fix="name a file in it, as last.pt")


def _entry(name: str, thing: Any, whole: Callable[[Any], Any]) -> Entry:
    state = state_of(thing)
    taken = thing if state is None else state.take(thing)
    return Entry(VALUE if state is None else state.kind, type(thing).__name__, plain(taken, where=name, whole=whole))


def _gathering(rank: int) -> Callable[[Any], Any]:
    """Makes whole tensors of parts, one at a time: rank 0 keeps them in the memory of the CPU, the others none."""
    kept: dict[int, Any] = {}  # tied weights are one part under several names

    def whole(part: Any) -> Any:
        from parallelize.backends import parts  # half a second to import: only where there are parts

        if id(part) not in kept:
            tensor = parts.whole(part)
            kept[id(part)] = part, tensor.cpu() if rank == 0 else None
        return kept[id(part)][1]

    return whole


def _generators(meeting: Meeting, told: str, *, is_certain: bool) -> tuple[Any, ...]:
    """Those of all ranks that have come; rank 0 waits a little for the others, unless they left it alone before."""
    if meeting.world_size == 1:
        return (take_generators(runtime.current().devices),)
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
    return tuple(None if each is None else _unpacked(each)["generators"] for each in brought)


def _refuse_others(meeting: Meeting, told: str) -> None:
    for rank in meeting.compared():
        brought = meeting.brought(rank)
        theirs = told if brought is None else _unpacked(brought)["told"]
        if theirs != told:
            other, its, main = (rank, theirs, told) if meeting.rank == 0 else (meeting.rank, told, theirs)
            raise SyncError(
                f"rank {other} saves {its}; rank 0 saves {main}",
                why="one file is written, by rank 0, for all",
                fix="give save() the same path and the same names on every rank",
            )


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
