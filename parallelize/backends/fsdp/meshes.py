"""The meshes of fully_shard, and of what the user's code gathers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.cluster.world import World
from parallelize.run.groups import GroupPurpose, separate_group, subgroup_of_this_rank

if TYPE_CHECKING:
    from parallelize.backends.fsdp.plugin import FSDPBackend

__all__ = ["meshes_of"]


def meshes_of(options: FSDPBackend, world: World, device: torch.device) -> list[DeviceMesh]:
    """Return the meshes of fully_shard and of what the user's code sends, which has a group of its own."""
    size = options.ranks_per_copy(world)
    # Offloaded rows are on the CPU, where DTensor's own methods send them, such as `full_tensor()`.
    purpose = GroupPurpose.OFFLOADED_ROWS if options.cpu_offload else GroupPurpose.ROWS
    # In the names, so that meshes with other groups are not equal.
    suffix = " offloaded" if options.cpu_offload else ""
    if size == world.world_size:
        groups = {
            "shard": dist.group.WORLD,
            f"rows{suffix}": separate_group(world, device, purpose),
        }
        return [
            DeviceMesh.from_group(each, device.type, mesh_dim_names=(name,))
            for name, each in groups.items()
        ]
    # (copies, ranks of a copy)
    ranks = torch.arange(world.world_size).view(-1, size)
    mesh = _mesh_of_ranks(
        world, device, purpose, ranks, names=(f"replicate{suffix}", f"shard{suffix}")
    )
    return [mesh, mesh]


def _mesh_of_ranks(
    world: World,
    device: torch.device,
    purpose: GroupPurpose,
    ranks: torch.Tensor,
    *,
    names: tuple[str, str],
) -> DeviceMesh:
    """Return the mesh of a matrix of ranks, whose columns and rows have groups for a purpose.

    Meshes of equal ranks have the same groups: DTensor's caches treat equal meshes as one.

    `init_device_mesh` would split a default group that is bound to a device, and hand NCCL's options to its gloo half,
    too (`_init_one_process_group` in torch's device_mesh.py), which gloo refuses or leaves out with a warning.

    Args:
        world: the ranks.
        device: the device of this process.
        purpose: of the groups.
        ranks: each rank of the world, once.
        names: of the groups of columns, and of those of rows.
    """
    column = subgroup_of_this_rank(world, device, purpose, ranks.T.tolist(), name=names[0])
    row = subgroup_of_this_rank(world, device, purpose, ranks.tolist(), name=names[1])
    return DeviceMesh.from_group([column, row], device.type, ranks, mesh_dim_names=names)
