"""save(): write the state of a run to one file, or to a sharded folder."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint.file_format import Checkpoint, Entry, write_file
from parallelize.checkpoint.rendezvous import ARRIVAL_TIMEOUT_S, GRACE_S, Rendezvous, from_bytes, to_bytes
from parallelize.checkpoint.rng_state import get_rng_states
from parallelize.checkpoint.safe_types import safe_names, to_safe_types
from parallelize.checkpoint.sharded_folder import FolderWrite, new_shard_folder, write_folder
from parallelize.checkpoint.state_dicts import VALUE, handler_for, needs_all_ranks
from parallelize.errors import ConfigError, SyncError
from parallelize.runtime import context

__all__ = ["call_site_of", "collect", "publishing_outcome", "save", "write_collected"]

_log = logging.getLogger("parallelize")


def save(path: str | os.PathLike[str], /, *, sharded: bool | None = None, **objects: Any) -> None:
    """Save the state of a run; any backend, with any number of processes, can load it.

        save("last.pt", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, epoch=epoch)

    Call `save` between steps, on every rank. Where every rank holds the full state (all backends but fsdp), rank 0
    writes one file. Rank 0 may also call `save` alone; the RNG states of other ranks are then not saved, and a warning
    is logged. Under fsdp `path` becomes a folder, and every rank writes its shards with
    torch.distributed.checkpoint.

    The write is atomic: a killed run leaves the old checkpoint or the new one. After the call the new one is on disk.

    Args:
        path: a file, or a folder if sharded; missing parent folders are created.
        sharded: whether to write a folder; with several nodes, one that all of them share. False: rank 0 gathers the
            full tensors in CPU memory and writes one file. None: keep the form of the checkpoint at `path`; for a new
            path, use a folder if ranks hold shards.
        **objects: models (weights under the names that they have without this library, with the loss scale if they are
            in a block with `amp=`), optimizers, loaders that `shard_loader` returns (epoch and position), any object
            with `state_dict()` and `load_state_dict()`, and plain values: numbers, strings, tensors and containers of
            these. The RNG states of every rank are saved too.

    Raises:
        ConfigError: no objects are passed, a value could only be loaded by running code from the file, or something
            other than a checkpoint is at `path`.
        SyncError: a required rank does not call `save` or saves other objects, or rank 0 failed to write.
        ParallelizeError: writing failed.
    """
    rendezvous = Rendezvous.for_call(f"save at {call_site_of(sys._getframe(1))}")
    wait_s = ARRIVAL_TIMEOUT_S if any(map(needs_all_ranks, objects.values())) else None
    with publishing_outcome(rendezvous):
        target = Path(path)
        collected = collect(target, objects, rendezvous, user_path=target, wait_s=wait_s, sharded=sharded)
        write_collected(target, *collected, rendezvous)


def call_site_of(frame: Any) -> str:
    """Return the file name and line of a call in the user's program; all ranks get the same text."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def write_collected(path: Path, checkpoint: Checkpoint, to_write: FolderWrite | None, rendezvous: Rendezvous) -> None:
    """Write the checkpoint and the shards that `collect` returned.

    Raises:
        ParallelizeError: writing failed.
        SyncError: on rank 0: a rank has not written its shards in time.
    """
    if to_write is not None:
        write_folder(path, checkpoint, to_write, rendezvous)
    elif rendezvous.rank == 0:
        write_file(path, checkpoint)


def collect(
    path: Path,
    objects: Mapping[str, Any],
    rendezvous: Rendezvous,
    *,
    user_path: Path,
    wait_s: float | None,
    sharded: bool | None,
) -> tuple[Checkpoint, FolderWrite | None]:
    """Collect the states to save, without writing them; their tensors share memory with the objects.

    Args:
        path: where the checkpoint will be written.
        objects: as for `save`.
        rendezvous: rendezvous of this call.
        user_path: the path as the user gave it, to compare across ranks: nodes may mount one folder at two paths.
        wait_s: seconds to wait for all ranks; None: rank 0 may make the call alone.
        sharded: as for `save`.

    Returns:
        The checkpoint (empty except on rank 0), and this rank's write to the shard folder (None if it has none).

    Raises:
        ConfigError: no objects, a value of an unsafe type, or something other than a checkpoint at `path`.
        SyncError: a required rank does not make the call, or saves other objects.
    """
    if not objects:
        raise ConfigError(f"save({str(user_path)!r})", why="there is nothing to save", fix="pass model=model")
    objects = safe_names(objects)
    kinds = {name: getattr(handler_for(obj), "kind", VALUE) for name, obj in objects.items()}
    description = f"{user_path}: {', '.join(f'{name} ({kind})' for name, kind in kinds.items())}"
    is_collective = any(map(needs_all_ranks, objects.values()))
    folder = _post_description(path, description, rendezvous, is_sharded=sharded, has_shards=is_collective)
    if wait_s is not None:
        rendezvous.require_all_ranks(
            wait_s,
            why="every rank saves its own shards and RNG states",
            fix="call it on all ranks, without `if is_main()`",
        )
        _require_same_description(rendezvous, description)  # otherwise ranks would gather different tensors
        folder = from_bytes(rendezvous.posted(0) or b"")["shard_folder"] if rendezvous.rank else folder
    collector = _ShardCollector()
    entries: dict[str, Entry] = {}
    if rendezvous.rank == 0 or wait_s is not None:  # all ranks gather, or each writes its shards
        convert_dtensor = collector if folder else _gather_full_tensors(rendezvous.rank)
        entries = {name: _make_entry(name, obj, convert_dtensor) for name, obj in objects.items()}
    to_write = None
    if folder and (rendezvous.rank == 0 or is_collective):
        to_write = collector.folder_write(folder, is_collective=is_collective)
    if rendezvous.rank != 0:
        return Checkpoint(rendezvous.world_size, {}, ()), to_write
    rng_states = _rng_states_of_ranks(rendezvous, description, have_all_arrived=wait_s is not None)
    return Checkpoint(rendezvous.world_size, entries, rng_states), to_write


