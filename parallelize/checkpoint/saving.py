"""save(): write the state of a run to one file, or to a sharded folder."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint.file_format import new_record, write_file
from parallelize.checkpoint.rendezvous import ARRIVAL_TIMEOUT_S, GRACE_S, Rendezvous
from parallelize.checkpoint.rng_state import get_rng_states
from parallelize.checkpoint.safe_types import safe_names, to_safe_types
from parallelize.checkpoint.sharded_folder import complete_folder, new_shard_folder
from parallelize.checkpoint.state_dicts import VALUE, handler_for, named_optimizer_state, needs_all_ranks
from parallelize.errors import ConfigError
from parallelize.runtime import context
from parallelize.runtime.containers import map_leaves

__all__ = ["Collected", "begin_write", "call_site_of", "collect", "publishing_outcome", "save", "states_of"]

_log = logging.getLogger("parallelize")

Submit = Callable[..., Callable[[], Any]]
"""Prepares the call of a function; the call is made, or its result awaited, by the returned function."""


def save(
    path: str | os.PathLike[str],
    /,
    *,
    sharded: bool | None = None,
    format: str = "torch",  # noqa: A002 - the name that users expect
    **objects: Any,
) -> None:
    """Save the state of a run; any backend, with any number of processes, can load it, and so can plain torch.

        save("last.pt", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, epoch=epoch)
        torch.load("last.pt", weights_only=True)["model"]  # a state dict

    Call `save` between steps, on every rank. Where every rank holds the full state (all backends but fsdp), rank 0
    writes one file. Rank 0 may also call `save` alone; the RNG states of other ranks are then not saved, and a warning
    is logged. Under fsdp `path` becomes a folder, in which every rank writes its shards in the format of
    torch.distributed.checkpoint.

    The write is atomic: a killed run leaves the old checkpoint or the new one. After the call the new one is on disk.

    Args:
        path: a file, or a folder if sharded; missing parent folders are created.
        sharded: whether to write a folder; with several nodes, one that all of them share. False: rank 0 gathers the
            full tensors in CPU memory and writes one file. None: keep the form of the checkpoint at `path`; for a new
            path, use a folder if ranks hold shards.
        format: "torch", or "safetensors": the weights of the one model as `path`.safetensors, and the rest beside it.
        **objects: models (weights under the names that they have without this library and torch.compile), optimizers,
            loaders that `shard_loader` returns (epoch and position), any object with `state_dict()` and
            `load_state_dict()`, and plain values: numbers, strings, tensors and containers of these. Arrays are saved
            as tensors, paths as strings, enums as their values. The RNG states of every rank are saved too.

    Raises:
        ConfigError: no objects are passed, a value could only be loaded by running code from the file, or something
            other than a checkpoint is at `path`.
        SyncError: a required rank does not call `save` or saves other objects, or rank 0 failed to write.
        ParallelizeError: writing failed.
    """
    rendezvous = Rendezvous(f"save at {call_site_of(sys._getframe(1))}")
    wait_s = ARRIVAL_TIMEOUT_S if any(map(needs_all_ranks, objects.values())) else None
    target = Path(path)
    if format != "torch":
        from parallelize.checkpoint.safetensors_file import check_request  # an optional package

        check_request(target, format, objects)
        sharded = False
    with publishing_outcome(rendezvous):
        collected = collect(target, objects, rendezvous, user_path=target, wait_s=wait_s, sharded=sharded)
        begin_write(target, collected, rendezvous, functools.partial, form=format)()


def call_site_of(frame: Any) -> str:
    """Return the file name and line of a call in the user's program; all ranks get the same text."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@dataclass(frozen=True)
class Collected:
    """What one rank has to write.

    Args:
        states: state dicts and values by the user's names, of safe types; {} on ranks that write nothing of them.
        record: the record to store beside them; {} except on rank 0.
        folder: name of the shard folder; "" for a single file.
        is_collective: whether every rank writes shards; False: rank 0 writes alone.
    """

    states: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    is_collective: bool = False


def begin_write(
    path: Path, collected: Collected, rendezvous: Rendezvous, submit: Submit, *, form: str = "torch"
) -> Callable[[], object]:
    """Prepare the write of what `collect` has returned; the returned function completes it.

    Raises:
        ParallelizeError: by the returned function: writing failed.
        SyncError: by the returned function, on rank 0: a rank has not written its shards in time.
    """
    if not collected.folder:
        if rendezvous.rank:
            return bool
        return submit(write_file, path, collected.states, collected.record, form)
    if rendezvous.rank and not collected.is_collective:
        return bool
    from parallelize.checkpoint.shards import local_shards, write_shards  # takes a second to import: only if sharded

    shards = local_shards(collected.states, rank=rendezvous.rank)
    written = submit(write_shards, path / collected.folder, rendezvous.rank, shards)
    # The caller may continue to train: no tensor of its own may be kept.
    rest = map_leaves(_placeholder, collected.states)
    main, is_collective = (rest, collected.record), collected.is_collective
    return functools.partial(
        complete_folder, path, collected.folder, written, main, rendezvous, is_collective=is_collective
    )


