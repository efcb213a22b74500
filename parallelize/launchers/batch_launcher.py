"""Base class of launchers that submit calls as jobs to a cluster's batch queue."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from parallelize.call.task import Task
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.plugins.base import Launcher

__all__ = ["BatchLauncher"]


class BatchLauncher(Launcher):
    """A launcher that submits calls to a batch queue; the jobs run on other machines."""

    queues: ClassVar[bool] = True

    @abc.abstractmethod
    def plan(self, config: Config) -> Layout:
        """Return the layout of a job on the cluster's nodes, whose hardware is not known yet.

        Raises:
            ConfigError: `config` lacks a number that the job needs, such as the GPUs per node.
        """

    @abc.abstractmethod
    def submit(self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]) -> list[Any]:
        """Submit calls of one function with one layout; return one job per call, in the same order.

        Args:
            tasks: the calls, at least one.
            at_most: how many jobs may run at the same time; None: no limit.
            environ: environment variables of the caller, passed on to the jobs.
        """

    @abc.abstractmethod
    def write_script(self, task: Task, path: Path) -> None:
        """Write the job script that `submit` would submit for the task."""
