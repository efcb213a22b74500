"""Rank of this process, or of its node, from the variables of launchers: torchrun, Kubeflow, MPI, Flux, PALS, Slurm."""

from __future__ import annotations

import itertools
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from parallelize.cluster.network import loopback
from parallelize.cluster.world import Node, World, bad_port
from parallelize.errors import ConfigError

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
_MOST_NODES = 1 << 16
"""The largest range of Slurm's lists of nodes (MAX_RANGE): a longer one is no list of nodes."""


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed list: rack1-node3 of "rack[1-2]-node[3-4],b".

    Source: https://slurm.schedmd.com/scontrol.html (show hostnames)
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist).partition(",")[0]


def tasks_per_node(counts: str) -> list[int]:
    """Return the number of tasks on each node of Slurm's compressed list: 2, 2, 2, 1 of "2(x3),1"."""
    parts = re.findall(r"(\d{1,9})(?:\(x(\d{1,6})\))?", counts)
    return [int(tasks) for tasks, nodes in parts for _ in range(int(nodes or 1))]


def hosts(nodelist: str) -> Iterator[str]:
    """Yield the hosts of Slurm's compressed list in its order: n1, n2, n4, b of "n[1-2,4],b".

    Source: https://slurm.schedmd.com/scontrol.html (show hostnames)
    """
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist):
        prefix, bracket, rest = entry.partition("[")
        if not bracket:
            yield entry
            continue
        ranges, _, suffix = rest.partition("]")
        ends = [*hosts(suffix)] or [""]
        for number in _numbers(ranges):
            yield from (f"{prefix}{number}{end}" for end in ends)


def _numbers(ranges: str) -> Iterator[str]:
    """Yield the numbers of ranges, with their zeros: 01, 02, 04 of "01-02,04"."""
    for first, last in re.findall(r"(\d{1,9})(?:-(\d{1,9}))?", ranges, re.ASCII):
        numbers = range(int(first), int(last or first) + 1)
        for number in numbers[:_MOST_NODES]:
            yield f"{number:0{len(first)}}"


def _of_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what has no variable of its own: the processes of this node, the nodes, and the address of rank 0."""
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node_rank = _integer(environ, "SLURM_NODEID")
    if (
        "SLURM_GTIDS" in environ
    ):  # the ranks on this node; some scripts unset it for programs that it disturbs
        local_size = len(environ["SLURM_GTIDS"].split(","))
    else:
        local_size = tasks[node_rank] if 0 <= node_rank < len(tasks) else 0
    computed = {
        "=LOCAL_SIZE": str(local_size),
        "=NUM_NODES": str(len(tasks)),
    }  # no variable has such a name
    if len(tasks) > 1 and "MASTER_ADDR" not in environ:
        computed["MASTER_ADDR"] = _node_of_rank_0(environ, node_rank)
    return computed


def _node_of_rank_0(environ: Mapping[str, str], node_rank: int) -> str:
    """Return the name of the node of rank 0 in a step of Slurm.

    The nodes of a step are listed in the order of their ranks, except over several components (`srun --het-group=0,1`,
    `srun A : B`). These are ranked one after another, but their nodes, and the tasks per node, are listed in the order
    of the nodes' names: see `_reorder_het_job_recs` in Slurm's src/srun/srun.c.

    Args:
        environ: variables of this process.
        node_rank: rank of its node, from 0, which is the node of rank 0.

    Raises:
        ConfigError: the first node in the list is not that of rank 0, and nothing tells the other ranks which one is.
    """
    nodelist = environ.get("SLURM_STEP_NODELIST", "")
    first = first_host(nodelist)
    # A job that is submitted in a heterogeneous job inherits the variables of that job's components.
    if environ.get("SLURM_JOB_ID_HET_GROUP_0") == environ.get("SLURM_JOB_ID", ""):
        first = next(
            filter(set(hosts(nodelist)).__contains__, _hosts_of_components(environ)), first
        )
    name = environ.get("SLURMD_NODENAME", first)
    if node_rank == 0 and name != first:
        raise ConfigError(
            f"rank 0 is on node {name}, and the list of its step, {nodelist}, begins with {first}",
            why="Slurm sorts the nodes of a heterogeneous step (srun A : B) by name and not by rank, so that the other "
            "ranks do not know where rank 0 is",
            fix=f"export MASTER_ADDR={name} before srun, or submit a heterogeneous job and use srun --het-group",
        )
    return first


def _hosts_of_components(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the nodes of a heterogeneous job, component by component: the order of its ranks."""
    for component in itertools.count():
        nodelist = environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{component}")
        if nodelist is None:
            return
        yield from hosts(nodelist)


