"""`parallelize top`: what each rank of a running program does, from what hang detection publishes when it is asked.

On Linux it finds the runs of this user on this machine, by the names of sockets in /proc/net/unix. A run elsewhere, and
any run on another system, is asked by the address of its store: the variables MASTER_ADDR:MASTER_PORT of its ranks.
"""

from __future__ import annotations

import contextlib
import re
import socket
import statistics
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallelize.errors import list_ranks
from parallelize.hang_detection.deadlock import awaited_ranks, waiting_line
from parallelize.hang_detection.rank_state import RankState
from parallelize.runtime.live_facts import listed_runs

__all__ = ["ask", "show", "table", "verdict"]

_EVERY_S = 5.0  # the watchdog of a rank looks at it ten times meanwhile
_ANSWER_S = 8.0  # of a rank on a busy machine
_SLOWER = 1.2
_CLEAR = "\033[H\033[J"

States = Mapping[int, RankState]


def show(run: str | None, *, once: bool) -> int:
    """Print a table of the ranks every 5 s until Ctrl-C, or once; return the exit code: 1 if there is no run.

    Args:
        run: HOST:PORT of a run's store; None: the runs of this user on this machine, on Linux.
        once: print one table.
    """
    while True:
        before = {each: ask(each) for each in ([run] if run else sorted(listed_runs()))}
        if not any(before.values()):
            sys.stderr.write(
                "no run of several processes answers; `parallelize top HOST:PORT` asks one on another machine, or on a "
                "system other than Linux, where runs are not listed\n"
            )
            return 1
        time.sleep(_EVERY_S)
        texts = [f"{each}\n{table(states, ask(each))}\n" for each, states in before.items() if states]
        sys.stdout.write(("" if once else _CLEAR) + "\n".join(texts))
        sys.stdout.flush()
        if once:
            return 0


def ask(address: str) -> States:
    """Ask where all ranks are; return the states of those that answer in time. The run goes on undisturbed.

    Args:
        address: HOST:PORT of a run's store.
    """
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=_ANSWER_S)
    with contextlib.suppress(RuntimeError, ValueError, OSError):  # no store, or none any more
        where = host.strip("[]"), int(port)
        socket.create_connection(where, 2).close()  # where none listens, torch tries for long, and prints its C++ stack
        store: Any = dist.TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timeout)
        watched = [re.fullmatch(r"(.*parallelize/watch/(\d+))/asked", key) for key in store.list_keys()]
        for each in sorted(filter(None, watched), key=lambda each: -int(each[2])):  # of ended ones no rank answers
            if states := _answers(dist.PrefixStore(each[1], store)):
                return states
    return {}


def _answers(store: Any) -> States:
    number, end_s = store.add("asked", 1), time.monotonic() + _ANSWER_S
    states: dict[int, RankState] = {}
    world_size = 1
    while len(states) < world_size and time.monotonic() < end_s:
        time.sleep(0.1)
        for rank in [each for each in range(world_size) if each not in states and store.check([f"state/{each}"])]:
            state = RankState.loads(store.get(f"state/{rank}"))
            if state.answers >= number and state.facts:
                states[rank], world_size = state, state.facts["world_size"]
    return states


def table(before: States, after: States) -> str:
    """Return a line for each rank, and the verdict.

    Args:
        before: the states some seconds earlier.
        after: the states now.
    """
    if not before.keys() & after.keys():
        return "the run has ended"
    awaited, shares = awaited_ranks(after), {}
    rows = [("rank", "host", "steps/s", "computing", "data", "waiting", "memory", "line")]
    for rank in sorted(before.keys() & after.keys()):
        state, facts, old = after[rank], after[rank].facts, before[rank].facts
        looks = {name: n - old["looks"].get(name, 0) for name, n in facts["looks"].items()}
        shares[rank] = {name: looks.get(name, 0) / max(1, sum(looks.values())) for name in rows[0][3:6]}
        steps_per_s = (facts["steps"] - old["steps"]) / (facts["at_s"] - old["at_s"])
        line = f"{state.location} in {state.operation}"
        if ranks := awaited.get(rank):
            line += f", for {list_ranks(ranks)} since {facts['waits_s']:.0f} s"
        percent = (f"{share:.0%}" for share in shares[rank].values())
        memory = f"{facts['memory_bytes'] / 2**30:.1f} GiB"
        rows.append((str(rank), facts["host"], f"{steps_per_s:.1f}", *percent, memory, line))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, verdict(after, shares)])


def verdict(states: States, shares: Mapping[int, Mapping[str, float]]) -> str:
    """Say in one line who waits for whom for long, or which rank the others wait for.

    Args:
        states: the states of all ranks.
        shares: for each rank the shares of "computing", "data" and "waiting" in its time.
    """
    if any(each.status == "waiting" for each in states.values()):
        return waiting_line(states, max(states) + 1)
    busy = {rank: 1 - share["waiting"] for rank, share in shares.items()}
    median = statistics.median(busy.values()) if busy else 0.0
    slowest = max(busy, key=lambda rank: busy[rank], default=0)
    # Ranks wait for each other in each step, so all make as many steps: one that waits less takes longer for its own.
    if not median or busy[slowest] < _SLOWER * median:
        return "no rank is much slower than the others"
    loading = {rank: share["data"] for rank, share in shares.items()}
    is_data = 2 * (loading[slowest] - statistics.median(loading.values())) >= busy[slowest] - median
    place = "in its data loader" if is_data else "outside of its data loader"
    return f"rank {slowest} is {busy[slowest] / median:.1f} times slower than the median {place}"
