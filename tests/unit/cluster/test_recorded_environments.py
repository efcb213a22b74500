"""Variables of one process under each launcher, recorded or taken from its documentation -> World and layout."""

from __future__ import annotations

import pytest

from parallelize.cluster.devices import Hardware
from parallelize.cluster.environment import detect
from parallelize.cluster.world import Node, World
from parallelize.config.config import Config
from parallelize.config.layout import place
from parallelize.errors import ConfigError


def env(text: str) -> dict[str, str]:
    """Return the variables of a text as `env` prints it, with any space between them."""
    return dict(variable.split("=", 1) for variable in text.split())


TORCHRUN = env("""
    LOCAL_RANK=1 RANK=3 GROUP_RANK=1 ROLE_RANK=3 ROLE_NAME=default LOCAL_WORLD_SIZE=2 WORLD_SIZE=4 GROUP_WORLD_SIZE=2
    ROLE_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29500 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0
    TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=False
""")
ELASTIC = TORCHRUN | env("PET_NNODES=1:4 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=n1:29400")

SALLOC = env("""
    SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_NTASKS=4
    SLURM_TASKS_PER_NODE=2(x2)
""")
SBATCH = SALLOC | env("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0")
SRUN = SALLOC | env("""
    SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=n[1-2]
    SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1
""")
UNEQUAL = SRUN | env("SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_PROCID=2 SLURM_LOCALID=0")
HETEROGENEOUS = SRUN | env("""
    SLURM_HET_SIZE=2 SLURM_JOB_ID_HET_GROUP_0=7 SLURM_JOB_ID_HET_GROUP_1=8 SLURM_JOB_NODELIST_HET_GROUP_1=big1
    SLURM_NTASKS_HET_GROUP_1=1
""")  # `srun` in a job of two components runs in the first one
CRAY_SHASTA = SRUN | env("""
    PALS_APID=7.0 PALS_RANKID=3 PALS_NODEID=1 PALS_LOCAL_RANKID=1 PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_RANK=1
    PMI_LOCAL_SIZE=2
""")  # srun --mpi=cray_shasta

OPEN_MPI = env("""
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    OMPI_COMM_WORLD_NODE_RANK=1 OMPI_UNIVERSE_SIZE=4 PMIX_RANK=3 PMIX_NAMESPACE=prterun-n1-381@1 PMIX_HOSTNAME=n2
    MASTER_ADDR=n1
""")
MPICH = env("""
    HYDI_CONTROL_FD=7 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=11 PMI_HOSTNAME=n2 PMI_RANK=3 PMI_SIZE=4
    MASTER_ADDR=n1
""")
INTEL_MPI = MPICH | env("""
    HYDRA_BSTRAP_LAUNCHER=ssh HYDRA_BSTRAP_LOCALHOST=n1 I_MPI_HYDRA_TOPOLIB=ipl2
    I_MPI_HYDRA_UUID=62010000-9152-2ef4-e360-06007d56cb0f
""")
PALS_PMIX = env("""
    PALS_APID=d5a7c1c1-1c0e-4d2e-8bb3-1f6a3a6a0b0e PALS_DEPTH=8 PALS_RANKID=3 PALS_NODEID=1 PALS_LOCAL_RANKID=1
    PALS_LOCAL_SIZE=2 PBS_JOBID=12.pbs MASTER_ADDR=n1 WORLD_SIZE=4
""")
PALS = PALS_PMIX | env("PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 PMI_UNIVERSE_SIZE=4 WORLD_SIZE=")
FLUX = env("""
    FLUX_JOB_ID=f23abc FLUX_JOB_SIZE=4 FLUX_JOB_NNODES=2 FLUX_TASK_RANK=3 FLUX_TASK_LOCAL_ID=1
    FLUX_URI=local:///run/flux/local PMI_FD=12 PMI_RANK=3 PMI_SIZE=4 MASTER_ADDR=n1
""")
FLUX_IN_SLURM = SRUN | env("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)") | FLUX

OLD_PYTORCHJOB = env("PYTHONUNBUFFERED=1 MASTER_ADDR=job-master-0 MASTER_PORT=23456 WORLD_SIZE=2 RANK=1")
PYTORCHJOB = OLD_PYTORCHJOB | env("""
    PET_MASTER_ADDR=job-master-0 PET_MASTER_PORT=23456 PET_NODE_RANK=1 PET_NNODES=2
""")
PYTORCHJOB_OF_8 = PYTORCHJOB | env("PET_NPROC_PER_NODE=8 WORLD_SIZE=16")  # WORLD_SIZE counts processes, RANK pods
ELASTIC_PYTORCHJOB = env("""
    PYTHONUNBUFFERED=1 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=job-worker-0:23456 PET_RDZV_ID=job PET_MAX_RESTARTS=3
    PET_NNODES=2:2
""")
TRAINJOB = env("""
    PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500
    JOB_COMPLETION_INDEX=1
""")
TRAINJOB_OF_ONE = TRAINJOB | env("PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=auto")

