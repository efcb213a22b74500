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
from parallelize.launchers.elastic.agent import Agent
from parallelize.launchers.elastic.control_plane import MultiNode, SingleNode
from parallelize.launchers.elastic.failures import caller_exception
from parallelize.launchers.elastic.rendezvous import Rendezvous
from parallelize.launchers.elastic.run_store import join_run
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
        start_method: "forkserver" (the fork server imports torch, and the installed modules that the caller has
            imported, once; with PARALLELIZE_PRELOAD=0 only torch) or "spawn"; None: "forkserver" where it exists.
        heartbeat_timeout: seconds after which a node without a heartbeat is lost, and the call fails on all nodes; a
            process that is stopped for less, as by the migration of its virtual machine, continues.
    """

    name = "elastic"
    start_method: str | None = None
    heartbeat_timeout: float = 60.0

    def __post_init__(self) -> None:
        if not self.heartbeat_timeout > 0:
            raise ConfigError(
                f"heartbeat_timeout={self.heartbeat_timeout!r}",
                why="every node would be lost at once",
                fix="use a positive number of seconds",
            )

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
        _require_semaphores()
        open_standard_streams()
        # The folder is removed before a stop signal is delivered to the caller's handler, which may end this process.
        with StopSignals().handled() as signals, _run_folder() as folder:
            task.write(task_path(folder))
            if node is not None:
                node = dataclasses.replace(node, master_addr=resolvable_address(node.master_addr))
            control_plane = self._control_plane(task, node, folder)
            start_method = self._resolve_start_method()
            with contextlib.closing(control_plane):
                return _NodeRun(task, folder, environ, control_plane, signals, start_method=start_method).result()

    def _control_plane(self, task: Task, node: Node | None, folder: Path) -> SingleNode:
        layout = task.layout
        if layout.num_nodes == 1:
            return SingleNode(task, folder)
        if node is None:
            raise ConfigError(
                f"num_nodes={layout.num_nodes} without MASTER_ADDR and MASTER_PORT",
                why="the same script runs on every node, and the nodes connect to node 0 at this address",
                fix="on every node: MASTER_ADDR=<address of node 0> MASTER_PORT=29400 NODE_RANK=<0, 1, ...> python ...",
            )
        client = join_run(node, layout.num_nodes, layout.config.timeout)
        nodes = MultiNode(client, task, folder, heartbeat_timeout=self.heartbeat_timeout)
        request = f"{task.name}, {layout.num_nodes} nodes x {layout.local_world_size} processes"
        nodes.wait_for_all_nodes(request, layout.config.timeout)
        return nodes

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
        control_plane: SingleNode,
        signals: StopSignals,
        *,
        start_method: str,
    ) -> None:
        self._layout = task.layout
        config, self._control_plane = self._layout.config, control_plane
        is_temporary = config.logs in ("rank0", "all")
        self._files = RankFiles(folder / "logs" if is_temporary else Path(config.logs), keeps_all=not is_temporary)
        self._tails: list[OutputTail] = []
        self._earlier_errors: list[BaseException] = []
        self._rendezvous = Rendezvous(control_plane, timeout=config.timeout)
        is_single = self._layout.num_nodes == 1
        interface = None if is_single else gloo_interface(control_plane.address)
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
            local_world_size=self._layout.local_world_size,
            entrypoint=run,
            args=(setup,),
            rdzv_handler=self._rendezvous,
            max_restarts=config.max_restarts,
            monitor_interval=1e-3,  # the agent waits for the workers itself
            local_addr=control_plane.address,
        )
        self._agent = Agent(
            spec,
            self._files,
            environ=variables,
            start_method=start_method,
            signals=signals,
            after_start=self._after_start,
            control_plane=control_plane,
        )

    def result(self) -> list[Outcome]:
        with forwarded(self._tails, self._files):
            try:
                result = self._agent.run()
            finally:
                self._rendezvous.shutdown()
        attempt = self._agent.attempt
        if result.is_failed():
            raise self._build_error(attempt)
        return self._control_plane.collect_outcomes(attempt)

    def _after_start(self, attempt: int) -> None:
        """Show the output of the new attempt, and log a restart."""
        config = self._layout.config
        for rank in (each for each in self._control_plane.ranks if each == 0 or config.logs == "all"):
            prefix = f"[rank {rank}] " if config.logs == "all" else ""
            self._tails.append(OutputTail(self._files.path(rank, attempt, "out"), sys.stdout, prefix))
            self._tails.append(OutputTail(self._files.path(rank, attempt, "err"), sys.stderr, prefix))
        if attempt:
            self._earlier_errors.append(self._build_error(attempt - 1))
            error = f"{type(self._earlier_errors[-1]).__name__}: {self._earlier_errors[-1]}".partition("\n")[0]
            _log.warning("restart %d of %d after %s", attempt, config.max_restarts, error)

    def _build_error(self, attempt: int) -> BaseException:
        outcomes, exits = self._control_plane.collect_failures(attempt)
        return caller_exception(
            outcomes,
            exits,
            world_size=self._layout.world_size,
            earlier=self._earlier_errors,
        )


def _refuse_in_daemons(task: Task) -> None:
    if multiprocessing.current_process().daemon:
        raise LaunchError(
            f"{task.name} needs {task.layout.world_size} processes in a daemonic process, such as a Pool worker",
            why="multiprocessing does not let daemonic processes start processes",
            fix="call from the process that created the Pool, or use a concurrent.futures.ProcessPoolExecutor",
        )


def _require_semaphores() -> None:
    folder = Path("/dev/shm")  # noqa: S108 - where Linux keeps the semaphores of multiprocessing
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise LaunchError(
            "processes cannot be started: /dev/shm is not writable",
            why="they return values through queues, whose semaphores are files there",
            fix="mount it writable, as by `docker run --tmpfs /dev/shm`, or start the script by torchrun",
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
