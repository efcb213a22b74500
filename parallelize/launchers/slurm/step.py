"""The job step that srun starts on each node: runs the call with the elastic launcher; node 0 writes the outcomes."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelize.call.task import Outcome
from parallelize.cluster.network import is_local_address, source_address_for
from parallelize.cluster.slurm_allocation import STOP_FILE_VARIABLE
from parallelize.cluster.world import Node, World
from parallelize.errors import LaunchError
from parallelize.launchers.batch_launcher import run_task
from parallelize.launchers.slurm import commands
from parallelize.launchers.slurm.job_folder import JobFolder

__all__ = ["Step", "main"]

_RENDEZVOUS_TIMEOUT_S = 300.0
_REQUEUE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Step:
    """One attempt of a job, on one node.

    Args:
        folder: folder of the submission.
        job: Slurm's job ID, "12" or "12_3".
        attempt: number of requeues so far.
        index: index of the call in the folder.
        max_requeues: upper limit of `attempt`.
        environ: environment variables of this process; not modified.
    """

    folder: JobFolder
    job: str
    attempt: int
    index: int
    max_requeues: int
    environ: Mapping[str, str]

    def run(self) -> int:
        """Run the call on this node; return the exit code.

        The elastic launcher starts the workers: a failure on one node ends the workers of all nodes within seconds.
        """
        is_first = self._node_rank == 0
        try:
            outcomes = self._run_call()
            if is_first and self._should_requeue():
                self._requeue()
            elif is_first:
                self.folder.write_outcomes(self.job, outcomes)
        except Exception as error:  # noqa: BLE001 - any error is the outcome of the call
            # This process's traceback is not shown: the error's notes contain the worker's traceback.
            sys.stderr.write("".join(traceback.format_exception_only(type(error), error)))
            if is_first:
                self.folder.write_failure(self.job, Outcome.raised(World(), error))
            return 1
        return 0

    def _run_call(self) -> list[Outcome]:
        task_file = self.folder.task_file(self.index)
        environ = {**self.environ, STOP_FILE_VARIABLE: str(self.folder.stop_file(self.job, self.attempt))}
        return run_task(task_file, node=self._rendezvous(), environ=environ)

    @property
    def _node_rank(self) -> int:
        return int(self.environ["SLURM_NODEID"])

    def _rendezvous(self) -> Node | None:
        """Exchange the address of node 0 through the job's folder, since host names may not resolve."""
        if int(self.environ["SLURM_STEP_NUM_NODES"]) == 1:
            return None
        path = self.folder.rendezvous_file(self.job, self.attempt)
        if self._node_rank == 0:
            address = self.environ.get("MASTER_ADDR") or _own_address(self.environ)
            port = self.environ.get("MASTER_PORT") or _free_port(address)
            partial = path.with_name(path.name + ".part")
            partial.write_text(f"{address} {port}")
            partial.replace(path)
        end = time.monotonic() + _RENDEZVOUS_TIMEOUT_S
        while not path.exists():
            if time.monotonic() > end:
                raise LaunchError(
                    f"node {self._node_rank} of job {self.job} waited {_RENDEZVOUS_TIMEOUT_S:g} s for node 0's address",
                    why=f"{path} does not exist",
                    fix="set folder= to a path on a file system that all nodes share",
                )
            list(path.parent.iterdir())  # refreshes the directory cache of a network file system
            time.sleep(0.05)
        address, port = path.read_text().split()
        return Node(address, int(port), self._node_rank)

    def _should_requeue(self) -> bool:
        """Return whether the function returned after should_stop() was true, and another requeue is allowed."""
        return self.folder.acknowledged_file(self.job, self.attempt).exists() and self.attempt < self.max_requeues

    def _requeue(self) -> None:
        """Requeue the job and wait until Slurm kills this process: returning earlier would end the job."""
        commands.requeue(self.job)
        threading.Event().wait(_REQUEUE_TIMEOUT_S)


def _own_address(environ: Mapping[str, str]) -> str:
    """Return this node's address on the cluster's network: its source address for connections to srun's node."""
    srun = environ.get("SLURM_SRUN_COMM_HOST") or environ.get("SLURM_LAUNCH_NODE_IPADDR") or ""
    address = source_address_for(srun) if srun else socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    # srun runs on this node and connects by loopback.
    launch_address = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return launch_address if launch_address and is_local_address(launch_address) else address


def _free_port(address: str) -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one attempt of a job: `python -m parallelize.launchers.slurm.step FOLDER --job ID ...`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", required=True)
    for number in ("--attempt", "--index", "--max-requeues"):
        parser.add_argument(number, type=int, default=0)
    parsed = parser.parse_args(arguments)
    folder = JobFolder(parsed.folder)
    sys.path[:] = folder.sys_path()
    settings = folder.settings()  # the launcher passes the applied settings on to the workers
    settings.apply()
    settings.apply_default_device()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # some clusters send SIGUSR2 to every process of a job
    step = Step(folder, parsed.job, parsed.attempt, parsed.index, parsed.max_requeues, dict(os.environ))
    return step.run()


if __name__ == "__main__":
    sys.exit(main())