# rank, local rank, node rank, world size, local world size, number of nodes
LAST_OF_2X2 = (3, 1, 1, 4, 2, 2)
SECOND_POD = (1, 0, 1, 2, 1, 2)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(TORCHRUN, LAST_OF_2X2, id="torchrun"),
        pytest.param(ELASTIC, LAST_OF_2X2, id="torchrun, elastic"),
        pytest.param({**SRUN, **TORCHRUN}, LAST_OF_2X2, id="torchrun in srun"),
        pytest.param({**TRAINJOB, **TORCHRUN}, LAST_OF_2X2, id="torchrun in a TrainJob"),
        pytest.param(SALLOC, None, id="salloc"),
        pytest.param(SBATCH, None, id="sbatch"),
        pytest.param(SRUN, LAST_OF_2X2, id="srun"),
        pytest.param(UNEQUAL, (2, 0, 1, 3, 1, 2), id="srun on unequal nodes"),
        pytest.param(HETEROGENEOUS, LAST_OF_2X2, id="srun in a heterogeneous job"),
        pytest.param(CRAY_SHASTA, LAST_OF_2X2, id="srun --mpi=cray_shasta"),
        pytest.param(OPEN_MPI, LAST_OF_2X2, id="Open MPI"),
        pytest.param({**SRUN, **OPEN_MPI}, LAST_OF_2X2, id="Open MPI in Slurm"),
        pytest.param(MPICH, LAST_OF_2X2, id="MPICH"),
        pytest.param({**SRUN, **MPICH}, LAST_OF_2X2, id="MPICH in Slurm"),
        pytest.param(INTEL_MPI, LAST_OF_2X2, id="Intel MPI"),
        pytest.param(PALS, LAST_OF_2X2, id="PALS"),
        pytest.param(PALS_PMIX, LAST_OF_2X2, id="PALS with PMIx"),
        pytest.param(FLUX, LAST_OF_2X2, id="Flux"),
        pytest.param(FLUX_IN_SLURM, LAST_OF_2X2, id="Flux in Slurm"),
        pytest.param({**FLUX, "FLUX_JOB_SIZE": "1", "PMI_SIZE": ""}, None, id="a shell of Flux"),
        pytest.param(PYTORCHJOB, SECOND_POD, id="PyTorchJob"),
        pytest.param(OLD_PYTORCHJOB, SECOND_POD, id="PyTorchJob of an older operator"),
        pytest.param(PYTORCHJOB_OF_8, SECOND_POD, id="PyTorchJob, 8 GPUs per pod"),
        pytest.param(ELASTIC_PYTORCHJOB, None, id="PyTorchJob with elasticPolicy"),
        pytest.param(TRAINJOB, SECOND_POD, id="TrainJob"),
        pytest.param(TRAINJOB_OF_ONE, (0, 0, 0, 1, 1, 1), id="TrainJob of one node"),
    ],
)
def test_world(environ: dict[str, str], expected: tuple[int, ...] | None) -> None:
    """Ranks and sizes are those of the launcher that has started this process."""
    assert _numbers(detect(environ)) == expected


def _numbers(world: World | None) -> tuple[int, ...] | None:
    sizes = world and (world.world_size, world.local_world_size, world.num_nodes)
    return world and (world.rank, world.local_rank, world.node_rank, *sizes)


@pytest.mark.parametrize(
    ("environ", "address", "port", "node_rank"),
    [
        pytest.param(PYTORCHJOB, "job-master-0", 23456, 1, id="PyTorchJob"),
        pytest.param(PYTORCHJOB_OF_8, "job-master-0", 23456, 1, id="PyTorchJob, 8 GPUs per pod"),
        pytest.param(ELASTIC_PYTORCHJOB, "job-worker-0", 23456, None, id="PyTorchJob with elasticPolicy"),
        pytest.param(TRAINJOB, "job-node-0-0.job", 29500, 1, id="TrainJob"),
    ],
)
def test_a_pod_with_several_gpus_is_a_node(
    environ: dict[str, str], address: str, port: int, node_rank: int | None
) -> None:
    """Each pod starts a process per GPU; the first pod serves the rendezvous. A pod of one GPU runs the call itself."""
    layout = place(Config.parse(), Hardware("cuda", 8), environ)
    assert (layout.world, layout.node) == (None, Node(address, port, node_rank))
    assert (layout.num_nodes, layout.local_world_size) == (2, 8)
    if node_rank is not None:
        world = place(Config.parse(), Hardware("cuda", 1), environ).world
        assert world is not None
        assert (world.rank, world.world_size, world.master_addr) == (1, 2, address)


def test_the_only_pod_starts_its_processes() -> None:
    """A job of one pod needs no rendezvous between nodes."""
    layout = place(Config.parse(), Hardware("cuda", 8), TRAINJOB_OF_ONE)
    assert (layout.world, layout.node, layout.world_size) == (None, None, 8)


def test_a_range_of_pods_is_refused() -> None:
    """An elastic job without torchrun would train a model in each pod; num_nodes= says how many pods there are."""
    environ = {**ELASTIC_PYTORCHJOB, "PET_NNODES": "1:4"}
    with pytest.raises(ConfigError, match=r"PET_NNODES='1:4'.*\n.*fixed number of nodes.*\n.*torchrun"):
        place(Config.parse(processes=2), Hardware(), environ)
    assert place(Config.parse(processes=2, num_nodes=3), Hardware(), environ).world_size == 6


def test_runs_of_intel_mpi_have_ports_of_their_own() -> None:
    """Two runs on one machine rendezvous at different ports, which all processes of a run derive."""
    runs = [detect({**INTEL_MPI, "I_MPI_HYDRA_UUID": f"{run}7010000-0760-31f4"}) for run in "ab"]
    assert len({world and world.master_port for world in runs}) == 2
