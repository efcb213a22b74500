"""How a call on several nodes returns rank 0's value on each of them.

Each node has a launcher, which reads outcomes in the folder of its own workers. When the function
has returned and the run has ended, the first rank of each node, its leader,

    waits       in the ranks' store, until the leaders of all nodes are here
    exchanges   rank 0's outcome, or those of all ranks, in a group of the leaders alone
    writes      the outcomes of ranks on other nodes beside those of its own node
    renames     its own outcome, which it has held: the launcher finds it when all others are there

The group is a new one: that of the run may be interrupted, or be the user's.

Outcomes are sent as pickles if the run has a key, which verifies them. Without a key they are sent
as plain values, which are read without running code (see `agreement/gather.py`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallelize.agreement.gather import broadcast_object, gather_objects
from parallelize.call.object_states import ObjectState
from parallelize.call.outcome import Outcome
from parallelize.call.random_states import RandomStates
from parallelize.call.task import Task
from parallelize.cluster.world import World
from parallelize.errors import ConfigError
from parallelize.run.group_abort import abort_and_destroy
from parallelize.run.rendezvous import reachable, reachable_gloo
from parallelize.run.run_key import run_key
from parallelize.torch_patches.process_groups import destroy_group
from parallelize.worker.setup import held_path, outcome_path

_LOOK_EVERY_S = 0.05


def share_outcome(task: Task, world: World, folder: Path) -> None:
    """Exchange outcomes with the other leaders, and write theirs to the folder of this node.

    Only a leader that holds its outcome does so: other ranks may find the leader's, and return.

    Args:
        task: the call, which says whether each node needs the outcomes of all ranks, or of rank 0.
        world: rank of this process, and the address of the store.
        folder: the folder of this node's workers.
    """
    if world.local_rank > 0 or not held_path(folder).exists():
        return
    # The collectives of this run are over. From here on, this process talks to other leaders only.
    # The function has returned: Ctrl-C has nothing to interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The group of a run that was interrupted, or of the user.
    if dist.is_initialized():
        abort_and_destroy()
    _connect_leaders(reachable(world), task.layout.config.timeout)
    first = world.rank - world.local_rank
    ranks_here = range(first, first + world.local_world_size)
    paths = {rank: outcome_path(folder, rank) for rank in ranks_here}
    paths[world.rank] = held_path(folder)
    ranks: Iterable[int] = [0]
    if task.all_ranks:
        ranks = range(world.world_size)
        _wait_for_files(paths.values())
    _share(paths, set(ranks) - set(ranks_here), folder, all_ranks=task.all_ranks)
    destroy_group()
    held_path(folder).rename(outcome_path(folder, world.rank))


def _share(paths: Mapping[int, Path], missing: set[int], folder: Path, *, all_ranks: bool) -> None:
    """Exchange outcomes, and write those that are missing on this node.

    Args:
        paths: the outcomes of this node's ranks, by rank.
        missing: the ranks of other nodes whose outcomes this node needs.
        folder: where to write them.
        all_ranks: whether the outcomes of all ranks are exchanged, and not that of rank 0 alone.
    """
    try:
        contents = _exchanged(paths, all_ranks=all_ranks)
    except ConfigError as error:
        # There is no key, and an outcome is not plain. What this node has is not lost by that: if
        # rank 0 is here, the caller gets its value.
        for rank in missing:
            Outcome(rank, "", 0, error=error).write(outcome_path(folder, rank))
        return
    for rank in missing:
        _write(contents[rank], outcome_path(folder, rank))


def _connect_leaders(world: World, timeout: timedelta) -> None:
    """Make a default process group of the leaders, in which the rank is that of the node."""
    store = dist.PrefixStore(
        "leaders",
        dist.TCPStore(world.master_addr, world.master_port, is_master=False, timeout=timeout),
    )
    # A leader that has ended its run counts itself, and waits for the others.
    store.add("count", 1)
    # Without a timeout: rank 0 may evaluate or save for hours while the others have returned.
    while store.add("count", 0) < world.num_nodes:
        time.sleep(_LOOK_EVERY_S)
    with reachable_gloo(world):
        dist.init_process_group(
            "gloo",
            store=store,
            rank=world.node_rank,
            world_size=world.num_nodes,
            timeout=timeout,
        )


def _wait_for_files(paths: Iterable[Path]) -> None:
    for path in paths:
        while not path.exists():
            time.sleep(_LOOK_EVERY_S)


def _exchanged(paths: Mapping[int, Path], *, all_ranks: bool) -> dict[int, Any]:
    """Return what `_write` takes, by rank; all leaders call this.

    Args:
        paths: the outcomes of this node's ranks, by rank.
        all_ranks: as for `_share`.
    """
    # With a key, the bytes of a pickle are a plain value that the key verifies. They are written to
    # a file as they are: only the launcher unpickles them.
    read: Callable[[Path], Any] = Path.read_bytes
    if run_key() is None:
        read = _plain_fields
    if not all_ranks:
        message = {}
        if 0 in paths:
            message = {0: read(paths[0])}
        contents: dict[int, Any] = broadcast_object(message)
        return contents
    contents = {}
    for message in gather_objects({rank: read(path) for rank, path in paths.items()}):
        contents.update(message)
    return contents


def _write(content: Any, path: Path) -> None:
    """Write the outcome of a rank on another node to the folder of this one."""
    if run_key() is not None:
        path.write_bytes(content)
        return
    # A plain value has no classes.
    outcome = Outcome(**content)
    states = {}
    for index, (tensors, trainable, rest) in outcome.states.items():
        for name in trainable:
            tensors[name].requires_grad_()
        states[index] = ObjectState(tensors, rest)
    random_states = outcome.random_states
    if random_states is not None:
        random_states = RandomStates(**content["random_states"])
    replace(outcome, states=states, random_states=random_states).write(path)


def _plain_fields(path: Path) -> dict[str, Any]:
    """Return an outcome as plain values, if its own values are plain."""
    outcome = Outcome.read(path)
    states = {}
    for index, state in outcome.states.items():
        # A plain tensor has no gradient.
        trainable = [name for name, tensor in state.tensors.items() if tensor.requires_grad]
        detached = {name: tensor.detach() for name, tensor in state.tensors.items()}
        states[index] = detached, trainable, state.rest
    random_states = None
    if outcome.random_states is not None:
        random_states = vars(outcome.random_states)
    return vars(outcome) | {"states": states, "random_states": random_states}
