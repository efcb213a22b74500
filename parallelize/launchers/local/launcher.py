"""The default launcher: starts a process per device by a fork server that has imported torch.

Read this file first: it has the steps of a call on this machine, from top to bottom.

    launch          makes attempts: one, and another one for each restart
      _attempt      connects to the fork server, which forks the workers          fork_server.py
                    pickles the call, while they are forked                       call/task.py
        _run        waits until the nodes have joined, if there are several       nodes.py
                    gives the workers their ranks, and shows their output         workers.py
          _watch    waits until all have returned, or any rank on any node fails
        exchange    with the other nodes: how their ranks have ended              node_reports.py
      _checked      returns the outcomes, or finds the rank that failed first     failures.py

What runs in the workers is in `worker/main.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from parallelize.call.outcome import Outcome
from parallelize.call.task import Task
from parallelize.cluster.call_folders import call_folder
from parallelize.cluster.devices import MASKS, compose_visible_devices
from parallelize.cluster.network import require_interfaces, resolvable_address
from parallelize.cluster.world import Node, World
from parallelize.config.layout import Layout
from parallelize.errors import ConfigError, WorkerError
from parallelize.launchers.failures import caller_exception
from parallelize.launchers.local.calling_process import calling_process
from parallelize.launchers.local.keyboard import Keyboard, open_keyboard
from parallelize.launchers.local.node_requests import Request
from parallelize.launchers.local.nodes import Nodes
from parallelize.launchers.local.one_node import Meeting, OneNode
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
from parallelize.worker.setup import WorkerSetup, outcome_path, task_path

_log = logging.getLogger("parallelize")


class _RankFailedError(Exception):
    """An attempt has failed because a rank has: a restart may succeed.

    Other errors, such as a missing node, are raised as they are, and end the call.

    Args:
        error: what the caller of the function gets.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True, kw_only=True)
class LocalLauncher(Launcher):
    """Starts one process per device (or the requested number) and waits for them.

    With several nodes the same script runs on each, and each starts its own processes.

    Args:
        start_method: "forkserver", or "spawn" for processes in which nothing was imported before;
            None: "forkserver". The fork server imports torch once, and what the caller has imported
            of NumPy, SciPy, scikit-learn, pandas, transformers, torchvision, ...; with
            PARALLELIZE_PRELOAD=0 only torch.
        heartbeat_timeout: seconds after which a node without a heartbeat is lost, and the call
            fails on all nodes; a process that is stopped for less, as by the migration of its
            virtual machine, continues.
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
            The outcomes of all ranks, in rank order, on every node. Only that of rank 0 has a
            value, unless the task wants all of them.

        Raises:
            BaseException: the exception of the first rank to fail, with rank, host and traceback as
                notes, if that rank is on this node.
            WorkerError: a worker ended without an exception, or a rank of another node has failed.
            LaunchError: a node did not join, or is lost.
            ConfigError: a variable names a network interface that does not exist.
        """
        open_standard_streams()
        if task.layout.world_size > 1:
            require_interfaces(environ, uses_nccl=task.layout.device_type == "cuda")
        earlier: list[BaseException] = []
        max_restarts = task.layout.config.max_restarts
        with StopSignals().handled() as signals:
            while True:
                try:
                    return self._attempt(task, node, environ, signals, earlier)
                except _RankFailedError as failure:
                    error = failure.error
                if len(earlier) == max_restarts:
                    raise error
                earlier.append(error)
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                _log.warning("restart %d of %d after %s", len(earlier), max_restarts, text)

    def _attempt(
        self,
        task: Task,
        node: Node | None,
        environ: Mapping[str, str],
        signals: StopSignals,
        earlier: Sequence[BaseException],
    ) -> list[Outcome]:
        """Run the task once; return the outcomes of all ranks, in rank order.

        Raises:
            _RankFailedError: a rank has raised an exception, or its process has ended.
            LaunchError: the processes could not be started, or a node is lost.
        """
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
        # The folder is removed before a stop signal is delivered to the caller's handler, which may
        # end this process. The fork server hears of the folder while it is empty, and is left last:
        # then it removes what is there.
        with server as call, call_folder() as folder, contextlib.ExitStack() as ended:
            # The workers are forked now, and wait. Meanwhile the call is pickled.
            workers = Workers(call, task.layout.local_world_size, folder)
            ended.callback(workers.close)
            task.write(task_path(folder), is_local=True)
            # Debuggers read the keyboard of this process, which the nodes of a call do not share.
            keyboard = None
            if task.layout.num_nodes == 1:
                keyboard = open_keyboard(folder, task.layout.world_size)
            ended.enter_context(keyboard or contextlib.nullcontext())

            # This node joins only now: no other node waits for one whose call cannot be pickled.
            nodes = self._nodes(task, node, environ)
            ended.callback(nodes.close)
            setup = _setup(task.layout, folder, variables, has_keyboard=keyboard is not None)
            _run(task, setup, workers, nodes, signals=signals, keyboard=keyboard)

            # All nodes find the same cause of a failure, from the outcomes of all ranks.
            own_outcomes = {rank: _read(rank, end) for rank, end in workers.outcomes().items()}
            reports = nodes.exchange(own_outcomes.values())
            outcomes = _checked(task, own_outcomes, reports, nodes, earlier)
            if task.layout.num_nodes > 1:
                outcomes.update(_shared_outcomes(task, own_outcomes, folder))
        # The caller gets what was trained first, and then its KeyboardInterrupt.
        outcomes[0] = replace(outcomes[0], is_interrupted=signals.is_interrupted)
        return [outcomes[rank] for rank in sorted(outcomes)]

    def _nodes(self, task: Task, node: Node | None, environ: Mapping[str, str]) -> Nodes | OneNode:
        """Return the nodes of the call; if there are several, this one is about to join.

        Raises:
            ConfigError: several nodes do not know where to meet.
            LaunchError: node 0 cannot listen at its address.
        """
        layout = task.layout
        if layout.num_nodes == 1:
            return OneNode(layout.config.timeout, serves_store=_serves_store(layout))
        if node is None:
            raise ConfigError(
                f"num_nodes={layout.num_nodes} without MASTER_ADDR and MASTER_PORT",
                why="the same script runs on every node, and the nodes connect to node 0 at this "
                "address",
                fix="on every node: MASTER_ADDR=<address of node 0> MASTER_PORT=29400 "
                "NODE_RANK=<0, 1, ...> python ...",
            )
        return Nodes(
            replace(node, master_addr=resolvable_address(node.master_addr)),
            layout.num_nodes,
            Request.of(task, environ.get("PARALLELIZE_KEY", "")),
            timeout=layout.config.timeout,
            patience_s=self.heartbeat_timeout,
        )


