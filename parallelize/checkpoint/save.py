"""save(): write the state of a run to one file, or to a sharded folder.

objects of a run         a call of all ranks: they compare the call and the weights; rank 0 writes the file, or each
                         rank its shards; then all ranks know whether it is written, or raise
plain values only        what torch.save does: each rank that calls it writes, and nobody waits
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from parallelize.checkpoint import files
from parallelize.checkpoint.states import (
    VALUE,
    Named,
    handler_for,
    is_sharded,
    refusing_deep_nesting,
    states_of,
    to_safe_types,
)
from parallelize.collectives import num_processes
from parallelize.errors import ConfigError, SyncError
from parallelize.runtime import context
from parallelize.runtime.group_abort import is_interrupted
from parallelize.runtime.process_group import separate_group
from parallelize.runtime.rng_state import global_generators
from parallelize.torch_patches.forward import route_of

__all__ = ["agree", "gather", "prepare_save", "rank", "save"]


@refusing_deep_nesting("save")
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

    Call `save` between steps, on every rank, without `if is_main()`: rank 0 writes one file. Under fsdp
    `path` becomes a folder, in which every rank writes its shards in the format of
    torch.distributed.checkpoint. All ranks compare the weights that must be equal, and return when the
    checkpoint is on disk.

    With plain values alone, such as `save("best.pt", model=model.state_dict())`, `save` is what
    torch.save is: rank 0 may call it alone, no rank waits for another, and RNG states are not saved.

    The write is atomic: a killed run leaves the old checkpoint or the new one.

    Args:
        path: a file, or a folder if sharded; missing parent folders are created. One run at a time may
            write to it.
        sharded: whether to write a folder; with several nodes, one that all of them share. False: rank 0
            gathers the full tensors in CPU memory and writes one file. None: keep the form of the
            checkpoint at `path`; for a new path, use a folder if ranks hold shards.
        format: "torch", or "safetensors": the weights of the one model as `path`.safetensors, and the rest
            beside it. (Such a file has no checksums.)
        **objects: models (weights under the names that they have without this library and torch.compile),
            optimizers, loaders that `shard_loader` returns (position, states of datasets), any object with
            `state_dict()` and `load_state_dict()`, and plain values: numbers, strings, tensors and
            containers of these. Arrays are saved as tensors, paths as strings, enums as their values. The RNG
            states of every rank are saved too.

    Raises:
        ConfigError: no objects are passed, a value could only be loaded by running code from the file, or
            something other than a checkpoint is at `path`.
        SyncError: ranks save other objects, weights differ between the ranks, or another rank failed. A rank
            that does not call `save` is named by hang detection.
        ParallelizeError: writing failed.
    """
    target, call = Path(path), f"save({os.fspath(path)!r})"
    if format != "torch":
        files.require_safetensors(target, format, sum(isinstance(each, nn.Module) for each in objects.values()))
        sharded = False
    is_plain = all(handler_for(each).kind == VALUE and not is_sharded(each) for each in objects.values())
    if objects and is_plain and not sharded and not target.is_dir():
        record = files.new_record(objects={name: {"kind": VALUE} for name in objects})
        files.write(target, {**states_of(objects), files.RECORD: record}, rank())
        return

    def save_here() -> None:
        prepare_save(call, target, objects, sharded=sharded, form=format)()

    agree(call, save_here)


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if num_processes() > 1 else 0


def gather(value: Any) -> list[Any]:
    """Return the value of each rank; hang detection names a rank that is missing. After Ctrl-C, only of this one."""
    if num_processes() == 1 or is_interrupted():
        return [value]
    run, found = context.current(), [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=separate_group(run.world, run.device, backend="gloo"))
    return found


