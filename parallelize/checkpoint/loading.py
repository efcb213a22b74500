"""load(): restore the state of a run from a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from parallelize.checkpoint.file_format import Checkpoint, read_file
from parallelize.checkpoint.rendezvous import ARRIVAL_TIMEOUT_S, Rendezvous
from parallelize.checkpoint.rng_state import set_rng_states
from parallelize.checkpoint.saving import call_site_of
from parallelize.checkpoint.state_dicts import VALUE, StateHandler, clone_tensor, handler_for, needs_all_ranks
from parallelize.errors import ConfigError, Fault, ParallelizeError, SyncError, did_you_mean
from parallelize.inplace.forward_routing import route_of
from parallelize.runtime import context
from parallelize.runtime.containers import map_leaves

__all__ = ["load", "load_into"]

_log = logging.getLogger("parallelize")


def load(path: str | os.PathLike[str], /, *, rng: bool = True, **objects: Any) -> dict[str, Any]:
    """Restore the state that `save` wrote, under any backend and with any number of processes.

        start = load("last.pt", model=model, optimizer=optimizer, loader=loader)["epoch"]

    All states are checked before any object is changed. To resume a run exactly, call `load` on all ranks inside the
    `parallel_model` block, because entering the block advances the RNG states. Outside a block each rank may call
    `load` alone.

    Args:
        path: the file or folder that `save` wrote. No code in it is run, even if it comes from an untrusted source.
        rng: whether to restore this rank's RNG states, if the number of processes is the same as when they were saved;
            use False to load weights for evaluation or for a new run.
        **objects: models, optimizers, loaders and other objects, under the names that they were saved with; other
            names in the checkpoint are ignored.

    Returns:
        The plain values in the checkpoint, by name.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint or holds unsafe types, a name is not in it, or states
            do not fit these objects; the error lists all faults.
        ParallelizeError: a damaged file or missing shards; raised on every rank that trains the same model.
        SyncError: some ranks that train one model do not call `load`, or ranks load different files.
    """
    return load_into(Path(path), objects, rng=rng, call=f"load at {call_site_of(sys._getframe(1))}")


def load_into(path: Path, objects: Mapping[str, Any], *, rng: bool, call: str) -> dict[str, Any]:
    """Load a checkpoint as `load` does; `call` is the name of the call in messages, the same on all ranks."""
    checkpoint = read_file(path)
    is_collective = any(map(_is_trained_jointly, objects.values()))
    if is_collective:
        # Checked before state_dict() is called: for a sharded model that may be a collective.
        _require_same_file(Rendezvous.for_call(call), f"{path.name} {checkpoint.checksum}: {', '.join(objects)}")
    handlers = _handlers_for(path, checkpoint, objects)
    if checkpoint.shard_index is not None and checkpoint.shard_index.keys:
        shared = _all_or_none(Rendezvous.for_call(f"{call}: shards"), path) if is_collective else None
        with shared or contextlib.nullcontext():
            from parallelize.checkpoint.shard_files import load_shards  # takes a second to import: only if sharded

            checkpoint = load_shards(path, checkpoint, objects, handlers)
    _set_states(checkpoint, objects, handlers)
    if rng:
        _restore_rng(path, checkpoint)
    values = {name: entry.state for name, entry in checkpoint.entries.items() if entry.kind == VALUE}
    return {name: map_leaves(clone_tensor, value) for name, value in values.items()}


def _handlers_for(path: Path, checkpoint: Checkpoint, objects: Mapping[str, Any]) -> dict[str, StateHandler]:
    """Return the handler of each object, after checking that every state fits."""
    faults: list[Fault] = []
    handlers = {}
    for name, obj in objects.items():
        entry, handler = checkpoint.entries.get(name), handler_for(obj)
        if entry is None:
            known = did_you_mean(name, checkpoint.entries)
            faults.append(Fault(f"{name}= is not in {path}", why="nothing was saved under this name", fix=known))
        elif handler is None:
            why, fix = "load() restores objects, not values", f"read it from the result of load(): load(path)[{name!r}]"
            faults.append(Fault(f"{name}={obj!r:.80}", why=why, fix=fix))
        else:
            faults += handler.faults(name, obj, entry)
            handlers[name] = handler
    if faults:
        raise ConfigError.of(faults)
    return handlers


def _is_trained_jointly(obj: Any) -> bool:
    """Return whether other ranks train the same object, so that all ranks must load together."""
    return needs_all_ranks(obj) or (isinstance(obj, nn.Module) and route_of(obj) is not None)


def _require_same_file(rendezvous: Rendezvous, description: str) -> None:
    rendezvous.post(description.encode())
    rendezvous.require_all_ranks(
        ARRIVAL_TIMEOUT_S,
        why="a rank that loads alone would train a different model, or wait forever for the other ranks",
        fix="call it on all ranks, without `if is_main()`; load from a folder that all nodes share",
    )
    for rank in rendezvous.ranks_to_compare():
        each = rendezvous.posted(rank)
        if each is not None and each.decode() != description:
            raise SyncError(
                f"rank {rendezvous.rank} loads {description}; rank {rank} loads {each.decode()}",
                why="ranks that train one model must resume from the same state",
                fix="load the same file on all ranks, from a folder that all nodes share",
            )


@contextlib.contextmanager
def _all_or_none(rendezvous: Rendezvous, path: Path) -> Iterator[None]:
    """Run the block on all ranks; raise on every rank if it fails on any.

    Raises:
        ParallelizeError: another rank has failed.
        SyncError: a rank does not finish the block in time.
    """
    failure = "an exception was raised"
    try:
        yield
        failure = ""
    except ParallelizeError as exc:
        failure = str(exc)
        raise
    finally:
        rendezvous.post(failure.encode())
    rendezvous.require_all_ranks(
        float("inf"),
        why="each rank reads its shards, and no rank continues before all have read theirs",
        fix="see that rank's error; if the disk is very slow, load with fewer ranks per node",
    )
    for rank in range(rendezvous.world_size):
        failure = (rendezvous.posted(rank) or b"").decode()
        if failure:
            raise ParallelizeError(
                f"rank {rank} could not read its shards of {path}",
                why=failure.replace("\n", "; "),
                fix="load another checkpoint; nothing was loaded from this one on any rank",
                is_secondary=True,
            )


def _set_states(checkpoint: Checkpoint, objects: Mapping[str, Any], handlers: Mapping[str, StateHandler]) -> None:
    """Set all states, first those whose `set_state` may raise; if one raises, restore the previous states."""
    may_raise = {name for name, handler in handlers.items() if handler.may_raise(objects[name])}
    previous: dict[str, Any] = {}
    try:
        for name in sorted(handlers, key=lambda name: name not in may_raise):
            if name in may_raise:
                previous[name] = map_leaves(clone_tensor, handlers[name].get_state(objects[name]))
            handlers[name].set_state(objects[name], checkpoint.entries[name].state)
    except BaseException:
        for name, state in previous.items():
            _restore(name, objects[name], handlers[name], state)
        raise


def _restore(name: str, obj: Any, handler: StateHandler, previous: Any) -> None:
    try:
        handler.set_state(obj, previous)
    except Exception as exc:  # noqa: BLE001 - the first error is raised, and the other objects are restored too
        _log.warning("%s= could not be restored to its previous state: %s: %s", name, type(exc).__name__, exc)


def _restore_rng(path: Path, checkpoint: Checkpoint) -> None:
    run = context.current()
    if run.world.world_size != checkpoint.world_size:
        _log.info(
            "%s was saved by %d processes, this run has %d: RNG states are not restored",
            path,
            checkpoint.world_size,
            run.world.world_size,
        )
        return
    states = checkpoint.rng_states[run.world.rank]
    if states is None:
        _log.warning("%s was saved without rank %d: RNG states are not restored on this rank", path, run.world.rank)
        return
    set_rng_states(states, run.devices)
