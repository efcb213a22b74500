"""The meshes of ranks over which fully_shard shards, and the user's code gathers.

    shard_over="world"    of_shards    ranks 0 1 2 3, in the default group
                          of_rows      the same ranks, in a group of their own

    shard_over=2          both         copies  ranks of a copy
                                       0       0 1
                                       1       2 3

Glossary:

    copy     all parameters once, sharded over the ranks of a row of the matrix
    column   the ranks that hold the same rows of each copy, over which gradients are averaged
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.cluster.world import World
from parallelize.run.groups import GroupPurpose, separate_group, subgroup_of_this_rank

if TYPE_CHECKING:
    from parallelize.backends.fsdp.plugin import FSDPBackend


@dataclass(frozen=True)
class Meshes:
    """The ranks that shard the parameters of a model.

    Args:
        of_shards: fully_shard gathers and reduces over it.
        of_rows: the user's code gathers over it. Its groups are others where the default group
            would do for `of_shards`: the user's code, at any time, must not mix with what
            fully_shard has in flight.
    """

    of_shards: DeviceMesh
    of_rows: DeviceMesh

    @property
    def has_copies(self) -> bool:
        """Whether several ranks hold the same rows."""
        return self.of_shards.ndim > 1


def meshes_of(options: FSDPBackend, world: World, device: torch.device) -> Meshes:
    """Return the meshes of a model; a collective.

    Raises:
        ConfigError: `shard_over` does not divide the ranks equally.
    """
    ranks_per_copy = options.ranks_per_copy(world)
    purpose, suffix = GroupPurpose.ROWS, ""
    if options.cpu_offload:
        # Offloaded rows are on the CPU, where DTensor's own methods send them, such as
        # `full_tensor()`. The names differ, so that meshes with other groups are not equal.
        purpose, suffix = GroupPurpose.OFFLOADED_ROWS, " offloaded"
    if ranks_per_copy == world.world_size:
        world_group: Any = dist.group.WORLD
        rows_group = separate_group(world, device, purpose)
        return Meshes(
            of_shards=DeviceMesh.from_group(world_group, device.type, mesh_dim_names=("shard",)),
            of_rows=DeviceMesh.from_group(
                rows_group, device.type, mesh_dim_names=(f"rows{suffix}",)
            ),
        )
    # `init_device_mesh` would split a default group that is bound to a device, and hand NCCL's
    # options to its gloo half, too (`_init_one_process_group` in torch's device_mesh.py), which
    # gloo refuses or leaves out with a warning.
    names = (f"replicate{suffix}", f"shard{suffix}")
    # Shape: (copies, ranks of a copy).
    ranks = torch.arange(world.world_size).view(-1, ranks_per_copy)
    # Meshes of equal ranks have the same groups: DTensor's caches treat equal meshes as one.
    column = subgroup_of_this_rank(world, device, purpose, ranks.T.tolist(), name=names[0])
    row = subgroup_of_this_rank(world, device, purpose, ranks.tolist(), name=names[1])
    mesh = DeviceMesh.from_group([column, row], device.type, ranks, mesh_dim_names=names)
    return Meshes(of_shards=mesh, of_rows=mesh)
