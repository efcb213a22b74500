"""Hang detection of a run: the watchdog runs as long as the run's process group does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parallelize.hang_detection.rank_state import Collective
from parallelize.hang_detection.watchdog import Watchdog
from parallelize.run.default_group import default_group_record, default_store
from parallelize.run.live_facts import LiveFacts, registered
from parallelize.run.threads import begin_on
from parallelize.torch_patches.save import atomic_saves
from parallelize.torch_patches.step import AfterStep, StepCount, after_step

DEBUGGED = timedelta(days=7)
"""Timeout of torch's collectives if ranks may wait for a rank that is stopped in pdb.

torch does not know of pdb. The watchdog does, and ends other waits after the run's timeout.
"""


@contextlib.contextmanager
def watching(
    watchdog: Watchdog,
    device: torch.device,
    timeout: timedelta,
    *,
    since_ns: int | None,
) -> Iterator[None]:
    """Run the watchdog in the block if the process group has several processes.

    Args:
        watchdog: the watchdog of this process.
        device: the device of this process.
        timeout: timeout of the run. If the group is the user's, no wait is ended earlier, even if
            the user has given the group a shorter timeout.
        since_ns: time when the run initialized the group (time.time_ns); None: the group is the
            user's, and outlives the run.
    """
    if dist.get_world_size() == 1:
        yield
        return
    record = default_group_record()
    number_of_watch = record.watches
    record.watches += 1
    store = dist.PrefixStore(f"parallelize/watch/{number_of_watch}", default_store())
    steps = StepCount()
    watchdog.on_start = functools.partial(begin_on, device)
    watchdog.on_look = LiveFacts(steps, device)
    limit = _WaitLimit(timeout, is_users_group=since_ns is None)
    with (
        after_step(AfterStep.COUNT, steps),
        registered(default_store()),
        atomic_saves(store, dist.get_rank()),
        watchdog.watch(store, timeout_s=limit, since_ns=since_ns),
    ):
        yield


@dataclass(frozen=True)
class _WaitLimit:
    """How long a rank may wait, by the groups in which it waits; the watchdog's thread asks.

    Args:
        timeout: of the run.
        is_users_group: whether the user has initialized the default group, with a timeout that may
            be shorter.
    """

    timeout: timedelta
    is_users_group: bool

    def __call__(self, calls: Sequence[Collective]) -> float:
        """Return the timeout of a wait, in seconds.

        Args:
            calls: the collectives that have not completed; empty: a wait in any group.
        """
        longest = _longest_timeout(calls, self.timeout)
        if self.is_users_group:
            longest = max(longest, self.timeout)
        return longest.total_seconds()


def _longest_timeout(calls: Sequence[Collective], default: timedelta) -> timedelta:
    """Return the longest timeout of the default group and of the groups of some collectives.

    Args:
        calls: the collectives. If empty, all groups of this process count.
        default: timeout of the run, in place of `DEBUGGED`, and if no backend says its timeout.
    """
    names_of_calls = set()
    for call in calls:
        # A counter is named "<group>/<library>".
        group_name, _, _ = call.counter.partition("/")
        names_of_calls.add(group_name)
    timeouts = []
    groups = list(dist.distributed_c10d._world.pg_names.items())
    for group, name in groups:
        if names_of_calls and name not in names_of_calls and group is not dist.group.WORLD:
            continue
        for device in group._device_types:
            # Not every backend has options.
            with contextlib.suppress(RuntimeError, AttributeError):
                timeouts.append(group._get_backend(device).options._timeout)
    limits = [default if timeout == DEBUGGED else timeout for timeout in timeouts]
    return max(limits, default=default)
