"""State of a rank (source line, stack, collectives), exchanged between ranks when one of them waits for long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Collective", "RankState", "Status"]

Status = Literal["running", "waiting", "returned"]


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has begun.

    Args:
        group: name of the process group, the same on all its ranks.
        seq: sequence number in the counter, from 1.
        signature: operation, with dtypes and shapes if they must be equal on all ranks: "all_reduce of float32[4]".
        is_completed: whether the collective has completed on this rank.
        root: source or destination rank, if known.
        library: "gloo" or "nccl". A group may use both, for tensors on different devices.
    """

    group: str
    seq: int
    signature: str
    is_completed: bool
    root: int | None = None
    library: str = "gloo"

    @property
    def counter(self) -> tuple[str, str]:
        """Group and library: each library of a group counts its own collectives."""
        return self.group, self.library


@dataclass(frozen=True)
class RankState:
    """What a rank is doing.

    Args:
        rank: global rank.
        status: "waiting": idle for seconds in a torch.distributed call, or elsewhere with a pending collective;
            "returned": the rank makes no further collectives; "running": any other state.
        location: innermost line of the user's program: "train.py:41".
        operation: call on that line: "all_reduce".
        stack: lines of the user's program on the stack, outermost first: "train.py:30 in train".
        collectives: most recent collectives of each group and all pending ones, oldest first.
        groups: names of all process groups of this rank; together, the states show the members of a group.
        peers: the peer of a pending send or recv.
        is_blocked: whether the rank waits and no other thread of its process could make a missing collective call.
        idle_s: time in seconds that the main thread has been at this position.
        request_id: number of the request that this state answers.
    """

    rank: int
    status: Status
    location: str = ""
    operation: str = ""
    stack: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    groups: tuple[str, ...] = ()
    peers: tuple[int, ...] = ()
    is_blocked: bool = False
    idle_s: float = 0.0
    request_id: int = 0

    def pending(self) -> list[Collective]:
        """Return the collectives that have not completed."""
        return [call for call in self.collectives if not call.is_completed]
