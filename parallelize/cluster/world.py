"""Rank and world size of a process in its run, and the address at which the nodes of a run meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelize.errors import ConfigError, Fault


@dataclass(frozen=True)
class World:
    """Ranks and sizes of this process in its run, with the address of the rendezvous.

    Args:
        rank: global rank, from 0.
        local_rank: rank on this node, from 0.
        node_rank: rank of this node, from 0.
        world_size: number of processes.
        local_world_size: number of processes on this node; other nodes may have more or fewer.
        master_addr: address of rank 0.
        master_port: port of the rendezvous on rank 0; 0: not chosen yet.
        has_store: whether the launcher serves the TCPStore at that address, as torchrun does; else rank 0 does.
        num_nodes: number of nodes; 0: computed here, for nodes of equal size.

    Raises:
        ConfigError: values that contradict each other.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    has_store: bool = False
    num_nodes: int = 0

    def __post_init__(self) -> None:
        if self.num_nodes == 0 and self.local_world_size > 0:
            num_nodes = -(-self.world_size // self.local_world_size)
            object.__setattr__(self, "num_nodes", max(self.node_rank + 1, num_nodes))
        faults = list(self._faults())
        if faults:
            raise ConfigError.of(faults)

    def _faults(self) -> Iterator[Fault]:
        elsewhere = (
            self.world_size - self.local_world_size
        )  # processes on other nodes: at least one on each
        node_limits = (2 if elsewhere else 1, elsewhere + 1)
        counts = f"world_size={self.world_size} and local_world_size={self.local_world_size}"
        for name, value, least, most, given in (
            ("rank", self.rank, 0, self.world_size - 1, f"world_size={self.world_size}"),
            (
                "local_rank",
                self.local_rank,
                0,
                self.local_world_size - 1,
                f"local_world_size={self.local_world_size}",
            ),
            (
                "local_world_size",
                self.local_world_size,
                1,
                self.world_size,
                f"world_size={self.world_size}",
            ),
            (
                "node_rank",
                self.node_rank,
                0,
                min(elsewhere, self.num_nodes - 1),
                f"num_nodes={self.num_nodes}",
            ),
            ("num_nodes", self.num_nodes, *node_limits, counts),
        ):
            if not least <= value <= most:
                why = f"it must be from {least} to {most}" if least <= most else "no value is valid"
                yield Fault(
                    f"{name}={value} with {given}",
                    why,
                    "check the variables that your launcher sets",
                )
        if not 0 <= self.master_port < 65536:
            yield bad_port("master_port", self.master_port)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def env(self) -> dict[str, str]:
        """Return the variables that torchrun would set for this process, plus NODE_RANK."""
        variables = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "NODE_RANK": self.node_rank,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            "TORCHELASTIC_USE_AGENT_STORE": self.has_store,
        }
        return {name: str(value) for name, value in variables.items()}


@dataclass(frozen=True)
class Node:
    """This machine in a run of several nodes, in which the user starts the same script once per node.

    Args:
        master_addr: address of node 0.
        master_port: port of the rendezvous on node 0.
        node_rank: rank of this node, from 0; None: node 0 is the one at `master_addr`, the others count as they join.
    """

    master_addr: str
    master_port: int
    node_rank: int | None = None


def bad_port(name: str, value: int) -> Fault:
    """Return the Fault of a port that is out of range."""
    return Fault(
        f"{name}={value}",
        "a port is a number from 1 to 65535",
        "export MASTER_PORT=29400, or any free port, the same on every node",
    )
