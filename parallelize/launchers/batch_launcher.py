"""Base class of launchers whose calls run as jobs on the nodes of a cluster, and the call on one of these nodes."""

from __future__ import annotations

import abc
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from parallelize.call.pickling import dump
from parallelize.call.task import Outcome, Task
from parallelize.cluster.devices import Hardware, probe
from parallelize.cluster.world import Node, World
from parallelize.config.config import Config
from parallelize.config.layout import Layout, compute_layout
from parallelize.config.options import Gpus
from parallelize.errors import ConfigError
from parallelize.plugins import registry
from parallelize.plugins.base import Launcher

__all__ = ["BatchLauncher", "read_result", "run_on_node"]


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


def run_on_node(task_file: Path, *, node: Node | None, environ: Mapping[str, str]) -> bytes:
    """Run a call on this node of the cluster with the default launcher; return what `read_result` reads in the caller.

    Args:
        task_file: file that `Task.write` has written.
        node: with several nodes, the address of node 0 and this node's rank.
        environ: environment variables of the workers.
    """
    with tempfile.TemporaryDirectory(prefix="parallelize-") as folder:
        result = Path(folder, "result")
        try:
            task = Task.read(task_file, device=torch.device("cpu"))
            task = dataclasses.replace(task, layout=compute_layout(task.layout.config, probe()))
            outcomes = registry.get("launchers", "local")().launch(task, node=node, environ=environ)
            dump(outcomes, result, parts={"the returned value": [each.value for each in outcomes]})
        except BaseException as error:  # noqa: BLE001 - any error is the result of the call
            Outcome.raised(World(), error).write(result)
        return result.read_bytes()


def read_result(result: bytes) -> list[Outcome]:
    """Return the outcomes of a call in `run_on_node`, or raise what it has raised."""
    found: Any = Outcome.read(result)
    if isinstance(found, Outcome):
        assert found.error is not None
        raise found.error
    return found  # type: ignore[no-any-return]  # what run_on_node has pickled
