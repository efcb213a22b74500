"""Rank of a process, or of its node, from the variables of each launcher."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from strategies import environments, worlds

from parallelize.cluster.environment import detect, detect_node
from parallelize.cluster.world import Node, World
from parallelize.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
THIRD = World(
    rank=3,
    local_rank=1,
    node_rank=1,
    world_size=4,
    local_world_size=2,
    master_addr="n1",
    master_port=29500,
    has_store=True,
    num_nodes=2,
)

# Variables of every process in a job of two nodes with two tasks each, recorded on a cluster.
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
ONE_TASK = {
    **JOB,
    "SLURM_NTASKS": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def task(procid, localid, nodeid, **changes):
    """Return the variables of one task of the step."""
    return {
        **STEP,
        "SLURM_PROCID": str(procid),
        "SLURM_LOCALID": str(localid),
        "SLURM_NODEID": str(nodeid),
        **changes,
    }


def ranks_and_sizes(world):
    """Return the fields of a World without the address."""
    assert world is not None
    return (
        world.rank,
        world.local_rank,
        world.node_rank,
        world.world_size,
        world.local_world_size,
        world.num_nodes,
    )


def faults_of(environ, function=detect):
    """Return the faults of an environment."""
    with pytest.raises(ConfigError) as caught:
        function(environ)
    return caught.value.faults


def test_torchrun():
    """torchrun's variables give the World."""
    assert detect(TORCHRUN) == THIRD


@pytest.mark.parametrize(
    ("procid", "localid", "nodeid"),
    [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)],
)
def test_srun(procid, localid, nodeid):
    """Each of 2 x 2 tasks is a rank, and the first host serves the rendezvous."""
    world = detect(task(procid, localid, nodeid))
    assert ranks_and_sizes(world) == (procid, localid, nodeid, 4, 2, 2)
    assert world.master_addr == "n1"
    assert not world.has_store


@pytest.mark.parametrize(("procid", "localid", "nodeid"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)])
def test_srun_cyclic(procid, localid, nodeid):
    """The local rank is Slurm's: with `-m cyclic` it cannot be computed from the rank."""
    assert ranks_and_sizes(detect(task(procid, localid, nodeid))) == (procid, localid, nodeid, 4, 2, 2)


@pytest.mark.parametrize(
    ("procid", "localid", "nodeid", "local_world_size"), [(0, 0, 0, 2), (1, 1, 0, 2), (2, 0, 1, 1)]
)
def test_srun_on_unequal_nodes(procid, localid, nodeid, local_world_size):
    """Nodes with different numbers of tasks agree on the number of nodes."""
    environ = task(procid, localid, nodeid, SLURM_STEP_NUM_TASKS="3", SLURM_STEP_TASKS_PER_NODE="2,1")
    assert ranks_and_sizes(detect(environ)) == (procid, localid, nodeid, 3, local_world_size, 2)