def _setup(
    layout: Layout, folder: Path, variables: Mapping[str, str], *, has_keyboard: bool
) -> WorkerSetup:
    """Return what the workers of this node are set up with."""
    setup = WorkerSetup.capture(layout, folder=str(folder), environ=variables)
    setup = replace(setup, has_file_store=not _serves_store(layout), has_keyboard=has_keyboard)
    if layout.num_nodes > 1:
        # Each node has made a key. Those of several nodes agree in PARALLELIZE_KEY only.
        return replace(setup, key=None, shares_outcome=True)
    return setup


def _serves_store(layout: Layout) -> bool:
    """Return whether the workers meet in a TCPStore.

    Those of one node meet in a file, which no other user can open.
    """
    return layout.num_nodes > 1 or layout.config.init_connection is not None


def _run(
    task: Task,
    setup: WorkerSetup,
    workers: Workers,
    nodes: Nodes | OneNode,
    *,
    signals: StopSignals,
    keyboard: Keyboard | None,
) -> None:
    """Run the workers of this node, and show their output, until they are ended."""
    meeting = nodes.start()
    worlds = _worlds(task.layout, meeting, has_store=not setup.has_file_store)
    size = task.layout.local_world_size
    # Output that is shown is read from files, which go with the folder of the call.
    folder = Path(setup.folder, "output")
    ranks = [world.rank for world in worlds]
    with forwarded(outputs_of_ranks(folder, ranks, task.layout.config.logs, meeting.stamp)):
        with announced(
            f"starting {size} processes of {task.name}, which import torch and what this program "
            "has imported"
        ):
            workers.start(setup, worlds, folder, task.layout.config.timeout)
        try:
            _watch(workers, nodes, signals, keyboard)
        finally:
            workers.end(0.0 if signals.is_interrupted else STOP_GRACE_S)


def _worlds(layout: Layout, meeting: Meeting, *, has_store: bool) -> list[World]:
    """Return the rank of each worker of this node, and where it meets the others."""
    size = layout.local_world_size
    worlds = []
    for local_rank in range(size):
        world = World(
            rank=meeting.node_rank * size + local_rank,
            local_rank=local_rank,
            node_rank=meeting.node_rank,
            world_size=layout.world_size,
            local_world_size=size,
            master_addr=meeting.address,
            master_port=meeting.port,
            has_store=has_store,
        )
        worlds.append(world)
    return worlds


