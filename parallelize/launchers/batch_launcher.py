"""Base class of launchers whose calls run as jobs on the nodes of a cluster, and the call on one of these nodes."""

from __future__ import annotations

import abc
import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from parallelize.call.serialization import dump
from parallelize.call.task import Outcome, Task
from parallelize.cluster.devices import Hardware, probe
from parallelize.cluster.world import Node, World
from parallelize.config.config import Config
from parallelize.config.gpus import Gpus
from parallelize.config.layout import Layout, compute_layout
from parallelize.errors import ConfigError
from parallelize.plugins import registry
from parallelize.plugins.base import Launcher

__all__ = ["BatchLauncher", "read_result", "run_on_node", "run_task"]


class BatchLauncher(Launcher):
    """A launcher that submits calls to a cluster; the jobs run on other machines."""

    queues: ClassVar[bool] = True

    def plan(self, config: Config) -> Layout:
        """Return the layout of a job on the cluster's nodes, whose hardware is not known yet.

        Raises:
            ConfigError: `config` lacks a number that the job needs, such as the GPUs per node.
        """
        config = config.changed(launcher=None, num_nodes=config.num_nodes or 1)
        gpus = config.gpus
        if gpus is not None and gpus.indices is not None:
            raise ConfigError(
                f"{gpus.as_option} with launcher={self.name!r}",
                why="the cluster decides which GPUs of a node a job gets",
                fix=f"use gpus={len(gpus.indices)}",
            )
        if gpus == Gpus.ALL or (gpus is None and config.processes is None):
            reason = "neither gpus= nor processes= is a number"
            raise ConfigError(
                f"{gpus.as_option if gpus else reason} with launcher={self.name!r}",
                why="a job requests a fixed number of GPUs before its nodes are known",
                fix="use gpus=4 (on each node), or processes=2 to run on CPUs",
            )
        count = 0 if gpus is None else gpus.count or 0
        return compute_layout(config, Hardware("cuda", count) if count else Hardware())

    @abc.abstractmethod
    def submit(self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]) -> list[Any]:
        """Submit calls of one function with one layout; return one job per call, in the same order.

        A job has `id`, `state`, `done()`, `logs()`, `cancel()` and `result()`.

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


def run_task(task_file: Path, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
    """Run a call on this node of the cluster with the elastic launcher; return its outcomes, as `Launcher.launch`.

    Args:
        task_file: file that `Task.write` has written.
        node: with several nodes, the address of node 0 and this node's rank.
        environ: environment variables of the workers.
    """
    task = Task.read(task_file, device=torch.device("cpu"))
    task = dataclasses.replace(task, layout=compute_layout(task.layout.config, probe()))
    outcomes: list[Outcome] = registry.get("launchers", "elastic")().launch(task, node=node, environ=environ)
    return outcomes


def run_on_node(task_file: Path, *, node: Node | None, environ: Mapping[str, str]) -> bytes:
    """Run a call as `run_task` does; return the outcomes, or what it has raised, for `read_result` in the caller."""
    result = task_file.with_name(f"{task_file.name}.{secrets.token_hex(4)}")
    try:
        outcomes = run_task(task_file, node=node, environ=environ)
        dump(outcomes, result, parts={"the returned value": [each.value for each in outcomes]})
    except BaseException as error:  # noqa: BLE001 - any error is the result of the call
        Outcome.raised(World(), error).write(result)
    try:
        return result.read_bytes()
    finally:
        result.unlink()


def read_result(result: bytes) -> list[Outcome]:
    """Return the outcomes of a call in `run_on_node`, or raise what it has raised."""
    outcomes: Any = Outcome.read(result)
    if isinstance(outcomes, Outcome):
        assert outcomes.error is not None
        raise outcomes.error
    return outcomes  # type: ignore[no-any-return]  # what run_on_node has pickled
