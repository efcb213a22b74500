"""load(): restore the state of a run from a checkpoint, or from a file of torch.save, safetensors or DCP."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from parallelize.checkpoint.checksum import damaged_error
from parallelize.checkpoint.file_format import Checkpoint, read_file
from parallelize.checkpoint.rendezvous import ARRIVAL_TIMEOUT_S, Rendezvous
from parallelize.checkpoint.rng_state import set_rng_states
from parallelize.checkpoint.saving import call_site_of
from parallelize.checkpoint.state_dicts import VALUE, StateHandler, clone_tensor, handler_for, needs_all_ranks
from parallelize.errors import ConfigError, Fault, ParallelizeError, did_you_mean
from parallelize.inplace.forward_routing import route_of
from parallelize.runtime import context
from parallelize.runtime.containers import leaves, map_leaves

__all__ = ["load", "load_into"]

_log = logging.getLogger("parallelize")

_STATE_SUFFIX = "_state_dict"
_FOREIGN_NAMES = {"model": ("state_dict", "model_state_dict"), "optimizer": ("optimizer_state_dict",)}
"""Names under which tutorials and Lightning save the state of an object, by kind."""


def load(path: str | os.PathLike[str], /, *, rng: bool = True, strict: bool = True, **objects: Any) -> dict[str, Any]:
    """Restore the state that `save` wrote, under any backend and with any number of processes.

        start = load("last.pt", model=model, optimizer=optimizer, loader=loader)["epoch"]

    The file may also be one of torch.save (a dictionary of state dicts, as of Lightning, or one state dict), of
    safetensors, or a folder of torch.distributed.checkpoint. Prefixes of torch.compile and DDP are ignored.

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
    call = f"load at {call_site_of(sys._getframe(1))}"
    return load_into(Path(path), objects, rng=rng, strict=strict, call=call)


@dataclass
class _Target:
    """An object to load, and the state for it.

    Args:
        obj: the object.
        handler: sets its state.
        state: the state, under the names of the object.
        details: what was recorded beside the state; {} in a file of another program.
        faults: reasons why the state does not fit a model: its hooks may still change the state's names.
    """

    obj: Any
    handler: StateHandler
    state: Any
    details: Mapping[str, Any]
    faults: list[Fault]

    @property
    def is_of_model(self) -> bool:
        """Whether a model gets the state of a model."""
        is_of_model = isinstance(self.obj, nn.Module) and self.details.get("kind", "model") == "model"
        return is_of_model and isinstance(self.state, Mapping)

    def set_state(self, *, strict: bool) -> None:
        """Set the state of the object.

        Raises:
            ConfigError: the state does not fit, after all.
        """
        try:
            self.handler.set_state(self.obj, self.state, self.details, strict=strict)
        except RuntimeError as exc:
            if not self.faults:
                raise
            raise ConfigError.of(self.faults) from exc


def load_into(path: Path, objects: Mapping[str, Any], *, rng: bool, call: str, strict: bool = True) -> dict[str, Any]:
    """Load a checkpoint as `load` does; `call` is the name of the call in messages, the same on all ranks."""
    checkpoint = read_file(path)
    shared: Any = contextlib.nullcontext()
    if any(needs_all_ranks(each) or (isinstance(each, nn.Module) and route_of(each)) for each in objects.values()):
        # Other ranks train the same object. Checked before state_dict(), which may be a collective of a sharded model.
        rendezvous = Rendezvous(call)
        _require_same_file(rendezvous, f"{path.name} {checkpoint.digest()}: {', '.join(objects)}")
        shared = _all_or_none(rendezvous, path)
    targets = _targets(path, checkpoint, objects, strict=strict)
    values = _values(checkpoint, targets)
    if checkpoint.shards is not None:
        with shared:
            values = _load_shards(path, checkpoint, targets, values)
    _set_states(targets, strict=strict)
    if rng and checkpoint.record:
        _restore_rng(path, checkpoint.record)
    return {name: map_leaves(clone_tensor, value) for name, value in values.items()}


def _targets(path: Path, checkpoint: Checkpoint, objects: Mapping[str, Any], *, strict: bool) -> dict[str, _Target]:
    """Return the state for each object, after checking that every state fits."""
    faults: list[Fault] = []
    targets = {}
    for name, obj in objects.items():
        handler = handler_for(obj)
        where = name if handler is None else _name_in(checkpoint, name, handler.kind)
        if where is None:
            known = did_you_mean(name, map(str, checkpoint.states))
            faults.append(Fault(f"{name}= is not in {path}", why="nothing was saved under this name", fix=known))
        elif handler is None:
            why, fix = "load() restores objects, not values", f"read it from the result of load(): load(path)[{name!r}]"
            faults.append(Fault(f"{name}={obj!r:.80}", why=why, fix=fix))
        else:
            state = checkpoint.states[where] if where else checkpoint.states
            details = checkpoint.record["objects"][name] if checkpoint.record else {}
            is_suitable = details.get("kind", handler.kind) == handler.kind and isinstance(state, Mapping)
            state = handler.adapt(obj, state) if is_suitable else state
            found = list(handler.faults(name, obj, state, details, strict=strict))
            targets[name] = _Target(obj, handler, state, details, found)
    # A hook, or a newer version of a module, may rename what torch's load_state_dict gets: torch decides.
    if faults or any(each.faults and not each.is_of_model for each in targets.values()):
        raise ConfigError.of([*faults, *(fault for each in targets.values() for fault in each.faults)])
    return targets


