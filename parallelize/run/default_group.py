"""What this library keeps for a default process group, as long as that group exists."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from parallelize.run.surroundings import surroundings


class KeyState(enum.Enum):
    """Whether it is decided which key the ranks of a default group have: see `run_key.py`."""

    OPEN = enum.auto()
    """Nobody has given a key, and the ranks have not looked for one."""

    DECIDED = enum.auto()
    """The ranks have a key, or have found out that they cannot have one."""


@dataclass(eq=False)
class DefaultGroupRecord:
    """Facts about one default group, which may be the user's and live longer than a run.

    A later run on the same group needs the groups and the key that the ranks have made together in
    an earlier run. So each field is changed only in calls that all ranks make in one order. A rank
    whose counter were ahead would read keys of the store that no other rank writes, and wait
    forever.

    Attributes:
        key_state: whether `key` is decided.
        key: the secret of the ranks; None while it is not decided, and if the ranks have no key.
        separate_groups: the groups that `groups.py` has made, by purpose and backend, or by purpose
            and ranks.
        watches: number of runs that have watched for hangs with this group. The prefix of a run's
            keys in the store has this number, so that no run reads what an earlier run has written.
    """

    key_state: KeyState = KeyState.OPEN
    key: bytes | None = None
    separate_groups: dict[Any, Any] = field(default_factory=dict)
    watches: int = 0


def default_group_record() -> DefaultGroupRecord:
    """Return the record of the present default group."""
    group: Any = dist.group.WORLD
    record_of_group = surroundings().script.record_of_group
    if group not in record_of_group:
        record_of_group[group] = DefaultGroupRecord()
    return record_of_group[group]


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()
