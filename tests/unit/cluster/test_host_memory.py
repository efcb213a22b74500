"""Tests of the memory that the kernel and the cgroups leave to the processes of a host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from parallelize.cluster.host_memory import available_host_bytes

MEMINFO = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:  800 kB\n"}
VERSION_1 = {
    **MEMINFO,
    "proc/self/cgroup": "8:pids:/\n4:cpuset,memory:/slurm/job_7\n0::/\n",
    "cgroups/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "cgroups/memory/memory.usage_in_bytes": "1\n",
    "cgroups/memory/slurm/memory.limit_in_bytes": "700000\n",
    "cgroups/memory/slurm/memory.usage_in_bytes": "400000\n",
    "cgroups/memory/slurm/memory.stat": "inactive_file 1\ntotal_inactive_file 100000\n",
    "cgroups/memory/slurm/job_7/memory.limit_in_bytes": "600000\n",
    "cgroups/memory/slurm/job_7/memory.usage_in_bytes": "100000\n",
}
VERSION_2 = {
    **MEMINFO,
    "proc/self/cgroup": "0::/pods/train\n",
    "cgroups/pods/memory.max": "max\n",
    "cgroups/pods/memory.current": "700000\n",
    "cgroups/pods/train/memory.max": "500000\n",
    "cgroups/pods/train/memory.current": "450000\n",
    "cgroups/pods/train/memory.stat": "anon 7\ninactive_file 20000\n",
}
IN_A_CONTAINER = {
    **MEMINFO,
    "proc/self/cgroup": "0::/../../pods/train\n",
    "cgroups/memory.max": "300000\n",
    "cgroups/memory.current": "200000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, math.inf, id="no Linux"),
        pytest.param(MEMINFO, 800 * 1024, id="no cgroups"),
        pytest.param(VERSION_1, 400_000, id="a parent of version 1"),
        pytest.param(VERSION_2, 70_000, id="version 2"),
        pytest.param(IN_A_CONTAINER, 100_000, id="a container that sees its cgroup as the root"),
        pytest.param({**IN_A_CONTAINER, "cgroups/memory.current": "400000"}, 0, id="all taken"),
    ],
)
def test_the_least_of_all_limits_counts(files: Mapping[str, str], expected: float, tmp_path: Path) -> None:
    """Pages of files that the kernel would free are no memory that is taken."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_host_bytes(tmp_path / "proc", tmp_path / "cgroups") == expected