def _placeholder(value: Any) -> Any:
    """Return a meta tensor for a tensor, as the main file of a folder holds them."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def collect(
    path: Path,
    objects: Mapping[str, Any],
    rendezvous: Rendezvous,
    *,
    user_path: Path,
    wait_s: float | None,
    sharded: bool | None,
) -> Collected:
    """Collect the states to save, without writing them; their tensors share memory with the objects.

    Args:
        path: where the checkpoint will be written.
        objects: as for `save`.
        rendezvous: rendezvous of this call.
        user_path: the path as the user gave it, to compare across ranks: nodes may mount one folder at two paths.
        wait_s: seconds to wait for all ranks; None: rank 0 may make the call alone.
        sharded: as for `save`.

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
    folder, rng_states = "", get_rng_states(context.current().devices)
    try:
        if rendezvous.rank == 0:
            folder = new_shard_folder(path, is_sharded=sharded, has_shards=is_collective)
    finally:  # also after an error, so that the other ranks do not wait for rank 0
        rendezvous.post(pickle.dumps((rng_states, folder)), "details")
        rendezvous.post(description.encode())
    if wait_s is not None:
        rendezvous.require_all_ranks(
            wait_s,
            why="every rank saves its own shards and RNG states",
            fix="call it on all ranks, without `if is_main()`",
        )
        _require_same_description(rendezvous, description)  # otherwise ranks would gather different tensors
        _, folder = pickle.loads(rendezvous.posted(0, "details") or b"")
    states = {}
    if rendezvous.rank == 0 or wait_s is not None:  # all ranks gather, or each writes its shards
        convert_dtensor = None if folder else _gather_full_tensors(rendezvous.rank)
        states = states_of(objects, convert_dtensor, by_name=bool(folder))
    if rendezvous.rank != 0:
        return Collected(states if folder else {}, {}, folder, is_collective)
    posted = _rng_states_of_ranks(rendezvous, description, have_all_arrived=wait_s is not None)
    details = {name: _details(name, obj) for name, obj in objects.items()}
    record = new_record(world_size=rendezvous.world_size, rng_states=posted, objects=details)
    return Collected(states, record, folder, is_collective)


def states_of(
    objects: Mapping[str, Any], convert_dtensor: Callable[[Any], Any] | None = None, *, by_name: bool = False
) -> dict[str, Any]:
    """Return the state of each object, or the value itself, as safe types.

    Raises:
        ConfigError: a value is of an unsafe type.
    """
    models = [each for each in objects.values() if isinstance(each, nn.Module)] if by_name else []
    names = {id(parameter): name for model in reversed(models) for name, parameter in model.named_parameters()}
    states = {}
    for name, obj in objects.items():
        handler = handler_for(obj)
        state = obj if handler is None else handler.get_state(obj)
        if by_name and isinstance(obj, torch.optim.Optimizer):
            state = named_optimizer_state(obj, state, names)
        states[name] = to_safe_types(state, where=name, convert_dtensor=convert_dtensor)
    return states


def _details(name: str, obj: Any) -> Any:
    handler = handler_for(obj)
    details = {"kind": VALUE} if handler is None else handler.details(obj)
    return to_safe_types(details, where=name)


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


def _gather_full_tensors(rank: int) -> Callable[[Any], Any]:
    """Return a function that gathers a DTensor and returns the full CPU tensor on rank 0, None on other ranks."""
    gathered: dict[int, Any] = {}  # tied weights: one DTensor under several names

    def convert_dtensor(dtensor: Any) -> Any:
        from parallelize.backends import sharded_tensors  # takes half a second to import: only if sharded

        if id(dtensor) not in gathered:
            tensor = sharded_tensors.full_tensor(dtensor)
            gathered[id(dtensor)] = dtensor, tensor.cpu() if rank == 0 else None
        return gathered[id(dtensor)][1]

    return convert_dtensor


def _rng_states_of_ranks(rendezvous: Rendezvous, description: str, *, have_all_arrived: bool) -> list[Any]:
    """Return the RNG states by rank, None for a rank that does not make this call.

    Rank 0 waits GRACE_S for late ranks, or not at all if a rank never made the previous call.
    """
    timeout_s = GRACE_S if rendezvous.call_index == 0 or rendezvous.previous_had_late_ranks() else 0.0
    if not have_all_arrived and not rendezvous.all_arrive(timeout_s):
        _log.warning(
            "%s was called by %d of %d ranks: the RNG states of the other ranks are not saved",
            rendezvous.call,
            rendezvous.world_size - len(rendezvous.missing_ranks()),
            rendezvous.world_size,
        )
    _require_same_description(rendezvous, description)
    posted = [rendezvous.posted(each, "details") for each in range(rendezvous.world_size)]
    return [None if each is None else pickle.loads(each)[0] for each in posted]


def _require_same_description(rendezvous: Rendezvous, description: str) -> None:
    rendezvous.require_same(
        description,
        "saves",
        why="rank 0 writes one checkpoint for all ranks",
        fix="give save() the same path and the same names on every rank",
    )
