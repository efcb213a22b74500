"""Process groups beside the default one, each for a purpose.

A group of gloo has a connection to each other rank: a file that is open, for as long as the default
group lives. So purposes share a group where two sentences can be said of them: all ranks send in
one order, and what is sent by a rank that is elsewhere by mistake is not taken for what was
expected.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelize.cluster.world import World
from parallelize.config.options import backend_by_device_type
from parallelize.run.default_group import default_group_record
from parallelize.run.rendezvous import reachable, reachable_gloo
from parallelize.torch_patches.backward import is_in_backward


class GroupPurpose(enum.Enum):
    """What a group is for.

    The default group is the user's: its collectives come in the order of the user's program. No
    purpose shares it. A rank that calls `save` alone would exchange data with the user's next
    collective on the other ranks, or end the process in gloo, if both are an all_gather. In a group
    of its own, it waits, and hang detection names both lines.
    """

    GRADIENTS = enum.auto()
    """Gradients of a `Reducer`. Its tensors are on one type of device.

    It does not share the default group: a rank may send a bucket before a collective that the
    user's code makes in backward, and another rank after it.
    """

    COMPARISONS = enum.auto()
    """Fingerprints, and the objects and shards of a checkpoint that the main thread writes. Its
    tensors are on the CPU.

    It shares the group of GRADIENTS where that is one of gloo. The order is one on all ranks: a
    backward pass has received all that it has sent when it returns to the main thread, which alone
    compares. Nothing is mixed up: an average begins with an all_reduce or an all_to_all, a
    comparison or a save begins with an all_gather, and gloo pairs messages of one type of
    collective only. A rank that compares and one that averages wait for each other, and hang
    detection proves it by the two types.

    In a backward pass, such as in a hook that saves, the order would not be one: see GRADIENTS.
    There, comparisons have a group of their own.
    """

    ROWS = enum.auto()
    """What the user's code gathers of a model under fsdp. Its tensors are on one type of device.

    It does not share a group with COMPARISONS, as both may be an all_gather: see `GroupPurpose`. It
    does not share the default group, by which fsdp gathers parameters while the user's code gathers
    others.
    """

    OFFLOADED_ROWS = enum.auto()
    """The same with `cpu_offload=True`. Its tensors are on the device and on the CPU."""

    BACKGROUND_SAVES = enum.auto()
    """What the thread that writes checkpoints in the background sends. Its tensors are on the CPU.

    It shares no group: the thread sends at any time. The first save in the background makes it.
    """


def separate_group(world: World, device: torch.device, purpose: GroupPurpose) -> Any:
    """Return the group of all ranks for a purpose; all ranks must call this.

    Args:
        world: the ranks.
        device: a device of this process. Under `GRADIENTS` and `ROWS`, that of the tensors to be
            sent.
        purpose: what the group is for.
    """
    groups = default_group_record().separate_groups
    backend = _backend_of(purpose, device)
    if purpose is GroupPurpose.COMPARISONS and not is_in_backward():
        purpose = GroupPurpose.GRADIENTS
    if (purpose, backend) not in groups:
        with _meeting_for_new_groups(world, device) as timeout:
            groups[purpose, backend] = dist.new_group(backend=backend, timeout=timeout)
    return groups[purpose, backend]


def subgroup_of_this_rank(
    world: World,
    device: torch.device,
    purpose: GroupPurpose,
    ranks_of_groups: Sequence[Sequence[int]],
    *,
    name: str,
) -> Any:
    """Return the group of some ranks, this one among them, for a purpose; all ranks must call this.

    Args:
        world: the ranks.
        device: as for `separate_group`.
        purpose: as for `separate_group`.
        ranks_of_groups: the ranks of each group. Each rank of the world is in one group.
        name: description of the groups.
    """
    groups = default_group_record().separate_groups
    key = purpose, f"{name} of {ranks_of_groups}"
    if key not in groups:
        make_subgroups: Any = dist.new_subgroups_by_enumeration
        backend = _backend_of(purpose, device)
        with _meeting_for_new_groups(world, device) as timeout:
            groups[key], _ = make_subgroups(ranks_of_groups, timeout, backend, group_desc=name)
    return groups[key]


_GLOO = "gloo"
"""Backend of groups whose tensors are on the CPU.

If the default group is bound to a device, each group must have a backend for that device: "gloo" is
one for each type of device, and "cpu:gloo" is not.
"""


def _backend_of(purpose: GroupPurpose, device: torch.device) -> str | None:
    """Return the backend of a group, as for torch.distributed.new_group.

    None: those of the default group, such as "cpu:gloo,cuda:nccl". They would connect all ranks by
    gloo once more: for tensors on one type of device, its own backend is enough.
    """
    if purpose is GroupPurpose.OFFLOADED_ROWS:
        return None
    if purpose in (GroupPurpose.GRADIENTS, GroupPurpose.ROWS):
        return backend_by_device_type(dist.get_backend_config()).get(device.type)
    return _GLOO


@contextlib.contextmanager
def _meeting_for_new_groups(world: World, device: torch.device) -> Iterator[timedelta]:
    """Wait for all ranks, which make groups in the block; yield the default group's timeout."""
    # Hang detection sees a rank that waits in a collective, and not one that waits for a new group.
    dist.all_reduce(torch.zeros(3, dtype=torch.int32, device=device))
    default_group: Any = dist.group.WORLD
    with reachable_gloo(reachable(world)):
        yield default_group._get_backend(device).options._timeout
