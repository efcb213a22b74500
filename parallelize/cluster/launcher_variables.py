"""The launchers that start processes of a run, and the variables by which each names its ranks.

To add a launcher, add a row to `LAUNCHERS`, at its place in the order, and its recorded variables
to tests/unit/cluster/test_environment.py. A row says which variable has which number. What a
launcher has in no variable of its own is computed by the row's `derive`.

The words of this room:

    launcher      a program outside of this library that starts processes: torchrun, srun, mpirun
    rank          the number of a process in its run, from 0
    local rank    its number among the processes of its node
    node          a machine of a run; its rank is its number among the nodes
    rendezvous    the address and port of rank 0, at which the ranks of a run meet
    allocation    the nodes and GPUs that Slurm has given to a job
    step          the processes that one srun starts in a job; Slurm calls each of them a task
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parallelize.cluster.slurm_step import LOCAL_SIZE, NUM_NODES, derive_from_lists
from parallelize.cluster.world import World

Names = tuple[str, ...]
"""Names of variables with the same meaning: the first one that is set counts."""

_PREFIXES_OF_TORCHRUN = ("TORCHELASTIC_", "PET_")
"""How the names of variables begin that torchrun sets, and that set torchrun's options."""


def _derive_nothing(_: Mapping[str, str]) -> dict[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True)
class LauncherVariables:
    """The names of a launcher's variables.

    Args:
        rank: rank of this process.
        local_rank: its rank on its node.
        world_size: number of processes.
        local_world_size: number of processes on its node; (): computed for nodes of equal size, so
            that num_nodes is needed.
        node_rank: rank of its node; (): computed from the ranks.
        num_nodes: number of nodes; (): computed from the sizes.
        run_id: their values together differ between runs, and are equal in all processes of a
            run; (): the launcher sets MASTER_PORT.
        least_processes: fewer are an interactive shell or a plain program, and no ranks of a run.
        derive: computes variables from others, under names that no launcher sets.
    """

    rank: str
    local_rank: str
    world_size: Names
    local_world_size: Names = ()
    node_rank: Names = ()
    num_nodes: Names = ()
    run_id: Names = ()
    least_processes: int = 1
    derive: Callable[[Mapping[str, str]], dict[str, str]] = _derive_nothing

    @property
    def names(self) -> frozenset[str]:
        """The names of all of its variables."""
        sizes = (*self.world_size, *self.local_world_size, *self.num_nodes)
        return frozenset({self.rank, self.local_rank, *sizes, *self.node_rank, *self.run_id})


TORCHRUN = LauncherVariables(
    rank="RANK",
    local_rank="LOCAL_RANK",
    world_size=("WORLD_SIZE",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK", "NODE_RANK"),
    num_nodes=("GROUP_WORLD_SIZE",),
)
_OPEN_MPI = LauncherVariables(
    rank="OMPI_COMM_WORLD_RANK",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    run_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
# Hydra, the mpirun of MPICH and Intel MPI. No variable of MPICH identifies a run.
_HYDRA = LauncherVariables(
    rank="PMI_RANK",
    local_rank="MPI_LOCALRANKID",
    world_size=("PMI_SIZE",),
    local_world_size=("MPI_LOCALNRANKS",),
    run_id=("I_MPI_HYDRA_UUID",),
)
_FLUX = LauncherVariables(
    rank="FLUX_TASK_RANK",
    local_rank="FLUX_TASK_LOCAL_ID",
    world_size=("FLUX_JOB_SIZE",),
    num_nodes=("FLUX_JOB_NNODES",),
    run_id=("FLUX_JOB_ID",),
    least_processes=2,
)
# SLURM_NTASKS is no size of a run: a batch script and the shell of salloc see it, too, with the
# count of the job. Only the processes of a step have its number of tasks.
_SRUN = LauncherVariables(
    rank="SLURM_PROCID",
    local_rank="SLURM_LOCALID",
    world_size=("SLURM_STEP_NUM_TASKS",),
    local_world_size=(LOCAL_SIZE,),
    node_rank=("SLURM_NODEID",),
    num_nodes=(NUM_NODES,),
    run_id=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    least_processes=2,
    derive=derive_from_lists,
)
# Older releases of PALS set some of these as PMI_* only. A job script may export WORLD_SIZE where
# PMI_SIZE is missing.
_PALS = LauncherVariables(
    rank="PALS_RANKID",
    local_rank="PALS_LOCAL_RANKID",
    world_size=("PALS_SIZE", "PMI_SIZE", "WORLD_SIZE"),
    local_world_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    run_id=("PALS_APID",),
)

LAUNCHERS = (_OPEN_MPI, _HYDRA, _FLUX, _SRUN, _PALS)
"""The launchers beside torchrun, in the order in which they are asked.

mpirun comes before Slurm: in a Slurm job, srun starts the daemons of mpirun, and the processes of
mpirun inherit SLURM_* of their daemon. Flux and Slurm come before PALS: both can set PALS_*.
"""


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of every launcher: a process with the rest is no rank.

    A worker, or another process that a launcher has started, passes its variables on to what it
    starts. A call there is a run of its own.

    The names of torchrun are dropped only with a RANK. Without it, they are what scripts export for
    a run to come, such as MASTER_ADDR and MASTER_PORT.
    """
    names_of_torchrun = TORCHRUN.names | World().env().keys()
    names = set[str]()
    for launcher in LAUNCHERS:
        names |= launcher.names
    names -= names_of_torchrun
    if TORCHRUN.rank in environ:
        names |= names_of_torchrun
    return {
        name: value
        for name, value in environ.items()
        if name not in names and not name.startswith(_PREFIXES_OF_TORCHRUN)
    }
