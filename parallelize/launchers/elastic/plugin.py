"""Processes started by torch elastic's agent from a warm fork server, on this node and on every other of the run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec

from parallelize.call.log_settings import Logs
from parallelize.call.task import Outcome, Task
from parallelize.call.torch_settings import Settings
from parallelize.cluster.network import gloo_interface, reachable
from parallelize.cluster.world import Node
from parallelize.errors import ConfigError, LaunchError
from parallelize.launchers.elastic.agent import MONITOR_INTERVAL_S, Agent
from parallelize.launchers.elastic.failures import verdict
from parallelize.launchers.elastic.node_coordination import Control, meet
from parallelize.launchers.elastic.peers import Alone, Nodes
from parallelize.launchers.elastic.rendezvous import Rendezvous
from parallelize.launchers.elastic.signals import Signals
from parallelize.launchers.elastic.worker_environment import worker_environ
from parallelize.launchers.elastic.worker_output import RankFiles, Stream, open_standard_streams, shown
from parallelize.plugins.base import Launcher
from parallelize.worker.main import Orders, run, task_path

__all__ = ["PLUGIN", "ElasticLauncher"]

_log = logging.getLogger("parallelize")


@dataclass(frozen=True, kw_only=True)
class ElasticLauncher(Launcher):
    """Starts one process per device (or as many as asked for) and waits for them.

    With several nodes the same script runs on each, and each starts its own processes.

    Args:
        start_method: "forkserver" (the fork server imports torch once, so that a later call starts in a fraction of a
            second) or "spawn"; None: the first where the system has it.
    """

    name = "elastic"
    start_method: str | None = None

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Run the task in every process of its layout.

        Args:
            task: the call.
            node: with several nodes, where they meet and which this is.
            environ: the caller's variables, which the workers get.

        Returns:
            The outcomes in rank order, on every node: all, or rank 0's alone, as the task asks.

        Raises:
            BaseException: whatever the first rank to fail raised, with a note on where and how.
            WorkerError: a worker ended without an exception.
            LaunchError: a node did not come, or is gone.
        """
        _refuse_in_daemons(task)
        open_standard_streams()
        # The folder goes first: a signal that ends this process is delivered on the way out.
        with Signals().kept() as signals, _run_folder() as folder:
            task.write(task_path(folder))
            if node is not None:
                node = dataclasses.replace(node, master_addr=reachable(node.master_addr))
            control = None if task.layout.num_nodes == 1 else self._meet(task, node)
            place = _Place.of(node, control)
            run = _Run(task, folder, environ, place=place, signals=signals, start_method=self._method())
            try:
                return run.result()
            finally:
                if control is not None:
                    control.beat(is_on=False)

    def _meet(self, task: Task, node: Node | None) -> Control:
        layout = task.layout
        if node is None:
            raise ConfigError(
                f"num_nodes={layout.num_nodes} without a place to meet",
                why="the same script runs on every node, and the nodes find each other at one address",
                fix="on every node: MASTER_ADDR=<address of node 0> MASTER_PORT=29400 NODE_RANK=<0, 1, ...> python ...",
            )
        request = f"{task.name}, {layout.num_nodes} nodes x {layout.local_world_size} processes"
        return meet(node, num_nodes=layout.num_nodes, request=request, timeout=layout.config.timeout)

    def _method(self) -> str:
        known = multiprocessing.get_all_start_methods()
        return self.start_method or ("forkserver" if "forkserver" in known else "spawn")


@dataclass(frozen=True)
class _Place:
    """Where this node stands in the run: the address its nodes share, its number, its line to the others."""

    address: str = "127.0.0.1"
    node_rank: int = 0
    control: Control | None = None

    @classmethod
    def of(cls, node: Node | None, control: Control | None) -> _Place:
        if node is None or control is None:
            return cls()
        return cls(node.master_addr, control.node_rank, control)

    def interface(self) -> str | None:
        """The interface that gloo must be told of, because this machine's own name leads nowhere."""
        return None if self.control is None else gloo_interface(self.address)


