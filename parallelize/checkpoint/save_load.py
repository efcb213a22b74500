"""save() and load(): the state of a run in one file, or in a sharded folder.

objects of a run         calls of all ranks: they compare the call and the weights; rank 0 writes the file, or each rank
                         its shards; then all ranks know whether it is written, or raise
plain values only        what torch.save does: each rank that calls it writes, and nobody waits
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelize.agreement.gather import gather_objects
from parallelize.checkpoint import files
from parallelize.checkpoint.record import FORMAT, not_of_save
from parallelize.checkpoint.states import (
    OBJECT,
    VALUE,
    Named,
    StateHandler,
    clone_tensor,
    handler_for,
    is_sharded,
    states_of,
    to_safe_types,
)
from parallelize.collectives import num_processes
from parallelize.errors import ConfigError, Fault, SyncError, did_you_mean
from parallelize.hang_detection.waiting import WaitKind, waiting_for
from parallelize.plugins.options import flag
from parallelize.run import context
from parallelize.run.containers import is_entangled, leaves, map_leaves
from parallelize.run.generators import global_generators
from parallelize.run.group_abort import is_interrupted
from parallelize.run.groups import GroupPurpose, separate_group
from parallelize.torch_patches.forward import route_of

__all__ = ["gather", "load", "load_into", "prepare_save", "rank", "save", "together"]

_USUAL = {
    "model": ("state_dict", "model_state_dict"),
    "optimizer": ("optimizer_state_dict", "optimizer_0"),
}
"""Names under which tutorials and Lightning save the states of a model and of an optimizer."""
_Changes = tuple[list[Callable[[], None]], dict[str, Any]]
"""What sets the states of the objects, in order, and the plain values in a checkpoint."""


@contextlib.contextmanager
def _refusing_deep_nesting(call: str) -> Iterator[None]:
    """Raise a ConfigError if values contain themselves, or are nested too deeply."""
    try:
        yield
    except RecursionError as exc:
        raise ConfigError(
            f"{call} of containers that are nested too deeply",
            why="one contains itself, or hundreds contain each other",
            fix="save the tensors and numbers of such a structure in a flat dictionary",
        ) from exc


@_refusing_deep_nesting("save")
def save(
    path: str | os.PathLike[str],
    /,
    *,
    sharded: bool | None = None,
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

    The write is atomic: a killed run leaves the old checkpoint or the new one, and perhaps a temporary
    file, which the next save of this path removes. If two runs save to one path, each reader finds
    the whole checkpoint of one of them. A file that is replaced keeps its permissions.

    Args:
        path: a file, or a folder if sharded; missing parent folders are created. A name that ends in
            .safetensors: the weights of one model alone, without checksums, as Hugging Face reads them.
        sharded: whether to write a folder; with several nodes, one that all of them share. False: rank 0
            gathers the full tensors in CPU memory and writes one file. None: keep the form of the
            checkpoint at `path`; for a new path, use a folder if ranks hold shards.
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
    sharded = None if sharded is None else flag("sharded", sharded)
    if target.suffix == files.SAFETENSORS:
        sharded = False
    is_plain = all(handler_for(each).kind == VALUE and not is_sharded(each) for each in objects.values())
    if objects and is_plain and not sharded and not target.is_dir():
        files.write(target, _content(objects, ()))
        return
    write = prepare_save(call, target, objects, sharded=sharded)
    with together(call):
        write()


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if num_processes() > 1 else 0


def gather(value: Any) -> list[Any]:
    """Return the value of each rank; hang detection names a rank that is missing. After Ctrl-C, only of this one."""
    if num_processes() == 1 or is_interrupted():
        return [value]
    run = context.current()
    return gather_objects(value, group=separate_group(run.world, run.device, GroupPurpose.COMPARISONS))


@contextlib.contextmanager
def together(call: str, *, is_shared: bool = True) -> Iterator[list[Any]]:
    """Raise on every rank if the block raises on any, or if ranks do different things.

    Args:
        call: the call in messages.
        is_shared: whether other ranks take part.

    Yields:
        A list, to which the block may add a text that must be equal on all ranks, and values; after the block, it
        holds such a list of each rank.
    """
    own: list[Any] = []
    with waiting_for(call, wait_kind=WaitKind.CALL):
        try:
            yield own
        except Exception as exc:
            if is_shared:
                gather(f"{type(exc).__name__}: {exc}")
            raise
        own[:] = gather([*own]) if is_shared else [[*own]]
    for number, each in enumerate(own):
        if isinstance(each, str):
            raise SyncError(
                f"{call} failed on rank {number}: {each}",
                why="a checkpoint is of all ranks",
                fix=f"see the error of rank {number}",
                is_secondary=True,
            )
        if each[:1] != own[0][:1]:
            raise SyncError(
                f"rank {number}: {each[0]}; rank 0: {own[0][0]}",
                why="ranks that train one model save and load one checkpoint",
                fix="give the same path and objects on every rank; with several nodes, use a folder that all share",
            )


def prepare_save(
    call: str,
    path: Path,
    objects: Named,
    *,
    sharded: bool | None,
    stage: Callable[[Any], Any] | None = None,
) -> Callable[[], None]:
    """Prepare the write of a checkpoint on all ranks; the returned function does this rank's part of it.

    Args:
        call: name in errors.
        path: the file or folder.
        objects: by name.
        sharded: as for `save`.
        stage: copies what another thread writes; None: this thread writes.
    """
    own_rank, has_shards = rank(), any(map(is_sharded, objects.values()))
    with together(call) as ranks:
        if not objects:
            raise ConfigError(call, why="there is nothing to save", fix="pass model=model")
        kinds = [(name, handler_for(each).kind) for name, each in objects.items()]
        folder = "" if own_rank else files.new_shard_folder(path, sharded=sharded, has_shards=has_shards)
        ranks += [f"{call} {path.name}: {kinds}", folder, _state_of_rank(objects)]
    _, (folder, *_), rng = zip(*ranks, strict=True)
    for verification in dict.fromkeys(each.owner.verification for each in _routes(objects)):
        if verification is not None:
            with waiting_for(call, wait_kind=WaitKind.CALL):
                verification.compare(f"at {call}")
    content: dict[str, Any] = {}
    with together(call):
        if has_shards or own_rank == 0:
            content = _content(objects, rng, None if folder else _full_tensors(own_rank))
            if folder:
                _refuse_entangled(call, content)
            content = stage(content) if stage else content
    if own_rank and not (folder and has_shards):
        return lambda: None
    if not folder:
        return functools.partial(files.write, path, content)
    from parallelize.checkpoint.shards import write_folder  # takes a second to import: only if sharded

    run = context.current()
    purpose = GroupPurpose.BACKGROUND_SAVES if stage else GroupPurpose.COMPARISONS
    with waiting_for(call, wait_kind=WaitKind.CALL):
        group = separate_group(run.world, run.device, purpose) if has_shards and len(rng) > 1 else None
    return functools.partial(write_folder, path, folder, content, group, own_rank)


def _refuse_entangled(call: str, content: Named) -> None:
    if is_entangled(content):
        raise ConfigError(
            f"{call} of lists that are in each other, many times over",
            why="torch.distributed.checkpoint walks through a list once for each place that it is in",
            fix="save them with sharded=False, or as separate flat lists",
        )


def _routes(objects: Named) -> list[Any]:
    """Return the routes of the models that are in a block."""
    return [*filter(None, (route_of(each) for each in objects.values() if isinstance(each, nn.Module)))]


def _content(objects: Named, rng: Sequence[Any], gather: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Return the states of the objects, and the record of the run; the arguments are as for `states_of`."""
    details = {name: handler_for(each).describe() for name, each in objects.items()}
    record = {
        "format": FORMAT,
        "torch": torch.__version__,
        "world_size": len(rng),
        "rng": rng,
        "objects": details,
    }
    return {**states_of(objects, gather), files.RECORD: to_safe_types(record, "the record")}


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
            were saved, else those of rank 0; use False to load weights for evaluation or for a new run.
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
    rng, strict = flag("rng", rng), flag("strict", strict)
    return load_into(Path(path), objects, rng=rng, strict=strict, call=f"load({os.fspath(path)!r})")


