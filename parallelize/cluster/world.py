"""Rank and world size of a process in its run, and the address at which the nodes of a run meet.

`World.env` has the variables by which a process knows its World. Those of launchers, from which
`detect` reads one, are in launcher_variables.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        has_store: whether the launcher serves the TCPStore at that address, as torchrun does; else
            rank 0 does.
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
        # Each of the other nodes has at least one of the processes that are not on this node.
        processes_elsewhere = self.world_size - self.local_world_size
        least_nodes = 2 if processes_elsewhere else 1
        most_nodes = processes_elsewhere + 1
        last_node = min(processes_elsewhere, self.num_nodes - 1)
        world_size = f"world_size={self.world_size}"
        local_world_size = f"local_world_size={self.local_world_size}"
        num_nodes = f"num_nodes={self.num_nodes}"
        rows = (
            ("rank", self.rank, 0, self.world_size - 1, world_size),
            ("local_rank", self.local_rank, 0, self.local_world_size - 1, local_world_size),
            ("local_world_size", self.local_world_size, 1, self.world_size, world_size),
            ("node_rank", self.node_rank, 0, last_node, num_nodes),
            (
                "num_nodes",
                self.num_nodes,
                least_nodes,
                most_nodes,
                f"{world_size} and {local_world_size}",
            ),
        )
        for name, value, least, most, related_number in rows:
            if least <= value <= most:
                continue
            why = f"it must be from {least} to {most}"
            if least > most:
                why = "no value is valid"
            yield Fault(
                f"{name}={value} with {related_number}",
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
    """This machine in a run of several nodes, on each of which the user starts the same script.

    Args:
        master_addr: address of node 0.
        master_port: port of the rendezvous on node 0.
        node_rank: rank of this node, from 0; None: node 0 is the one at `master_addr`, the others
            count as they join.
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


def read_integer(
    environ: Mapping[str, str], name: str, default: int | None = None, *, fix: str | None = None
) -> int:
    """Return the integer in a variable.

    Args:
        environ: the variables.
        name: the variable's name.
        default: the value if the variable is not set; None: it has to be set.
        fix: what to do if there is no integer; None: to let the launcher set it.

    Raises:
        ConfigError: the variable is not set, or has no integer.
    """
    value = environ.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        fault = f"{name}={value!r}"
        why = "it is not an integer"
        if value is None:
            fault = f"{name} is not set"
            why = "related variables are set"
        fix = fix or (
            f"let the launcher set {name}, or unset all variables of the launcher to run without "
            "one"
        )
        raise ConfigError(fault, why=why, fix=fix) from None
