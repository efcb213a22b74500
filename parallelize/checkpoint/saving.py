"""Writes a checkpoint on all ranks: what `save` and `checkpoints` do.

prepare_save    1  exchange   the ranks agree on path, objects and form; rank 0 names the folder
                2  compare    the weights that must be equal are
                3  together   each rank takes the content that it writes
the result      4             rank 0 writes the file, or each rank its shards
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint import files
from parallelize.checkpoint.exchange import Request, exchange, rank, together
from parallelize.checkpoint.parameter_names import ParameterNames
from parallelize.checkpoint.record import FORMAT, RECORD
from parallelize.checkpoint.safe_types import to_safe_types
from parallelize.checkpoint.state_handler import Named
from parallelize.checkpoint.states import handler_for, is_sharded, states_of
from parallelize.errors import ConfigError
from parallelize.hang_detection.waiting import WaitKind, waiting_for
from parallelize.plugins.base import RoutedModel
from parallelize.run import context
from parallelize.run.containers import is_entangled
from parallelize.run.generators import global_generators
from parallelize.run.groups import GroupPurpose, separate_group
from parallelize.torch_patches.forward import route_of


@dataclass(frozen=True)
class _SaveRequest(Request):
    """What a rank tells the others before a save.

    Args:
        statement: the call, the name of the path, and the names and kinds of the objects.
        shard_folder: on rank 0, the name of the new folder of shards; "": the checkpoint is a file.
        random_states: the rank's generators of random numbers, and its datasets.
    """

    shard_folder: str
    random_states: dict[str, Any]


def _nothing() -> None:
    """What a rank writes that has no part of the checkpoint."""


def prepare_save(
    call: str,
    path: Path,
    objects: Named,
    *,
    sharded: bool | None,
    stage: Callable[[Any], Any] | None = None,
) -> Callable[[], None]:
    """Prepare a save on all ranks; the returned function writes this rank's part.

    Args:
        call: the call in messages.
        path: the file or folder.
        objects: by name.
        sharded: as for `save`.
        stage: copies what another thread writes; None: this thread writes.
    """
    own_rank = rank()
    any_sharded = any(map(is_sharded, objects.values()))
    replies = exchange(call, functools.partial(_save_request, call, path, objects, sharded=sharded))
    shard_folder = replies[0].shard_folder
    random_states = [reply.random_states for reply in replies]
    _compare_models(call, objects)

    def take_content() -> dict[str, Any]:
        if not any_sharded and own_rank != 0:
            return {}
        if shard_folder:
            content = content_of(objects, random_states)
            _refuse_entangled(call, content)
        else:
            content = content_of(objects, random_states, gather=_full_tensors(own_rank))
        if stage is not None:
            content = stage(content)
        return content

    content = together(call, take_content)
    if not shard_folder:
        if own_rank != 0:
            return _nothing
        return functools.partial(files.write, path, content)
    if not any_sharded and own_rank != 0:
        return _nothing
    # The import takes a second, and is needed only for folders.
    from parallelize.checkpoint.shards import write_folder

    group = None
    if any_sharded and len(replies) > 1:
        group = _group_for_shards(call, in_background=stage is not None)
    return functools.partial(write_folder, path, shard_folder, content, group, own_rank)


def _save_request(call: str, path: Path, objects: Named, *, sharded: bool | None) -> _SaveRequest:
    if not objects:
        raise ConfigError(call, why="there is nothing to save", fix="pass model=model")
    kinds = [(name, handler_for(obj).kind.value) for name, obj in objects.items()]
    shard_folder = ""
    if rank() == 0:
        any_sharded = any(map(is_sharded, objects.values()))
        shard_folder = files.new_shard_folder(path, sharded=sharded, has_shards=any_sharded)
    return _SaveRequest(
        statement=f"{call} {path.name}: {kinds}",
        shard_folder=shard_folder,
        random_states=_random_states(objects),
    )


def _random_states(objects: Named) -> dict[str, Any]:
    """Return the states of this rank's generators by name; "data": of its datasets by loader."""
    states: dict[str, Any] = {}
    for name, generator in global_generators(context.current().devices).items():
        states[name] = generator.get()
    states["data"] = {}
    for name, obj in objects.items():
        if not hasattr(type(obj), "load_rank_state"):
            continue
        # A dataset may have a state that a checkpoint cannot hold. Then its data is read again.
        with contextlib.suppress(ConfigError):
            states["data"][name] = to_safe_types(obj.rank_state(), name)
    return states


def _compare_models(call: str, objects: Named) -> None:
    """Raise a SyncError if weights of models in a block differ between the ranks."""
    verifications = {}
    for routed in routed_owners(objects):
        if routed.verification is not None:
            verifications[id(routed.verification)] = routed.verification
    for verification in verifications.values():
        with waiting_for(call, wait_kind=WaitKind.CALL):
            verification.compare(f"at {call}")


def routed_owners(objects: Named) -> list[RoutedModel]:
    """Return what is known of each model among the objects that is in a block."""
    owners = []
    for obj in objects.values():
        if isinstance(obj, nn.Module):
            route = route_of(obj)
            if route is not None:
                owners.append(route.owner)
    return owners


def content_of(
    objects: Named,
    random_states: Sequence[Any],
    *,
    gather: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Return the states of the objects, and the record.

    Args:
        objects: by name.
        random_states: of each rank; () if only plain values are saved.
        gather: as for `states_of`.
    """
    parameter_names = ParameterNames(objects)
    details = {}
    for name, obj in objects.items():
        details[name] = handler_for(obj, name, parameter_names).describe()
    record = {
        "format": FORMAT,
        "torch": torch.__version__,
        "world_size": len(random_states),
        "rng": random_states,
        "objects": details,
    }
    content = states_of(objects, gather=gather)
    content[RECORD] = to_safe_types(record, "the record")
    return content


def _full_tensors(own_rank: int) -> Callable[[Any], Any]:
    """Return a function that gathers a DTensor.

    It returns the full tensor on the CPU of rank 0, and None on the other ranks.
    """

    # Tied weights are one DTensor under several names, which is gathered once.
    @functools.cache
    def full(dtensor: Any) -> Any:
        # The import takes half a second, and is needed only with shards.
        from parallelize.backends.fsdp.shards import full_tensor

        tensor = full_tensor(dtensor)
        if own_rank != 0:
            return None
        return tensor.cpu()

    return full


def _refuse_entangled(call: str, content: Named) -> None:
    if is_entangled(content):
        raise ConfigError(
            f"{call} of lists that are in each other, many times over",
            why="torch.distributed.checkpoint walks through a list once for each place that it is "
            "in",
            fix="save them with sharded=False, or as separate flat lists",
        )


def _group_for_shards(call: str, *, in_background: bool) -> Any:
    """Return the group in which the ranks write their shards; a collective."""
    run = context.current()
    purpose = GroupPurpose.COMPARISONS
    if in_background:
        purpose = GroupPurpose.BACKGROUND_SAVES
    with waiting_for(call, wait_kind=WaitKind.CALL):
        return separate_group(run.world, run.device, purpose)
