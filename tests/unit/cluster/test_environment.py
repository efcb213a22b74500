"""Rank of a process, or of its node, and placement of a call, from the variables of each launcher.

The variables are recorded, or taken from the launcher's documentation.
"""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import environments, heterogeneous_steps, hostlists, worlds

from parallelize.cluster.devices import Hardware
from parallelize.cluster.environment import detect, detect_node
from parallelize.cluster.launcher_variables import without_launcher
from parallelize.cluster.slurm_step import first_host, hosts, tasks_per_node
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
FIRST_TASK = env("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0")
HETEROGENEOUS = SRUN | env("""
    SLURM_HET_SIZE=2 SLURM_JOB_ID_HET_GROUP_0=7 SLURM_JOB_ID_HET_GROUP_1=8 SLURM_JOB_NODELIST_HET_GROUP_1=big1
    SLURM_NTASKS_HET_GROUP_1=1
""")  # `srun` in a job of two components runs in the first one
# Recorded from `sbatch -n2 -N1 --exclude=n1 : -n1 -N1 --exclude=n2` with `srun --het-group=0,1`: rank 0 is on n2.
TWO_COMPONENTS = env("""
    SLURM_JOB_ID=4 SLURM_HET_SIZE=2 SLURM_JOB_ID_HET_GROUP_0=4 SLURM_JOB_ID_HET_GROUP_1=5 SLURM_NTASKS=3
    SLURM_NTASKS_HET_GROUP_0=2 SLURM_NTASKS_HET_GROUP_1=1 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NODELIST_HET_GROUP_0=n2
    SLURM_JOB_NODELIST_HET_GROUP_1=n1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=1,2
""")
OF_FIRST_COMPONENT = env("SLURMD_NODENAME=n2 SLURM_NODEID=0 SLURM_GTIDS=0,1 SLURM_PROCID=1 SLURM_LOCALID=1")
OF_SECOND_COMPONENT = env("SLURMD_NODENAME=n1 SLURM_NODEID=1 SLURM_GTIDS=2 SLURM_PROCID=2 SLURM_LOCALID=0")
# `srun -n2 -w n2 A : -n1 -w n1 A` in an ordinary job: the same step, without the variables of components.
HETEROGENEOUS_STEP = {name: value for name, value in TWO_COMPONENTS.items() if "HET_" not in name}
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

ONE_PER_NODE = SRUN | env("""
    SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1 SLURM_LOCALID=0 MASTER_ADDR=10.0.0.1
    MASTER_PORT=29400
""")
ONE_OF_TWO = env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 GROUP_WORLD_SIZE=2")
ADDRESS = {"MASTER_ADDR": "n1", "MASTER_PORT": "12910"}


def task(procid, localid, nodeid, **changes):
    """Return the variables of one task of srun's 2 x 2."""
    return SRUN | env(f"SLURM_PROCID={procid} SLURM_LOCALID={localid} SLURM_NODEID={nodeid}") | changes


def open_mpi(rank, local_rank, **changes):
    """Return the variables of one of 2 x 2 processes of Open MPI's mpirun."""
    return OPEN_MPI | env(f"OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_LOCAL_RANK={local_rank}") | changes


def mpich(rank, local_rank):
    """Return the variables of one of 2 x 2 processes of MPICH's hydra."""
    return MPICH | env(f"PMI_RANK={rank} MPI_LOCALRANKID={local_rank}")


def numbers(world):
    """Return the ranks (of the process, on its node, of its node) and sizes (of the world, of the node, in nodes)."""
    sizes = world and (world.world_size, world.local_world_size, world.num_nodes)
    return world and (world.rank, world.local_rank, world.node_rank, *sizes)


ON_ONE_NODE = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2"}
ONE_TASK = task(0, 0, 0, **ON_ONE_NODE | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"})


def faults_of(environ, function=detect):
    """Return the faults of an environment."""
    with pytest.raises(ConfigError) as caught:
        function(environ)
    return caught.value.faults


# Ranks fill nodes one by one, or are distributed round-robin: then the local rank cannot be computed from the rank.
EVERY_RANK = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (1, 0, 1), (2, 1, 0)]


