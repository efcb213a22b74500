"""What the author of a launcher reads whose calls wait in a cluster's queue."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from parallelize.call.task import Task
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.plugins.base import Launcher

__all__ = ["Queue"]


class Queue(Launcher):
    """A launcher that hands calls to a queue, from a machine that is not the one they run on."""

    queues: ClassVar[bool] = True

    @abc.abstractmethod
    def plan(self, config: Config) -> Layout:
        """The processes that a request means on the cluster's nodes, none of which can be looked at yet.

        Raises:
            ConfigError: the request leaves open what the queue has to be asked for.
        """

    @abc.abstractmethod
    def submit(self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]) -> list[Any]:
        """Queue calls of one function under one layout; a job for each, in their order.

        Args:
            tasks: the calls, at least one.
            at_most: how many may run at the same time; None: as many as there is room for.
            environ: the caller's variables, which the jobs get.
        """

    @abc.abstractmethod
    def write_script(self, task: Task, path: Path) -> None:
        """Write the job script that a `submit` of the task would queue."""
