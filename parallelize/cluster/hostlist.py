"""Parsing of Slurm's compressed lists: hosts ("rack[1-2]-node[3-4],b") and tasks per node ("2(x3),1")."""

from __future__ import annotations

import re

from parallelize.errors import ConfigError

__all__ = ["first_host", "tasks_on"]

_NUMBERS = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOST = rf"(?:[^\[\],\s]|{_NUMBERS})+"
_HOSTS = re.compile(rf"({_HOST})(?:,{_HOST})*")
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,6})\))?")


def first_host(nodelist: str) -> str:
    """Return the first host of a list: rack1-node3 for "rack[1-2]-node[3-4],b".

    Args:
        nodelist: value of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST; numbers keep their leading zeros.

    Raises:
        ConfigError: a malformed list, such as "n[1-".

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
    """Return the number of tasks on a node, and the number of nodes.

    Args:
        node: number of the node, from 0; a node past the end has 0 tasks.
        counts: value of SLURM_STEP_TASKS_PER_NODE: "2(x3),1" is two tasks on each of three nodes, then one.

    Raises:
        ConfigError: a malformed list.
    """
    parts = [_COUNT.fullmatch(part) for part in counts.split(",")]
    sizes = [int(part[1]) for part in parts if part is not None for _ in range(int(part[2] or 1))]
    if None in parts:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={counts!r}",
            why="Slurm writes counts as '2(x3),1'",
            fix="let srun set it",
        )
    return sizes[node] if 0 <= node < len(sizes) else 0, len(sizes)
