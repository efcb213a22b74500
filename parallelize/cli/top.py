"""`parallelize top`: what each rank of a running program does, from what hang detection publishes when it is asked.

It finds the runs of this user on this machine: by the files in which the ranks of a call meet, and on Linux, for a
TCPStore, by the names of sockets in /proc/net/unix. A run elsewhere is asked by the address of its store: the variables
MASTER_ADDR:MASTER_PORT of its ranks.

Whoever reaches a TCPStore can write to it, or answer in place of one. A child process asks, which is ended after 5 s
and may not take much memory. Of what it brings, only values of the right types are used, and only printable characters
are shown.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallelize.errors import list_ranks
from parallelize.hang_detection.deadlock import awaited_ranks, waiting_line
from parallelize.hang_detection.rank_state import Collective, RankState
from parallelize.hang_detection.statements import Statement, StatementKind
from parallelize.hang_detection.waiting import WaitKind
from parallelize.run.live_facts import listed_runs

__all__ = ["ask", "show", "state_of", "table", "verdict"]

_EVERY_S = 5.0  # the watchdog of a rank looks at it ten times meanwhile
_LONGEST_S = 5.0  # of a question to all runs
_ANSWER_S = 4.0  # of the ranks of a run, in the child process
_SLOWER = 1.2
_CLEAR = "\033[H\033[J"
_MOST_BYTES = 2**26  # of all answers of a run
_MOST_RANKS = 100_000
_MOST_CHARACTERS = 300
_CHILD_MEMORY = 2**30  # beside what it has at its start

States = Mapping[int, RankState]


def show(run: str | None, *, once: bool) -> int:
    """Print a table of the ranks every 5 s until Ctrl-C, or once; return the exit code: 1 if there is no run.

    Args:
        run: HOST:PORT of a run's store, or the path of one; None: the runs of this user on this machine.
        once: print one table.
    """
    while True:
        before = ask([run] if run else sorted(listed_runs()))
        if not any(before.values()):
            sys.stderr.write(
                "no run of several processes answers; `parallelize top HOST:PORT` asks one on another machine, or on a "
                "system other than Linux, where not all runs are listed\n"
            )
            return 1
        time.sleep(_EVERY_S)
        after = ask([address for address, states in before.items() if states])
        texts = [f"{_printable(address)}\n{_text(before[address], states)}\n" for address, states in after.items()]
        sys.stdout.write(("" if once else _CLEAR) + "\n".join(texts))
        sys.stdout.flush()
        if once:
            return 0


def _text(before: States, after: States) -> str:
    try:
        return table(before, after)
    except Exception as exc:  # noqa: BLE001 - states of a stranger may contradict each other in any way
        return f"its ranks say what cannot be: {type(exc).__name__}"


def ask(addresses: Collection[str]) -> dict[str, States]:
    """Ask where all ranks of runs are, for at most 5 s in all; the runs go on undisturbed.

    Args:
        addresses: HOST:PORT of a run's store, or the path of one.

    Returns:
        For each address the states of the ranks that answer in time. A line on stderr names a store that is silent, or
        says what no run says.
    """
    end_s = time.monotonic() + _LONGEST_S
    context: Any = multiprocessing.get_context("fork")  # torch is imported
    children = {}
    for address in addresses:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_ask_in_child, args=[address, sender], daemon=True)
        child.start()
        sender.close()
        children[receiver] = address, child
    states: dict[str, States] = {address: {} for address in addresses}
    waiting: list[Any] = list(children)
    while waiting and (ready := wait(waiting, max(0.0, end_s - time.monotonic()))):
        for receiver in ready:
            assert isinstance(receiver, Connection)
            waiting.remove(receiver)
            address, _ = children[receiver]
            try:
                states[address] = _states_of_answer(receiver.recv_bytes(_MOST_BYTES))
            except (EOFError, OSError, ValueError):
                _say(address, "says what no run of this library says")
    for receiver, (address, child) in children.items():
        if receiver in waiting:
            _say(address, f"does not answer within {_LONGEST_S:g} s")
        child.kill()
        child.join()
        receiver.close()
    return states


def _say(address: str, text: str) -> None:
    sys.stderr.write(f"{_printable(address)} {text}\n")


# In the child process


def _ask_in_child(address: str, answer: Connection) -> None:
    """Ask a store, and send the texts of the states of its ranks as JSON; nothing comes back if it lies."""
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - a descriptor is needed
        os.dup2(nothing.fileno(), 2)  # torch prints its C++ stack
    _limit_memory()
    answer.send_bytes(json.dumps(_texts_of(address)).encode())


def _limit_memory() -> None:
    """Let a request for more memory fail: a store may announce an answer of any length."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not Linux
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _CHILD_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _texts_of(address: str) -> list[str]:
    end_s = time.monotonic() + _ANSWER_S
    store = _store_at(address)
    if store is None:
        return []
    watched = [re.fullmatch(r"(.*parallelize/watch/(\d{1,9}))/asked", key) for key in store.list_keys()]
    # Of ended ones no rank answers.
    for match in sorted(filter(None, watched), key=lambda match: -int(match[2])):
        if texts := _answers(dist.PrefixStore(match[1], store), end_s):
            return texts
    return []