def test_srun_on_one_node_needs_no_name():
    """Tasks of one node use the loopback address, because hostnames do not resolve on many clusters."""
    environ = task(1, 1, 0, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2", SLURM_STEP_NODELIST="n1")
    assert detect(environ).master_addr == "127.0.0.1"


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
        pytest.param({"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "NODE_RANK": "1"}, id="rendezvous of nodes"),
        pytest.param({"WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, id="a job script's exports"),
        pytest.param({"RANK": "", "WORLD_SIZE": ""}, id="set to nothing"),
        pytest.param({**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, id="sbatch script without srun"),
        pytest.param(JOB, id="salloc"),
        pytest.param(ONE_TASK, id="one-task step in a four-task job"),
        pytest.param({**ONE_TASK, "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290"}, id="interactive step"),
        pytest.param({**ONE_TASK, "SLURM_PTY_PORT": "41123"}, id="srun --pty"),
        pytest.param({**ONE_TASK, "PMI_RANK": "0", "PMI_SIZE": "1"}, id="one-task step by --mpi=pmi2"),
    ],
)
def test_no_launcher(environ):
    """Variables that describe a job but no rank in it give no World."""
    assert detect(environ) is None


def open_mpi(rank, local_rank, **changes):
    """Return the variables that Open MPI's mpirun sets for one of 2 x 2 processes."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "PMIX_NAMESPACE": "prterun-n1-4242@1",
        "MASTER_ADDR": "n1",
        **changes,
    }


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 8)])
def test_a_rank_in_the_environment_does_not_hide_other_launchers(rank, world_size):
    """Of a pod with one process, of a node, or left in a shell: the tasks that mpirun has started are one world."""
    environ = {**open_mpi(2, 0), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    assert detect({**environ, "MASTER_ADDR": "n1", "MASTER_PORT": "29400"}) == dataclasses.replace(
        detect(open_mpi(2, 0)), master_addr="n1", master_port=29400
    )


def mpich(rank, local_rank):
    """Return the variables that MPICH's hydra sets for one of 2 x 2 processes."""
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": "2",
        "MASTER_ADDR": "n1",
    }


@pytest.mark.parametrize("variables", [open_mpi, mpich])
@pytest.mark.parametrize(
    ("rank", "local_rank", "node_rank"),
    [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (1, 0, 1), (2, 1, 0)],
)
def test_mpirun(variables, rank, local_rank, node_rank):
    """mpirun's variables give the World, whether ranks fill nodes one by one or round-robin."""
    assert ranks_and_sizes(detect(variables(rank, local_rank))) == (rank, local_rank, node_rank, 4, 2, 2)


def test_srun_with_pmi2():
    """With `srun --mpi=pmi2`, which also sets PMI_RANK, the local rank is Slurm's."""
    assert ranks_and_sizes(detect({**task(1, 0, 1), "PMI_RANK": "1", "PMI_SIZE": "4"})) == (1, 0, 1, 4, 2, 2)


def test_mpirun_on_one_node():
    """On one node no address is needed, and two runs most likely use different ports."""
    one = {**open_mpi(0, 0), "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": ""}
    world = detect(one)
    assert (world.master_addr, world.num_nodes) == ("127.0.0.1", 1)
    assert world.master_port != detect({**one, "PMIX_NAMESPACE": "prterun-n1-4243@1"}).master_port


def test_torch_names_over_srun():
    """If a script copies srun's rank and size to RANK and WORLD_SIZE, the local rank is srun's."""
    environ = {**task(1, 0, 1), "RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "12910"}
    assert ranks_and_sizes(detect(environ)) == (1, 0, 1, 4, 2, 2)
    assert detect(environ).master_port == 12910


def test_torch_names_without_local_world_size():
    """Ranks that equal their local ranks are all on one node."""
    environ = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    assert ranks_and_sizes(detect(environ)) == (1, 1, 0, 2, 2, 1)


def test_a_world_of_one_needs_no_more():
    """RANK=0 and WORLD_SIZE=1 suffice."""
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}) == World()


@pytest.mark.parametrize(
    ("environ", "what", "why"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set", "related variables are set"),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "MASTER_ADDR is not set",
            "processes are on several nodes, and their launcher does not provide the address of rank 0",
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "2", "PET_RDZV_ENDPOINT": "a:1"},
            "rank=2 with world_size=2",
            "it must be from 0 to 1",
        ),
        (
            {"PET_NNODES": "1:4", "PET_NODE_RANK": "0"},
            "PET_NNODES='1:4'",
            "a call runs on a fixed number of nodes, and this is a range",
        ),
        (
            {"FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "3", "FLUX_JOB_NNODES": "2"},
            "FLUX_JOB_SIZE=3 with FLUX_JOB_NNODES=2",
            "this launcher does not set the number of processes of a node, and they cannot be equal",
        ),
        (
            {"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1"},
            "PALS_SIZE is not set",
            "related variables are set",
        ),
        (
            {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},
            "LOCAL_WORLD_SIZE is not set",
            "related variables are set",
        ),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT is not set", "related variables are set"),
        ({**TORCHRUN, "RANK": "zero"}, "RANK='zero'", "it is not an integer"),
        ({**TORCHRUN, "LOCAL_RANK": "1.0"}, "LOCAL_RANK='1.0'", "it is not an integer"),
        ({**TORCHRUN, "RANK": "4"}, "rank=4 with world_size=4", "it must be from 0 to 3"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "local_rank=-1 with local_world_size=2", "it must be from 0 to 1"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node_rank=2 with num_nodes=2", "it must be from 0 to 1"),
        (
            {**TORCHRUN, "GROUP_WORLD_SIZE": "4"},
            "num_nodes=4 with world_size=4 and local_world_size=2",
            "it must be from 2 to 3",
        ),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "master_port=70000", "a port is a number from 1 to 65535"),
        (
            {**TORCHRUN, "MASTER_ADDR": ""},
            "MASTER_ADDR is not set",
            "processes are on several nodes, and their launcher does not provide the address of rank 0",
        ),
        (
            {**open_mpi(2, 0), "MASTER_ADDR": ""},
            "MASTER_ADDR is not set",
            "processes are on several nodes, and their launcher does not provide the address of rank 0",
        ),
        (
            {**open_mpi(2, 0), "OMPI_COMM_WORLD_LOCAL_RANK": ""},
            "OMPI_COMM_WORLD_LOCAL_RANK is not set",
            "related variables are set",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set", "related variables are set"),
        (
            task(0, 0, 0, SLURM_STEP_TASKS_PER_NODE=""),
            "MASTER_ADDR is not set",
            "processes are on several nodes, and their launcher does not provide the address of rank 0",
        ),
        (task(0, 0, 2), "local_world_size=0 with world_size=4", "it must be from 1 to 4"),
    ],
)
def test_refuses_invalid_variables(environ, what, why):
    """Missing variables, invalid values and contradictory numbers are reported with the reason."""
    assert (what, why) in [(fault.what, fault.why) for fault in faults_of(environ)]
    assert all(fault.fix for fault in faults_of(environ))


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
        faults = ()
        try:
            found = function(environ)
        except ConfigError as error:
            found, faults = None, error.faults
        assert found is None or isinstance(found, (World, Node))
        assert all(fault.what and fault.why and fault.fix for fault in faults)
    assert environ == before


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        ({}, None),
        ({"MASTER_PORT": "12910"}, None),
        ({"NODE_RANK": "1"}, None),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "12910"}, Node("n1", 12910)),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "12910", "NODE_RANK": ""}, Node("n1", 12910)),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "12910", "NODE_RANK": "1"}, Node("n1", 12910, 1)),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "12910", "NODE_RANK": "0"}, Node("n1", 12910, 0)),
    ],
)
def test_rendezvous_of_nodes(environ, node):
    """An address with a port is the rendezvous; a port alone, exported for other programs, is not."""
    assert detect_node(environ) == node


@pytest.mark.parametrize(
    ("environ", "what", "fix"),
    [
        ({"MASTER_ADDR": "n1"}, "MASTER_PORT is not set", "export MASTER_PORT=29400"),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "http"}, "MASTER_PORT='http'", "export MASTER_PORT=29400"),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "0"}, "MASTER_PORT=0", "export MASTER_PORT=29400"),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "65536"}, "MASTER_PORT=65536", "export MASTER_PORT=29400"),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "1", "NODE_RANK": "a"}, "NODE_RANK='a'", "let the launcher set NODE_"),
    ],
)
def test_refuses_half_a_rendezvous(environ, what, fix):
    """An address without a port, or an invalid value, is refused with the line to export."""
    (fault,) = faults_of(environ, detect_node)
    assert fault.what == what
    assert fault.fix.startswith(fix)
