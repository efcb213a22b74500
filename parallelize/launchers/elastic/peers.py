"""The other nodes of a run, from where this node's agent stands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from parallelize.call.task import Outcome
from parallelize.errors import Fault, LaunchError, SyncError
from parallelize.launchers.elastic.agent import Death
from parallelize.launchers.elastic.failures import is_echo, was_stopped
from parallelize.launchers.elastic.node_coordination import Control
from parallelize.worker.main import outcome_path

__all__ = ["Alone", "Nodes"]

T = TypeVar("T")

_SILENT = "it has said nothing for a while"


class Alone:
    """One node: what its own folder holds is all there is."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder, self._world_size = folder, world_size
        self._deaths: dict[int, Sequence[Death]] = {}

    def has_failed(self, attempt: int) -> bool:  # noqa: ARG002 - as Peers has it
        """There is nobody else."""
        return False

    def all_done(self, attempt: int) -> bool:  # noqa: ARG002 - as Peers has it
        """There is nobody else."""
        return True

    def report(self, attempt: int, deaths: Sequence[Death]) -> None:
        """Keep it for `failures`."""
        self._deaths[attempt] = deaths

    def failures(self, attempt: int) -> tuple[list[Outcome], list[Death]]:
        """Outcomes that were left in an attempt that failed, and the workers that ended by themselves."""
        paths = [outcome_path(self._folder, rank, attempt) for rank in range(self._world_size)]
        return [Outcome.read(path) for path in paths if path.exists()], list(self._deaths[attempt])

    def refuse_to_restart(self) -> None:
        """There is nobody else."""

    def results(self, attempt: int, wanted: Sequence[int]) -> list[Outcome]:
        """The outcomes of the wanted ranks, in that order."""
        return [Outcome.read(outcome_path(self._folder, rank, attempt)) for rank in wanted]


class Nodes:
    """Several nodes, each with a folder of its own, which tell each other through `Control`.

    Args:
        control: the call, as its nodes see it.
        folder: this node's.
        ranks: the global ranks of its workers.
    """

    def __init__(self, control: Control, folder: Path, ranks: Sequence[int]) -> None:
        self._control, self._folder, self._ranks = control, folder, ranks
        self._fetched = itertools.count()
        self._gone: Exception | None = None
        self._reported = 0

    def has_failed(self, attempt: int) -> bool:
        """Whether another node has failed, is silent, or cannot be asked any more."""
        failed = self._asked(lambda: self._control.has_failed(attempt))
        return self._gone is not None or bool(failed)

    def all_done(self, attempt: int) -> bool:
        """Whether every node's workers have returned."""
        return bool(self._asked(lambda: self._control.all_done(attempt)))

    def report(self, attempt: int, deaths: Sequence[Death]) -> None:
        """Tell the others, unless they cannot be reached."""
        self._reported = attempt
        if self._gone is None:
            paths = [outcome_path(self._folder, rank, attempt) for rank in self._ranks]
            written = [path.read_bytes() for path in paths if path.exists()]
            self._asked(lambda: self._control.report(attempt, written, deaths))

    def failures(self, attempt: int) -> tuple[list[Outcome], list[Death]]:
        """What every node has reported of an attempt that failed.

        Raises:
            LaunchError: a node is gone, and nobody's report says why.
        """
        reported = self._asked(lambda: self._control.reports(attempt))
        if reported is None:
            raise _lost([0], str(self._gone)) from self._gone
        written, deaths = reported
        outcomes = [self._read(each) for each in written]
        told = {outcome.rank for outcome in outcomes}
        silent = [death for death in deaths if death.rank not in told]
        if self._control.lost and not silent and all(map(_came_of_it, outcomes)):
            raise _lost(self._control.lost, _SILENT)
        return outcomes, deaths

    def refuse_to_restart(self) -> None:
        """Nothing, where every node has told of the attempt that failed.

        Raises:
            LaunchError: a node is gone, and the nodes of a run are always the same.
        """
        self._asked(lambda: self._control.reports(self._reported))
        if self._gone is not None:
            raise _lost([0], str(self._gone)) from self._gone
        if self._control.lost:
            raise _lost(self._control.lost, _SILENT)

    def results(self, attempt: int, wanted: Sequence[int]) -> list[Outcome]:
        """The outcomes of the wanted ranks, in that order, wherever they ran.

        Raises:
            LaunchError: node 0 is gone before it has given them.
        """
        own = {rank: outcome_path(self._folder, rank, attempt) for rank in self._ranks}
        paths = self._asked(lambda: self._control.exchange(own, wanted, self._folder))
        if paths is None:
            raise _lost([0], str(self._gone)) from self._gone
        return [Outcome.read(paths[rank]) for rank in wanted]

    def _asked(self, question: Callable[[], T]) -> T | None:
        """What the others' store says; None: it cannot be asked any more."""
        if self._gone is None:
            try:
                return question()
            except (dist.DistError, RuntimeError) as exc:
                self._gone = exc
        return None

    def _read(self, written: bytes) -> Outcome:
        path = self._folder / f"reported.{next(self._fetched)}"
        path.write_bytes(written)
        return Outcome.read(path)


def _came_of_it(outcome: Outcome) -> bool:
    """Whether a rank ended because another one did."""
    return was_stopped(outcome) or is_echo(outcome) or isinstance(outcome.error, SyncError)


def _lost(nodes: Sequence[int], reason: str) -> LaunchError:
    fault = Fault(
        f"node {', '.join(map(str, nodes))} is gone",
        reason.partition("\n")[0],
        "see that node's output: its process was ended, its machine failed, or the network between them did",
    )
    return LaunchError(fault.what, why=fault.why, fix=fault.fix)
