"""Rank of a process, or of its node, from the variables of each launcher."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from strategies import environments, worlds

from parallelize.cluster.environment import detect, detect_node
from parallelize.cluster.world import Node, World
from parallelize.errors import ConfigError

THIRD = World(3, 1, 1, 4, 2, "n1", 29500, has_store=True, num_nodes=2)
TORCHRUN = THIRD.env()
ADDRESS = {"MASTER_ADDR": "n1", "MASTER_PORT": "12910"}


def task(procid, localid, nodeid, **changes):
    """Return the variables of one task of a step of two nodes with two tasks each."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": str(procid),
        "SLURM_LOCALID": str(localid),
        "SLURM_NODEID": str(nodeid),
        **changes,
    }


ON_ONE_NODE = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2"}
ONE_TASK = task(0, 0, 0, **ON_ONE_NODE | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"})


def open_mpi(rank, local_rank, **changes):
    """Return the variables that Open MPI's mpirun sets for one of 2 x 2 processes."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-n1-4242@1",
        "MASTER_ADDR": "n1",
        **changes,
    }


def mpich(rank, local_rank):
    """Return the variables that MPICH's hydra sets for one of 2 x 2 processes."""
    ranks = {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(local_rank), "MASTER_ADDR": "n1"}
    return ranks | {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}


def numbers(environ):
    """Return the ranks (of the process, on its node, of its node) and sizes (of the world, of the node, in nodes)."""
    world = detect(environ)
    sizes = (world.world_size, world.local_world_size, world.num_nodes)
    return (world.rank, world.local_rank, world.node_rank, *sizes)


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
        assert numbers(environ) == (rank, local_rank, node_rank, 4, 2, 2)
    assert (detect(of_srun).master_addr, detect(of_srun).has_store) == ("n1", False)


@pytest.mark.parametrize(
    ("rank", "local_rank", "node_rank", "local_world_size"), [(0, 0, 0, 2), (1, 1, 0, 2), (2, 0, 1, 1)]
)
def test_srun_on_unequal_nodes(rank, local_rank, node_rank, local_world_size):
    """Nodes with different numbers of tasks agree on the number of nodes."""
    unequal = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    environ = task(rank, local_rank, node_rank, **unequal)
    assert numbers(environ) == (rank, local_rank, node_rank, 3, local_world_size, 2)


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
    """Variables that describe a job but no rank in it give no World; salloc, sbatch: test_recorded_environments.py."""
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
    assert numbers(environ) == (1, 0, 1, 4, 2, 2)
    assert detect(environ).master_port == int(copies.get("MASTER_PORT", detect(task(1, 0, 1)).master_port))


def test_torch_names_alone():
    """Ranks that equal their local ranks are all on one node; a world of one needs no more."""
    assert numbers({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}) == (1, 1, 0, 2, 2, 1)
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
    ],
)
def test_refuses_invalid_variables(environ, what, why):
    """Missing variables, invalid values and contradictory numbers are reported with the reason."""
    (fault,) = (fault for fault in faults_of(environ) if fault.what == what)
    assert why in fault.why
    assert fault.fix


@given(worlds())
def test_round_trip(world):
    """The variables of a World are detected as that World, also among those of other launchers."""
    assert detect(world.env()) == world
    assert detect({**task(0, 0, 0), **open_mpi(0, 0), **mpich(0, 0), **world.env()}) == world


@given(environments)
def test_random_variables(environ):
    """Random variables give a World, None or a ConfigError, and are not changed."""
    before = dict(environ)
    for function in (detect, detect_node):
        try:
            found = function(environ)
        except ConfigError as error:
            for fault in error.faults:
                assert all((fault.what, fault.why, fault.fix))
        else:
            assert found is None or isinstance(found, (World, Node))
    assert environ == before


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