@pytest.mark.parametrize(("rank", "local_rank", "node_rank"), EVERY_RANK)
def test_each_process_of_srun_and_mpirun_is_a_rank(rank, local_rank, node_rank):
    """Of 2 x 2 processes, whether ranks fill nodes one by one or round-robin; srun's first host has the address."""
    of_srun = task(rank, local_rank, node_rank)
    for environ in (of_srun, open_mpi(rank, local_rank), mpich(rank, local_rank)):
        assert numbers(detect(environ)) == (rank, local_rank, node_rank, 4, 2, 2)
    assert (detect(of_srun).master_addr, detect(of_srun).has_store) == ("n1", False)


def test_one_node_needs_no_name():
    """Its processes use the loopback address, because hostnames do not resolve on many clusters."""
    assert detect(task(1, 1, 0, **ON_ONE_NODE)).master_addr == "127.0.0.1"
    one = open_mpi(0, 0, OMPI_COMM_WORLD_LOCAL_SIZE="4", MASTER_ADDR="")
    assert (detect(one).master_addr, detect(one).num_nodes) == ("127.0.0.1", 1)
    assert detect(one).master_port != detect({**one, "PMIX_NAMESPACE": "prterun-n1-4243@1"}).master_port


def test_srun_ports():
    """All tasks of a step derive the same port, other steps most likely different ones; MASTER_PORT wins."""
    ports = [detect(task(rank, rank % 2, rank // 2)).master_port for rank in range(4)]
    assert len(set(ports)) == 1
    assert 20000 <= ports[0] < 32000
    others = {detect(task(0, 0, 0, SLURM_JOB_ID=str(job))).master_port for job in range(100)}
    others |= {detect(task(0, 0, 0, SLURM_STEP_ID=str(step))).master_port for step in range(100)}
    assert len(others) > 190
    assert detect(task(0, 0, 0, MASTER_PORT="12910", MASTER_ADDR="10.0.0.11")).master_port == 12910


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"WORLD_SIZE": "8"}, id="WORLD_SIZE only"),
        pytest.param({**ADDRESS, "NODE_RANK": "1"}, id="rendezvous of nodes"),
        pytest.param({**ADDRESS, "WORLD_SIZE": "8"}, id="a job script's exports"),
        pytest.param({"RANK": "", "WORLD_SIZE": ""}, id="set to nothing"),
        pytest.param(ONE_TASK, id="one-task step in a four-task job"),
        pytest.param({**ONE_TASK, "SLURM_STEP_ID": "4294967290"}, id="interactive step"),
        pytest.param({**ONE_TASK, "SLURM_PTY_PORT": "41123"}, id="srun --pty"),
        pytest.param({**ONE_TASK, "PMI_RANK": "0", "PMI_SIZE": "1"}, id="one-task step by --mpi=pmi2"),
    ],
)
def test_no_launcher(environ):
    """Variables that describe a job but no rank in it give no World."""
    assert detect(environ) is None


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 8)])
def test_a_rank_in_the_environment_does_not_hide_other_launchers(rank, world_size):
    """Of a pod with one process, of a node, or left in a shell: the tasks that mpirun has started are one world."""
    environ = {**open_mpi(2, 0), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    assert detect({**environ, "MASTER_ADDR": "n1", "MASTER_PORT": "29400"}) == dataclasses.replace(
        detect(open_mpi(2, 0)), master_addr="n1", master_port=29400
    )


@pytest.mark.parametrize(
    "copies", [{"PMI_RANK": "1", "PMI_SIZE": "4"}, {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "12910"}]
)
def test_copies_of_the_ranks_of_srun(copies):
    """`srun --mpi=pmi2` sets PMI_RANK, a script may set RANK and WORLD_SIZE: the local rank is srun's."""
    environ = {**task(1, 0, 1), **copies}
    assert numbers(detect(environ)) == (1, 0, 1, 4, 2, 2)
    assert detect(environ).master_port == int(copies.get("MASTER_PORT", detect(task(1, 0, 1)).master_port))


def test_torch_names_alone():
    """Ranks that equal their local ranks are all on one node; a world of one needs no more."""
    assert numbers(detect({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"})) == (
        1,
        1,
        0,
        2,
        2,
        1,
    )
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}) == World()


@pytest.mark.parametrize(
    ("environ", "what", "why"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set", "related variables are set"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set", "processes are on several nodes"),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is not set", "related variables"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT is not set", "related variables are set"),
        (TORCHRUN | {"RANK": "zero"}, "RANK='zero'", "it is not an integer"),
        (TORCHRUN | {"LOCAL_RANK": "1.0"}, "LOCAL_RANK='1.0'", "it is not an integer"),
        (TORCHRUN | {"RANK": "4"}, "rank=4 with world_size=4", "it must be from 0 to 3"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "local_rank=-1 with local_world_size=2", "it must be from 0 to 1"),
        (TORCHRUN | {"GROUP_RANK": "2"}, "node_rank=2 with num_nodes=2", "it must be from 0 to 1"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "4"}, "num_nodes=4 with world_size=4 and local_world_size=2", "from 2 to 3"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "master_port=70000", "a port is a number from 1 to 65535"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set", "does not provide the address of rank 0"),
        (open_mpi(2, 0, MASTER_ADDR=""), "MASTER_ADDR is not set", "does not provide the address of rank 0"),
        (open_mpi(2, 0, OMPI_COMM_WORLD_LOCAL_RANK=""), "OMPI_COMM_WORLD_LOCAL_RANK is not set", "related variables"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set", "related variables are set"),
        (task(0, 0, 0, SLURM_STEP_TASKS_PER_NODE=""), "MASTER_ADDR is not set", "the address of rank 0"),
        (task(0, 0, 2), "local_world_size=0 with world_size=4", "it must be from 1 to 4"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2", **ADDRESS}, "rank=2 with world_size=2", "it must be from 0 to 1"),
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "PET_NNODES='1:4'", "a fixed number of nodes"),
        ({"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1"}, "PALS_SIZE is not set", "related"),
        (
            {"FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "3", "FLUX_JOB_NNODES": "2"},
            "FLUX_JOB_SIZE=3 with FLUX_JOB_NNODES=2",
            "this launcher does not set the number of processes of a node, and they cannot be equal",
        ),
        (FLUX | {"FLUX_JOB_NNODES": ""}, "FLUX_JOB_NNODES is not set", "related variables are set"),
    ],
)
def test_refuses_invalid_variables(environ, what, why):
    """Missing variables, invalid values and contradictory numbers are reported with the reason."""
    (fault,) = (fault for fault in faults_of(environ) if fault.what == what)
    assert why in fault.why
    assert fault.fix


def test_a_heterogeneous_step_whose_first_node_nobody_knows():
    """Its rank 0 says what to export, which then counts on every rank."""
    first, second = (HETEROGENEOUS_STEP | task for task in (OF_FIRST_COMPONENT, OF_SECOND_COMPONENT))
    (fault,) = faults_of(first)
    assert fault.what == "rank 0 is on node n2, and the list of its step, n[1-2], begins with n1"
    assert "heterogeneous" in fault.why
    assert fault.fix.startswith("export MASTER_ADDR=n2 before srun")
    assert [detect(environ | {"MASTER_ADDR": "n2"}).master_addr for environ in (first, second)] == ["n2", "n2"]


def test_variables_of_the_job_that_submitted_this_one():
    """Components of another job do not say where rank 0 is."""
    stale = TWO_COMPONENTS | OF_SECOND_COMPONENT | env("SLURM_JOB_ID=9 SLURM_JOB_NODELIST=n[1-2]")
    assert detect(stale).master_addr == "n1"
    assert detect(TWO_COMPONENTS | OF_SECOND_COMPONENT).master_addr == "n2"


@given(heterogeneous_steps())
def test_ranks_of_any_heterogeneous_step(step):
    """All ranks know their places, and the node of rank 0, however the nodes of the components are named."""
    found = [detect(environ) for environ in step.environments]
    assert [numbers(world) for world in found] == step.expected
    assert {world.master_addr for world in found} == {step.node_of_rank_0}
    assert len({world.master_port for world in found}) == 1


@given(worlds())
def test_round_trip(world):
    """The variables of a World are detected as that World, also among those of other launchers."""
    assert detect(world.env()) == world
    assert detect({**task(0, 0, 0), **open_mpi(0, 0), **mpich(0, 0), **world.env()}) == world


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        ({}, None),
        ({"MASTER_PORT": "12910"}, None),
        ({"NODE_RANK": "1"}, None),
        (ADDRESS, Node("n1", 12910)),
        (ADDRESS | {"NODE_RANK": ""}, Node("n1", 12910)),
        (ADDRESS | {"NODE_RANK": "1"}, Node("n1", 12910, 1)),
        (ADDRESS | {"NODE_RANK": "0"}, Node("n1", 12910, 0)),
    ],
)
def test_rendezvous_of_nodes(environ, node):
    """An address with a port is the rendezvous; a port alone, exported for other programs, is not."""
    assert detect_node(environ) == node


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set", "export MASTER_PORT=29400"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'", "export MASTER_PORT=29400"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0", "export MASTER_PORT=29400"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536", "export MASTER_PORT=29400"),
        ({"NODE_RANK": "a"}, "NODE_RANK='a'", "let the launcher set NODE_"),
    ],
)
def test_refuses_half_a_rendezvous(changes, what, fix):
    """An address without a port, or an invalid value, is refused with the line to export."""
    (fault,) = faults_of(ADDRESS | changes, detect_node)
    assert fault.what == what
    assert fault.fix.startswith(fix)


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
        pytest.param({**UNEQUAL, **FIRST_TASK}, (0, 0, 0, 3, 2, 2), id="the first of them"),
        pytest.param(HETEROGENEOUS, LAST_OF_2X2, id="srun in a heterogeneous job"),
        pytest.param(TWO_COMPONENTS | OF_FIRST_COMPONENT, (1, 1, 0, 3, 2, 2), id="srun --het-group, first component"),
        pytest.param(TWO_COMPONENTS | OF_SECOND_COMPONENT, (2, 0, 1, 3, 1, 2), id="srun --het-group, second component"),
        pytest.param(HETEROGENEOUS_STEP | OF_SECOND_COMPONENT, (2, 0, 1, 3, 1, 2), id="srun A : B"),
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
    assert numbers(detect(environ)) == expected


