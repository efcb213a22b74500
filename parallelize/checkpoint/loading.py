"""Loads a checkpoint into objects: what `load` and `checkpoints` do.

    1  read       the file, or the main file of a folder; ranks of a node verify it together
    2  check      each state against its object; all faults are reported at once
    3  prepare    copy the states into memory; read this rank's shards
    4  change     the objects, then this rank's datasets and generators of random numbers

What takes the place of a tensor is copied in step 4, so that the old one and the new one of all of
them are never in memory at once: weights, and the moments of an optimizer that has stepped.

Nothing is changed before step 4. Models in a block, and objects with shards, are loaded by all
ranks together: each of the steps 1 and 3 ends with an exchange, so that all ranks change their
objects, or none.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallelize.checkpoint import files
from parallelize.checkpoint.exchange import Request, exchange, rank, together
from parallelize.checkpoint.parameter_names import ParameterNames
from parallelize.checkpoint.record import not_of_save
from parallelize.checkpoint.safe_types import refusing_deep_nesting
from parallelize.checkpoint.saving import routed_owners
from parallelize.checkpoint.state_handler import Named, ObjectKind, StateHandler, clone_tensor
from parallelize.checkpoint.states import handler_for, is_sharded
from parallelize.errors import ConfigError, Fault, did_you_mean
from parallelize.run import context
from parallelize.run.containers import leaves, map_leaves
from parallelize.run.generators import global_generators

_USUAL_NAMES: Mapping[ObjectKind, tuple[str, ...]] = {
    ObjectKind.MODEL: ("state_dict", "model_state_dict"),
    ObjectKind.OPTIMIZER: ("optimizer_state_dict", "optimizer_0"),
}
"""Names under which tutorials and Lightning save the states of a model and of an optimizer."""


@dataclass(frozen=True)
class _Prepared:
    """A checkpoint that was checked and copied.

    Args:
        changes: the functions that change the objects, in order.
        values: the plain values in the checkpoint.
    """

    changes: list[Callable[[], None]]
    values: dict[str, Any]


@dataclass(frozen=True)
class LoadOptions:
    """How objects are loaded.

    Args:
        rng: as for `load`.
        strict: as for `load`.
        check_values: raises, before any object is changed, if the plain values of a path are not
            as expected; None: any values are right.
    """

    rng: bool = True
    strict: bool = True
    check_values: Callable[[Path, Named], None] | None = None


@refusing_deep_nesting("load")
def load_into(path: Path, objects: Named, options: LoadOptions, *, call: str) -> dict[str, Any]:
    """Load a checkpoint as `load` does, and return its plain values.

    Args:
        path: as for `load`.
        objects: by name.
        options: how they are loaded.
        call: the call in messages.
    """
    is_shared = any(map(is_sharded, objects.values())) or bool(routed_owners(objects))
    readers = files.ONE_READER
    if is_shared:
        readers = _readers(call, path)
    checkpoints: list[files.Checkpoint] = []

    def read() -> Request:
        checkpoint = _read(path, readers)
        checkpoints.append(checkpoint)
        return Request(f"load {path.name} ({checkpoint.digest}): {', '.join(objects)}")

    exchange(call, read, is_shared=is_shared)

    def prepare() -> _Prepared:
        if is_shared:
            prepared = _prepared(path, objects, options, checkpoints[0])
        else:
            prepared = _prepared_newest(path, objects, options, checkpoints[0])
        if options.check_values is not None:
            options.check_values(path, prepared.values)
        return prepared

    prepared = together(call, prepare, is_shared=is_shared)
    for change in prepared.changes:
        change()
    return prepared.values


@dataclass(frozen=True)
class _FileRequest(Request):
    """What a rank tells the others before it reads a file.

    Args:
        statement: equal on all ranks: when the files are read, their digests are compared, too.
        file: node, device and number of the file: equal for ranks that read one file; "": there is
            no file that ranks could verify together.
    """

    file: str


def _readers(call: str, path: Path) -> files.Readers:
    """Return the ranks that read the same file of the same machine as this rank."""

    def make_request() -> _FileRequest:
        file = path
        if path.is_dir():
            file = path / files.MAIN_FILE
            if not file.exists():
                return _FileRequest("load", file="")
        with files.reading(file):
            status = file.stat()
        node = f"{socket.gethostname()} {context.current().world.node_rank}"
        return _FileRequest("load", file=f"{node} {status.st_dev} {status.st_ino}")

    replies = exchange(call, make_request)
    own_rank = rank()
    # After Ctrl-C, there is the reply of this rank alone.
    if len(replies) <= own_rank or not replies[own_rank].file:
        return files.ONE_READER
    ranks = [number for number, reply in enumerate(replies) if reply.file == replies[own_rank].file]
    return files.Readers(len(ranks), ranks.index(own_rank))


def _read(path: Path, readers: files.Readers = files.ONE_READER) -> files.Checkpoint:
    if not path.is_dir():
        return files.read(path, readers)
    # The import takes a second, and is needed only for folders.
    from parallelize.checkpoint.shard_reader import read_folder

    return read_folder(path, readers)


def _prepared_newest(
    path: Path, objects: Named, options: LoadOptions, checkpoint: files.Checkpoint
) -> _Prepared:
    """Prepare a checkpoint, or a newer one if another run replaces the folder meanwhile.

    Ranks that load together do not do so: all of them would have to read the same one.
    """
    while True:
        try:
            return _prepared(path, objects, options, checkpoint)
        except ConfigError as exc:
            if not isinstance(exc.__cause__, FileNotFoundError):
                raise
            newer = _read(path)
            if newer.digest == checkpoint.digest:
                raise
            checkpoint = newer


def _prepared(
    path: Path, objects: Named, options: LoadOptions, checkpoint: files.Checkpoint
) -> _Prepared:
    """Check all that is loaded, and copy it."""
    handlers = _checked_handlers(path, objects, checkpoint, strict=options.strict)
    values = _plain_values(checkpoint, has_objects=bool(objects))
    for handler in handlers:
        _fill(path, handler, checkpoint)
    values = checkpoint.fill(values, {})
    if checkpoint.is_mapped:
        values = map_leaves(clone_tensor, values, once=True)
    for handler in handlers:
        handler.prepare(is_mapped=checkpoint.is_mapped)
    # An object's own code may raise when it loads a state. It comes first, when models and
    # optimizers are not changed yet.
    with_own_code = [handler for handler in handlers if handler.kind == ObjectKind.OBJECT]
    other_handlers = [handler for handler in handlers if handler.kind != ObjectKind.OBJECT]
    changes = [handler.set for handler in (*with_own_code, *other_handlers)]
    states = _states_of_this_rank(checkpoint.record.get("rng", ()))
    changes += _changes_of_loaders(objects, states)
    if options.rng:
        changes += _changes_of_generators(path, states)
    return _Prepared(changes, values)


def _checked_handlers(
    path: Path, objects: Named, checkpoint: files.Checkpoint, *, strict: bool
) -> list[StateHandler]:
    """Return a handler for each object, which has taken its state.

    Raises:
        ConfigError: states are missing, or do not fit; the error lists all faults.
    """
    details_by_name = checkpoint.record.get("objects")
    if details_by_name is None:
        details_by_name = {}
        states = _states_of_other_program(checkpoint.states, objects)
    else:
        states = checkpoint.states
    faults: list[Fault] = []
    parameter_names = ParameterNames(objects)
    handlers = [handler_for(obj, name, parameter_names) for name, obj in objects.items()]
    for handler in handlers:
        name = handler.name
        if name in states:
            faults += handler.take(states[name], details_by_name.get(name, {}), strict=strict)
        else:
            hint = did_you_mean(name, map(str, checkpoint.states))
            why = "nothing was saved under this name"
            faults.append(Fault(f"{name}= is not in {path}", why=why, fix=hint))
    if faults:
        raise ConfigError.of(faults)
    return handlers


def _states_of_other_program(states: Mapping[Any, Any], objects: Named) -> dict[Any, Any]:
    """Return the states by the names of the objects, and by the other program's own names."""
    by_name = dict(states)
    optimizer_names = []
    for name, obj in objects.items():
        if isinstance(obj, torch.optim.Optimizer):
            optimizer_names.append(name)
    # Lightning saves a list of the states of all optimizers.
    states_in_order = states.get("optimizer_states", ())
    if len(states_in_order) == len(optimizer_names):
        by_name.update(zip(optimizer_names, states_in_order, strict=True))
    is_state_dict = all(
        isinstance(value, Tensor) or str(name).endswith("extra_state")
        for name, value in states.items()
    )
    for name, obj in objects.items():
        usual_names = _USUAL_NAMES.get(handler_for(obj).kind, ())
        for usual_name in (name, f"{name}_state_dict", *usual_names):
            if usual_name in states:
                by_name[name] = states[usual_name]
                break
        if is_state_dict and isinstance(obj, nn.Module):
            by_name[name] = states
    return by_name


