"""What launchers have in common whose calls run on other machines: by ssh, Ray or Slurm.

NodeCall        a call as it is sent to the machines that make it, each as a node of it
outcomes_of     what they send back
BatchLauncher   base class of these launchers
BatchJob        base class of the jobs that `submit` returns
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from parallelize.call.logs import LogSettings
from parallelize.call.outcome import Outcome
from parallelize.call.random_states import RandomStates
from parallelize.call.settings import Settings
from parallelize.call.task import Task
from parallelize.call.tracebacks import folded_traceback
from parallelize.cluster.call_folders import call_folder
from parallelize.cluster.devices import Hardware, probe
from parallelize.cluster.world import Node, World
from parallelize.config.config import Config
from parallelize.config.layout import Layout, compute_layout
from parallelize.config.options import ALL_GPUS, gpus_text
from parallelize.errors import ConfigError, WorkerError
from parallelize.plugins import registry
from parallelize.plugins.base import Launcher

R = TypeVar("R")


@dataclass(frozen=True)
class NodeCall:
    """A call as it is sent to the machines that make it.

    Args:
        task: the pickled call.
        settings: the caller's settings of torch and warnings.
        random_states: states of the caller's random generators.
        logs: the caller's loggers.
    """

    task: bytes
    settings: Settings
    random_states: RandomStates
    logs: LogSettings

    @classmethod
    def of(cls, task: Task) -> NodeCall:
        """Pickle a call.

        Raises:
            ConfigError: an argument, or a variable that the function uses, cannot be pickled.
        """
        with call_folder() as folder:
            path = folder / "call"
            task.write(path)
            random_states = RandomStates.capture(task.layout.devices[0])
            return cls(path.read_bytes(), Settings.capture(), random_states, LogSettings.capture())

    def run(
        self, node: Node, send: Callable[[str], object] | None = None, *, key: str = ""
    ) -> bytes:
        """Make the call on this machine, as a node of it; return what `outcomes_of` reads.

        Args:
            node: this machine.
            send: sends log records, for `handle_records`; None: they are shown on stderr.
            key: the secret of the nodes; "": PARALLELIZE_KEY, if it is set.
        """
        self.settings.apply()
        self.settings.apply_default_device()
        self.logs.apply(send)
        environ = dict(os.environ)
        if key:
            environ["PARALLELIZE_KEY"] = key
        try:
            task = self._task_on_this_machine()
            # The launcher sends them on to the workers.
            self.random_states.begin(task.layout.devices[0])
            local = registry.find("launchers", "local")()
            outcome = Outcome.returned(World(), local.launch(task, node=node, environ=environ))
        except BaseException as error:  # noqa: BLE001 - any error is the result of the call
            outcome = Outcome.raised(World(), error)
        with call_folder() as folder:
            path = folder / "outcome"
            outcome.write(path)
            return path.read_bytes()

    def _task_on_this_machine(self) -> Task:
        """Return the call, laid out over the devices of this machine."""
        # The folder is removed as soon as the call is read: if this process is killed, no arguments
        # are left. Their tensors are mapped from the file, which the kernel keeps as long as that.
        with call_folder() as folder:
            path = folder / "call"
            path.write_bytes(self.task)
            task = Task.read(path, device=torch.device("cpu"))
        return dataclasses.replace(task, layout=compute_layout(task.layout.config, probe()))


def outcomes_of(results: Iterable[bytes]) -> list[Outcome]:
    """Return the outcomes of a call from what `NodeCall.run` has returned on its nodes.

    Args:
        results: those of the nodes that have one, in the order of the nodes.

    Raises:
        BaseException: what the call has raised. If only one node has the exception of the rank that
            has failed first, and the others a WorkerError in its place, the exception itself.
    """
    first_error: BaseException | None = None
    for result in results:
        outcome = Outcome.read(result)
        if outcome.error is None:
            outcomes: list[Outcome] = outcome.value
            return outcomes
        if not getattr(outcome.error, "is_secondary", False):
            raise outcome.error
        first_error = first_error or outcome.error
    assert first_error is not None, "a call has at least one node"
    raise first_error


class BatchJob(abc.ABC, Generic[R]):
    """A call that a cluster queues or runs.

    Args:
        job_id: the cluster's or the launcher's name of the job.
        all_ranks: whether `result` returns the list of all ranks' values instead of rank 0's value.
    """

    def __init__(self, job_id: str, *, all_ranks: bool) -> None:
        self.id = job_id
        self._all_ranks = all_ranks

    def result(self, timeout_s: float | None = None) -> R:
        """Wait for the call to end and return its value.

        Args:
            timeout_s: seconds to wait; None: no limit.

        Raises:
            TimeoutError: the job has no result in time.
            BaseException: the exception that the call raised, with rank and traceback as notes.
            WorkerError: the job ended without a result, or was cancelled.
            LaunchError: a node is lost.
        """
        with folded_traceback:
            try:
                outcomes = self._wait(timeout_s)
            except SystemExit as error:
                # The function has ended the job, and not the program that asks for the result.
                raise WorkerError(
                    f"the call of job {self.id} has exited: sys.exit({error.code!r})",
                    why="all its ranks have called sys.exit(), which ends the job",
                    fix="return a value, or raise an exception, whose reason can be shown here",
                ) from error
        value: Any = outcomes[0].value
        if self._all_ranks:
            value = [outcome.value for outcome in outcomes]
        return value  # type: ignore[no-any-return]  # the value was pickled

    @abc.abstractmethod
    def _wait(self, timeout_s: float | None) -> list[Outcome]:
        """Wait for the outcomes of all ranks, or of rank 0; raise the same errors as `result`."""


class BatchLauncher(Launcher):
    """A launcher that submits calls to a cluster; the jobs run on other machines."""

    def plan(self, config: Config) -> Layout:
        """Return the layout of a job on the cluster's nodes, whose hardware is not known yet.

        Raises:
            ConfigError: `config` lacks a number that the job needs, such as the GPUs per node.
        """
        config = config.changed(launcher=None, hosts=None, num_nodes=config.num_nodes or 1)
        gpus = config.gpus
        if isinstance(gpus, tuple):
            raise ConfigError(
                f"{gpus_text(gpus)} with launcher={self.name!r}",
                why="the cluster decides which GPUs of a node a job gets",
                fix=f"use gpus={len(gpus)}",
            )
        if gpus == ALL_GPUS or (gpus is None and config.processes is None):
            request = "neither gpus= nor processes= is a number"
            if gpus:
                request = gpus_text(gpus)
            raise ConfigError(
                f"{request} with launcher={self.name!r}",
                why="a job requests a fixed number of GPUs before its nodes are known",
                fix="use gpus=4 (on each node), or processes=2 to run on CPUs",
            )
        hardware = Hardware()
        if gpus:
            hardware = Hardware("cuda", gpus)
        return compute_layout(config, hardware)

    @abc.abstractmethod
    def submit(
        self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]
    ) -> list[Any]:
        """Submit calls of one function with one layout; return a job for each, in the same order.

        A job has `id`, `state`, `done()`, `cancel()` and `result()`; Slurm's has `logs()`, too.

        Args:
            tasks: the calls, at least one.
            at_most: how many jobs may run at the same time; None: no limit.
            environ: environment variables of the caller, passed on to the jobs.
        """

    def write_script(self, task: Task, path: Path) -> None:
        """Write the job script that `submit` would submit for the task; by default, there is none.

        Raises:
            ConfigError: jobs of this launcher have no script.
        """
        raise ConfigError(
            f"a job script for {task.name} with launcher={self.name!r}: {path}",
            why="its jobs have no script",
            fix="call submit, or use launcher=SlurmLauncher(...)",
        )
