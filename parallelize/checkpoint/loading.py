"""load: a run goes on from a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint.file_format import Checkpoint, read
from parallelize.checkpoint.rendezvous import ALONE_S, Meeting
from parallelize.checkpoint.rng_state import put_generators
from parallelize.checkpoint.saving import line_of
from parallelize.checkpoint.state_dicts import VALUE, State, needs_all_ranks, state_of
from parallelize.errors import ConfigError, Fault, ParallelizeError, SyncError, did_you_mean
from parallelize.inplace.forward_routing import route_of
from parallelize.runtime import context
from parallelize.runtime.containers import map_leaves

__all__ = ["load", "load_into"]

_SEE = "see what that rank says; a disk that is very slow may need fewer ranks that read at once"
_OTHER = "load another checkpoint; nothing has been changed by this one, on any rank"

_log = logging.getLogger("parallelize")


def load(path: str | os.PathLike[str], /, *, rng: bool = True, **things: Any) -> dict[str, Any]:
    """Give things the state that `save` has written, whatever backend and however many processes wrote it.

        start = load("last.pt", model=model, optimizer=optimizer, loader=loader)["epoch"]

    All is checked before anything is changed. To go on exactly where a run was, call it on all ranks, inside the
    `parallel_model` block, whose entry moves the random generators. Outside of a block each rank may call it alone.

    Args:
        path: what `save` has written, a file or a folder. Nothing in it is run, whoever wrote it.
        rng: whether this rank's random generators go on too, if the file is of a run of as many processes; False where
            weights are loaded to evaluate or to begin something new.
        **things: models, optimizers, loaders and others under the names that they were saved by; what the file has
            beyond them is left in it.

    Returns:
        The plain values in the file, by name.

    Raises:
        ConfigError: no such file, no checkpoint, something else in it than plain values, a name that it does not have,
            or states that these things cannot take: every fault at once.
        ParallelizeError: a damaged file, or parts that are missing; on every rank that trains the same model.
        SyncError: ranks that train one model do not load it together, or load different files.
    """
    return load_into(Path(path), things, rng=rng, what=f"load at {line_of(sys._getframe(1))}")


def load_into(path: Path, things: Mapping[str, Any], *, rng: bool, what: str) -> dict[str, Any]:
    """What `load` does; `what` names the call, the same on all ranks."""
    checkpoint = read(path)
    is_common = any(map(_is_shared, things.values()))
    if is_common:
        # First of all: to ask a model in parts for its state may take all ranks.
        _together(Meeting.of(what), f"{path.name} {checkpoint.fingerprint}: {', '.join(things)}")
    states = _admitted(path, checkpoint, things)
    if checkpoint.pieces is not None and checkpoint.pieces.keys:
        with _agreed(Meeting.of(f"{what}: its parts"), path) if is_common else contextlib.nullcontext():
            from parallelize.checkpoint.load_shards import filled  # a second to import: only where there are parts

            checkpoint = filled(path, checkpoint, things, states)
    _put(checkpoint, things, states)
    if rng:
        _put_generators(path, checkpoint)
    return {name: map_leaves(_own, entry.state) for name, entry in checkpoint.entries.items() if entry.kind == VALUE}


def _admitted(path: Path, checkpoint: Checkpoint, things: Mapping[str, Any]) -> dict[str, State]:
    """What puts each thing's state, once there is no fault in any."""
    faults: list[Fault] = []
    states = {}
    for name, thing in things.items():
        entry, state = checkpoint.entries.get(name), state_of(thing)
        if entry is None:
            known = did_you_mean(name, checkpoint.entries)
            faults.append(Fault(f"{name}= is not in {path}", why="nothing was saved under this name", fix=known))
        elif state is None:
            why, fix = "load() puts state into objects", f"read it from what load() returns: load(path)[{name!r}]"
            faults.append(Fault(f"{name}={thing!r:.80}", why=why, fix=fix))
        else:
            faults += state.refuse(name, thing, entry)
            states[name] = state
    if faults:
        raise ConfigError.of(faults)
    return states


def _is_shared(thing: Any) -> bool:
    """Whether other ranks train the same thing, so that one that loads alone would leave them."""
    return needs_all_ranks(thing) or (isinstance(thing, nn.Module) and route_of(thing) is not None)


def _together(meeting: Meeting, told: str) -> None:
    meeting.bring(told.encode())
    meeting.require_all(
        ALONE_S,
        why="a rank that loads alone would train another model than the others, or wait for them",
        fix="call it on all ranks, without `if is_main()`; with several nodes from a folder that all of them share",
    )
    for rank in meeting.compared():
        each = meeting.brought(rank)
        if each is not None and each.decode() != told:
            raise SyncError(
                f"rank {meeting.rank} loads {told}; rank {rank} loads {each.decode()}",
                why="ranks that train one model have to go on from one state",
                fix="load the same file on all ranks, from a folder that all nodes share",
            )


@contextlib.contextmanager
def _agreed(meeting: Meeting, path: Path) -> Iterator[None]:
    """Work that all ranks have done, or none has.

    Raises:
        ParallelizeError: on a rank that has done it, that another one could not.
        SyncError: a rank is gone.
    """
    failure = "it ended by an exception"
    try:
        yield
        failure = ""
    except ParallelizeError as exc:
        failure = str(exc)
        raise
    finally:
        meeting.bring(failure.encode())
    meeting.require_all(float("inf"), why="each rank reads its parts, and none goes on without the others", fix=_SEE)
    for rank in range(meeting.world_size):
        failure = (meeting.brought(rank) or b"").decode()
        if failure:
            why = failure.replace("\n", "; ")
            raise ParallelizeError(f"rank {rank} could not read its parts of {path}", why=why, fix=_OTHER, is_echo=True)


def _put(checkpoint: Checkpoint, things: Mapping[str, Any], states: Mapping[str, State]) -> None:
    """Give all things their states; those that may still refuse first, and back if one does."""
    refusing = {name for name, state in states.items() if state.may_refuse(things[name])}
    before: dict[str, Any] = {}
    try:
        for name in sorted(states, key=lambda name: name not in refusing):
            if name in refusing:
                before[name] = map_leaves(_own, states[name].take(things[name]))
            states[name].put(things[name], checkpoint.entries[name].state)
    except BaseException:
        for name, state in before.items():
            _put_back(name, things[name], states[name], state)
        raise


def _put_back(name: str, thing: Any, state: State, before: Any) -> None:
    try:
        state.put(thing, before)
    except Exception as exc:  # noqa: BLE001 - what it raised first is raised, and the others get their states back
        _log.warning("%s= has refused the state that it had, too: %s: %s", name, type(exc).__name__, exc)


def _put_generators(path: Path, checkpoint: Checkpoint) -> None:
    run = context.current()
    if run.world.world_size != checkpoint.world_size:
        _log.info(
            "%s is of %d processes, this run is of %d: random generators stay as they are",
            path,
            checkpoint.world_size,
            run.world.world_size,
        )
        return
    mine = checkpoint.generators[run.world.rank]
    if mine is None:
        _log.warning("%s was saved without rank %d: its random generators stay as they are", path, run.world.rank)
        return
    put_generators(mine, run.devices)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
