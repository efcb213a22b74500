"""save(): write the state of a run to one file, or to a sharded folder."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint.file_format import new_record, new_shard_folder, write_file
from parallelize.checkpoint.rendezvous import ARRIVAL_TIMEOUT_S, GRACE_S, Rendezvous
from parallelize.checkpoint.safe_types import safe_names, to_safe_types
from parallelize.checkpoint.state_dicts import VALUE, handler_for, needs_all_ranks
from parallelize.errors import ConfigError
from parallelize.runtime import context
from parallelize.runtime.rank_comparison import flat_fingerprint
from parallelize.torch_patches.forward import route_of

__all__ = ["call_site_of", "prepare_save", "save", "set_rng_states", "states_of"]

_log = logging.getLogger("parallelize")

_MAX_DATA_STATE_BYTES = 2**20  # passes through the process group's store

_SAME = {
    "why": "rank 0 writes one checkpoint for all ranks",
    "fix": "give save() the same path and the same names on every rank; parameters that differ were changed on some "
    "ranks only: verify_every=1 finds the step",
}

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
            loaders that `shard_loader` returns (position, states of datasets), any object with `state_dict()` and
            `load_state_dict()`, and plain values: numbers, strings, tensors and containers of these. Arrays are saved
            as tensors, paths as strings, enums as their values. Of tensor subclasses, those that are registered with
            torch.serialization.add_safe_globals are saved as they are. The RNG states of every rank are saved too.

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
    with rendezvous.publishing_outcome():
        prepare_save(target, objects, rendezvous, user_path=target, wait_s=wait_s, sharded=sharded, form=format)()


def call_site_of(frame: Any) -> str:
    """Return the file name and line of a call in the user's program; all ranks get the same text."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def prepare_save(
    path: Path,
    objects: Mapping[str, Any],
    rendezvous: Rendezvous,
    submit: Submit = functools.partial,
    *,
    user_path: Path,
    wait_s: float | None,
    sharded: bool | None,
    form: str = "torch",
) -> Callable[[], object]:
    """Prepare the write of a checkpoint, as for `save`; the returned function completes it.

    If `submit` copies the arguments of the call that writes this rank's file, no tensor of the objects is kept. Ranks
    compare `user_path`, because nodes may mount one folder at two paths. Rank 0 waits `wait_s` for all ranks; None: it
    may make the call alone.
    """
    if not objects:
        raise ConfigError(f"save({str(user_path)!r})", why="there is nothing to save", fix="pass model=model")
    objects = safe_names(objects)
    handlers = {name: handler_for(obj) for name, obj in objects.items()}
    kinds = [f"{name} ({getattr(handlers[name], 'kind', VALUE)}{_weights(each)})" for name, each in objects.items()]
    description = f"{user_path}: {', '.join(kinds)}"
    is_collective = any(map(needs_all_ranks, objects.values()))
    folder, rng_states = "", _get_rng_states(context.current().devices)
    try:
        if rendezvous.rank == 0:
            folder = new_shard_folder(path, is_sharded=sharded, has_shards=is_collective)
    finally:  # also after an error, so that the other ranks do not wait for rank 0
        rendezvous.post((description, {**rng_states, "data": _data_states(objects)}, folder))
    if wait_s is not None:
        rendezvous.require_all_ranks(
            wait_s,
            why="every rank saves its own shards and RNG states",
            fix="call it on all ranks, without `if is_main()`",
        )
        rendezvous.require_same("saves", **_SAME)  # otherwise ranks would gather different tensors
        folder = rendezvous.posted(0)[2]
    states: dict[str, Any] = {}
    if rendezvous.rank == 0 or wait_s is not None:  # all ranks gather, or each writes its shards
        convert_dtensor = None if folder else _gather_full_tensors(rendezvous.rank)
        states = states_of(objects, convert_dtensor, by_name=bool(folder))
    record = {}
    if rendezvous.rank == 0:
        posted = _rng_states_of_ranks(rendezvous, have_all_arrived=wait_s is not None)
        details = {name: each.describe() if each else {"kind": VALUE} for name, each in handlers.items()}
        details = to_safe_types(details, where="")
        record = new_record(world_size=rendezvous.world_size, rng=posted, objects=details)
    elif not (folder and is_collective):
        return bool
    if not folder:
        return submit(write_file, path, states, record, form)
    from parallelize.checkpoint import shards  # takes a second to import: only if sharded

    written = submit(shards.write_shards, path / folder, shards.ShardPlanner(states, rendezvous.rank))
    main = shards.main_states(states), record
    complete = functools.partial(shards.complete_folder, path / folder, written, main, rendezvous)
    return functools.partial(complete, is_collective=is_collective)


