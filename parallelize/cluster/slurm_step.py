"""What the tasks of a Slurm step know of its nodes, from Slurm's compressed lists.

SLURM_STEP_NODELIST=rack[1-2]-node[3-4],b      the hosts, in a compressed list
SLURM_STEP_TASKS_PER_NODE=2(x3),1              2, 2, 2 and 1 tasks on the nodes
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from parallelize.cluster.world import read_integer
from parallelize.errors import ConfigError

# No variable has such names, since "=" ends the name of a variable.
LOCAL_SIZE = "=LOCAL_SIZE"
NUM_NODES = "=NUM_NODES"

_MAX_NUMBERS_OF_RANGE = 1 << 16
"""The largest range in Slurm's lists of nodes (MAX_RANGE): a longer one is no list of nodes."""


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed list: rack1-node3 of "rack[1-2]-node[3-4],b".

    Source: https://slurm.schedmd.com/scontrol.html (show hostnames)
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist).partition(",")[0]


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
        ends = list(hosts(suffix)) or [""]
        for number, end in itertools.product(_numbers(ranges), ends):
            yield f"{prefix}{number}{end}"


def _numbers(ranges: str) -> Iterator[str]:
    """Yield the numbers of ranges, with their zeros: 01, 02, 04 of "01-02,04"."""
    for first, last in re.findall(r"(\d{1,9})(?:-(\d{1,9}))?", ranges, re.ASCII):
        numbers = range(int(first), int(last or first) + 1)
        for number in numbers[:_MAX_NUMBERS_OF_RANGE]:
            yield f"{number:0{len(first)}}"


def tasks_per_node(counts: str) -> list[int]:
    """Return the tasks on each node by Slurm's compressed list: 2, 2, 2, 1 of "2(x3),1"."""
    tasks_of_nodes: list[int] = []
    for tasks, nodes in re.findall(r"(\d{1,9})(?:\(x(\d{1,6})\))?", counts):
        tasks_of_nodes += [int(tasks)] * int(nodes or 1)
    return tasks_of_nodes


def derive_from_lists(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what has no variable of its own in a step; the variables are of a task of it.

    Returns:
        LOCAL_SIZE, the number of tasks on this node, NUM_NODES and, for several nodes without a
        MASTER_ADDR of the user, the MASTER_ADDR.

    Raises:
        ConfigError: SLURM_NODEID is no integer, or nothing tells where rank 0 is.
    """
    tasks_of_nodes = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node_rank = read_integer(environ, "SLURM_NODEID")
    local_size = 0
    if "SLURM_GTIDS" in environ:
        # The ranks on this node. Some scripts unset the variable for programs that it disturbs.
        local_size = len(environ["SLURM_GTIDS"].split(","))
    elif 0 <= node_rank < len(tasks_of_nodes):
        local_size = tasks_of_nodes[node_rank]
    derived = {LOCAL_SIZE: str(local_size), NUM_NODES: str(len(tasks_of_nodes))}
    if len(tasks_of_nodes) > 1 and "MASTER_ADDR" not in environ:
        derived["MASTER_ADDR"] = _node_of_rank_0(environ, node_rank)
    return derived


def _node_of_rank_0(environ: Mapping[str, str], node_rank: int) -> str:
    """Return the name of the node of rank 0 in a step of Slurm.

    The nodes of a step are listed in the order of their ranks, except over several components
    (`srun --het-group=0,1`, `srun A : B`). These are ranked one after another, but their nodes, and
    the tasks per node, are listed in the order of the nodes' names: see `_reorder_het_job_recs` in
    Slurm's src/srun/srun.c.

        components         0: n2 with 2 tasks     1: n1 with 1 task
        ranks              0 and 1 on n2          2 on n1
        list of the step   n[1-2], with 1,2 tasks

    Args:
        environ: variables of this process.
        node_rank: rank of its node; 0 is the node of rank 0.

    Raises:
        ConfigError: the first node in the list is not that of rank 0, and nothing tells the other
            ranks which one is.
    """
    nodelist = environ.get("SLURM_STEP_NODELIST", "")
    node_of_rank_0 = first_host(nodelist)
    # A job that is submitted in a heterogeneous job inherits the variables of that job's
    # components, which have another number.
    if environ.get("SLURM_JOB_ID_HET_GROUP_0") == environ.get("SLURM_JOB_ID", ""):
        hosts_of_step = set(hosts(nodelist))
        for host in _hosts_of_components(environ):
            if host in hosts_of_step:
                node_of_rank_0 = host
                break
    name = environ.get("SLURMD_NODENAME", node_of_rank_0)
    if node_rank == 0 and name != node_of_rank_0:
        raise ConfigError(
            f"rank 0 is on node {name}, and the list of its step, {nodelist}, begins with "
            f"{node_of_rank_0}",
            why="Slurm sorts the nodes of a heterogeneous step (srun A : B) by name and not by "
            "rank, so that the other ranks do not know where rank 0 is",
            fix=f"export MASTER_ADDR={name} before srun, or submit a heterogeneous job and use "
            "srun --het-group",
        )
    return node_of_rank_0


def _hosts_of_components(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the nodes of a heterogeneous job, component by component: the order of its ranks."""
    for component in itertools.count():
        nodelist = environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{component}")
        if nodelist is None:
            return
        yield from hosts(nodelist)