def _watch(
    workers: Workers, nodes: Nodes | OneNode, signals: StopSignals, keyboard: Keyboard | None
) -> None:
    """Wait until the workers of this node have returned; if the call fails anywhere, end them.

    Raises:
        StopRequested: Ctrl-C has interrupted the function, which has not returned.
    """

    def has_failed_elsewhere() -> bool:
        # `watch` calls this several times a second: so what others do is noticed here, too.
        if keyboard is not None:
            keyboard.look()
        if nodes.is_interrupted() and not signals.is_interrupted:
            signals.stop(signal.SIGINT)
        return nodes.has_failed()

    def interrupt() -> None:
        nodes.say("interrupt")
        workers.interrupt()

    # Until it returns, the first Ctrl-C lets the function save what it has, and a second one ends
    # the workers.
    signals.interrupt = interrupt
    signals.pass_on = workers.pass_on
    have_returned = workers.watch(has_failed_elsewhere)
    signals.interrupt = None
    signals.pass_on = None
    if have_returned:
        return
    # First to the other nodes, whose workers may wait for those of this one.
    nodes.say("stop")
    workers.stop()
    if signals.is_interrupted:
        raise StopRequested


def _read(rank: int, end: Path | Outcome) -> Outcome:
    """Return how a rank of this node has ended."""
    if isinstance(end, Outcome):
        return end
    # What cannot be unpickled is a failure that all nodes must hear of.
    try:
        return Outcome.read(end)
    except WorkerError as error:
        return Outcome(rank, "this host", 0, error=error, failed_at=time.time())


def _shared_outcomes(
    task: Task, own_outcomes: Mapping[int, Outcome], folder: Path
) -> dict[int, Outcome]:
    """Return the outcomes of other nodes' ranks that have come to this node, with their values.

    Raises:
        ConfigError: a value could not be sent to this node.
    """
    ranks: Iterable[int] = [0]
    if task.all_ranks:
        ranks = range(task.layout.world_size)
    outcomes = {}
    for rank in set(ranks) - own_outcomes.keys():
        outcome = Outcome.read(outcome_path(folder, rank))
        # It is no failure of a rank: a restart would not help.
        if outcome.error is not None:
            raise outcome.error
        outcomes[rank] = outcome
    return outcomes


def _checked(
    task: Task,
    own_outcomes: Mapping[int, Outcome],
    reports: Mapping[int, Sequence[Outcome]],
    nodes: Nodes | OneNode,
    earlier: Sequence[BaseException],
) -> dict[int, Outcome]:
    """Return the outcomes of all ranks, which have returned.

    Args:
        task: the call.
        own_outcomes: those of the ranks of this node.
        reports: those of the ranks of other nodes, without values, by node.
        nodes: knows which node is lost.
        earlier: the errors of earlier attempts.

    Raises:
        _RankFailedError: a rank has raised an exception, or its process has ended.
        LaunchError: a node is lost.
    """
    outcomes = dict(own_outcomes)
    errors_elsewhere = list[BaseException | None]()
    for report in reports.values():
        for outcome in report:
            outcomes[outcome.rank] = outcome
            errors_elsewhere.append(outcome.error)
    error = None
    if any(outcome.error is not None for outcome in outcomes.values()):
        in_order = [outcomes[rank] for rank in sorted(outcomes)]
        error = caller_exception(in_order, world_size=task.layout.world_size, earlier=earlier)
    # An error explains the loss of a node at most: who started it has to see that node's output.
    is_heard = len(reports) == task.layout.num_nodes - 1
    if not is_heard or (error is None and len(outcomes) < task.layout.world_size):
        raise nodes.lost_error() from error
    if error is None:
        return outcomes
    if isinstance(error, WorkerError) and any(error is other for other in errors_elsewhere):
        # For who hears all nodes: another one raises the exception itself.
        error.is_secondary = True
    raise _RankFailedError(error)


def worker_environ(environ: Mapping[str, str], layout: Layout, *, cores: int) -> dict[str, str]:
    """Return the environment variables of all workers of this node, without those of the ranks.

    Args:
        environ: the caller's variables; only CUDA_VISIBLE_DEVICES is overwritten.
        layout: the processes of the node.
        cores: processor cores that this node's processes may use.
    """
    changed = dict(environ)
    mask = MASKS.get(layout.device_type)
    if mask is not None:
        changed[mask] = compose_visible_devices(environ.get(mask), layout.indices)
    threads = max(1, cores // layout.local_world_size)
    changed["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or str(threads)
    # For progress bars.
    if sys.stderr is not None and sys.stderr.isatty():
        changed.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    return changed


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
