"""Rank of this process, or of its node, from the variables of the launcher that has started it.

detect        the rank of this process in a run, from a row of launcher_variables.py
detect_node   the rank of this machine in a run, in which the user starts one script on each
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping

from parallelize.cluster.launcher_variables import LAUNCHERS, TORCHRUN, LauncherVariables, Names
from parallelize.cluster.network import loopback
from parallelize.cluster.world import Node, World, bad_port, read_integer
from parallelize.errors import ConfigError

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")

# Ports of runs whose launcher sets none: above the well-known services, and below the ephemeral
# ports of Linux, which begin at 32768.
_FIRST_PORT = 20000
_NUMBER_OF_PORTS = 12000


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the World of this process: of its launcher, or of the user's own process group.

    In this order:

        torchrun            RANK, LOCAL_RANK and LOCAL_WORLD_SIZE are set. It also runs inside Slurm
                            and MPI, whose ranks are then those of its agents.
        another launcher    the first of `LAUNCHERS` that has started this process
        a pod of Kubeflow   RANK without LOCAL_RANK, or PET_*: a node with one process
        the user's group    as in processes of torch.multiprocessing.spawn; without LOCAL_RANK,
                            LOCAL_WORLD_SIZE and NODE_RANK, all ranks count as those of one node

    WORLD_SIZE, MASTER_ADDR, MASTER_PORT and NODE_RANK, which job scripts export, give a process no
    rank: see `detect_node`. An empty variable counts as unset.

    Args:
        environ: variables of this process, as in os.environ; only read.

    Returns:
        None: no launcher started this process. Ranks count from 0; world_size counts processes, not
        GPUs. The local rank is the launcher's: it cannot be computed from the rank, since
        `srun -m cyclic` distributes ranks round-robin over the nodes.

    Raises:
        ConfigError: a rank without a size or a local rank, a value that is no integer, values that
            contradict each other, several processes without an address for their rendezvous.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables,
        https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES,
        https://slurm.schedmd.com/heterogeneous_jobs.html,
        https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html,
        https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch,
        https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html,
        https://cpe.ext.hpe.com/docs/latest/mpt/index.html (PALS); MPICH's hydra and Intel MPI set
        PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS.
    """
    variables = _set_variables(environ)
    if {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= variables.keys():
        return _world_of(TORCHRUN, variables)
    world = None
    for launcher in LAUNCHERS:
        world = world or _world_of(launcher, variables)
    if "RANK" not in variables:
        return world or _world_of_pod(variables) or _world_of_users_group(variables)
    # A script may export RANK and WORLD_SIZE that it has copied from srun or mpirun. The rest is in
    # the variables of these. RANK alone may also be that of a pod, or of a node, whose WORLD_SIZE
    # counts processes, or it may be left in a shell.
    rank = read_integer(variables, "RANK")
    world_size = read_integer(variables, "WORLD_SIZE")
    has_local_rank = "LOCAL_RANK" in variables
    if world is not None:
        is_copy = (world.rank, world.world_size) == (rank, world_size)
        if is_copy or (not has_local_rank and world.world_size > 1):
            return world
    return _world_of(TORCHRUN, variables) if has_local_rank else _world_of_pod(variables)


def detect_node(environ: Mapping[str, str]) -> Node | None:
    """Return the rendezvous of the nodes, from MASTER_ADDR, MASTER_PORT and NODE_RANK.

    A port alone does not count: job scripts export one for other programs. PET_MASTER_ADDR,
    PET_RDZV_ENDPOINT, ..., which set torchrun's options, count like the variables of the same name
    without PET_.

    Returns:
        None: no MASTER_ADDR. Without NODE_RANK, the node has no rank yet.

    Raises:
        ConfigError: an address without a port, a port that is no integer from 1 to 65535, a rank
            that is no integer.
    """
    variables = _set_variables(environ)
    if "MASTER_ADDR" not in variables:
        return None
    port = read_integer(
        variables,
        "MASTER_PORT",
        fix="export MASTER_PORT=29400, or any free port, the same on every node",
    )
    if not 0 < port < 65536:
        raise ConfigError.of([bad_port("MASTER_PORT", port)])
    node_rank = None
    if "NODE_RANK" in variables:
        node_rank = read_integer(variables, "NODE_RANK")
    return Node(_without_brackets(variables["MASTER_ADDR"]), port, node_rank)


def number_of_pods(environ: Mapping[str, str]) -> int | None:
    """Return the number of nodes in PET_NNODES, torchrun's option that Kubeflow sets in every pod.

    Returns:
        None: the variable is not set.

    Raises:
        ConfigError: a range, as in elastic jobs, or no integer.
    """
    value = environ.get("PET_NNODES", "").strip()
    if not value:
        return None
    least, _, most = value.partition(":")
    if most and least != most:
        raise ConfigError(
            f"PET_NNODES={value!r}",
            why="a call runs on a fixed number of nodes, and this is a range",
            fix="start the script by torchrun, which waits for the nodes, or use "
            "num_nodes=<number of pods>",
        )
    return read_integer({"PET_NNODES": least}, "PET_NNODES")


def _set_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not empty, and torchrun's options, PET_*, without the prefix.

    PMI_RANK is left out unless it is hydra's: Flux, PALS and `srun --mpi=pmi2` set it, too, and
    only hydra sets MPI_LOCALRANKID.
    """
    variables = {name: value for name, value in environ.items() if value.strip()}
    others_that_set_it = {"SLURM_STEP_ID", "FLUX_TASK_RANK", "PALS_RANKID"} & variables.keys()
    is_of_hydra = "MPI_LOCALRANKID" in variables or not others_that_set_it
    if "PMI_SIZE" not in variables or not is_of_hydra:
        variables.pop("PMI_RANK", None)

    options: dict[str, str] = {}
    host, _, port = variables.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    # The server of etcd, which the endpoint may be, is on no node of the run.
    if host and not variables.get("PET_RDZV_BACKEND", "").startswith("etcd"):
        options = {"MASTER_ADDR": host, "MASTER_PORT": port}
    for name in _RENDEZVOUS:
        if f"PET_{name}" in variables:
            options[name] = variables[f"PET_{name}"]
    return {**options, **variables}


def _world_of_pod(variables: Mapping[str, str]) -> World | None:
    """Return the world of pods, with one process in each.

    PET_* count pods. WORLD_SIZE may count the processes that torchrun would start in them, unlike
    RANK, which is the pod's.
    """
    pod = {**variables, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if {"PET_NNODES", "PET_NODE_RANK"} <= variables.keys():
        pod["RANK"] = variables["PET_NODE_RANK"]
        pod["WORLD_SIZE"] = str(number_of_pods(variables))
    if "RANK" not in pod:
        return None
    return _world_of(TORCHRUN, {**pod, "GROUP_RANK": pod["RANK"]})


def _world_of_users_group(variables: Mapping[str, str]) -> World | None:
    """Return the world of the process group that the user has initialized.

    Returns:
        None: there is none, or it has one rank.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    return World(
        rank=rank,
        local_rank=read_integer(variables, "LOCAL_RANK", rank),
        node_rank=read_integer(variables, "NODE_RANK", 0),
        world_size=world_size,
        local_world_size=read_integer(variables, "LOCAL_WORLD_SIZE", world_size),
    )


def _world_of(launcher: LauncherVariables, variables: Mapping[str, str]) -> World | None:
    """Return the world of this process by the variables of a launcher.

    Returns:
        None: the launcher has not started this process as a rank.
    """
    if launcher.rank not in variables:
        return None
    # A launcher that also starts plain programs, as one process, need not set their number.
    default = None
    if launcher.least_processes > 1:
        default = 1
    if _number(variables, launcher.world_size, default) < launcher.least_processes:
        return None
    variables = {**launcher.derive(variables), **variables}
    world_size = _number(variables, launcher.world_size)
    rank = read_integer(variables, launcher.rank)
    local_rank = read_integer(variables, launcher.local_rank, 0 if world_size == 1 else None)
    local_world_size = _local_world_size(launcher, variables, rank, local_rank)
    node_rank = _node_rank_by_position(rank, local_rank, world_size, local_world_size)
    return World(
        rank=rank,
        local_rank=local_rank,
        node_rank=_number(variables, launcher.node_rank, node_rank),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=_address(variables, has_one_node=local_world_size == world_size),
        master_port=_port(launcher, variables, world_size),
        has_store=launcher is TORCHRUN and variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        num_nodes=_number(variables, launcher.num_nodes, 0),
    )


def _local_world_size(
    launcher: LauncherVariables, variables: Mapping[str, str], rank: int, local_rank: int
) -> int:
    """Return the number of processes of this node, from its variable or for nodes of equal size."""
    world_size = _number(variables, launcher.world_size)
    num_nodes = _number(variables, launcher.num_nodes, 0)
    size_of_equal_nodes, remainder = divmod(world_size, num_nodes or 1)
    if remainder and not launcher.local_world_size:
        raise ConfigError(
            f"{launcher.world_size[0]}={world_size} with {launcher.num_nodes[0]}={num_nodes}",
            why="this launcher does not set the number of processes of a node, and they cannot be "
            "equal",
            fix="start the same number of processes on every node",
        )
    # Without the number of nodes, all processes are on one, unless rank and local rank differ.
    default = None
    if num_nodes > 0 or rank == local_rank:
        default = size_of_equal_nodes
    return _number(variables, launcher.local_world_size or launcher.num_nodes, default)


def _node_rank_by_position(
    rank: int, local_rank: int, world_size: int, local_world_size: int
) -> int:
    """Return the rank of this node among nodes of equal size, from the two layouts of ranks.

        one node after another    node 0: 0 1 2    node 1: 3 4 5    rank = node * 3 + local rank
        round-robin               node 0: 0 2 4    node 1: 1 3 5    rank = node + 2 * local rank

    A process may fit both layouts: rank 0, and the last rank, are at the same place in them.
    """
    size = max(local_world_size, 1)  # a node of size 0 is refused by World
    node_rank, remainder = divmod(rank - local_rank, size)
    if remainder == 0:
        return node_rank
    num_nodes = max(-(-world_size // size), 1)
    return rank % num_nodes


def _address(variables: Mapping[str, str], *, has_one_node: bool) -> str:
    """Return the address of rank 0: that of the launcher or the user, else loopback on one node."""
    default = loopback() if has_one_node else ""
    address = _without_brackets(variables.get("MASTER_ADDR", default))
    if not address:
        raise ConfigError(
            "MASTER_ADDR is not set",
            why="processes are on several nodes, and their launcher does not provide the address "
            "of rank 0",
            fix="export MASTER_ADDR=<address of the first node> to all of them "
            "(Open MPI: mpirun -x MASTER_ADDR)",
        )
    return address


def _without_brackets(address: str) -> str:
    """Return an address of IPv6 as sockets take it, fd00::1, of a URL's [fd00::1]."""
    return address.strip("[]")


def _port(launcher: LauncherVariables, variables: Mapping[str, str], world_size: int) -> int:
    """Return the port of the rendezvous: MASTER_PORT, else one that all ranks of a run derive."""
    default = 0 if world_size == 1 else None
    if launcher.run_id:
        values = [variables[name] for name in launcher.run_id if name in variables]
        run_id = ".".join(values) or "mpirun"
        checksum = zlib.crc32(run_id.encode(errors="replace"))
        default = _FIRST_PORT + checksum % _NUMBER_OF_PORTS
    return read_integer(variables, "MASTER_PORT", default)


def _number(variables: Mapping[str, str], names: Names, default: int | None = None) -> int:
    """Return the integer of the first of the names that is set, else the default.

    Raises:
        ConfigError: none is set and there is no default, or the value is no integer.
    """
    for name in names:
        if name in variables:
            return read_integer(variables, name)
    if default is not None:
        return default
    return read_integer(variables, names[0])
