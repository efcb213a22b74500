"""Do the ranks do the same? Texts such as "iterates epoch 3" are compared, and no rank waits.

    check        a text that must be equal on all ranks, such as "iterates epoch 3"
    topic        what the text is about, such as a loader; texts of one topic are compared
    sync point   a place in the program that every rank passes once, such as a model's 5th forward

The first rank at a sync point writes its text to the store of the process group. Each rank that
comes later compares its text with the first one. This is done before anything that could block, so
that ranks which would wait for each other forever get an error instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakSet

import torch.distributed as dist

from parallelize.errors import SyncError
from parallelize.run.default_group import default_store


@dataclass(frozen=True, eq=False)
class ConsistencyCheck:
    """A text that must be equal on all ranks.

    It is compared at the next sync point, if the object still exists then. Its maker, such as a
    loader, drops it when the text is no longer true.

    Args:
        topic: a key that is the same on all ranks.
        text: what this rank is doing.
        fix: the `fix` of the error if texts differ.
    """

    topic: str
    text: str
    fix: str


def run_checks(pending_checks: WeakSet[ConsistencyCheck], sync_point: str) -> None:
    """Compare the pending texts with those of the first rank at a sync point, and forget them.

    Args:
        pending_checks: the checks of the run.
        sync_point: name of the sync point. No other one in the life of the process group may have
            this name: the texts would be compared with those that are in the store already.

    Raises:
        SyncError: the first rank has written another text.
    """
    if not pending_checks:
        return
    checks = list(pending_checks)
    pending_checks.clear()
    # Without a process group, this process is the only rank.
    if not dist.is_initialized():
        return
    for check in checks:
        _compare_with_first_rank(check, sync_point)


def _compare_with_first_rank(check: ConsistencyCheck, sync_point: str) -> None:
    """Write the text of a check to the store, or compare it with the text that is there.

    Raises:
        SyncError: they differ.
    """
    text_of_this_rank = f"rank {dist.get_rank()} {check.text}"
    key = f"parallelize/{sync_point}/{check.topic}"
    # `compare_set` writes the text if there is none yet, and returns the text that is there.
    stored = default_store().compare_set(key, "", text_of_this_rank)
    text_of_first_rank = stored.decode()
    # Such as "rank 2 iterates epoch 3".
    _word_rank, _number, first_text = text_of_first_rank.split(" ", maxsplit=2)
    if first_text != check.text:
        raise SyncError(
            f"{text_of_this_rank}, where {text_of_first_rank}",
            why="ranks that differ here wait for each other forever, or train on the same data",
            fix=check.fix,
        )