class _Run:
    """One launch on this node: its agent, its output, what its attempts came to."""

    def __init__(
        self,
        task: Task,
        folder: Path,
        environ: Mapping[str, str],
        *,
        place: _Place,
        signals: Signals,
        start_method: str,
    ) -> None:
        self._task, self._layout, self._signals = task, task.layout, signals
        config, local_world_size = self._layout.config, self._layout.local_world_size
        first = place.node_rank * local_world_size
        self._ranks = range(first, first + local_world_size)
        kept = config.logs not in ("rank0", "all")
        self._files = RankFiles(Path(config.logs) if kept else folder / "logs")
        self._streams: list[Stream] = []
        self._earlier: list[BaseException] = []
        self._nodes: Alone | Nodes = Alone(folder, self._layout.world_size)
        if place.control is not None:
            self._nodes = Nodes(place.control, folder, self._ranks)
        self._rendezvous = Rendezvous(
            place.address,
            node_rank=place.node_rank,
            num_nodes=self._layout.num_nodes,
            timeout=config.timeout,
            agents=place.control.store if place.control else None,
            before_again=self._nodes.refuse_to_restart,
        )
        orders = Orders(
            folder=str(folder),
            environ=worker_environ(
                environ, self._layout, cores=_cores(), columns=_columns(), interface=place.interface()
            ),
            launcher_pid=os.getpid(),
            start_method=_for_loaders(),
            logs=Logs.here(),
            settings=Settings.here(),
        )
        spec = WorkerSpec(
            role=task.name,
            local_world_size=local_world_size,
            entrypoint=run,
            args=(orders,),
            rdzv_handler=self._rendezvous,
            max_restarts=config.max_restarts,
            monitor_interval=MONITOR_INTERVAL_S,
            local_addr=place.address,
        )
        self._agent = Agent(spec, self._files, start_method=start_method, after_start=self._started, peers=self._nodes)

    def result(self) -> list[Outcome]:
        with shown(self._streams):
            try:
                result = self._agent.run()
            finally:
                self._rendezvous.shutdown()
        attempt = self._agent.attempt
        if result.is_failed():
            raise self._cause(attempt)
        return self._nodes.results(attempt, range(self._layout.world_size if self._task.all_ranks else 1))

    def _started(self, attempt: int) -> None:
        """The processes of an attempt are there: show their output, keep our hands on the signals."""
        self._signals.take()
        config = self._layout.config
        for rank in (each for each in self._ranks if each == 0 or config.logs == "all"):
            prefix = f"[rank {rank}] " if config.logs == "all" else ""
            self._streams.append(Stream(self._files.path(rank, attempt, "out"), sys.stdout, prefix))
            self._streams.append(Stream(self._files.path(rank, attempt, "err"), sys.stderr, prefix))
        if attempt:
            self._earlier.append(self._cause(attempt - 1))
            failed = f"{type(self._earlier[-1]).__name__}: {self._earlier[-1]}".partition("\n")[0]
            _log.warning("restart %d of %d after %s", attempt, config.max_restarts, failed)

    def _cause(self, attempt: int) -> BaseException:
        outcomes, deaths = self._nodes.failures(attempt)
        return verdict(
            outcomes,
            deaths,
            world_size=self._layout.world_size,
            output=lambda rank: self._files.texts(rank, attempt),
            earlier=self._earlier,
        )


def _refuse_in_daemons(task: Task) -> None:
    if multiprocessing.current_process().daemon:
        raise LaunchError(
            f"{task.name} asks for {task.layout.world_size} processes in a daemonic one, such as a Pool's worker",
            why="multiprocessing lets a daemonic process start no others",
            fix="call from the process that made the Pool, or use a concurrent.futures.ProcessPoolExecutor",
        )


@contextlib.contextmanager
def _run_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="parallelize-"))  # 0700
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _for_loaders() -> str:
    """How a worker starts processes of its own: as the user chose, else by fork, which sees classes of __main__."""
    known = multiprocessing.get_all_start_methods()
    return multiprocessing.get_start_method(allow_none=True) or ("fork" if "fork" in known else known[0])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _columns() -> int | None:
    return shutil.get_terminal_size().columns if sys.stderr is not None and sys.stderr.isatty() else None


PLUGIN = ElasticLauncher