class _Launcher(NamedTuple):
    """Names of a launcher's variables; of several, with spaces between them, the first that is set counts.

    Args:
        rank: rank of this process.
        local_rank: its rank on its node.
        world_size: number of processes.
        local_world_size: number of processes on its node; not set: that of nodes of equal size.
        node_rank: rank of its node; not set: computed from the ranks.
        num_nodes: number of nodes; not set: computed from the sizes.
        run_id: together they differ between runs, and are equal in all processes of a run; "": it sets MASTER_PORT.
        least: fewer processes are an interactive shell or a plain program, and no ranks of a run.
        more: what is computed from other variables.
    """

    rank: str
    local_rank: str
    world_size: str
    local_world_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    run_id: str = ""
    least: int = 1
    more: Callable[[Mapping[str, str]], Mapping[str, str]] = lambda _: {}


_TORCHRUN = _Launcher(
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK NODE_RANK",
    "GROUP_WORLD_SIZE",
)
_LAUNCHERS = (
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        run_id="PMIX_NAMESPACE OMPI_MCA_ess_base_jobid",
    ),
    # MPICH, Intel MPI; MPICH's variables do not identify a run
    _Launcher(
        "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS", run_id="I_MPI_HYDRA_UUID"
    ),
    _Launcher(
        "FLUX_TASK_RANK",
        "FLUX_TASK_LOCAL_ID",
        "FLUX_JOB_SIZE",
        num_nodes="FLUX_JOB_NNODES",
        run_id="FLUX_JOB_ID",
        least=2,
    ),
    # Only a step has its number of tasks: a batch script and salloc's shell see the counts of the job.
    _Launcher(
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_TASKS",
        "=LOCAL_SIZE",
        "SLURM_NODEID",
        "=NUM_NODES",
        run_id="SLURM_JOB_ID SLURM_STEP_ID",
        least=2,
        more=_of_slurm,
    ),
    # Older releases set some as PMI_* only; a script may export WORLD_SIZE where PMI_SIZE is missing.
    _Launcher(
        "PALS_RANKID",
        "PALS_LOCAL_RANKID",
        "PALS_SIZE PMI_SIZE WORLD_SIZE",
        "PALS_LOCAL_SIZE PMI_LOCAL_SIZE",
        run_id="PALS_APID",
    ),
)


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the World that a launcher has set for this process, or of the process group that the user has initialized.

    torchrun's variables come first: it also runs inside Slurm and MPI, whose ranks are then those of its agents.
    mpirun's come before Slurm's: inside a Slurm job srun starts mpirun's daemons, and their processes inherit a
    daemon's SLURM_* values. Flux and Slurm can set PMI_* and PALS_*, too, so they come before PALS. A pod of Kubeflow
    (RANK without LOCAL_RANK, or PET_*) is a node with one process. WORLD_SIZE, MASTER_ADDR, MASTER_PORT and NODE_RANK,
    which job scripts export, give a process no rank (see `detect_node`). An empty variable counts as unset. Last comes
    the user's own group, as in processes of torch.multiprocessing.spawn; without LOCAL_RANK, LOCAL_WORLD_SIZE and
    NODE_RANK they are taken to be those of one node.

    Args:
        environ: variables of this process, as in os.environ; only read.

    Returns:
        None: no launcher started this process. Ranks count from 0; world_size counts processes, not GPUs. The local
        rank is the launcher's: it cannot be computed from the rank (`srun -m cyclic` distributes ranks round-robin
        over the nodes).

    Raises:
        ConfigError: a rank without a size or a local rank, a value that is no integer, values that contradict each
            other, several processes without an address for their rendezvous.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables,
        https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES,
        https://slurm.schedmd.com/heterogeneous_jobs.html,
        https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html,
        https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch,
        https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html,
        https://cpe.ext.hpe.com/docs/latest/mpt/index.html (PALS); MPICH's hydra and Intel MPI set PMI_RANK, PMI_SIZE,
        MPI_LOCALRANKID, MPI_LOCALNRANKS.
    """
    present = _present(environ)
    if {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= present.keys():
        return _read(_TORCHRUN, present)
    world = next(filter(None, (_read(each, present) for each in _LAUNCHERS)), None)
    if "RANK" not in present:
        return world or _pod(present) or _users_group(present)
    # A script may export only RANK and WORLD_SIZE, copied from srun or mpirun: the rest is in their variables.
    # RANK alone may be a pod's, a node's (WORLD_SIZE then counts processes) or left in a shell.
    is_rank = "LOCAL_RANK" in present
    numbers = _integer(present, "RANK"), _integer(present, "WORLD_SIZE")
    if world and (
        (world.rank, world.world_size) == numbers or (not is_rank and world.world_size > 1)
    ):
        return world
    return _read(_TORCHRUN, present) if is_rank else _pod(present)


def detect_node(environ: Mapping[str, str]) -> Node | None:
    """Return the rendezvous of the nodes, from MASTER_ADDR, MASTER_PORT and (optionally) NODE_RANK; None without it.

    A port alone does not count: job scripts export one for other programs. PET_MASTER_ADDR, PET_RDZV_ENDPOINT, ...,
    which set torchrun's options, count like the variables of the same name without PET_.

    Raises:
        ConfigError: an address without a port, a port that is no integer from 1 to 65535, a rank that is no integer.
    """
    present = _present(environ)
    if "MASTER_ADDR" not in present:
        return None
    port = _integer(
        present,
        "MASTER_PORT",
        fix="export MASTER_PORT=29400, or any free port, the same on every node",
    )
    if not 0 < port < 65536:
        raise ConfigError.of([bad_port("MASTER_PORT", port)])
    node_rank = _integer(present, "NODE_RANK") if "NODE_RANK" in present else None
    return Node(present["MASTER_ADDR"].strip("[]"), port, node_rank)


def number_of_pods(environ: Mapping[str, str]) -> int | None:
    """Return the number of nodes in PET_NNODES, torchrun's option that Kubeflow sets in every pod; None: not set.

    Raises:
        ConfigError: a range, as in elastic jobs, or no integer.
    """
    value = environ.get("PET_NNODES", "").strip()
    least, _, most = value.partition(":")
    if most and least != most:
        raise ConfigError(
            f"PET_NNODES={value!r}",
            why="a call runs on a fixed number of nodes, and this is a range",
            fix="start the script by torchrun, which waits for the nodes, or use num_nodes=<number of pods>",
        )
    return _integer({"PET_NNODES": least}, "PET_NNODES") if value else None


def _pod(environ: Mapping[str, str]) -> World | None:
    """Return the world of pods: one process in each. PET_* count pods; WORLD_SIZE may count processes, unlike RANK."""
    pod = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if {"PET_NNODES", "PET_NODE_RANK"} <= environ.keys():
        pod |= {"RANK": environ["PET_NODE_RANK"], "WORLD_SIZE": str(number_of_pods(environ))}
    found = {**environ, **pod}
    return _read(_TORCHRUN, {**found, "GROUP_RANK": found["RANK"]}) if "RANK" in found else None


def _read(launcher: _Launcher, environ: Mapping[str, str]) -> World | None:
    def number(names: str, default: int | None = None) -> int:
        known = names.split() or [""]
        return _integer(
            environ, next((name for name in known if name in environ), known[0]), default
        )

    least = launcher.least
    if launcher.rank not in environ or number(launcher.world_size, least - 1 or None) < least:
        return None
    environ = {**launcher.more(environ), **environ}
    world_size, rank = number(launcher.world_size), number(launcher.rank)
    is_single = world_size == 1
    local_rank, num_nodes = (
        number(launcher.local_rank, 0 if is_single else None),
        number(launcher.num_nodes, 0),
    )
    # Without the number of processes of this node all are on it, unless rank and local rank differ.
    own_size, rest = divmod(world_size, num_nodes or 1)
    if rest and not launcher.local_world_size:
        raise ConfigError(
            f"{launcher.world_size}={world_size} with {launcher.num_nodes}={num_nodes}",
            why="this launcher does not set the number of processes of a node, and they cannot be equal",
            fix="start the same number of processes on every node",
        )
    local_world_size = number(
        launcher.local_world_size, own_size if num_nodes or rank == local_rank else None
    )
    has_one_node, port = local_world_size == world_size, 0 if is_single else None
    if launcher.run_id:
        run_id = (
            ".".join(environ[name] for name in launcher.run_id.split() if name in environ)
            or "mpirun"
        )
        # All processes of a run derive the same one, above well-known services, below Linux's ephemeral ports (32768).
        port = 20000 + zlib.crc32(run_id.encode(errors="replace")) % 12000
    address = environ.get("MASTER_ADDR", loopback() if has_one_node else "").strip("[]")
    if not address:
        raise ConfigError(
            "MASTER_ADDR is not set",
            why="processes are on several nodes, and their launcher does not provide the address of rank 0",
            fix="export MASTER_ADDR=<address of the first node> to all of them (Open MPI: mpirun -x MASTER_ADDR)",
        )
    # Ranks fill one node after another, or are distributed round-robin.
    size = max(local_world_size, 1)
    filled, rest = divmod(rank - local_rank, size)
    return World(
        rank=rank,
        local_rank=local_rank,
        node_rank=number(
            launcher.node_rank, rank % max(-(-world_size // size), 1) if rest else filled
        ),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=address,
        master_port=_integer(environ, "MASTER_PORT", port),
        has_store=launcher is _TORCHRUN and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        num_nodes=num_nodes,
    )


def _users_group(environ: Mapping[str, str]) -> World | None:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", world_size)
    node_rank = _integer(environ, "NODE_RANK", 0)
    return World(
        rank, _integer(environ, "LOCAL_RANK", rank), node_rank, world_size, local_world_size
    )


def _present(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not empty, with those of torchrun's options (PET_*) as their plain counterparts.

    PMI_RANK is left out unless MPICH's hydra has set it: Flux, PALS and `srun --mpi=pmi2` set it, too.
    """
    present = {name: value for name, value in environ.items() if value.strip()}
    others = present.keys() & {"SLURM_STEP_ID", "FLUX_TASK_RANK", "PALS_RANKID"}
    if "PMI_SIZE" not in present or (others and "MPI_LOCALRANKID" not in present):
        present.pop("PMI_RANK", None)
    options = {name: present[f"PET_{name}"] for name in _RENDEZVOUS if f"PET_{name}" in present}
    host, _, port = present.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    if host and not present.get("PET_RDZV_BACKEND", "").startswith(
        "etcd"
    ):  # an etcd server is on no node of the run
        options = {"MASTER_ADDR": host, "MASTER_PORT": port, **options}
    return {**options, **present}


def _integer(
    environ: Mapping[str, str], name: str, default: int | None = None, *, fix: str | None = None
) -> int:
    value = environ.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise ConfigError(
            f"{name} is not set" if value is None else f"{name}={value!r}",
            why="related variables are set" if value is None else "it is not an integer",
            fix=fix
            or f"let the launcher set {name}, or unset all variables of the launcher to run without one",
        ) from None
