"""load(): restore the state of a run from a checkpoint, or from a file of torch.save, safetensors or DCP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallelize.checkpoint.files import Checkpoint, read
from parallelize.checkpoint.save import agree
from parallelize.checkpoint.states import (
    OBJECT,
    VALUE,
    Named,
    StateHandler,
    clone_tensor,
    handler_for,
    is_sharded,
    refusing_deep_nesting,
)
from parallelize.errors import ConfigError, Fault, did_you_mean
from parallelize.runtime import context
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.rng_state import global_generators
from parallelize.torch_patches.forward import route_of

__all__ = ["load", "load_into"]

_OPTIMIZERS = "optimizer_states"  # name under which Lightning saves the list of the states of all optimizers
_USUAL = {
    "model": ("state_dict", "model_state_dict"),
    "optimizer": ("optimizer_state_dict", "optimizer_0"),
}
"""Names under which tutorials and Lightning save the states of a model and of an optimizer."""


def load(path: str | os.PathLike[str], /, *, rng: bool = True, strict: bool = True, **objects: Any) -> dict[str, Any]:
    """Restore the state that `save` wrote, under any backend and with any number of processes.

        start = load("last.pt", model=model, optimizer=optimizer, loader=loader)["epoch"]

    The file may also be one of torch.save (a dictionary of state dicts, as of Lightning, or one state
    dict), of safetensors, or a folder of torch.distributed.checkpoint. Prefixes of torch.compile and DDP
    are ignored, and in such files a prefix of all names, as Lightning's `net.`, without which the names
    are those of the model.

    All states are checked before any object is changed; objects whose own code loads their state come
    first. To resume a run exactly, call `load` on all ranks inside the `parallel_model` block, because
    entering the block advances the RNG states. Outside a block each rank may call `load` alone.

    Args:
        path: the file or folder that `save` wrote. No code in it is run, even if it comes from an untrusted
            source.
        rng: whether to restore this rank's RNG states, if the number of processes is the same as when they
            were saved; use False to load weights for evaluation or for a new run.
        strict: whether a model must have exactly the weights in the file; False: log the names that only one
            of them has, and load the others.
        **objects: models, optimizers, loaders and other objects, under the names that they were saved with;
            other names in the checkpoint are ignored.

    Returns:
        The plain values in the checkpoint, by name; without `objects`, all its content.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint or holds unsafe types, a name is not in it,
            or states do not fit these objects; the error lists all faults.
        ParallelizeError: a damaged file or missing shards; raised on every rank that trains the same model.
        SyncError: ranks load different files, or another rank failed.
    """
    return load_into(Path(path), objects, rng=rng, strict=strict, call=f"load({os.fspath(path)!r})")


def load_into(path: Path, objects: Named, *, call: str, rng: bool = True, strict: bool = True) -> dict[str, Any]:
    """Load a checkpoint as `load` does; `call` names the call in messages."""
    models = [each for each in objects.values() if isinstance(each, nn.Module)]
    # Then other ranks load the same objects.
    is_shared = any(map(is_sharded, objects.values())) or any(map(route_of, models))
    found: list[Any] = []

    def read_it() -> str:
        if path.is_dir():
            from parallelize.checkpoint.shards import read_folder  # takes a second to import: only if sharded

            found.append(read_folder(path))
        else:
            found.append(read(path))
        return f"load {path.name} ({found[0].digest}): {', '.join(objects)}"

    @refusing_deep_nesting("load")
    def check_it() -> None:
        found.extend(_checked(path, found[0], objects, strict=strict))

    agree(call, read_it, is_shared=is_shared, is_same=True)
    agree(call, check_it, is_shared=is_shared)
    checkpoint, handlers, values = found
    for each in sorted(handlers, key=lambda each: each.kind != OBJECT):
        each.set()
    run, states = context.current(), checkpoint.record.get("rng", ())
    own = states[run.world.rank] if run.world.world_size == len(states) else None
    if own is not None:  # None also in an older file, of a rank that did not call save()
        _restore_rank(own, objects, rng=rng)
    return dict(values)


def _restore_rank(own: Named, objects: Named, *, rng: bool) -> None:
    """Let this rank's datasets and random numbers go on from where they were."""
    for name, state in own.get("data", {}).items():
        if state is not None and hasattr(type(objects.get(name)), "load_rank_state"):
            objects[name].load_rank_state(state)
    for name, generator in global_generators(context.current().devices).items():
        if rng and name in own:
            generator.set(own[name])


def _checked(path: Path, checkpoint: Checkpoint, objects: Named, *, strict: bool) -> tuple[list[StateHandler], Any]:
    """Return a handler for each object, with its state, which fits, and the plain values."""
    states, record = checkpoint.states, checkpoint.record.get("objects")
    theirs = _foreign_states(states, objects) if record is None else states
    faults: list[Fault] = []
    handlers = [handler_for(obj, name) for name, obj in objects.items()]
    for each in handlers:
        if each.name in theirs:
            faults += each.take(theirs[each.name], record[each.name] if record else {}, strict=strict)
        else:
            known = did_you_mean(each.name, map(str, states))
            faults.append(Fault(f"{each.name}= is not in {path}", why="nothing was saved under this name", fix=known))
    if faults:
        raise ConfigError.of(faults)

    def is_value(name: Any, each: Any) -> bool:
        is_state = isinstance(each, (Tensor, Mapping)) and any(isinstance(leaf, Tensor) for leaf in leaves(each))
        is_one = not is_state and name != _OPTIMIZERS if record is None else record[name]["kind"] == VALUE
        return is_one or not handlers

    values: Any = {name: each for name, each in states.items() if is_value(name, each)}
    if checkpoint.shards is not None:
        from parallelize.checkpoint.shards import read_shards  # takes a second to import: only if sharded

        dtensors = {id(value): dtensor for each in handlers for value, dtensor in each.shard_targets()}
        *filled, values = read_shards(checkpoint, [*(each.state for each in handlers), values], dtensors)
        for each, state in zip(handlers, filled, strict=True):
            each.state = state
    return handlers, map_leaves(clone_tensor, values)


def _foreign_states(states: Mapping[Any, Any], objects: Named) -> dict[Any, Any]:
    """Return the states in a file of another program by the names of the objects, and by its own names."""
    found = dict(states)
    optimizers = [name for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)]
    in_order = states.get(_OPTIMIZERS, ())
    if len(in_order) == len(optimizers):
        found.update(zip(optimizers, in_order, strict=True))
    is_bare = all(isinstance(each, Tensor) or str(name).endswith("extra_state") for name, each in states.items())
    for name, obj in objects.items():
        for usual in reversed((name, f"{name}_state_dict", *_USUAL.get(handler_for(obj).kind, ()))):
            if usual in states:
                found[name] = states[usual]
        if is_bare and isinstance(obj, nn.Module):
            found[name] = states
    return found