@_refusing_deep_nesting("load")
def load_into(
    path: Path,
    objects: Named,
    *,
    call: str,
    rng: bool = True,
    strict: bool = True,
    check: Callable[[Path, Named], None] = lambda _path, _values: None,
) -> dict[str, Any]:
    """Load a checkpoint as `load` does.

    Args:
        path: as for `load`.
        objects: by name.
        call: the call in messages.
        rng: as for `load`.
        strict: as for `load`.
        check: raises before any object is changed if the plain values are not as expected.
    """
    # Then other ranks load the same objects.
    is_shared = any(map(is_sharded, objects.values())) or bool(_routes(objects))
    with together(call, is_shared=is_shared) as ranks:
        checkpoint = _read(path)
        ranks.append(f"load {path.name} ({checkpoint.digest}): {', '.join(objects)}")
    with together(call, is_shared=is_shared):
        prepare = functools.partial(_prepared, path, objects, rng=rng, strict=strict)
        changes, values = prepare(checkpoint) if is_shared else _prepared_newest(path, checkpoint, prepare)
        check(path, values)
    for change in changes:
        change()
    return values


def _read(path: Path) -> files.Checkpoint:
    if not path.is_dir():
        return files.read(path)
    from parallelize.checkpoint.shards import read_folder  # takes a second to import: only if sharded

    return read_folder(path)


