"""The default launcher: starts a process per device by a fork server that has imported torch.

caller ── pickles the call ──> nodes meet ──> Workers ──> outcomes, or a failure: end all, then the error or a restart
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from parallelize.call.outcome import Outcome
from parallelize.call.task import Task
from parallelize.cluster.call_folders import call_folder
from parallelize.cluster.devices import MASKS, compose_visible_devices
from parallelize.cluster.network import resolvable_address
from parallelize.cluster.world import Node, World
from parallelize.config.layout import Layout
from parallelize.errors import ConfigError
from parallelize.launchers.failures import caller_exception
from parallelize.launchers.local.calling_process import calling_process
from parallelize.launchers.local.keyboard import Keyboard, open_keyboard
from parallelize.launchers.local.nodes import Nodes
from parallelize.launchers.local.server_calls import names_training
from parallelize.launchers.local.workers import STOP_GRACE_S, Workers
from parallelize.launchers.output import (
    forwarded,
    open_standard_streams,
    outputs_of_ranks,
)
from parallelize.launchers.stop_signals import StopRequested, StopSignals
from parallelize.plugins.base import Launcher
from parallelize.plugins.options import Parse, choice, number
from parallelize.run.startup_summary import announced
from parallelize.worker.setup import WorkerSetup, task_path

_log = logging.getLogger("parallelize")


@dataclass(frozen=True, kw_only=True)
class LocalLauncher(Launcher):
    """Starts one process per device (or the requested number) and waits for them.

    With several nodes the same script runs on each, and each starts its own processes.

    Args:
        start_method: "forkserver", or "spawn" for processes in which nothing was imported before; None: "forkserver".
            The fork server imports torch once, and what the caller has imported of NumPy, SciPy, scikit-learn, pandas,
            transformers, torchvision, ...; with PARALLELIZE_PRELOAD=0 only torch.
        heartbeat_timeout: seconds after which a node without a heartbeat is lost, and the call fails on all nodes; a
            process that is stopped for less, as by the migration of its virtual machine, continues.
    """

    name = "local"
    option_parsers: ClassVar[Mapping[str, Parse]] = {
        "start_method": choice("forkserver", "spawn"),
        "heartbeat_timeout": number(0, is_above=True),
    }
    start_method: str | None = None
    heartbeat_timeout: float = 60.0

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Run the task in every process of its layout.

        Args:
            task: the call.
            node: with several nodes, the address of node 0 and this node's rank.
            environ: the caller's variables, passed on to the workers.

        Returns:
            The outcomes of all ranks, in rank order, on every node.

        Raises:
            BaseException: the exception of the first rank to fail, with rank, host and traceback as notes.
            WorkerError: a worker ended without an exception.
            LaunchError: a node did not join, or is lost.
        """
        open_standard_streams()
        earlier: list[BaseException] = []
        with StopSignals().handled() as signals:
            while True:
                outcomes, error = self._attempt(task, node, environ, signals, earlier)
                if error is None:
                    return outcomes
                most = task.layout.config.max_restarts
                if len(earlier) == most:
                    raise error
                earlier.append(error)
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                _log.warning("restart %d of %d after %s", len(earlier), most, text)

    def _attempt(
        self,
        task: Task,
        node: Node | None,
        environ: Mapping[str, str],
        signals: StopSignals,
        earlier: Sequence[BaseException],
    ) -> tuple[list[Outcome], BaseException | None]:
        """Run the task once; return the outcomes, or the error that one of its ranks has raised."""
        cores = _available_cores()
        variables = worker_environ(environ, task.layout, cores=cores)
        variables["TORCHELASTIC_RESTART_COUNT"] = str(len(earlier))
        is_preloaded = self.start_method != "spawn"
        # Workers that import torch's compiler by themselves must not share processor cores.
        has_cores = task.layout.local_world_size <= cores
        imports_later = has_cores and not names_training(task.function)
        server = calling_process.fork_servers.connected(
            variables, is_preloaded=is_preloaded, imports_later=imports_later
        )
        # The folder is removed before a stop signal is delivered to the caller's handler, which may end this process.
        # The fork server hears of the folder while it is empty, and is left last: then it removes what is there.
        with server as call, call_folder() as folder, contextlib.ExitStack() as ended:
            workers = Workers(call, task.layout.local_world_size, folder)
            ended.callback(workers.close)
            task.write(task_path(folder), is_local=True)
            keyboard = (
                open_keyboard(folder, task.layout.world_size)
                if task.layout.num_nodes == 1
                else None
            )
            with (
                contextlib.closing(self._nodes(task, node, environ)) as nodes,
                keyboard or contextlib.nullcontext(),
            ):
                setup = WorkerSetup.capture(task.layout, folder=str(folder), environ=variables)
                setup = replace(
                    setup,
                    # Each node has made a key. Those of several nodes agree in PARALLELIZE_KEY only.
                    key=setup.key if task.layout.num_nodes == 1 else None,
                    has_file_store=not _serves_store(task.layout),
                    has_keyboard=keyboard is not None,
                )
                reports = self._run(task, setup, workers, nodes, signals=signals, keyboard=keyboard)
            found = sorted(
                (pair for report in reports for pair in report.items()), key=itemgetter(0)
            )
            outcomes = [
                each if isinstance(each, Outcome) else Outcome.read(each) for _, each in found
            ]
        have_reported = len(reports) == task.layout.num_nodes  # a node may leave after its report
        is_failed = any(each.error for each in outcomes)
        if have_reported and len(outcomes) == task.layout.world_size and not is_failed:
            return [
                replace(outcomes[0], is_interrupted=signals.is_interrupted),
                *outcomes[1:],
            ], None
        world_size = task.layout.world_size
        error = (
            caller_exception(outcomes, world_size=world_size, earlier=earlier)
            if is_failed
            else None
        )
        if error is None or not have_reported:
            raise nodes.lost_error() from error
        return [], error

    def _run(
        self,
        task: Task,
        setup: WorkerSetup,
        workers: Workers,
        nodes: Nodes,
        *,
        signals: StopSignals,
        keyboard: Keyboard | None,
    ) -> list[Mapping[int, Any]]:
        """Run the workers of this node, and show their output; return how those of all nodes have ended."""
        port, logs, size = nodes.start(), task.layout.config.logs, task.layout.local_world_size
        worlds = [
            World(
                rank=nodes.node_rank * size + local_rank,
                local_rank=local_rank,
                node_rank=nodes.node_rank,
                world_size=task.layout.world_size,
                local_world_size=size,
                master_addr=nodes.address,
                master_port=port,
                has_store=not setup.has_file_store,
            )
            for local_rank in range(size)
        ]
        folder = Path(setup.folder, "output")
        ranks = [world.rank for world in worlds]
        with forwarded(outputs_of_ranks(folder, ranks, logs, nodes.stamp)):
            what = f"starting {size} processes of {task.name}, which import torch and what this program has imported"
            with announced(what):
                workers.start(setup, worlds, folder, task.layout.config.timeout)
            try:
                return nodes.exchange(_watched(workers, nodes, signals, keyboard))
            finally:
                workers.end(0.0 if signals.is_interrupted else STOP_GRACE_S)

    def _nodes(self, task: Task, node: Node | None, environ: Mapping[str, str]) -> Nodes:
        if task.layout.num_nodes == 1:
            node = None
        elif node is None:
            raise ConfigError(
                f"num_nodes={task.layout.num_nodes} without MASTER_ADDR and MASTER_PORT",
                why="the same script runs on every node, and the nodes connect to node 0 at this address",
                fix="on every node: MASTER_ADDR=<address of node 0> MASTER_PORT=29400 NODE_RANK=<0, 1, ...> python ...",
            )
        else:
            node = replace(node, master_addr=resolvable_address(node.master_addr))
        return Nodes(
            node,
            task,
            patience_s=self.heartbeat_timeout,
            key=environ.get("PARALLELIZE_KEY", ""),
            serves_store=_serves_store(task.layout),
        )


