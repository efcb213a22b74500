"""Process groups beside the default one, each for a purpose.

A gloo group keeps a connection to every other rank open until the default group ends. To save
connections, two purposes share a group if both of these hold:

    all ranks send in the same order, whichever purpose they send for
    if a rank is at another line by mistake, no rank takes its messages for those of another purpose
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
from parallelize.run.data_ranks import DataRanks
from parallelize.run.default_group import default_group_record
from parallelize.run.rendezvous import reachable, reachable_gloo
from parallelize.torch_patches.backward import is_in_backward


class GroupPurpose(enum.Enum):
    """What a group is for.

    No purpose shares the default group, which is the user's. Suppose that one rank calls `save` by
    mistake, while the other ranks call an all_gather of the user's. In one group, the all_gather of
    `save` would exchange data with the user's, or gloo would end the process. In a separate group,
    the rank waits, and hang detection names both lines.
    """

    GRADIENTS = enum.auto()
    """Gradients of a `Reducer`. Its tensors are on one type of device.

    It does not share the default group. The user's code may make a collective in backward, and one
    rank may send a bucket of gradients before that collective, another rank after it.
    """

    COMPARISONS = enum.auto()
    """Fingerprints, and the objects and shards of a checkpoint that the main thread writes. Its
    tensors are on the CPU.

    It shares the group of GRADIENTS if that is a group of gloo. All ranks send in the same order:
    only the main thread compares, and a backward pass does not return to that thread before all
    gradients are received. No message is taken for another: an average begins with an all_reduce or
    an all_to_all, a comparison or a save begins with an all_gather, and gloo only pairs messages of
    the same type of collective. If one rank compares while another rank averages, both wait, and
    hang detection proves it by the two types.

    In a backward pass, such as in a hook that saves, the order could differ between ranks, as it
    could for GRADIENTS in the default group. There, comparisons have a separate group.
    """

    ROWS = enum.auto()
    """What the user's code gathers of a model under fsdp. Its tensors are on one type of device.

    It does not share a group with COMPARISONS, as both may be an all_gather: see `GroupPurpose`. It
    does not share the default group, in which fsdp itself may gather other parameters meanwhile.
    """

    OFFLOADED_ROWS = enum.auto()
    """As ROWS, under `cpu_offload=True`. Its tensors are on the device and on the CPU."""

    BACKGROUND_SAVES = enum.auto()
    """What the thread that writes checkpoints in the background sends. Its tensors are on the CPU.

    It shares no group, because the thread sends at any time. The first save in the background makes
    the group.
    """


def separate_group(world: World, device: torch.device, purpose: GroupPurpose) -> Any:
    """Return the group of all ranks for a purpose; all ranks must call this.

    The first call makes the group, for as long as the default group exists.

    Args:
        world: the ranks.
        device: a device of this process. For `GRADIENTS` and `ROWS`, the device of the tensors to
            be sent.
        purpose: what the group is for.
    """
    groups = default_group_record().separate_groups
    backend = _backend_of(purpose, device)
    # The key of a group has its backend. Comparisons use gloo, so that they do not get the group of
    # gradients if that is one of NCCL.
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
    """Divide all ranks into groups for a purpose, and return the group that has this rank.

    All ranks must call this. The first call makes the groups.

    Args:
        world: the ranks.
        device: as for `separate_group`.
        purpose: as for `separate_group`.
        ranks_of_groups: for each group, its ranks. Each rank of the world is in one group.
        name: description of the groups. Calls with another name get other groups.
    """
    groups = default_group_record().separate_groups
    key = purpose, f"{name} of {ranks_of_groups}"
    if key not in groups:
        make_subgroups: Any = dist.new_subgroups_by_enumeration
        backend = _backend_of(purpose, device)
        with _meeting_for_new_groups(world, device) as timeout:
            groups[key], _ = make_subgroups(ranks_of_groups, timeout, backend, group_desc=name)
    return groups[key]


def group_of_data_ranks(
    data_ranks: DataRanks, world: World, device: torch.device, purpose: GroupPurpose
) -> Any:
    """Return the group of the data ranks of this rank for a purpose; all ranks must call this.

    Args:
        data_ranks: the data ranks of the run.
        world: the ranks.
        device: as for `separate_group`.
        purpose: as for `separate_group`.
    """
    if data_ranks.are_all_ranks:
        return separate_group(world, device, purpose)
    return subgroup_of_this_rank(world, device, purpose, data_ranks.groups, name="data ranks")


_GLOO = "gloo"
"""Backend of groups whose tensors are on the CPU.

If the default group is bound to a device, torch wants each group to have a backend for that device.
"gloo" is a backend for all types of devices; "cpu:gloo" would be one for the CPU alone.
"""


def _backend_of(purpose: GroupPurpose, device: torch.device) -> str | None:
    """Return the backend of a group, as for torch.distributed.new_group.

    None: the backends of the default group, such as "cpu:gloo,cuda:nccl". A group whose tensors are
    on one type of device gets the backend of that type alone: with the others, gloo would connect
    all ranks once more.
    """
    if purpose is GroupPurpose.OFFLOADED_ROWS:
        return None
    if purpose in (GroupPurpose.GRADIENTS, GroupPurpose.ROWS):
        return backend_by_device_type(dist.get_backend_config()).get(device.type)
    return _GLOO


@contextlib.contextmanager
def _meeting_for_new_groups(world: World, device: torch.device) -> Iterator[timedelta]:
    """Wait for all ranks, which make groups in the block; yield the default group's timeout."""
    # A rank that is missing is waited for in this collective, which hang detection sees. It would
    # not see a rank that waits for a new group.
    dist.all_reduce(torch.zeros(3, dtype=torch.int32, device=device))
    default_group: Any = dist.group.WORLD
    with reachable_gloo(reachable(world)):
        yield default_group._get_backend(device).options._timeout
