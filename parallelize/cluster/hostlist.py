"""What Slurm's short forms mean: "rack[1-2]-node[3-4],b" names hosts, "2(x3),1" counts tasks on each of them."""

from __future__ import annotations

import re

from parallelize.errors import ConfigError

__all__ = ["first_host", "tasks_on"]

_NUMBERS = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOST = rf"(?:[^\[\],\s]|{_NUMBERS})+"
_HOSTS = re.compile(rf"({_HOST})(?:,{_HOST})*")
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def first_host(nodelist: str) -> str:
    """The first host of a list: "rack[1-2]-node[3-4],b" is rack1-node3.

    Args:
        nodelist: as SLURM_STEP_NODELIST and SLURM_JOB_NODELIST have it; numbers keep their leading zeros.

    Raises:
        ConfigError: it is no such list, as "n[1-".

    Source: https://slurm.schedmd.com/scontrol.html (show hostnames)
    """
    found = _HOSTS.fullmatch(nodelist)
    if found is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodelist!r}",
            why="Slurm writes hosts as 'rack[1-2]-node[3-4],b'",
            fix="let srun set it, or export MASTER_ADDR",
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def tasks_on(node: int, counts: str) -> tuple[int, int]:
    """Tasks on a node, and nodes in all.

    Args:
        node: number of the node, from 0; beyond the last it has no tasks.
        counts: as SLURM_STEP_TASKS_PER_NODE has it: "2(x3),1" is two tasks on each of three nodes, then one.

    Raises:
        ConfigError: it is no such list.
    """
    parts = [_COUNT.fullmatch(part) for part in counts.split(",")]
    runs = [(int(part[1]), int(part[2] or 1)) for part in parts if part is not None]
    if len(runs) < len(parts):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={counts!r}",
            why="Slurm writes counts as '2(x3),1'",
            fix="let srun set it",
        )
    nodes, tasks = 0, 0
    for count, repeat in runs:
        if nodes <= node < nodes + repeat:
            tasks = count
        nodes += repeat
    return tasks, nodes
