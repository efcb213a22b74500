"""Rank of this process, or of its node, from the variables of launchers: torchrun, Kubeflow, MPI, Flux, PALS, Slurm."""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

from parallelize.cluster.hostlist import first_host, tasks_on
from parallelize.cluster.world import Node, World, bad_port
from parallelize.errors import ConfigError

__all__ = ["detect", "detect_node", "number_of_pods"]

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


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
        https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html,
        https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch,
        https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html,
        https://cpe.ext.hpe.com/docs/latest/mpt/index.html (PALS); MPICH's hydra and Intel MPI set PMI_RANK, PMI_SIZE,
        MPI_LOCALRANKID, MPI_LOCALNRANKS.
    """
    present = _present(environ)
    worlds = (each(present) for each in (_torchrun, *_OTHER_LAUNCHERS, _pod, _users_group))
    return next(filter(None, worlds), None)


def detect_node(environ: Mapping[str, str]) -> Node | None:
    """Return the rendezvous of the nodes, from MASTER_ADDR, MASTER_PORT and (optionally) NODE_RANK; None without it.

    A port alone does not count: job scripts export one for other programs. PET_MASTER_ADDR, PET_RDZV_ENDPOINT, ...,
    which set torchrun's options, count like the variables of the same name without PET_.

    Raises:
        ConfigError: an address without a port, a port that is no integer from 1 to 65535, a rank that is no integer
            from 0.
    """
    present = _present(environ)
    if "MASTER_ADDR" not in present:
        return None
    port = _integer(present, "MASTER_PORT", fix="export MASTER_PORT=29400, or any free port, the same on every node")
    if not 0 < port < 65536:
        raise ConfigError.of([bad_port("MASTER_PORT", port)])
    node_rank = _integer(present, "NODE_RANK") if "NODE_RANK" in present else None
    if node_rank is not None and node_rank < 0:
        raise ConfigError(
            f"NODE_RANK={node_rank}", why="nodes count from 0", fix="export NODE_RANK=0 on the node of MASTER_ADDR"
        )
    return Node(present["MASTER_ADDR"], port, node_rank)


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


def _torchrun(environ: Mapping[str, str]) -> World | None:
    # Some cluster guides export WORLD_SIZE alone from a job script: that gives a process no rank.
    if "RANK" not in environ:
        return None
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environ.keys():
        # A script may export only RANK and WORLD_SIZE, copied from srun or mpirun: the rest is in their variables.
        for detect_launcher in _OTHER_LAUNCHERS:
            world = detect_launcher(environ)
            if world is None:
                continue
            # RANK alone may be a pod's, a node's (WORLD_SIZE then counts processes) or left in a shell.
            is_several = "LOCAL_RANK" not in environ and world.world_size > 1
            if is_several or (world.rank, world.world_size) == (rank, world_size):
                return world
    if "LOCAL_RANK" not in environ:
        return _pod(environ)
    local_rank = _integer(environ, "LOCAL_RANK")
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


def _pod(environ: Mapping[str, str]) -> World | None:
    """Return the world of pods: one process in each. PET_* count pods; WORLD_SIZE may count processes, unlike RANK."""
    if {"PET_NNODES", "PET_NODE_RANK"} <= environ.keys():
        rank, num_nodes = _integer(environ, "PET_NODE_RANK"), number_of_pods(environ) or 1
    elif "RANK" in environ:
        rank, num_nodes = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    else:
        return None
    address, port = _rendezvous(environ, one_node=num_nodes == 1, port=0 if num_nodes == 1 else None)
    return World(rank, 0, rank, num_nodes, 1, address, port, num_nodes=num_nodes)


def _open_mpi(environ: Mapping[str, str]) -> World | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    run_id = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "mpirun"
    return _mpi(environ, "OMPI_COMM_WORLD_{}", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), run_id)


def _mpich(environ: Mapping[str, str]) -> World | None:
    if not {"PMI_RANK", "PMI_SIZE"} <= environ.keys():
        return None
    # These two are also set by `srun --mpi=pmi2`, Flux and PALS, but no local rank: use their own variables.
    if "MPI_LOCALRANKID" not in environ and {"SLURM_STEP_ID", "FLUX_TASK_RANK", "PALS_RANKID"} & environ.keys():
        return None
    run_id = environ.get("I_MPI_HYDRA_UUID") or _pid_of_hydra() or "mpirun"
    return _mpi(environ, "{}", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), run_id)


def _pid_of_hydra() -> str | None:
    """Return the process ID of MPICH's proxy, which starts all processes of its node; no variable identifies a run."""
    pid = str(os.getppid())
    with contextlib.suppress(OSError, ValueError):  # a system without /proc
        while pid != "0":
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith("hydra_pmi"):
                return pid
            pid = rest.split()[1]
    return None


def _flux(environ: Mapping[str, str]) -> World | None:
    # A job of one task is an interactive shell or a plain program, and no rank of a run.
    if "FLUX_TASK_RANK" not in environ or _integer(environ, "FLUX_JOB_SIZE") < 2:
        return None
    world_size, num_nodes = _integer(environ, "FLUX_JOB_SIZE"), _integer(environ, "FLUX_JOB_NNODES")
    if num_nodes < 1 or world_size % num_nodes:
        raise ConfigError(
            f"FLUX_JOB_SIZE={world_size} with FLUX_JOB_NNODES={num_nodes}",
            why="Flux does not set the number of tasks of a node, and they cannot be equal",
            fix="start the same number of tasks on every node: flux run --nodes=2 --tasks-per-node=4 ...",
        )
    sizes = {"FLUX_LOCAL_SIZE": str(world_size // num_nodes), **environ}
    names = ("TASK_RANK", "JOB_SIZE", "TASK_LOCAL_ID", "LOCAL_SIZE")
    return _mpi(sizes, "FLUX_{}", names, environ.get("FLUX_JOB_ID", "flux"))


def _pals(environ: Mapping[str, str]) -> World | None:
    # Older releases set some numbers as PMI_* only; a script may export WORLD_SIZE where PMI_SIZE is missing.
    if "PALS_RANKID" not in environ:
        return None
    fallbacks = {"PALS_SIZE": ("PMI_SIZE", "WORLD_SIZE"), "PALS_LOCAL_SIZE": ("PMI_LOCAL_SIZE",)}
    sizes = {name: environ[each] for name, names in fallbacks.items() for each in reversed(names) if each in environ}
    names = ("RANKID", "SIZE", "LOCAL_RANKID", "LOCAL_SIZE")
    return _mpi({**sizes, **environ}, "PALS_{}", names, environ.get("PALS_APID", "pals"))


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


def _users_group(environ: Mapping[str, str]) -> World | None:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", world_size)
    node_rank = _integer(environ, "NODE_RANK", 0)
    return World(rank, _integer(environ, "LOCAL_RANK", rank), node_rank, world_size, local_world_size)


_OTHER_LAUNCHERS = (_open_mpi, _mpich, _flux, _slurm, _pals)


def _present(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not empty, with those of torchrun's options (PET_*) as their plain counterparts."""
    present = {name: value for name, value in environ.items() if value.strip()}
    options = {name: present[f"PET_{name}"] for name in _RENDEZVOUS if f"PET_{name}" in present}
    host, _, port = present.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    if host and not present.get("PET_RDZV_BACKEND", "").startswith("etcd"):  # an etcd server is on no node of the run
        options = {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port, **options}
    return {**options, **present}


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
