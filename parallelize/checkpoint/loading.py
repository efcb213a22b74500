"""load(): restore the state of a run from a checkpoint, or from a file of torch.save, safetensors or DCP."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallelize.checkpoint.checksum import damaged_error
from parallelize.checkpoint.file_format import MAIN_FILE, Checkpoint, read_file
from parallelize.checkpoint.rendezvous import ARRIVAL_TIMEOUT_S, Rendezvous
from parallelize.checkpoint.saving import call_site_of, set_rng_states
from parallelize.checkpoint.state_dicts import VALUE, StateHandler, clone_tensor, handler_for, needs_all_ranks
from parallelize.errors import ConfigError, Fault, ParallelizeError, did_you_mean
from parallelize.runtime import context
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.torch_patches.forward import route_of

__all__ = ["load", "load_into"]

_log = logging.getLogger("parallelize")

_OPTIMIZERS = "optimizer_states"  # name under which Lightning saves the list of the states of all optimizers
_STATE_SUFFIX = "_state_dict"
_MODEL_NAMES, _OPTIMIZER_NAMES = ("state_dict", "model_state_dict"), ("optimizer_state_dict",)
"""Names under which tutorials and Lightning save the states of a model and of an optimizer."""


def load(path: str | os.PathLike[str], /, *, rng: bool = True, strict: bool = True, **objects: Any) -> dict[str, Any]:
    """Restore the state that `save` wrote, under any backend and with any number of processes.

        start = load("last.pt", model=model, optimizer=optimizer, loader=loader)["epoch"]

    The file may also be one of torch.save (a dictionary of state dicts, as of Lightning, or one state dict), of
    safetensors, or a folder of torch.distributed.checkpoint. Prefixes of torch.compile and DDP are ignored, and in such
    files a prefix of all names, as Lightning's `net.`, without which the names are those of the model.

    All states are checked before any object is changed. To resume a run exactly, call `load` on all ranks inside the
    `parallel_model` block, because entering the block advances the RNG states. Outside a block each rank may call
    `load` alone.

    Args:
        path: the file or folder that `save` wrote. No code in it is run, even if it comes from an untrusted source.
        rng: whether to restore this rank's RNG states, if the number of processes is the same as when they were saved;
            use False to load weights for evaluation or for a new run.
        strict: whether a model must have exactly the weights in the file; False: log the names that only one of them
            has, and load the others.
        **objects: models, optimizers, loaders and other objects, under the names that they were saved with; other
            names in the checkpoint are ignored.

    Returns:
        The plain values in the checkpoint, by name; without `objects`, all its content.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint or holds unsafe types, a name is not in it, or states
            do not fit these objects; the error lists all faults.
        ParallelizeError: a damaged file or missing shards; raised on every rank that trains the same model.
        SyncError: some ranks that train one model do not call `load`, or ranks load different files.
    """
    name = f"load at {call_site_of(sys._getframe(1))}"
    return load_into(Path(path), objects, rng=rng, strict=strict, name=name)


def load_into(path: Path, objects: Mapping[str, Any], *, rng: bool, name: str, strict: bool = True) -> dict[str, Any]:
    """Load a checkpoint as `load` does; `name` is that of the call in messages, the same on all ranks."""
    checkpoint = _read_folder_of_dcp(path) or read_file(path)
    shared: Any = contextlib.nullcontext()
    if any(needs_all_ranks(each) or (isinstance(each, nn.Module) and route_of(each)) for each in objects.values()):
        # Other ranks train the same object. Checked before state_dict(), which may be a collective of a sharded model.
        rendezvous = Rendezvous(name)
        _require_same_file(rendezvous, f"{path.name} {checkpoint.digest()}: {', '.join(objects)}")
        shared = _all_or_none(rendezvous, path)
    handlers = _handlers(path, checkpoint, objects, strict=strict)
    values = _values(checkpoint, handlers)
    if checkpoint.shards is not None:
        with shared:
            values = _read_shards(path, checkpoint, handlers, values)
    _set_states(handlers)
    if checkpoint.record:
        _restore_data(checkpoint.record, objects)
    if rng and checkpoint.record:
        _restore_rng(path, checkpoint.record)
    return {name: map_leaves(clone_tensor, value) for name, value in values.items()}


def _read_folder_of_dcp(path: Path) -> Checkpoint | None:
    """Return the content of a folder that torch.distributed.checkpoint has written."""
    if not (path / ".metadata").is_file() or (path / MAIN_FILE).exists():
        return None
    from parallelize.checkpoint.shards import states_in  # takes a second to import: only if sharded

    return Checkpoint(states_in(path), {}, path)


def _handlers(path: Path, checkpoint: Checkpoint, objects: Mapping[str, Any], *, strict: bool) -> list[StateHandler]:
    """Return a handler for each object, with its state, after checking that every state fits."""
    faults: list[Fault] = []
    handlers: list[StateHandler] = []
    renamed: list[Fault] = []
    theirs = {} if checkpoint.record else _foreign_states(checkpoint.states, objects)
    for name, obj in objects.items():
        handler = handler_for(obj, name)
        if name not in theirs and name not in checkpoint.states:
            known = did_you_mean(name, map(str, checkpoint.states))
            faults.append(Fault(f"{name}= is not in {path}", why="nothing was saved under this name", fix=known))
        elif handler is None:
            why, fix = "load() restores objects, not values", f"read it from the result of load(): load(path)[{name!r}]"
            faults.append(Fault(f"{name}={obj!r:.80}", why=why, fix=fix))
        else:
            details = checkpoint.record["objects"][name] if checkpoint.record else {}
            if not handler.take(theirs.get(name, checkpoint.states.get(name)), details, strict=strict):
                what = f"{name}={type(obj).__name__}(...), where the checkpoint holds a {details.get('kind', VALUE)}"
                fix = "pass the same objects to load() as to save(), under the same names"
                faults.append(Fault(what, why="their states are incompatible", fix=fix))
            # A hook, or a newer version of a module, may rename what torch's load_state_dict gets: torch decides.
            (renamed if isinstance(obj, nn.Module) else faults).extend(handler.faults())
            handlers.append(handler)
    if faults:
        raise ConfigError.of([*faults, *renamed])
    return handlers


def _foreign_states(states: Mapping[Any, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states in a file of another program that it has under other names than those of the objects."""
    found = {}
    optimizers = [name for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)]
    in_order = states.get(_OPTIMIZERS, ())
    is_bare = all(isinstance(each, Tensor) or str(name).endswith("extra_state") for name, each in states.items())
    for name, obj in objects.items():
        is_model = isinstance(obj, nn.Module)
        names = (name + _STATE_SUFFIX, *(_MODEL_NAMES if is_model else _OPTIMIZER_NAMES if name in optimizers else ()))
        known = next((each for each in names if each in states), None)
        if name in states:
            continue
        if known is not None:
            found[name] = states[known]
        elif name in optimizers and len(in_order) == len(optimizers):
            found[name] = in_order[optimizers.index(name)]
        elif is_model and is_bare:
            found[name] = states
    return found