def _store_at(address: str) -> Any:
    """Return the store at an address; None: there is none, or none any more."""
    if Path(address).is_file():
        return dist.FileStore(address, -1)
    host, _, port = address.rpartition(":")
    try:
        where = host.strip("[]"), int(port)
        socket.create_connection(where, 2).close()  # where none listens, torch tries for long
    except (ValueError, OSError):
        return None
    timeout = timedelta(seconds=_ANSWER_S)
    return dist.TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timeout)


def _answers(store: Any, end_s: float) -> list[str]:
    """Ask the ranks of one block; return the texts of the states of those that answer in time."""
    number = store.add("asked", 1)
    texts: dict[int, str] = {}
    world_size = 1
    while len(texts) < world_size and time.monotonic() < end_s:
        time.sleep(0.1)
        for rank in [rank for rank in range(world_size) if rank not in texts and store.check([f"state/{rank}"])]:
            text = store.get(f"state/{rank}").decode()
            state = state_of(text)
            if state.answers >= number and state.facts:
                texts[rank], world_size = text, state.facts["world_size"]
    return list(texts.values())


# What a stranger may have written


def _states_of_answer(answer: bytes) -> States:
    states = [state_of(text) for text in json.loads(answer)]
    return {state.rank: state for state in states}


def state_of(text: str) -> RankState:
    """Return the state of a rank from its JSON, with printable characters only.

    Args:
        text: may come from anybody.

    Raises:
        ValueError: it is no state of a rank.
    """
    try:
        rank, status, location, operation, collectives, groups, is_blocked, since, answers, facts, *wait = json.loads(
            text
        )
        wait_kind, block, statements = wait
        return RankState(
            _integer(rank, _MOST_RANKS),
            _printable(status),
            _printable(location),
            _printable(operation),
            [_collective(*fields) for fields in collectives],
            [_printable(name) for name in groups],
            is_blocked is True,
            _integer(since),
            _integer(answers),
            None if facts is None else _facts(**facts),
            WaitKind(wait_kind),
            _printable(block),
            [_statement(*fields) for fields in statements],
        )
    except (TypeError, RecursionError) as exc:
        raise ValueError(f"no state of a rank: {exc}") from None


def _statement(kind: str, line: str, text: str, _exits: object) -> Statement:
    return Statement(StatementKind(kind), _printable(line), _printable(text))


def _collective(counter: str, seq: int, signature: str, is_completed: bool) -> Collective:  # noqa: FBT001 - as in JSON
    return Collective(_printable(counter), _integer(seq), _printable(signature), is_completed is True)


def _facts(*, looks: Mapping[str, int], **others: Any) -> dict[str, Any]:
    """Return what `LiveFacts` says of a rank; a missing or additional fact is a TypeError."""
    known = {"host", "world_size", "at_s", "steps", "waits_s", "memory_bytes"}
    if others.keys() != known or not isinstance(looks, dict):
        raise TypeError(f"facts {sorted(others)}")
    return {
        "host": _printable(others["host"]),
        "world_size": _integer(others["world_size"], _MOST_RANKS),
        "at_s": _seconds(others["at_s"]),
        "steps": _integer(others["steps"]),
        "looks": {name: _integer(looks.get(name, 0)) for name in ("computing", "data", "waiting")},
        "waits_s": _seconds(others["waits_s"]),
        "memory_bytes": _integer(others["memory_bytes"]),
    }


def _integer(value: object, most: int = 2**63) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise TypeError("no number of that size")
    return value


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]  # a number
        raise TypeError("no time")
    return float(value)  # type: ignore[arg-type]  # a number


def _printable(text: object) -> str:
    """Return a text without the characters that a terminal obeys, and not longer than a few lines."""
    if not isinstance(text, str):
        raise TypeError("no text")
    return "".join(character if character.isprintable() else "?" for character in text[:_MOST_CHARACTERS])


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
        seconds = facts["at_s"] - old["at_s"]
        steps_per_s = (facts["steps"] - old["steps"]) / seconds if seconds > 0 else 0.0
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