def _plain_values(checkpoint: files.Checkpoint, *, has_objects: bool) -> dict[str, Any]:
    """Return the plain values in a checkpoint; all that it holds if no objects are loaded."""
    details_by_name = checkpoint.record.get("objects")
    values = {}
    for name, state in checkpoint.states.items():
        if not has_objects:
            is_value = True
        elif details_by_name is None:
            # In a file of another program, what holds tensors is the state of some object.
            is_value = not any(isinstance(leaf, Tensor) for leaf in leaves(state, once=True))
        else:
            is_value = details_by_name[name]["kind"] == ObjectKind.VALUE
        if is_value:
            values[name] = state
    return values


def _fill(path: Path, handler: StateHandler, checkpoint: files.Checkpoint) -> None:
    """Put this rank's stored tensors in place of the meta tensors of a state."""
    handler.state = checkpoint.fill(handler.state, handler.shard_targets())
    for leaf in leaves(handler.state, once=True):
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise not_of_save(path, f"a tensor of {handler.name} has no values")


def _states_of_this_rank(states_of_ranks: Any) -> dict[str, Any]:
    """Return the states of generators and datasets with which this rank goes on.

    Args:
        states_of_ranks: for each rank of the run that has saved.
    """
    run = context.current()
    if len(states_of_ranks) == 0:
        return {}
    state_of_rank_0 = states_of_ranks[0] or {}
    # Under logical=, all ranks have one state.
    if run.config.logical is not None:
        return dict(state_of_rank_0)
    if len(states_of_ranks) == run.world.world_size:
        return states_of_ranks[run.world.rank] or {}
    if run.world.is_main:
        # With any number of processes, rank 0 draws the numbers of one process, as for the orders
        # of loaders. The datasets were divided over another number of ranks.
        return {name: state for name, state in state_of_rank_0.items() if name != "data"}
    return {}


def _changes_of_loaders(objects: Named, states: Named) -> list[Callable[[], None]]:
    """Return the functions that let this rank's datasets go on from their states."""
    changes: list[Callable[[], None]] = []
    for name, state in states.get("data", {}).items():
        loader: Any = objects.get(name)
        if state is not None and hasattr(type(loader), "check_rank_state"):
            loader.check_rank_state(state)
            changes.append(functools.partial(loader.load_rank_state, state))
    return changes


def _changes_of_generators(path: Path, states: Named) -> list[Callable[[], None]]:
    """Return the functions that set this rank's generators of random numbers."""
    changes: list[Callable[[], None]] = []
    for name, generator in global_generators(context.current().devices).items():
        if name not in states:
            continue
        try:
            generator.check(states[name])
        except Exception as exc:
            # Each library raises errors of its own.
            raise not_of_save(path, f"the state of {name} is none: {exc}") from exc
        changes.append(functools.partial(generator.set, states[name]))
    return changes