@pytest.mark.parametrize(
    ("environ", "address", "port", "node_rank"),
    [
        pytest.param(PYTORCHJOB, "job-master-0", 23456, 1, id="PyTorchJob"),
        pytest.param(PYTORCHJOB_OF_8, "job-master-0", 23456, 1, id="PyTorchJob, 8 GPUs per pod"),
        pytest.param(ELASTIC_PYTORCHJOB, "job-worker-0", 23456, None, id="PyTorchJob with elasticPolicy"),
        pytest.param(TRAINJOB, "job-node-0-0.job", 29500, 1, id="TrainJob"),
        pytest.param(ONE_PER_NODE, "10.0.0.1", 29400, 1, id="srun, one task per node"),
    ],
)
def test_a_pod_or_task_with_several_gpus_is_a_node(
    environ: dict[str, str], address: str, port: int, node_rank: int | None
) -> None:
    """Each starts a process per GPU, also by default; the first serves the rendezvous. With one it runs the call."""
    for options in ({"gpus": 8, "num_nodes": 2}, {"gpus": 8}, {}):
        layout = place(Config.parse(**options), Hardware("cuda", 8), environ)
        assert (layout.world, layout.node) == (None, Node(address, port, node_rank))
        assert (layout.num_nodes, layout.local_world_size) == (2, 8)
    if node_rank is not None:
        for options, count in (({}, 1), ({"gpus": 1}, 8)):
            world = place(Config.parse(**options), Hardware("cuda", count), environ).world
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


