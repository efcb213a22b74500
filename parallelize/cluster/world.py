"""Who this process is among how many, read from the variables that launchers set."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cluster.hostlist import first_host, tasks_on
from parallelize.errors import ConfigError, Fault

__all__ = ["Node", "World", "detect", "detect_node"]


@dataclass(frozen=True)
class World:
    """This process among the others of one run.

    Args:
        rank: number of this process among all, from 0.
        local_rank: number of this process on its node, from 0.
        node_rank: number of this process's node, from 0.
        world_size: processes in all.
        local_world_size: processes on this node; other nodes may have more or fewer.
        master_addr: address on which rank 0 can be reached.
        master_port: port of the rendezvous there; 0: none chosen yet.
        has_store: whether the launcher itself serves a store at that address, as torchrun does; else rank 0 must.
        num_nodes: nodes in all; 0: as many as equal shares make, which the World then holds.

    Raises:
        ConfigError: numbers that do not fit each other.
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
            shares = -(-self.world_size // self.local_world_size)
            object.__setattr__(self, "num_nodes", max(self.node_rank + 1, shares))
        faults = list(self._faults())
        if faults:
            raise ConfigError.of(faults)

    def _faults(self) -> Iterator[Fault]:
        elsewhere = self.world_size - self.local_world_size  # every other node has at least one of these
        nodes = (2 if elsewhere else 1, elsewhere + 1)
        counts = f"world_size={self.world_size} and local_world_size={self.local_world_size}"
        for name, value, least, most, given in (
            ("rank", self.rank, 0, self.world_size - 1, f"world_size={self.world_size}"),
            ("local_rank", self.local_rank, 0, self.local_world_size - 1, f"local_world_size={self.local_world_size}"),
            ("local_world_size", self.local_world_size, 1, self.world_size, f"world_size={self.world_size}"),
            ("node_rank", self.node_rank, 0, min(elsewhere, self.num_nodes - 1), f"num_nodes={self.num_nodes}"),
            ("num_nodes", self.num_nodes, *nodes, counts),
        ):
            if not least <= value <= most:
                why = f"it goes from {least} to {most} there" if least <= most else "no number fits there"
                yield Fault(f"{name}={value} with {given}", why, "check the variables that your launcher sets")
        if not 0 <= self.master_port < 65536:
            yield _bad_port("master_port", self.master_port)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def env(self) -> dict[str, str]:
        """The variables torchrun would set for this process, and NODE_RANK beside its GROUP_RANK."""
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
    """This machine among the nodes of a run in which the same script is started once per node.

    Args:
        master_addr: address of node 0.
        master_port: port on node 0 at which the nodes meet.
        node_rank: number of this node, from 0; None: whoever is at `master_addr` is 0, the others as they come.
    """

    master_addr: str
    master_port: int
    node_rank: int | None = None


def detect(environ: Mapping[str, str]) -> World | None:
    """The World in which a launcher has placed this process, or None if nobody launched it.

    torchrun is asked first: it also runs inside Slurm and MPI, whose ranks are then those of its agents. mpirun is
    asked before Slurm: inside a Slurm job it starts its daemons by srun, and the processes inherit a daemon's numbers.
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT and NODE_RANK are no place, with whichever of them a job script exports: they
    say how many there are and where nodes meet (see `detect_node`). A variable that is set to nothing is not set.

    Args:
        environ: variables of this process, as in os.environ; only read.

    Returns:
        Ranks count from 0; world_size counts processes, not GPUs. The local rank is what a launcher says it is: it
        does not follow from the rank (`srun -m cyclic` deals ranks to the nodes in turn).

    Raises:
        ConfigError: a rank without a size or a local rank, a value that is no integer, numbers that do not fit each
            other, several processes with no place to meet.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables,
        https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES,
        https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html; MPICH's hydra and Intel MPI set PMI_RANK,
        PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS.
    """
    present = _present(environ)
    for read in (_torchrun, _open_mpi, _mpich, _slurm):
        world = read(present)
        if world is not None:
            return world
    return None


def detect_node(environ: Mapping[str, str]) -> Node | None:
    """Where the nodes of this run meet, from MASTER_ADDR, MASTER_PORT and (optionally) NODE_RANK.

    A port alone is no place: job scripts export one for whatever they start.

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
    # WORLD_SIZE alone is what some cluster guides export from a job script: it places nobody.
    if "RANK" not in environ:
        return None
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environ.keys():
        # A script that gives torch's names to the ranks of srun or mpirun may leave the rest to them.
        for read in (_open_mpi, _mpich, _slurm):
            world = read(environ)
            if world is not None and (world.rank, world.world_size) == (rank, world_size):
                return world
    local_rank = _integer(environ, "LOCAL_RANK", 0 if world_size == 1 else None)
    # Without a count, all processes are on this node, unless their ranks say that some are not.
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", world_size if rank == local_rank else None)
    node_rank = _integer(environ, "NODE_RANK", _node(rank, local_rank, local_world_size, world_size))
    num_nodes = _integer(environ, "GROUP_WORLD_SIZE", 0)
    address, port = _meeting(environ, one_node=local_world_size == world_size, port=0 if world_size == 1 else None)
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
    run = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "mpirun"
    return _mpi(environ, "OMPI_COMM_WORLD_{}", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), run)


def _mpich(environ: Mapping[str, str]) -> World | None:
    if not {"PMI_RANK", "PMI_SIZE"} <= environ.keys():
        return None
    # `srun --mpi=pmi2` sets these two as well; the local rank is then Slurm's.
    if "SLURM_STEP_ID" in environ and "MPI_LOCALRANKID" not in environ:
        return None
    return _mpi(environ, "{}", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "mpirun")


def _mpi(environ: Mapping[str, str], form: str, names: tuple[str, str, str, str], run: str) -> World:
    """The World by four variables: rank, size, local rank, local size; `run` tells two runs on one machine apart."""
    rank, world_size = (_integer(environ, form.format(name)) for name in names[:2])
    alone = world_size == 1
    local_rank = _integer(environ, form.format(names[2]), 0 if alone else None)
    local_world_size = _integer(environ, form.format(names[3]), 1 if alone else None)
    address, port = _meeting(environ, one_node=local_world_size == world_size, port=_port_of(run))
    return World(
        rank=rank,
        local_rank=local_rank,
        node_rank=_node(rank, local_rank, local_world_size, world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=address,
        master_port=port,
    )


def _slurm(environ: Mapping[str, str]) -> World | None:
    # Only a step has SLURM_STEP_ID: a batch script and salloc's shell have the job's task counts without being a task.
    # A step of one task is an interactive shell (srun --pty) or a plain program: it is nobody's rank.
    if "SLURM_STEP_ID" not in environ or _integer(environ, "SLURM_STEP_NUM_TASKS", 1) < 2:
        return None
    node_rank = _integer(environ, "SLURM_NODEID")
    local_world_size, num_nodes = tasks_on(node_rank, environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    address, port = _meeting(
        environ,
        one_node=num_nodes == 1,
        host=environ.get("SLURM_STEP_NODELIST"),
        port=_port_of(f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"),
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
            why="variables that go with it are set" if value is None else "it is no whole number",
            fix=fix or f"let the launcher set {name}, or unset all of its variables to run without one",
        ) from None


def _node(rank: int, local_rank: int, local_world_size: int, world_size: int) -> int:
    """The node's number where nobody tells it: nodes are filled one after the other, or are dealt ranks in turn."""
    size = max(local_world_size, 1)
    if (rank - local_rank) % size == 0:
        return (rank - local_rank) // size
    return rank % max(-(-world_size // size), 1)


def _meeting(
    environ: Mapping[str, str], *, one_node: bool, port: int | None, host: str | None = None
) -> tuple[str, int]:
    """Address and port at which the ranks meet: MASTER_ADDR and MASTER_PORT, else what the launcher makes known."""
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_node else host and first_host(host))
    if not address:
        raise ConfigError(
            "MASTER_ADDR is not set",
            why="processes are on several nodes, and their launcher does not tell them where rank 0 is",
            fix="export MASTER_ADDR=<address of the first node> to all of them (Open MPI: mpirun -x MASTER_ADDR)",
        )
    return address, _integer(environ, "MASTER_PORT", port)


def _port_of(run: str) -> int:
    # Every process of a run derives it alike. Above the ports of well-known services, below those that Linux hands
    # out to clients (32768 and up).
    return 20000 + zlib.crc32(run.encode(errors="replace")) % 12000


def _bad_port(name: str, value: int) -> Fault:
    return Fault(
        f"{name}={value}",
        "a port is a number from 1 to 65535",
        "export MASTER_PORT=29400, or any free port, the same on every node",
    )
