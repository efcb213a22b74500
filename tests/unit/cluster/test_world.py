"""World: ranks and sizes that fit each other."""

from __future__ import annotations

import pytest

from parallelize.cluster.world import World
from parallelize.errors import ConfigError


def test_every_contradiction_is_named():
    """One error lists all contradictory numbers of a World."""
    with pytest.raises(ConfigError) as caught:
        World(rank=2, local_rank=2, world_size=2, local_world_size=1, master_port=-1)
    assert [fault.what for fault in caught.value.faults] == [
        "rank=2 with world_size=2",
        "local_rank=2 with local_world_size=1",
        "master_port=-1",
    ]


def test_is_main():
    """Only rank 0 is the main process."""
    assert World().is_main
    assert not World(rank=1, world_size=2).is_main


def test_number_of_nodes_is_computed():
    """Without a number of nodes it is computed for equal nodes, and is above this node's rank."""
    assert World(world_size=8, local_world_size=4).num_nodes == 2
    assert World(rank=2, node_rank=1, world_size=3, local_world_size=1).num_nodes == 3
    assert World(rank=4, node_rank=1, world_size=5, local_world_size=4).num_nodes == 2