def test_variables_are_ignored_on_one_node() -> None:
    """A leftover MASTER_ADDR changes nothing for a call on one node."""
    layout = place(Config.parse(processes=2), Hardware(), ADDRESS)
    assert layout.node is None


def test_a_request_of_the_environment_is_named() -> None:
    """A request that does not fit the machine names the variables that may have made it."""
    with pytest.raises(ConfigError, match=r"no GPU .*\(the environment has PARALLELIZE_AMP=1, PARALLELIZE_GPUS=4\)"):
        place(Config.parse(gpus=4), Hardware(), {"PARALLELIZE_GPUS": "4", "PARALLELIZE_AMP": "1"})


def test_torchruns_only_worker_starts_no_others() -> None:
    """torchrun's only worker on a node of eight GPUs runs the call itself."""
    layout = place(Config.parse(), Hardware("cuda", 8), {**TORCHRUN, **ONE_OF_TWO})
    assert layout.world is not None
    assert layout.local_world_size == 1


@settings(max_examples=500)
@given(environments)
def test_any_environment(environ):
    """Random launcher variables give a consistent World, None, or a ConfigError with all its parts; none is changed."""
    faults, before = [], dict(environ)
    for function, kind in ((detect, World), (detect_node, Node)):
        try:
            found = function(environ)
        except ConfigError as exc:
            faults += exc.faults
        else:
            assert found is None or isinstance(found, kind)
            if isinstance(found, World):
                assert 0 <= found.rank < found.world_size
                assert 0 <= found.local_rank < found.local_world_size <= found.world_size
                assert 0 < found.master_port < 65536 or found.world_size == 1
    assert all(each.what and each.why and each.fix for each in faults)
    assert environ == before