def _prepared_newest(
    path: Path, checkpoint: files.Checkpoint, prepare: Callable[[files.Checkpoint], _Changes]
) -> _Changes:
    """Return `prepare(checkpoint)`, of a newer one if another run replaces the folder meanwhile.

    Ranks that load together do not do so: all of them would have to read the same one.
    """
    while True:
        try:
            return prepare(checkpoint)
        except ConfigError as exc:
            if not isinstance(exc.__cause__, FileNotFoundError):
                raise
            newer = _read(path)
            if newer.digest == checkpoint.digest:
                raise
            checkpoint = newer


def _prepared(path: Path, objects: Named, checkpoint: files.Checkpoint, *, rng: bool, strict: bool) -> _Changes:
    """Check all that is loaded; return the functions that change the objects, and the plain values."""
    handlers, values = _checked(path, checkpoint, objects, strict=strict)
    for handler in handlers:
        handler.prepare()
    # The user's own code, which may raise, comes first.
    in_order = sorted(handlers, key=lambda handler: handler.kind != OBJECT)
    changes = [handler.set for handler in in_order]
    # This rank's datasets and random numbers go on from where they were.
    world, states = context.current().world, checkpoint.record.get("rng", ())
    has_parts = context.current().config.logical is not None  # then all ranks have one state
    own: dict[str, Any] = {}
    if len(states) > 0 and has_parts:
        own = states[0] or {}
    elif len(states) == world.world_size:
        own = states[world.rank] or {}
    elif len(states) > 0 and world.is_main:
        # At any number of processes rank 0 draws the numbers of one process, as for the orders of loaders.
        own = {name: state for name, state in (states[0] or {}).items() if name != "data"}
    for name, state in own.get("data", {}).items():
        loader: Any = objects.get(name)
        if state is not None and hasattr(type(loader), "check_rank_state"):
            loader.check_rank_state(state)
            changes.append(functools.partial(loader.load_rank_state, state))
    for name, generator in global_generators(context.current().devices).items():
        if rng and name in own:
            try:
                generator.check(own[name])
            except Exception as exc:  # each library raises its own
                raise not_of_save(path, f"the state of {name} is none: {exc}") from exc
            changes.append(functools.partial(generator.set, own[name]))
    return changes, values


def _checked(
    path: Path, checkpoint: files.Checkpoint, objects: Named, *, strict: bool
) -> tuple[list[StateHandler], dict[str, Any]]:
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

    def is_value(name: Any) -> Any:
        if record is None:  # what holds tensors is the state of some object
            return not any(isinstance(leaf, Tensor) for leaf in leaves(states[name], once=True))
        return record[name]["kind"] == VALUE

    values: Any = {name: each for name, each in states.items() if not handlers or is_value(name)}
    for each in handlers:
        each.state = checkpoint.fill(each.state, each.shard_targets())
        stored = [leaf for leaf in leaves(each.state, once=True) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in stored):
            raise not_of_save(path, f"a tensor of {each.name} has no values")
    return handlers, map_leaves(clone_tensor, checkpoint.fill(values, {}), once=True)


def _foreign_states(states: Mapping[Any, Any], objects: Named) -> dict[Any, Any]:
    """Return the states in a file of another program by the names of the objects, and by its own names."""
    found = dict(states)
    optimizers = [name for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)]
    in_order = states.get("optimizer_states", ())  # of all optimizers, as Lightning saves them
    if len(in_order) == len(optimizers):
        found.update(zip(optimizers, in_order, strict=True))
    is_bare = all(isinstance(each, Tensor) or str(name).endswith("extra_state") for name, each in states.items())
    for name, obj in objects.items():
        usual = (name, f"{name}_state_dict", *_USUAL.get(handler_for(obj).kind, ()))
        found.update([(name, states[each]) for each in reversed(usual) if each in states])
        if is_bare and isinstance(obj, nn.Module):
            found[name] = states
    return found