def _name_in(checkpoint: Checkpoint, name: str, kind: str) -> str | None:
    """Return the name of an object's state in the checkpoint; "": the whole file; None: it has no such state."""
    names = (name, name + _STATE_SUFFIX, *_FOREIGN_NAMES.get(kind, ()))
    found = next((each for each in names[: 1 if checkpoint.record else None] if each in checkpoint.states), None)
    if found is None and not checkpoint.record and kind == "model":
        is_bare = all(
            isinstance(each, Tensor) or str(key).endswith("extra_state") for key, each in checkpoint.states.items()
        )
        return "" if is_bare else None
    return found


def _values(checkpoint: Checkpoint, targets: Mapping[str, _Target]) -> dict[str, Any]:
    """Return the plain values in the checkpoint; without targets, everything."""
    if not targets:
        return checkpoint.states
    if checkpoint.record:
        return {name: each for name, each in checkpoint.states.items() if checkpoint.kind(name) == VALUE}
    return {
        name: each
        for name, each in checkpoint.states.items()
        if not (isinstance(each, (Tensor, Mapping)) and any(isinstance(leaf, Tensor) for leaf in leaves(each)))
    }


def _load_shards(
    path: Path, checkpoint: Checkpoint, targets: Mapping[str, _Target], values: dict[str, Any]
) -> dict[str, Any]:
    """Replace the placeholders in the targets' states by stored tensors; return the values with theirs replaced.

    A placeholder that is loaded into a DTensor is replaced by this rank's shard of that DTensor, any other placeholder
    by the full tensor. No collective is used: each rank reads the stored shards that overlap its own shards.

    Raises:
        ParallelizeError: a shard file is missing or damaged.
    """
    from parallelize.checkpoint.shards import empty_target, keys_of, read_shards  # takes a second: only if sharded

    assert checkpoint.shards is not None
    key_of = keys_of(checkpoint.states)
    dtensors = {
        id(value): dtensor
        for each in targets.values()
        for value, dtensor in each.handler.shard_targets(each.obj, each.state)
    }
    filled: dict[str, Any] = {}

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or id(leaf) not in key_of:
            return leaf
        return filled.setdefault(key_of[id(leaf)], empty_target(leaf, dtensors.get(id(leaf))))

    states = {name: map_leaves(fill, each.state) for name, each in targets.items()}
    values = {name: map_leaves(fill, each) for name, each in values.items()}
    try:
        read_shards(checkpoint.shards, filled, checkpoint.record.get("shards"))
    except (OSError, ValueError, RuntimeError, KeyError) as exc:
        raise damaged_error(path, str(exc)) from exc
    for name, state in states.items():
        targets[name].state = state
    return values


def _require_same_file(rendezvous: Rendezvous, description: str) -> None:
    rendezvous.post(description.encode())
    rendezvous.require_all_ranks(
        ARRIVAL_TIMEOUT_S,
        why="a rank that loads alone would train a different model, or wait forever for the other ranks",
        fix="call it on all ranks, without `if is_main()`; load from a folder that all nodes share",
    )
    rendezvous.require_same(
        description,
        "loads",
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
        rendezvous.post(failure.encode(), "result")
    for rank, each in enumerate(rendezvous.results()):
        if each:
            raise ParallelizeError(
                f"rank {rank} could not read its shards of {path}",
                why=each.decode().replace("\n", "; "),
                fix="load another checkpoint; nothing was loaded from this one on any rank",
                is_secondary=True,
            )


def _set_states(targets: Mapping[str, _Target], *, strict: bool) -> None:
    """Set all states, first those whose `set_state` may raise; if one raises, restore the previous states."""
    may_raise = {name for name, each in targets.items() if each.faults or each.handler.may_raise(each.obj)}
    previous: dict[str, tuple[Any, Any]] = {}
    try:
        for name in sorted(targets, key=lambda name: name not in may_raise):
            target = targets[name]
            if name in may_raise:
                state = target.handler.get_state(target.obj), target.handler.details(target.obj)
                previous[name] = map_leaves(clone_tensor, state)
            target.set_state(strict=strict)
    except BaseException:
        for name, (state, details) in previous.items():
            handler, obj = targets[name].handler, targets[name].obj
            try:
                handler.set_state(obj, handler.adapt(obj, state), details)
            except Exception as exc:  # noqa: BLE001 - the first error is raised, and the other objects are restored too
                _log.warning("%s= could not be restored to its previous state: %s: %s", name, type(exc).__name__, exc)
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
        return
    set_rng_states(states, run.devices)
