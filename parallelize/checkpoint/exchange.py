"""What the ranks tell each other in `save`, `load` and `checkpoints`: all succeed, or all raise.

    rank 0                            rank 1
    makes its request                 raises an error while it makes its request
            ------- all_gather of the requests, or of the texts of errors -------
    SyncError, which names rank 1     its own error

A rank that raised before the all_gather would leave the others waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from parallelize.agreement.gather import gather_objects
from parallelize.collectives import num_processes
from parallelize.errors import SyncError
from parallelize.hang_detection.waiting import WaitKind, waiting_for
from parallelize.run import context
from parallelize.run.group_abort import is_interrupted
from parallelize.run.groups import GroupPurpose, separate_group


@dataclass(frozen=True)
class Request:
    """What a rank tells the other ranks at one point of a call; subclasses have more fields.

    Fields are plain values, because a run whose ranks have no common secret exchanges no pickles.

    Args:
        statement: what this rank does. It must be equal on all ranks.
    """

    statement: str


RequestT = TypeVar("RequestT", bound=Request)
ResultT = TypeVar("ResultT")


def rank() -> int:
    """Return the rank of this process."""
    if num_processes() == 1:
        return 0
    return dist.get_rank()


def gather_values(value: Any) -> list[Any]:
    """Return the value of each rank, in rank order; hang detection names a rank that is missing.

    After Ctrl-C, return the value of this rank alone: the other ranks may have ended.
    """
    if num_processes() == 1 or is_interrupted():
        return [value]
    run = context.current()
    group = separate_group(run.world, run.device, GroupPurpose.COMPARISONS)
    return gather_objects(value, group=group)


def exchange(
    call: str, make_request: Callable[[], RequestT], *, is_shared: bool = True
) -> list[RequestT]:
    """Return the request of each rank, in rank order.

    Args:
        call: the call in messages, such as "save('last.pt')".
        make_request: makes this rank's request. Whatever else the rank has to do or to check at
            this point is done in it, because its errors are raised on all ranks.
        is_shared: whether the other ranks take part; if not, the only reply is this rank's.

    Raises:
        SyncError: `make_request` has raised on another rank, or the statements differ.
        Exception: `make_request` has raised it on this rank.
    """
    with waiting_for(call, wait_kind=WaitKind.CALL):
        try:
            request = make_request()
        except Exception as exc:
            if is_shared:
                gather_values({"error": f"{type(exc).__name__}: {exc}"})
            raise
        if not is_shared:
            return [request]
        messages = gather_values({"error": "", "fields": vars(request)})
    replies: list[RequestT] = []
    for number, message in enumerate(messages):
        _require_success(call, number, message["error"])
        reply = type(request)(**message["fields"])
        replies.append(reply)
        _require_equal_statement(number, reply.statement, replies[0].statement)
    return replies


def together(call: str, action: Callable[[], ResultT], *, is_shared: bool = True) -> ResultT:
    """Run an action on every rank, and return this rank's result; raise if it raises on any rank.

    Args:
        call: as for `exchange`.
        action: what this rank does.
        is_shared: as for `exchange`.
    """
    results: list[ResultT] = []

    def make_request() -> Request:
        results.append(action())
        # Ranks may give other paths to one file. What the call is must be equal.
        return Request(statement=call.partition("(")[0])

    exchange(call, make_request, is_shared=is_shared)
    return results[0]


def _require_success(call: str, number: int, error: str) -> None:
    if error:
        raise SyncError(
            f"{call} failed on rank {number}: {error}",
            why="a checkpoint is of all ranks",
            fix=f"see the error of rank {number}",
            is_secondary=True,
        )


def _require_equal_statement(number: int, statement: str, statement_of_rank_0: str) -> None:
    if statement != statement_of_rank_0:
        raise SyncError(
            f"rank {number}: {statement}; rank 0: {statement_of_rank_0}",
            why="ranks that train one model save and load one checkpoint",
            fix="give the same path and objects on every rank; with several nodes, use a folder "
            "that all share",
        )