def _values(checkpoint: Checkpoint, handlers: Sequence[StateHandler]) -> dict[str, Any]:
    """Return the plain values in the checkpoint; without objects to load, everything."""
    if not handlers:
        return checkpoint.states
    if checkpoint.record:
        kinds = {name: each["kind"] for name, each in checkpoint.record["objects"].items()}
        return {name: each for name, each in checkpoint.states.items() if kinds[name] == VALUE}
    return {
        name: each
        for name, each in checkpoint.states.items()
        if name != _OPTIMIZERS
        and not (isinstance(each, (Tensor, Mapping)) and any(isinstance(leaf, Tensor) for leaf in leaves(each)))
    }


def _read_shards(
    path: Path, checkpoint: Checkpoint, handlers: Sequence[StateHandler], values: dict[str, Any]
) -> dict[str, Any]:
    """Replace the placeholders in the handlers' states by stored tensors; return the values with theirs replaced.

    A placeholder that is loaded into a DTensor is replaced by this rank's shard of that DTensor, any other placeholder
    by the full tensor. No collective is used: each rank reads the stored shards that overlap its own shards.
    """
    from parallelize.checkpoint.shards import keys_of, read_shards  # takes a second to import: only if sharded

    assert checkpoint.shards is not None
    keys = keys_of(checkpoint.states)
    dtensors = {id(value): dtensor for each in handlers for value, dtensor in each.shard_targets()}
    filled: dict[str, Tensor] = {}

    def fill(leaf: Any) -> Any:
        if id(leaf) not in keys:
            return leaf
        dtensor = dtensors.get(id(leaf))
        like, where = (leaf, "cpu") if dtensor is None else (dtensor.shard.detach(), dtensor.device)
        return filled.setdefault(keys[id(leaf)], torch.empty_like(like, dtype=leaf.dtype, device=where))

    for each in handlers:
        each.state = map_leaves(fill, each.state)
    values = {name: map_leaves(fill, each) for name, each in values.items()}
    try:
        read_shards(checkpoint.shards, filled, checkpoint.record.get("shards"))
    except (OSError, ValueError, RuntimeError, KeyError) as exc:
        raise damaged_error(path, str(exc)) from exc
    return values


