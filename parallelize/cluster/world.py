"""Rank and world size of this process, from the variables of torchrun, Slurm (SLURM_*), Open MPI or MPICH."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cluster.hostlist import first_host, tasks_on
from parallelize.errors import ConfigError, Fault

__all__ = ["Node", "World", "detect", "detect_node"]


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
        elsewhere = self.world_size - self.local_world_size  # processes on other nodes: at least one on each
        node_limits = (2 if elsewhere else 1, elsewhere + 1)
        counts = f"world_size={self.world_size} and local_world_size={self.local_world_size}"
        for name, value, least, most, given in (
            ("rank", self.rank, 0, self.world_size - 1, f"world_size={self.world_size}"),
            ("local_rank", self.local_rank, 0, self.local_world_size - 1, f"local_world_size={self.local_world_size}"),
            ("local_world_size", self.local_world_size, 1, self.world_size, f"world_size={self.world_size}"),
            ("node_rank", self.node_rank, 0, min(elsewhere, self.num_nodes - 1), f"num_nodes={self.num_nodes}"),
            ("num_nodes", self.num_nodes, *node_limits, counts),
        ):
            if not least <= value <= most:
                why = f"it must be from {least} to {most}" if least <= most else "no value is valid"
                yield Fault(f"{name}={value} with {given}", why, "check the variables that your launcher sets")
        if not 0 <= self.master_port < 65536:
            yield _bad_port("master_port", self.master_port)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def env(self) -> dict[str, str]:
        """Return the variables that torchrun would set for this process, plus NODE_RANK."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "NODE_RANK": str(self.node_rank),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.has_store),
        }


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


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the World that a launcher has set for this process; None if no launcher started it.

    torchrun's variables come first: it also runs inside Slurm and MPI, whose ranks are then those of its agents.
    mpirun's come before Slurm's: inside a Slurm job srun starts mpirun's daemons, and their processes inherit a
    daemon's SLURM_* values. WORLD_SIZE, MASTER_ADDR, MASTER_PORT and NODE_RANK, which job scripts export, give a
    process no rank (see `detect_node`). An empty variable counts as unset.

    Args:
        environ: variables of this process, as in os.environ; only read.

    Returns:
        Ranks count from 0; world_size counts processes, not GPUs. The local rank is the launcher's: it cannot be
        computed from the rank (`srun -m cyclic` distributes ranks round-robin over the nodes).

    Raises:
        ConfigError: a rank without a size or a local rank, a value that is no integer, values that contradict each
            other, several processes without an address for their rendezvous.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables,
        https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES,
        https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html; MPICH's hydra and Intel MPI set PMI_RANK,
        PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS.
    """
    present = _present(environ)
    for detect_launcher in (_torchrun, _open_mpi, _mpich, _slurm):
        world = detect_launcher(present)
        if world is not None:
            return world
    return None


def detect_node(environ: Mapping[str, str]) -> Node | None:
    """Return the rendezvous of the nodes, from MASTER_ADDR, MASTER_PORT and (optionally) NODE_RANK; None without it.

    A port alone does not count: job scripts export one for other programs.

    Raises:
        ConfigError: an address without a port, a port that is no integer from 1 to 65535, a rank that is no integer
            from 0.
    """
    present = _present(environ)
    if "MASTER_ADDR" not in present:
        return None
    port = _integer(present, "MASTER_PORT", fix="export MASTER_PORT=29400, or any free port, the same on every node")
    if not 0 < port < 65536:
        raise ConfigError.of([_bad_port("MASTER_PORT", port)])
    node_rank = _integer(present, "NODE_RANK") if "NODE_RANK" in present else None
    if node_rank is not None and node_rank < 0:
        raise ConfigError(
            f"NODE_RANK={node_rank}", why="nodes count from 0", fix="export NODE_RANK=0 on the node of MASTER_ADDR"
        )
    return Node(present["MASTER_ADDR"], port, node_rank)


def _torchrun(environ: Mapping[str, str]) -> World | None:
    # Some cluster guides export WORLD_SIZE alone from a job script: that gives a process no rank.
    if "RANK" not in environ:
        return None
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environ.keys():
        # A script may export only RANK and WORLD_SIZE, copied from srun or mpirun: the rest is in their variables.
        for detect_launcher in (_open_mpi, _mpich, _slurm):
            world = detect_launcher(environ)
            if world is not None and (world.rank, world.world_size) == (rank, world_size):
                return world
    local_rank = _integer(environ, "LOCAL_RANK", 0 if world_size == 1 else None)
    # Without LOCAL_WORLD_SIZE all processes are on this node, unless rank and local rank differ.
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", world_size if rank == local_rank else None)
    node_rank = _integer(environ, "NODE_RANK", _infer_node_rank(rank, local_rank, local_world_size, world_size))
    num_nodes = _integer(environ, "GROUP_WORLD_SIZE", 0)
    address, port = _rendezvous(environ, one_node=local_world_size == world_size, port=0 if world_size == 1 else None)
    return World(
        rank=rank,
        local_rank=local_rank,
        node_rank=_integer(environ, "GROUP_RANK", node_rank),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=address,
        master_port=port,
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        num_nodes=num_nodes,
    )


def _open_mpi(environ: Mapping[str, str]) -> World | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    run_id = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "mpirun"
    return _mpi(environ, "OMPI_COMM_WORLD_{}", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), run_id)


def _mpich(environ: Mapping[str, str]) -> World | None:
    if not {"PMI_RANK", "PMI_SIZE"} <= environ.keys():
        return None
    # `srun --mpi=pmi2` sets these two as well, but no local rank: use Slurm's variables.
    if "SLURM_STEP_ID" in environ and "MPI_LOCALRANKID" not in environ:
        return None
    return _mpi(environ, "{}", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "mpirun")


def _mpi(environ: Mapping[str, str], template: str, names: tuple[str, str, str, str], run_id: str) -> World:
    """Build the World from four variables: rank, size, local rank, local size; each run has its own `run_id`."""
    rank, world_size = (_integer(environ, template.format(name)) for name in names[:2])
    is_single = world_size == 1
    local_rank = _integer(environ, template.format(names[2]), 0 if is_single else None)
    local_world_size = _integer(environ, template.format(names[3]), 1 if is_single else None)
    address, port = _rendezvous(environ, one_node=local_world_size == world_size, port=_port_for(run_id))
    return World(
        rank=rank,
        local_rank=local_rank,
        node_rank=_infer_node_rank(rank, local_rank, local_world_size, world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=address,
        master_port=port,
    )


def _slurm(environ: Mapping[str, str]) -> World | None:
    # Only a job step has SLURM_STEP_ID: a batch script and salloc's shell see the job's task counts but are no task.
    # A one-task step is an interactive shell (srun --pty) or a plain program, and no rank of a run.
    if "SLURM_STEP_ID" not in environ or _integer(environ, "SLURM_STEP_NUM_TASKS", 1) < 2:
        return None
    node_rank = _integer(environ, "SLURM_NODEID")
    local_world_size, num_nodes = tasks_on(node_rank, environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    address, port = _rendezvous(
        environ,
        one_node=num_nodes == 1,
        host=environ.get("SLURM_STEP_NODELIST"),
        port=_port_for(f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"),
    )
    return World(
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        node_rank=node_rank,
        world_size=_integer(environ, "SLURM_STEP_NUM_TASKS"),
        local_world_size=local_world_size,
        master_addr=address,
        master_port=port,
        num_nodes=num_nodes,
    )


def _present(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if value.strip()}


def _integer(environ: Mapping[str, str], name: str, default: int | None = None, *, fix: str | None = None) -> int:
    value = environ.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise ConfigError(
            f"{name} is not set" if value is None else f"{name}={value!r}",
            why="related variables are set" if value is None else "it is not an integer",
            fix=fix or f"let the launcher set {name}, or unset all variables of the launcher to run without one",
        ) from None


def _infer_node_rank(rank: int, local_rank: int, local_world_size: int, world_size: int) -> int:
    """Compute the node's rank, if ranks fill one node after another or are distributed round-robin."""
    size = max(local_world_size, 1)
    if (rank - local_rank) % size == 0:
        return (rank - local_rank) // size
    return rank % max(-(-world_size // size), 1)


def _rendezvous(
    environ: Mapping[str, str], *, one_node: bool, port: int | None, host: str | None = None
) -> tuple[str, int]:
    """Return address and port of the rendezvous: MASTER_ADDR and MASTER_PORT, else from the launcher's variables."""
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_node else host and first_host(host))
    if not address:
        raise ConfigError(
            "MASTER_ADDR is not set",
            why="processes are on several nodes, and their launcher does not provide the address of rank 0",
            fix="export MASTER_ADDR=<address of the first node> to all of them (Open MPI: mpirun -x MASTER_ADDR)",
        )
    return address, _integer(environ, "MASTER_PORT", port)


def _port_for(run_id: str) -> int:
    # All processes of a run derive the same port: above well-known services, below Linux's ephemeral ports (32768 up).
    return 20000 + zlib.crc32(run_id.encode(errors="replace")) % 12000


def _bad_port(name: str, value: int) -> Fault:
    return Fault(
        f"{name}={value}",
        "a port is a number from 1 to 65535",
        "export MASTER_PORT=29400, or any free port, the same on every node",
    )
