"""Hypothesis strategies for pure functions: options, hardware, worlds, environments, host lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from hypothesis import strategies as st

from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.plugins.base import LEVELS, Amp

__all__ = [
    "HeterogeneousStep",
    "Hosts",
    "environments",
    "hardware",
    "heterogeneous_steps",
    "hostlists",
    "invalid_options",
    "option_sets",
    "valid_gpus",
    "valid_options",
    "worlds",
]

indices = st.integers(0, 9)

valid_gpus: st.SearchStrategy[Any] = st.one_of(
    st.integers(-1, 9),
    st.lists(indices, unique=True, max_size=4),
    st.lists(indices, unique=True, max_size=4).map(tuple),
    st.just("auto"),
    st.just("-1"),
    st.integers(0, 9).map(str),
    indices.map("{},".format),
    st.lists(indices, unique=True, min_size=2, max_size=4).map(lambda several: ",".join(map(str, several))),
)

invalid_gpus: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    st.integers(max_value=-2),
    st.lists(st.integers(max_value=-1), min_size=1, max_size=3),
    st.sampled_from([1.5, "two", "", "0,,1", "-2", "1.5", b"01", {0, 1}, [True], [0, 1.0], ["0"], "0,-1", object]),
)

amps = st.builds(
    Amp,
    level=st.sampled_from([None, *LEVELS]),
    dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    init_scale=st.sampled_from([1.0, 2.0, 65536.0]),
    growth_interval=st.integers(1, 10_000),
    communication_dtype=st.sampled_from([None, torch.bfloat16, torch.float32]),
)


def connect(world: World) -> None:
    """A user's `init_connection`; only its identity matters."""


# Valid and invalid values of each option. Backends and engines are given by name: whether a combination is valid
# depends on what they declare.
valid_options: Mapping[str, st.SearchStrategy[Any]] = {
    "gpus": st.none() | valid_gpus,
    "processes": st.none() | st.integers(1, 64),
    "num_nodes": st.none() | st.integers(1, 64),
    "amp": st.one_of(st.none(), st.booleans(), st.sampled_from([*LEVELS, "bf16", "fp16"]), amps),
    "seed": st.none() | st.integers(0, 2**32 - 1),
    "timeout": st.floats(0.001, 10**8) | st.integers(1, 10**8) | st.timedeltas(timedelta(seconds=1), timedelta(1000)),
    "max_restarts": st.integers(0, 100),
    "logs": st.sampled_from(["rank0", "all", "some/folder"]),
    "process_group_backend": st.sampled_from([None, "gloo", "nccl", "cpu:gloo,cuda:nccl"]),
    "init_connection": st.sampled_from([None, connect]),
    "wrap": st.sampled_from([None, connect]),
    "verify_every": st.integers(0, 10**6),
    "update_modules": st.booleans(),
}

no_integer: st.SearchStrategy[Any] = st.sampled_from([-1, 1.5, True, "four", [1], float("nan")])

invalid_options: Mapping[str, st.SearchStrategy[Any]] = {
    "backend": st.sampled_from([None, "DDP", "horovod", "", 3, object(), Amp]),
    "gpus": invalid_gpus,
    "processes": no_integer | st.just(0),
    "num_nodes": no_integer | st.just(0),
    "amp": st.sampled_from(["O4", "o1", 16, "int8", [], Amp(init_scale=-1.0), Amp(level="O9")]),  # type: ignore[arg-type]  # on purpose
    "amp_engine": st.sampled_from([None, "Native", "amp", 1]),
    "seed": no_integer | st.just(2**32),
    "timeout": st.sampled_from([0, -1.0, True, None, float("nan"), float("inf"), 1e-9, timedelta(0), "30 x"]),
    "max_restarts": no_integer,
    "launcher": st.sampled_from(["sge", 1, object()]),
    "logs": st.sampled_from(["", None, 3, True]),
    "process_group_backend": st.sampled_from(["", "NCCL", "cpu:nccl:gloo", "gloo,nccl", "cpu:gloo,cpu:gloo", 5]),
    "init_connection": st.sampled_from([1, "connect"]),
    "wrap": st.sampled_from([1, "wrap"]),
    "verify_every": no_integer,
    "update_modules": st.sampled_from([None, 1, "on"]),
}


@st.composite
def option_sets(draw: st.DrawFn, *, invalid: bool = False) -> dict[str, Any]:
    """Options for some names, each with a valid value, or with an invalid one if `invalid`."""
    values = invalid_options if invalid else valid_options
    names = draw(st.lists(st.sampled_from(sorted(values)), unique=True, min_size=int(invalid)))
    return {name: draw(values[name]) for name in names}