def _serves_store(layout: Layout) -> bool:
    """Return whether the workers meet in a TCPStore; those of one node meet in a file, which no other user can open."""
    return layout.num_nodes > 1 or layout.config.init_connection is not None


def _watched(
    workers: Workers, nodes: Nodes, signals: StopSignals, keyboard: Keyboard | None
) -> dict[int, Path | Outcome]:
    """Wait for the end of the workers of this node; return their outcomes."""

    def is_stopped() -> bool:
        if keyboard is not None:
            keyboard.look()
        if nodes.is_interrupted and not signals.is_interrupted:
            signals.stop(signal.SIGINT)
        return nodes.is_stopped()

    def interrupt() -> None:
        nodes.interrupt()
        workers.interrupt()

    signals.interrupt = interrupt
    has_returned = workers.watch(is_stopped)
    signals.interrupt = None
    if not has_returned:
        nodes.stop()
        workers.stop()
        if signals.is_interrupted:  # and the function has not returned
            raise StopRequested
    return workers.outcomes()


def worker_environ(environ: Mapping[str, str], layout: Layout, *, cores: int) -> dict[str, str]:
    """Return the environment variables for all workers of this node; rank variables are not included.

    Args:
        environ: the caller's variables; only CUDA_VISIBLE_DEVICES is overwritten.
        layout: the processes of the node.
        cores: processor cores that this node's processes may use.
    """
    changed = dict(environ)
    mask = MASKS.get(layout.device_type)
    if mask is not None:
        changed[mask] = compose_visible_devices(environ.get(mask), layout.indices)
    changed["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or str(
        max(1, cores // layout.local_world_size)
    )
    if sys.stderr is not None and sys.stderr.isatty():  # for progress bars
        changed.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    return changed


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