def _post_description(
    path: Path, description: str, rendezvous: Rendezvous, *, is_sharded: bool | None, has_shards: bool
) -> str:
    """Post this rank's description and RNG states, and on rank 0 the shard folder; return that folder's name or ""."""
    posted = {"description": description, "rng_states": get_rng_states(context.current().devices), "shard_folder": ""}
    try:
        if rendezvous.rank == 0:
            posted["shard_folder"] = new_shard_folder(path, is_sharded=is_sharded, has_shards=has_shards)
    finally:  # also after an error, so that the other ranks do not wait for rank 0
        rendezvous.post(to_bytes(posted))
    return str(posted["shard_folder"])


@contextlib.contextmanager
def publishing_outcome(rendezvous: Rendezvous) -> Iterator[None]:
    """Run the block; rank 0 then publishes whether the block succeeded, and the other ranks wait for this outcome.

    Raises:
        SyncError: on ranks other than 0: rank 0 has failed or has not made the call.
    """
    if rendezvous.rank != 0:
        yield
        failure = rendezvous.wait_outcome()
        if failure:
            raise rendezvous.error_of_rank_0(failure)
        return
    outcome = "an exception was raised"
    try:
        yield
        outcome = ""
    except Exception as exc:
        outcome = f"{type(exc).__name__}: {exc}"
        raise
    finally:
        rendezvous.publish_outcome(outcome)


def _make_entry(name: str, obj: Any, convert_dtensor: Callable[[Any, str], Any]) -> Entry:
    handler = handler_for(obj)
    state = obj if handler is None else handler.get_state(obj)
    state = to_safe_types(state, where=name, convert_dtensor=convert_dtensor)
    return Entry(VALUE if handler is None else handler.kind, type(obj).__name__, state)


class _ShardCollector:
    """Replaces each DTensor by a placeholder and keeps the DTensor, whose shard this rank writes later."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._dtensors: dict[str, Any] = {}
        self._seen: dict[Any, str] = {}  # tied weights: one DTensor under several names

    def __call__(self, dtensor: Any, where: str) -> torch.Tensor:
        local = dtensor.to_local()
        identity = (local.data_ptr(), local.shape, dtensor.placements) if local.numel() else where
        key = self._seen.setdefault(identity, where)
        self._dtensors.setdefault(key, dtensor)
        self._keys.append(key)
        return torch.empty(dtensor.shape, dtype=dtensor.dtype, device="meta")

    def folder_write(self, folder: str, *, is_collective: bool) -> FolderWrite:
        """Return this rank's write of the DTensors collected so far."""
        if not is_collective:
            return FolderWrite(folder, (), [], is_collective=False)
        from parallelize.checkpoint.shard_files import shards_to_write  # takes a second to import: only if sharded

        return FolderWrite(folder, tuple(self._keys), shards_to_write(self._dtensors), is_collective=True)


def _gather_full_tensors(rank: int) -> Callable[[Any, str], Any]:
    """Return a function that gathers a DTensor and returns the full CPU tensor on rank 0, None on other ranks."""
    gathered: dict[int, Any] = {}  # tied weights: one DTensor under several names

    def convert_dtensor(dtensor: Any, _where: str) -> Any:
        from parallelize.backends import sharded_tensors  # takes half a second to import: only if sharded

        if id(dtensor) not in gathered:
            tensor = sharded_tensors.full_tensor(dtensor)
            gathered[id(dtensor)] = dtensor, tensor.cpu() if rank == 0 else None
        return gathered[id(dtensor)][1]

    return convert_dtensor


def _rng_states_of_ranks(rendezvous: Rendezvous, description: str, *, have_all_arrived: bool) -> tuple[Any, ...]:
    """Return the RNG states by rank, None for a rank that does not make this call.

    Rank 0 waits GRACE_S for late ranks, or not at all if a rank never made the previous call.
    """
    if rendezvous.world_size == 1:
        return (get_rng_states(context.current().devices),)
    timeout_s = GRACE_S if rendezvous.call_index == 0 or rendezvous.previous_had_late_ranks() else 0.0
    if not have_all_arrived and not rendezvous.all_arrive(timeout_s):
        _log.warning(
            "%s was called by %d of %d ranks: the RNG states of the other ranks are not saved",
            rendezvous.call,
            rendezvous.world_size - len(rendezvous.missing_ranks()),
            rendezvous.world_size,
        )
    _require_same_description(rendezvous, description)
    posted = map(rendezvous.posted, range(rendezvous.world_size))
    return tuple(None if each is None else from_bytes(each)["rng_states"] for each in posted)


def _require_same_description(rendezvous: Rendezvous, description: str) -> None:
    for rank in rendezvous.ranks_to_compare():
        posted = rendezvous.posted(rank)
        theirs = description if posted is None else from_bytes(posted)["description"]
        if theirs != description:
            is_main = rendezvous.rank == 0
            other, its, main = (rank, theirs, description) if is_main else (rendezvous.rank, description, theirs)
            raise SyncError(
                f"rank {other} saves {its}; rank 0 saves {main}",
                why="rank 0 writes one checkpoint for all ranks",
                fix="give save() the same path and the same names on every rank",
            )
