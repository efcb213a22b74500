"""save() and load(): the state of a run in one file, or in a folder with shards.

    objects of a run      calls of all ranks: they compare the call and the weights; rank 0 writes
                          the file, or each rank its shards; then all ranks know that it is written,
                          or raise
    plain values only     what torch.save does: each rank that calls it writes, and nobody waits

Glossary of this room:

    object      what the user passes by name: a model, an optimizer, a loader, a plain value
    state       what an object's state_dict returns, or the value itself, as safe types
    record      what this library notes beside the states: generators, kinds and shapes of objects
    content     the states and the record, as they are written
    main file   in a folder: the record, and the states with a meta tensor for each tensor in shards
    item        a part of a file of shards: a chunk of a tensor, or a value, with its checksum
    handler     takes, compares and loads the state of one object

    save_load       ->  saving   ->  states   ->  files, shards
    checkpoints     ->  loading  ->  states   ->  files, shard_reader
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from parallelize.checkpoint import files
from parallelize.checkpoint.exchange import together
from parallelize.checkpoint.loading import LoadOptions, load_into
from parallelize.checkpoint.safe_types import refusing_deep_nesting
from parallelize.checkpoint.saving import content_of, prepare_save
from parallelize.checkpoint.state_handler import Named, ObjectKind
from parallelize.checkpoint.states import handler_for, is_sharded
from parallelize.plugins.options import flag


@refusing_deep_nesting("save")
def save(
    path: str | os.PathLike[str],
    /,
    *,
    sharded: bool | None = None,
    **objects: Any,
) -> None:
    """Save the state of a run, for any backend, any number of processes, and plain torch.

        save("last.pt", model=model, optimizer=optimizer, loader=loader, epoch=epoch)
        torch.load("last.pt", weights_only=True)["model"]  # a state dict

    Call `save` between steps, on every rank, without `if is_main()`: rank 0 writes one file. Under
    fsdp `path` becomes a folder, in which every rank writes its shards in the format of
    torch.distributed.checkpoint. All ranks compare the weights that must be equal, and return when
    the checkpoint is on disk.

    With plain values alone, such as `save("best.pt", model=model.state_dict())`, `save` is what
    torch.save is: rank 0 may call it alone, no rank waits for another, and no RNG states are
    saved.

    The write is atomic: a killed run leaves the old checkpoint or the new one, and perhaps a
    temporary file, which the next save of this path removes. If two runs save to one path, each
    reader finds the whole checkpoint of one of them. A file that is replaced keeps its permissions.

    Args:
        path: a file, or a folder if sharded; missing parent folders are created. A name that ends
            in .safetensors: the weights of one model alone, without checksums, as Hugging Face
            reads them.
        sharded: whether to write a folder; with several nodes, one that all of them share. False:
            rank 0 gathers the full tensors in CPU memory and writes one file. None: keep the form
            of the checkpoint at `path`; for a new path, use a folder if ranks hold shards.
        **objects: models (weights under the names that they have without this library and
            torch.compile), optimizers, loaders that `shard_loader` returns (position, states of
            datasets), any object with `state_dict()` and `load_state_dict()`, and plain values:
            numbers, strings, tensors and containers of these. Arrays are saved as tensors, paths as
            strings, enums as their values. The RNG states of every rank are saved too.

    Raises:
        ConfigError: no objects are passed, a value could only be loaded by running code from the
            file, or something other than a checkpoint is at `path`.
        SyncError: ranks save other objects, weights differ between the ranks, or another rank
            failed. A rank that does not call `save` is named by hang detection.
        ParallelizeError: writing failed.
    """
    target = Path(path)
    call = f"save({os.fspath(path)!r})"
    if sharded is not None:
        sharded = flag("sharded", sharded)
    if target.suffix == files.SAFETENSORS:
        sharded = False
    if _are_plain_values(objects) and not sharded and not target.is_dir():
        files.write(target, content_of(objects, random_states=()))
        return
    write = prepare_save(call, target, objects, sharded=sharded)
    together(call, write)


def _are_plain_values(objects: Named) -> bool:
    """Return whether there are objects, all of them plain values without shards."""
    for obj in objects.values():
        if handler_for(obj).kind != ObjectKind.VALUE or is_sharded(obj):
            return False
    return bool(objects)


def load(
    path: str | os.PathLike[str], /, *, rng: bool = True, strict: bool = True, **objects: Any
) -> dict[str, Any]:
    """Restore the state that `save` wrote, under any backend and with any number of processes.

        start = load("last.pt", model=model, optimizer=optimizer, loader=loader)["epoch"]

    The file may also be one of torch.save (a dictionary of state dicts, as of Lightning, or one
    state dict), of safetensors, or a folder of torch.distributed.checkpoint. Prefixes of
    torch.compile and DDP are ignored, and in such files a prefix of all names, as Lightning's
    `net.`, without which the names are those of the model.

    An optimizer that is loaded with its models gets the state of each parameter by name, if `save`
    got them together, too: layers may be declared in another order. Otherwise its parameters go by
    their positions, as in torch.

    All states are checked before any object is changed; objects whose own code loads their state
    come first. To resume a run exactly, call `load` on all ranks inside the `parallel_model` block,
    because entering the block advances the RNG states. Outside a block each rank may call `load`
    alone.

    Args:
        path: the file or folder that `save` wrote. No code in it is run, even if it comes from an
            untrusted source.
        rng: whether to restore this rank's RNG states, if the number of processes is the same as
            when they were saved, else those of rank 0; use False to load weights for evaluation or
            for a new run.
        strict: whether a model must have exactly the weights in the file; False: log the names that
            only one of them has, and load the others.
        **objects: models, optimizers, loaders and other objects, under the names that they were
            saved with; other names in the checkpoint are ignored.

    Returns:
        The plain values in the checkpoint, by name; without `objects`, all its content.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint or holds unsafe types, a name is
            not in it, or states do not fit these objects; the error lists all faults.
        ParallelizeError: a damaged file or missing shards; raised on every rank that trains the
            same model.
        SyncError: ranks load different files, or another rank failed.
    """
    options = LoadOptions(rng=flag("rng", rng), strict=flag("strict", strict))
    return load_into(Path(path), objects, options, call=f"load({os.fspath(path)!r})")