def _weights(value: Any) -> str:
    """Return a fingerprint of the parameters of a model in a block that keeps them equal on all ranks; else ""."""
    route = route_of(value) if isinstance(value, nn.Module) else None
    if route is None or not route.owner.engine.is_replica:
        return ""
    return f", parameters {int(flat_fingerprint(list(value.parameters()))) % 2**32:08x}"


def states_of(
    objects: Mapping[str, Any], convert_dtensor: Callable[[Any], Any] | None = None, *, by_name: bool = False
) -> dict[str, Any]:
    """Return the state of each object, or the value itself, as safe types; of optimizers, optionally by names."""
    models = [each for each in objects.values() if isinstance(each, nn.Module)]
    names = {id(parameter): name for model in reversed(models) for name, parameter in model.named_parameters()}
    states = {}
    for name, obj in objects.items():
        handler = handler_for(obj)
        state = obj if handler is None else handler.get(names if by_name else None)
        states[name] = to_safe_types(state, where=name, convert_dtensor=convert_dtensor)
    return states


def _gather_full_tensors(rank: int) -> Callable[[Any], Any]:
    """Return a function that gathers a DTensor and returns the full CPU tensor on rank 0, None on other ranks."""
    gathered: dict[int, Any] = {}  # tied weights: one DTensor under several names

    def convert_dtensor(dtensor: Any) -> Any:
        from parallelize.backends.fsdp import full_tensors  # takes half a second to import: only if sharded

        if id(dtensor) not in gathered:
            tensor = full_tensors.full_tensor(dtensor)
            gathered[id(dtensor)] = dtensor, tensor.cpu() if rank == 0 else None
        return gathered[id(dtensor)][1]

    return convert_dtensor


def _rng_states_of_ranks(rendezvous: Rendezvous, *, have_all_arrived: bool) -> list[Any]:
    """Return the RNG states by rank, None for a rank that is not there in GRACE_S, or never made the previous call."""
    timeout_s = GRACE_S if rendezvous.call_index == 0 or rendezvous.previous_is_complete() else 0.0
    if not have_all_arrived and not rendezvous.all_arrive(timeout_s):
        _log.warning(
            "%s was called by %d of %d ranks: the RNG states of the other ranks are not saved",
            rendezvous.call,
            rendezvous.world_size - len(rendezvous.missing_ranks()),
            rendezvous.world_size,
        )
    rendezvous.require_same("saves", **_SAME)
    posted = map(rendezvous.posted, range(rendezvous.world_size))
    return [None if each is None else each[1] for each in posted]


def _data_states(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of this rank's datasets, by the names of the loaders; large or unsafe ones are left out."""
    found = {}
    for name, obj in objects.items():
        state = obj.rank_state() if hasattr(type(obj), "load_rank_state") else None
        with contextlib.suppress(Exception):  # a type that a checkpoint cannot hold, or that cannot be pickled
            if state is not None and len(pickle.dumps(state)) <= _MAX_DATA_STATE_BYTES:
                found[name] = to_safe_types(state, where=name)
    return found


def _get_rng_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the RNG states of torch on the CPU and on `devices`, of `random`, and of NumPy if it is imported."""
    version, words, gauss = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        numpy_state = [str(kind), torch.from_numpy(keys.astype("int64")), *map(float, rest)]
    return {
        "torch": torch.get_rng_state(),
        "accelerators": [torch.get_device_module(each).get_rng_state(each) for each in devices if each.type != "cpu"],
        "python": [version, torch.tensor(words), gauss],
        "numpy": numpy_state,
    }


def set_rng_states(state: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    """Restore the RNG states; skip those of accelerators if the number of accelerators has changed."""
    torch.set_rng_state(state["torch"].clone())
    accelerators = [each for each in devices if each.type != "cpu"]
    if len(accelerators) == len(state["accelerators"]):
        for device, device_state in zip(accelerators, state["accelerators"], strict=True):
            torch.get_device_module(device).set_rng_state(device_state.clone(), device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), int(position), int(has_gauss), cached))
