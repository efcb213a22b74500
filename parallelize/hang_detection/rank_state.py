"""Where a rank is in the program, as ranks tell each other when one of them waits for long."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Call", "Place", "State"]

State = Literal["runs", "waits", "returned"]


@dataclass(frozen=True)
class Call:
    """A collective that a rank has begun.

    Args:
        group: name of its process group, the same on all of the group's ranks.
        number: how many of the group's collectives this rank has begun, this one included.
        what: operation, and what has to be alike on all ranks of it: "all_reduce of float32[4]".
        is_over: whether this rank is through with it.
        root: the rank that sends or receives for all, where it is known.
        engine: who carries it out: "gloo", "nccl".
    """

    group: str
    number: int
    what: str
    is_over: bool
    root: int | None = None
    engine: str = "gloo"


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Args:
        rank: which.
        state: "waits": it has stood in one call of torch.distributed, or in backward, for some seconds, and does not
            compute; "returned": it takes part in no collective any more; "runs": whatever else.
        at: the innermost line of the user's program: "train.py:41".
        doing: the call there, in a few words.
        stack: the user's lines that led there, outermost first: "train.py:30 in train".
        calls: what it has begun last, in each group.
        groups: ranks of each group in which it has begun something.
        awaits: ranks that it waits for although no collective says so: the sender of a message.
        is_alone: whether it can do nothing but wait, and no other thread of its process could go on for it.
        since_s: for how long it has stood there.
        answer: the number of the question that this answers.
    """

    rank: int
    state: State
    at: str = ""
    doing: str = ""
    stack: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    awaits: tuple[int, ...] = ()
    is_alone: bool = False
    since_s: float = 0.0
    answer: int = 0

    def last(self, group: str) -> int | None:
        """The number of the last collective that it has begun in a group; None: it has told of none."""
        return max((call.number for call in self.calls if call.group == group), default=None)

    def pending(self) -> list[Call]:
        """What it has begun and is not through with."""
        return [call for call in self.calls if not call.is_over]

    def dumps(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Place:
        """From text of `dumps`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(
            **{
                **fields,
                "stack": tuple(fields["stack"]),
                "awaits": tuple(fields["awaits"]),
                "calls": tuple(Call(**each) for each in fields["calls"]),
                "groups": tuple((name, tuple(ranks)) for name, ranks in fields["groups"]),
            }
        )