hardware = st.one_of(
    st.just(Hardware()),
    st.builds(Hardware, device_type=st.just("cuda"), count=st.integers(1, 8)),
    st.just(Hardware("mps", 1)),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """One process of a run whose nodes may differ in size, with ranks node by node or round-robin."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ranks = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    if draw(st.booleans()):
        ranks.sort(key=lambda each: (each[1], each[0]))
    rank = draw(st.integers(0, len(ranks) - 1))
    node_rank, local_rank = ranks[rank]
    return World(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=len(ranks),
        local_world_size=sizes[node_rank],
        master_addr=draw(st.sampled_from(["127.0.0.1", "10.0.0.11", "n1", "fe80::1"])),
        master_port=draw(st.integers(0, 65535)),
        has_store=draw(st.booleans()),
        num_nodes=len(sizes),
    )


launcher_variables = [
    *World().env(),
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_NAMESPACE"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
    *("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "I_MPI_HYDRA_UUID"),
    *("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES"),
    *("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_GTIDS", "SLURMD_NODENAME"),
    *("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_1"),
]
texts = st.one_of(
    st.integers(-1, 5).map(str),
    st.integers().map(str),
    st.sampled_from(["", " ", "2(x2)", "2,1", "n[1-2]", "n[1-", "True", "9" * 5000, "2(x999999999)", "\udcff", "²"]),
    st.sampled_from(["1(x0)", "1e3", "0x1"]),
    st.text(max_size=8),
)
environments = st.dictionaries(st.sampled_from(launcher_variables), texts, max_size=len(launcher_variables))


@dataclass(frozen=True)
class Hosts:
    """A list of hosts, compressed as by Slurm and expanded."""

    text: str
    names: tuple[str, ...]


words = st.text("abcdefghijklmnopqrstuvwxyz-.", min_size=1, max_size=4)


@st.composite
def _numbers(draw: st.DrawFn) -> Hosts:
    width = draw(st.integers(1, 3))
    texts, names = [], []
    for low, more in draw(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=3)):
        low_text = str(low).zfill(width)
        texts.append(f"{low_text}-{str(low + more).zfill(width)}" if more else low_text)
        names += [str(number).zfill(width) for number in range(low, low + more + 1)]
    return Hosts(f"[{','.join(texts)}]", tuple(names))


@st.composite
def _host(draw: st.DrawFn) -> Hosts:
    text, names = "", [""]
    for part in draw(st.lists(words.map(lambda word: Hosts(word, (word,))) | _numbers(), min_size=1, max_size=4)):
        text += part.text
        names = [name + end for name in names for end in part.names]
    return Hosts(text, tuple(names))


@st.composite
def hostlists(draw: st.DrawFn) -> Hosts:
    """Host lists such as "rack[1-2]-node[03-04,7],b"."""
    hosts = draw(st.lists(_host(), min_size=1, max_size=3))
    return Hosts(",".join(host.text for host in hosts), tuple(name for host in hosts for name in host.names))


@dataclass(frozen=True)
class HeterogeneousStep:
    """A step of Slurm over components of a heterogeneous job.

    Args:
        environments: variables of each task, in the order of the ranks.
        expected: of each task: its rank, its rank on its node, the rank of its node, the number of tasks, of tasks on
            its node, and of nodes.
        node_of_rank_0: the name of the first node of the first component; 127.0.0.1 if all tasks are on one node.
    """

    environments: list[dict[str, str]]
    expected: list[tuple[int, ...]]
    node_of_rank_0: str


@st.composite
def heterogeneous_steps(draw: st.DrawFn) -> HeterogeneousStep:
    """Steps over some components and some of their nodes, as Slurm ranks the tasks and lists the nodes.

    Ranks and nodes count component by component. The step's nodes, and its tasks per node, are listed by name.
    """
    numbers = draw(st.permutations(range(1, 8)))
    job = {"SLURM_JOB_ID": "4", "SLURM_JOB_ID_HET_GROUP_0": "4", "SLURM_STEP_ID": "0"}
    nodes_of_step = []
    for component in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 2))
        nodes, numbers = sorted(numbers[:size]), numbers[size:]
        job[f"SLURM_JOB_NODELIST_HET_GROUP_{component}"] = f"n[{','.join(map(str, nodes))}]"
        nodes_of_step += [node for node in nodes if draw(st.booleans())]
    nodes_of_step = nodes_of_step or [numbers[0]]
    sizes = [draw(st.integers(1 if len(nodes_of_step) > 1 else 2, 3)) for _ in nodes_of_step]
    listed = sorted(zip(nodes_of_step, sizes, strict=True))
    job["SLURM_STEP_NODELIST"] = f"n[{','.join(str(node) for node, _ in listed)}]"
    job["SLURM_STEP_TASKS_PER_NODE"] = ",".join(str(tasks) for _, tasks in listed)
    job["SLURM_STEP_NUM_TASKS"] = str(sum(sizes))
    environments, expected = [], []
    for node_rank, (node, tasks) in enumerate(zip(nodes_of_step, sizes, strict=True)):
        ranks = range(len(expected), len(expected) + tasks)
        for local_rank, rank in enumerate(ranks):
            task = {"SLURM_PROCID": rank, "SLURM_LOCALID": local_rank, "SLURM_NODEID": node_rank}
            of_node = {"SLURM_GTIDS": ",".join(map(str, ranks)), "SLURMD_NODENAME": f"n{node}"}
            environments.append(job | of_node | {name: str(number) for name, number in task.items()})
            expected.append((rank, local_rank, node_rank, sum(sizes), tasks, len(sizes)))
    address = f"n{nodes_of_step[0]}" if len(sizes) > 1 else "127.0.0.1"
    return HeterogeneousStep(environments, expected, address)