def agree(call: str, make: Callable[[], Any], *, is_shared: bool = True, is_same: bool = False) -> list[Any]:
    """Call a function on all ranks and return the results; raise on every rank if it raises on any.

    Args:
        call: the call in messages, which hang detection shows.
        make: the function.
        is_shared: whether other ranks take part.
        is_same: whether to raise, on every rank, if results differ.
    """
    try:
        own = make()
    except Exception as exc:
        if is_shared:
            gather(f"{type(exc).__name__}: {exc}")
        raise
    results = gather((own,)) if is_shared else [(own,)]
    for number, each in enumerate(results):
        if isinstance(each, str):
            raise SyncError(
                f"{call} failed on rank {number}: {each}",
                why="a checkpoint is of all ranks",
                fix=f"see the error of rank {number}",
                is_secondary=True,
            )
    for number, each in enumerate(results):
        if is_same and each != results[0]:
            raise SyncError(
                f"rank {number}: {each[0]}; rank 0: {results[0][0]}",
                why="ranks that train one model save and load one checkpoint",
                fix="give the same path and objects on every rank; with several nodes, use a folder that all share",
            )
    return [each for (each,) in results]


def prepare_save(
    call: str,
    path: Path,
    objects: Named,
    *,
    sharded: bool | None,
    form: str = "torch",
    stage: Callable[[Any], Any] | None = None,
) -> Callable[[], None]:
    """Prepare the write of a checkpoint on all ranks; the returned function does this rank's part of it.

    Args:
        call: name in errors.
        path: the file or folder.
        objects: by name.
        sharded: as for `save`.
        form: of a file, "torch" or "safetensors".
        stage: copies what another thread writes; None: this thread writes.
    """
    handlers = [handler_for(obj, name) for name, obj in objects.items()]
    own_rank, has_shards = rank(), any(map(is_sharded, objects.values()))

    def begin() -> Any:
        if not objects:
            raise ConfigError(call, why="there is nothing to save", fix="pass model=model")
        folder = "" if own_rank else files.new_shard_folder(path, sharded=sharded, has_shards=has_shards)
        return folder, _state_of_rank(objects)

    # Not the whole path: nodes may mount one folder at two paths.
    agree(call, lambda: f"{call} {path.name}: {[(each.name, each.kind) for each in handlers]}", is_same=True)
    (folder, *_), rng = zip(*agree(call, begin), strict=True)
    routes = [route_of(each) for each in objects.values() if isinstance(each, nn.Module)]
    for verification in dict.fromkeys(each.owner.verification for each in routes if each):
        if verification is not None:
            verification.compare(f"at {call}")
    if own_rank and not has_shards:
        return lambda: None
    content = states_of(objects, None if folder else _full_tensors(own_rank))
    details = to_safe_types({each.name: each.describe() for each in handlers}, "details")
    content[files.RECORD] = files.new_record(world_size=len(rng), rng=to_safe_types(rng, "rng"), objects=details)
    if stage:
        content = stage(content)
    if not folder:
        write = files.write if form == "torch" else files.write_safetensors
        return (lambda: None) if own_rank else functools.partial(write, path, content)
    from parallelize.checkpoint.shards import write_folder  # takes a second to import: only if sharded

    run = context.current()
    backend = "cpu:gloo" if stage else "gloo"  # of each backend there is one group, which one thread uses
    group = separate_group(run.world, run.device, backend=backend) if has_shards and len(rng) > 1 else None
    return functools.partial(write_folder, path, folder, content, group, own_rank)


def _full_tensors(rank: int) -> Callable[[Any], Any]:
    """Return a function that gathers a DTensor: the full tensor on the CPU of rank 0, None on other ranks."""

    @functools.cache  # tied weights: one DTensor under several names
    def full(dtensor: Any) -> Any:
        from parallelize.backends.fsdp.full_tensors import full_tensor  # takes half a second: only if sharded

        tensor = full_tensor(dtensor)
        return None if rank else tensor.cpu()

    return full


def _state_of_rank(objects: Named) -> dict[str, Any]:
    """Return the states of this rank's generators of random numbers, and of its datasets by the loaders' names."""
    generators = global_generators(context.current().devices)
    data: dict[str, Any] = {}
    for name, obj in objects.items():
        with contextlib.suppress(ConfigError):  # a type that a checkpoint cannot hold: the data is read again
            if hasattr(type(obj), "load_rank_state"):
                data[name] = to_safe_types(obj.rank_state(), name)
    return {**{name: each.get() for name, each in generators.items()}, "data": data}
