"""The default launcher: starts a process per device with torch elastic's agent and a preloaded fork server."""

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

from parallelize.call.log_settings import LogSettings
from parallelize.call.task import Outcome, Task
from parallelize.call.torch_settings import TorchSettings
from parallelize.cluster.network import gloo_interface, resolvable_address
from parallelize.cluster.world import Node
from parallelize.errors import ConfigError, LaunchError
from parallelize.launchers.elastic.agent import MONITOR_INTERVAL_S, Agent
from parallelize.launchers.elastic.failures import caller_exception
from parallelize.launchers.elastic.node_coordination import NodeCoordinator, join_call
from parallelize.launchers.elastic.peers import MultiNode, SingleNode
from parallelize.launchers.elastic.rendezvous import Rendezvous
from parallelize.launchers.elastic.signals import StopSignals
from parallelize.launchers.elastic.worker_environment import available_cores, terminal_columns, worker_environ
from parallelize.launchers.elastic.worker_output import OutputTail, RankFiles, forwarded, open_standard_streams
from parallelize.plugins.base import Launcher
from parallelize.worker.main import WorkerSetup, run, task_path

__all__ = ["PLUGIN", "ElasticLauncher"]

_log = logging.getLogger("parallelize")


@dataclass(frozen=True, kw_only=True)
class ElasticLauncher(Launcher):
    """Starts one process per device (or the requested number) and waits for them.

    With several nodes the same script runs on each, and each starts its own processes.

    Args:
        start_method: "forkserver" (the fork server imports torch once, so that a later call starts in a fraction of a
            second) or "spawn"; None: "forkserver" where the system supports it.
    """

    name = "elastic"
    start_method: str | None = None

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Run the task in every process of its layout.

        Args:
            task: the call.
            node: with several nodes, the address of node 0 and this node's rank.
            environ: the caller's variables, passed on to the workers.

        Returns:
            The outcomes in rank order, on every node: of all ranks or of rank 0 only, as `task.all_ranks` specifies.

        Raises:
            BaseException: the exception of the first rank to fail, with rank, host and traceback as notes.
            WorkerError: a worker ended without an exception.
            LaunchError: a node did not join, or is lost.
        """
        _refuse_in_daemons(task)
        open_standard_streams()
        # The folder is removed before a stop signal is delivered to the caller's handler, which may end this process.
        with StopSignals().handled() as signals, _run_folder() as folder:
            task.write(task_path(folder))
            if node is not None:
                node = dataclasses.replace(node, master_addr=resolvable_address(node.master_addr))
            coordinator = None if task.layout.num_nodes == 1 else self._join_call(task, node)
            start_method = self._resolve_start_method()
            run = _NodeRun(task, folder, environ, coordinator, signals=signals, start_method=start_method)
            try:
                return run.result()
            finally:
                if coordinator is not None:
                    coordinator.heartbeats.stop()

    def _join_call(self, task: Task, node: Node | None) -> NodeCoordinator:
        layout = task.layout
        if node is None:
            raise ConfigError(
                f"num_nodes={layout.num_nodes} without MASTER_ADDR and MASTER_PORT",
                why="the same script runs on every node, and the nodes connect to node 0 at this address",
                fix="on every node: MASTER_ADDR=<address of node 0> MASTER_PORT=29400 NODE_RANK=<0, 1, ...> python ...",
            )
        request = f"{task.name}, {layout.num_nodes} nodes x {layout.local_world_size} processes"
        return join_call(node, num_nodes=layout.num_nodes, request=request, timeout=layout.config.timeout)

    def _resolve_start_method(self) -> str:
        known = multiprocessing.get_all_start_methods()
        return self.start_method or ("forkserver" if "forkserver" in known else "spawn")


class _NodeRun:
    """One call on this node: its agent, the workers' output, and the errors of its attempts."""

    def __init__(
        self,
        task: Task,
        folder: Path,
        environ: Mapping[str, str],
        coordinator: NodeCoordinator | None,
        *,
        signals: StopSignals,
        start_method: str,
    ) -> None:
        self._task, self._layout, self._signals = task, task.layout, signals
        config, local_world_size = self._layout.config, self._layout.local_world_size
        address, node_rank = (coordinator.address, coordinator.node_rank) if coordinator else ("127.0.0.1", 0)
        first_rank = node_rank * local_world_size
        self._ranks = range(first_rank, first_rank + local_world_size)
        self._files = RankFiles(folder / "logs" if config.logs in ("rank0", "all") else Path(config.logs))
        self._tails: list[OutputTail] = []
        self._earlier_errors: list[BaseException] = []
        self._peers: SingleNode | MultiNode = SingleNode(folder, self._layout.world_size)
        if coordinator is not None:
            self._peers = MultiNode(coordinator, folder, self._ranks)
        self._rendezvous = Rendezvous(
            address,
            node_rank=node_rank,
            num_nodes=self._layout.num_nodes,
            timeout=config.timeout,
            agent_store=coordinator.store if coordinator else None,
            before_restart=self._peers.require_all_nodes,
        )
        interface = gloo_interface(address) if coordinator else None
        variables = worker_environ(
            environ, self._layout, cores=available_cores(), columns=terminal_columns(), interface=interface
        )
        setup = WorkerSetup(
            folder=str(folder),
            environ=variables,
            devices=tuple(driven[0] for driven in self._layout.renumbered().devices),
            launcher_pid=os.getpid(),
            start_method=_start_method_of_workers(),
            logs=LogSettings.capture(),
            settings=TorchSettings.capture(),
        )
        spec = WorkerSpec(
            role=task.name,
            local_world_size=local_world_size,
            entrypoint=run,
            args=(setup,),
            rdzv_handler=self._rendezvous,
            max_restarts=config.max_restarts,
            monitor_interval=MONITOR_INTERVAL_S,
            local_addr=address,
        )
        self._agent = Agent(
            spec, self._files, start_method=start_method, after_start=self._after_start, peers=self._peers
        )

    def result(self) -> list[Outcome]:
        with forwarded(self._tails):
            try:
                result = self._agent.run()
            finally:
                self._rendezvous.shutdown()
        attempt = self._agent.attempt
        if result.is_failed():
            raise self._build_error(attempt)
        return self._peers.collect_outcomes(attempt, range(self._layout.world_size if self._task.all_ranks else 1))

    def _after_start(self, attempt: int) -> None:
        """Install our signal handlers again, show the output of the new attempt, and log a restart."""
        self._signals.install()
        config = self._layout.config
        for rank in (each for each in self._ranks if each == 0 or config.logs == "all"):
            prefix = f"[rank {rank}] " if config.logs == "all" else ""
            self._tails.append(OutputTail(self._files.path(rank, attempt, "out"), sys.stdout, prefix))
            self._tails.append(OutputTail(self._files.path(rank, attempt, "err"), sys.stderr, prefix))
        if attempt:
            self._earlier_errors.append(self._build_error(attempt - 1))
            error = f"{type(self._earlier_errors[-1]).__name__}: {self._earlier_errors[-1]}".partition("\n")[0]
            _log.warning("restart %d of %d after %s", attempt, config.max_restarts, error)

    def _build_error(self, attempt: int) -> BaseException:
        outcomes, exits = self._peers.collect_failures(attempt)
        return caller_exception(
            outcomes,
            exits,
            world_size=self._layout.world_size,
            output=lambda rank: self._files.read_output(rank, attempt),
            earlier=self._earlier_errors,
        )


def _refuse_in_daemons(task: Task) -> None:
    if multiprocessing.current_process().daemon:
        raise LaunchError(
            f"{task.name} needs {task.layout.world_size} processes in a daemonic process, such as a Pool worker",
            why="multiprocessing does not let daemonic processes start processes",
            fix="call from the process that created the Pool, or use a concurrent.futures.ProcessPoolExecutor",
        )


@contextlib.contextmanager
def _run_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="parallelize-"))  # with mode 0700
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_method_of_workers() -> str:
    """Return the start method for a worker's own child processes: the user's, else fork, which keeps __main__."""
    known = multiprocessing.get_all_start_methods()
    return multiprocessing.get_start_method(allow_none=True) or ("fork" if "fork" in known else known[0])


PLUGIN = ElasticLauncher
