"""What srun starts on every node of a job: it runs the node's share of the call, and node 0 leaves what came of it."""

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

import torch

from parallelize.call.task import Outcome, Task
from parallelize.cluster.devices import probe
from parallelize.cluster.network import address_towards, is_own
from parallelize.cluster.slurm_allocation import STOP_FILE
from parallelize.cluster.world import Node, World
from parallelize.config.layout import lay_out
from parallelize.errors import LaunchError
from parallelize.launchers.slurm import commands
from parallelize.launchers.slurm.job_folder import JobFolder
from parallelize.plugins import registry

__all__ = ["Step", "main"]

_MEETS_WITHIN_S = 300.0
_REQUEUED_WITHIN_S = 60.0


@dataclass(frozen=True)
class Step:
    """One attempt of a job, on one node.

    Args:
        folder: the job's.
        job: Slurm's number, "12" or "12_3".
        attempt: how often the job has been requeued.
        index: which of the folder's calls.
        max_requeues: how often it may be.
        environ: variables of this process; only read.
    """

    folder: JobFolder
    job: str
    attempt: int
    index: int
    max_requeues: int
    environ: Mapping[str, str]

    def run(self) -> int:
        """Run the call; the exit code.

        The workers are torch elastic's, as anywhere else: a failure on one node ends the others within seconds.
        """
        is_first = self._node_rank == 0
        try:
            outcomes = self._outcomes()
            if is_first and self._was_stopped():
                self._go_on_later()
            elif is_first:
                self.folder.write_outcomes(self.job, outcomes)
        except Exception as error:  # noqa: BLE001 - whatever ends the call is what came of it
            # What raised it is in its notes; the frames between there and here say nothing.
            sys.stderr.write("".join(traceback.format_exception_only(type(error), error)))
            if is_first:
                self.folder.write_failure(self.job, Outcome.raised(World(), error))
            return 1
        return 0

    def _outcomes(self) -> list[Outcome]:
        task = Task.read(self.folder.task(self.index), device=torch.device("cpu"))
        layout = lay_out(task.layout.config, probe())
        task = Task(task.function, task.args, task.kwargs, layout, task.all_ranks)
        launcher = registry.get("launchers", "elastic")()
        environ = {**self.environ, STOP_FILE: str(self.folder.stop(self.job, self.attempt))}
        outcomes: list[Outcome] = launcher.launch(task, node=self._node(layout.num_nodes), environ=environ)
        return outcomes

    @property
    def _node_rank(self) -> int:
        return int(self.environ["SLURM_NODEID"])

    def _node(self, num_nodes: int) -> Node | None:
        """Where the nodes meet: no name has to lead anywhere, the job's folder says it."""
        if num_nodes == 1:
            return None
        place = self.folder.meeting(self.job, self.attempt)
        if self._node_rank == 0:
            address = self.environ.get("MASTER_ADDR") or _own_address(self.environ)
            port = self.environ.get("MASTER_PORT") or _free_port(address)
            draft = place.with_name(place.name + ".part")
            draft.write_text(f"{address} {port}")
            draft.replace(place)
        end = time.monotonic() + _MEETS_WITHIN_S
        while not place.exists():
            if time.monotonic() > end:
                raise LaunchError(
                    f"node {self._node_rank} of job {self.job} has waited {_MEETS_WITHIN_S:g} s for node 0",
                    why=f"there is no {place}",
                    fix="let folder= be on a file system that all nodes share",
                )
            list(place.parent.iterdir())  # a network file system is asked again what there is
            time.sleep(0.05)
        address, port = place.read_text().split()
        return Node(address, int(port), self._node_rank)

    def _was_stopped(self) -> bool:
        """Whether the function has returned because it was told to, and may go on later."""
        stop = self.folder.stop(self.job, self.attempt)
        return _heeded(stop).exists() and self.attempt < self.max_requeues

    def _go_on_later(self) -> None:
        """Back into the queue; Slurm then ends this process, which must not end the job before."""
        commands.requeue(self.job)
        threading.Event().wait(_REQUEUED_WITHIN_S)


def _heeded(stop: Path) -> Path:
    """The file that says that a function knows that it should stop."""
    return stop.with_name(stop.name + ".heeded")


def _own_address(environ: Mapping[str, str]) -> str:
    """The address of this node on the network of the cluster: that by which it reaches the node that started it."""
    srun = environ.get("SLURM_SRUN_COMM_HOST") or environ.get("SLURM_LAUNCH_NODE_IPADDR") or ""
    address = address_towards(srun) if srun else socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    # srun runs on this very node and calls it by loopback.
    named = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return named if named and is_own(named) else address


def _free_port(address: str) -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as `python -m parallelize.launchers.slurm.step FOLDER --job ID ...`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", required=True)
    for number in ("--attempt", "--index", "--max-requeues"):
        parser.add_argument(number, type=int, default=0)
    given = parser.parse_args(arguments)
    folder = JobFolder(given.folder)
    sys.path[:] = folder.sys_path()
    settings = folder.settings()  # the workers get those of this process
    settings.settle()
    settings.settle_device()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a cluster may send it to every process
    step = Step(folder, given.job, given.attempt, given.index, given.max_requeues, dict(os.environ))
    return step.run()


if __name__ == "__main__":
    sys.exit(main())
