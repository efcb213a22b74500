"""World: ranks and sizes that fit each other."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from parallelize.cluster.world import World
from parallelize.errors import ConfigError


def test_a_world_is_valid_if_nodes_of_some_sizes_hold_its_ranks():
    """Of all small worlds, those are accepted for which nodes exist, each with at least one process."""
    for world_size, local_world_size, num_nodes in itertools.product(range(4), range(4), range(1, 4)):
        nodes = [sizes for sizes in itertools.product(range(1, 4), repeat=num_nodes) if sum(sizes) == world_size]
        for rank, local_rank, node_rank in itertools.product(range(-1, 4), repeat=3):
            fits = any(sizes[node_rank] == local_world_size for sizes in nodes if 0 <= node_rank < num_nodes)
            is_valid = fits and 0 <= rank < world_size and 0 <= local_rank < local_world_size
            with contextlib.nullcontext() if is_valid else pytest.raises(ConfigError):
                World(rank, local_rank, node_rank, world_size, local_world_size, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("numbers", "faults"),
    [
        ({"rank": 2, "world_size": 2}, {"rank=2 with world_size=2": "it must be from 0 to 1"}),
        ({"rank": 1}, {"rank=1 with world_size=1": "it must be from 0 to 0"}),
        (
            {"world_size": 2, "local_world_size": 0},
            {
                "local_rank=0 with local_world_size=0": "no value is valid",
                "local_world_size=0 with world_size=2": "it must be from 1 to 2",
                "node_rank=0 with num_nodes=0": "no value is valid",
                "num_nodes=0 with world_size=2 and local_world_size=0": "it must be from 2 to 3",
            },
        ),
        ({"master_port": 65536}, {"master_port=65536": "a port is a number from 1 to 65535"}),
    ],
)
def test_a_fault_names_the_valid_numbers(numbers, faults):
    """One error lists all contradictory numbers; of sizes that contradict each other, no number is valid."""
    with pytest.raises(ConfigError) as caught:
        World(**numbers)
    assert {fault.what: fault.why for fault in caught.value.faults} == faults


def test_number_of_nodes_is_computed():
    """Without a number of nodes it is computed for equal nodes, and is above this node's rank."""
    assert World(world_size=8, local_world_size=4).num_nodes == 2
    assert World(rank=2, node_rank=1, world_size=3, local_world_size=1).num_nodes == 3
    assert World(rank=4, node_rank=1, world_size=5, local_world_size=4).num_nodes == 2