def _require_same_file(rendezvous: Rendezvous, description: str) -> None:
    rendezvous.post((description,))
    rendezvous.require_all_ranks(
        ARRIVAL_TIMEOUT_S,
        why="a rank that loads alone would train a different model, or wait forever for the other ranks",
        fix="call it on all ranks, without `if is_main()`; load from a folder that all nodes share",
    )
    rendezvous.require_same(
        "loads",
        why="ranks that train one model must resume from the same state",
        fix="load the same file on all ranks, from a folder that all nodes share",
    )


@contextlib.contextmanager
def _all_or_none(rendezvous: Rendezvous, path: Path) -> Iterator[None]:
    """Run the block on all ranks; raise on every rank if it fails on any."""
    failure = "an exception was raised"
    try:
        yield
        failure = ""
    except ParallelizeError as exc:
        failure = str(exc)
        raise
    finally:
        rendezvous.post(failure, "result")
    for rank, each in enumerate(rendezvous.results()):
        if each:
            raise ParallelizeError(
                f"rank {rank} could not read its shards of {path}",
                why=each.replace("\n", "; "),
                fix="load another checkpoint; nothing was loaded from this one on any rank",
                is_secondary=True,
            )


def _set_states(handlers: Sequence[StateHandler]) -> None:
    """Set all states, first those whose `set` may raise; if one raises, restore the previous states."""
    previous: list[StateHandler] = []
    try:
        for each in sorted(handlers, key=lambda each: not (each.mismatches or each.may_raise())):
            if each.mismatches or each.may_raise():
                backup = type(each)(each.obj, each.name)
                previous.append(backup)
                backup.take(*map_leaves(clone_tensor, (each.get(), each.describe())))
            each.set()
    except BaseException:
        for backup in previous:
            try:
                backup.set()
            except Exception as exc:  # noqa: BLE001 - the first error is raised, and the other objects are restored too
                what = f"{type(exc).__name__}: {exc}"
                _log.warning("%s= could not be restored to its previous state: %s", backup.name, what)
        raise


def _restore_rng(path: Path, record: Mapping[str, Any]) -> None:
    run = context.current()
    if run.world.world_size != record["world_size"]:
        _log.info(
            "%s was saved by %d processes, this run has %d: RNG states are not restored",
            path,
            record["world_size"],
            run.world.world_size,
        )
        return
    states = record["rng"][run.world.rank]
    if states is None:
        _log.warning("%s was saved without rank %d: RNG states are not restored on this rank", path, run.world.rank)
    else:
        set_rng_states(states, run.devices)


def _restore_data(record: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Let the datasets of this rank go on from their states; without these, their loaders read them again."""
    world = context.current().world
    states = record["rng"][world.rank] if world.world_size == record["world_size"] else None
    for name, state in (states or {}).get("data", {}).items():
        if name in objects and hasattr(type(objects[name]), "load_rank_state"):
            objects[name].load_rank_state(state)
