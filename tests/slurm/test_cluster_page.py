"""The job scripts on the page of a university's cluster run as they are written there.

Source: the page on PyTorch Lightning of Princeton Research Computing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SINGLE_GPU = """\
#!/bin/bash
#SBATCH --job-name=myjob         # create a short name for your job
#SBATCH --nodes=1                # node count
#SBATCH --ntasks=1               # total number of tasks across all nodes
#SBATCH --cpus-per-task=8        # cpu-cores per task (>1 if multi-threaded tasks)
#SBATCH --mem-per-cpu=4G         # memory per cpu-core (4G per cpu-core is default)
#SBATCH --time=1:00:00           # total run time limit (HH:MM:SS)
#SBATCH --gres=gpu:1             # number of gpus per node

module purge
module load anaconda3/2020.11
conda activate torch-pl-env

python myscript.py
"""
MULTI_GPU = """\
#!/bin/bash
#SBATCH --job-name=myjob         # create a short name for your job
#SBATCH --nodes=2                # node count
#SBATCH --ntasks=2               # total number of tasks across all nodes
#SBATCH --cpus-per-task=8        # cpu-cores per task (>1 if multi-threaded tasks)
#SBATCH --mem-per-cpu=4G         # memory per cpu-core (4G per cpu-core is default)
#SBATCH --time=1:00:00           # total run time limit (HH:MM:SS)
#SBATCH --gres=gpu:2             # number of gpus per node

module purge
module load anaconda3/2020.11
conda activate torch-pl-env

srun python myscript.py
"""
# The page's numbers; processes= in place of gpus=, since the GPUs of this cluster are pretended.
SCRIPT = """
import json, os
import torch
import torch.distributed as dist
from parallelize import distributed, rank

num_nodes = int(os.environ["SLURM_NNODES"])
gpus_per_node = int(os.environ["SLURM_GPUS_ON_NODE"])

@distributed(processes=gpus_per_node, num_nodes=num_nodes, timeout=200)
def train():
    places = [None] * dist.get_world_size() if dist.is_initialized() else [None]
    place = (rank(), int(os.environ.get("LOCAL_RANK", 0)), os.uname().nodename)
    if len(places) == 1:
        return [place]
    dist.all_gather_object(places, place)
    return places

if __name__ == "__main__":
    print(json.dumps(train()), flush=True)
"""


def submitted(cluster: Cluster, folder: Path, job_script: str) -> list[Any]:
    """Run a job script where `module` and `conda` do nothing; return the lines that its processes print."""
    (folder / "job.sh").write_text(job_script)
    (folder / "myscript.py").write_text(SCRIPT)
    for command in ("module", "conda"):
        (folder / command).write_text("#!/bin/sh\n")
        (folder / command).chmod(0o755)
    environ: Mapping[str, str] = {
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), cluster.environ["PATH"]])
    }
    state = cluster.sbatch("--output=log", "job.sh", cwd=folder, env=environ)
    text = (folder / "log").read_text()
    assert state == "COMPLETED", text
    return [json.loads(line) for line in text.splitlines() if line.startswith("[")]


def test_the_script_for_one_gpu(cluster: Cluster, tmp_path: Path) -> None:
    """Without srun, the script runs the call on the node of the job."""
    assert submitted(cluster, tmp_path, SINGLE_GPU) == [[[0, 0, "n1"]]]


def test_the_script_for_several_gpus(cluster: Cluster, tmp_path: Path) -> None:
    """One task per node starts the processes of its GPUs, and all ranks are one run."""
    places = [[0, 0, "n1"], [1, 1, "n1"], [2, 0, "n2"], [3, 1, "n2"]]
    assert submitted(cluster, tmp_path, MULTI_GPU) == [places, places]