@settings(max_examples=300)
@given(environments)
def test_what_a_rank_starts_is_no_rank(environ):
    """Without the variables of launchers, any environment is that of a plain program."""
    assert detect(without_launcher(environ)) is None


@pytest.mark.parametrize(
    "environ",
    [TORCHRUN, ELASTIC, SRUN, TWO_COMPONENTS | OF_FIRST_COMPONENT, OPEN_MPI, MPICH, INTEL_MPI, PALS, FLUX, TRAINJOB],
)
def test_only_variables_of_launchers_are_dropped(environ):
    """What a user exports stays; MASTER_ADDR goes with a rank, and is kept for the nodes of a run to come."""
    users = {"HOME": "/home/me", "NCCL_DEBUG": "INFO", "SLURM_CONF": "/etc/slurm.conf"}
    rest = without_launcher({**environ, **users})
    assert detect(rest) is None
    assert rest.items() >= users.items()
    assert without_launcher({**users, **ADDRESS}) == {**users, **ADDRESS}
    assert without_launcher({**users, **ADDRESS, "RANK": "0"}) == users


@given(hostlists())
def test_any_list_of_hosts(expected):
    """A compressed list is expanded in its order, and its first host is the first one of the expanded list."""
    assert tuple(hosts(expected.text)) == expected.names
    assert first_host(expected.text) == expected.names[0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_tasks_per_node(runs):
    """A compressed list gives the same counts as the expanded one."""
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else f"{count}" for count, repeat in runs)
    assert tasks_per_node(text) == [count for count, repeat in runs for _ in range(repeat)]


@pytest.mark.parametrize(
    "text",
    ["n[0-999999999999]", "n" * 10**5, "n[" + "1," * 10**5 + "1]", "n[1-2]" * 10**5 + "[", "[" * 10**5, "9" * 10**5],
    ids=lambda text: text[:6],
)
def test_long_host_lists_are_parsed_in_linear_time(text):
    """The list of an ordinary step is never expanded, and no regular expression backtracks."""
    started = time.process_time()
    for each in (text, f"1(x{text[:9]})," * 10**4):
        first_host(each)
        tasks_per_node(each)
    assert time.process_time() - started < 5
