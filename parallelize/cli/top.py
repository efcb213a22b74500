"""`parallelize top`: what each rank of a running program does, as hang detection publishes it.

    show ── every 5 s
    ├── ask ── a child process for each run
    │            ├── connects to the store of the run
    │            ├── increases "asked" in it, by which the watchdogs of the ranks are asked
    │            └── reads the states that they answer with, and sends them as JSON
    └── table ── of the states of two moments

It finds the runs of this user on this machine: by the files in which the ranks of a call meet, and
on Linux, for a TCPStore, by the names of sockets in /proc/net/unix. A run elsewhere is asked by the
address of its store: the variables MASTER_ADDR:MASTER_PORT of its ranks.

Whoever reaches a TCPStore can write to it, or answer in place of one. A child process asks, which
is ended after 5 s and may not take much memory. Of what it brings, only values of the right types
are used, and only printable characters are shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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

# Between two tables. Meanwhile, the watchdog of a rank notes ten times what the rank does.
_INTERVAL_S = 5.0
# For an answer of all runs, and in the child process for an answer of the ranks of one run.
_ASKING_S = 5.0
_RANKS_ANSWER_S = 4.0
_CONNECT_S = 2.0
# A rank is called slow if it is busy this many times as long as the median rank.
_SLOW_FACTOR = 1.2
_CLEAR_SCREEN = "\033[H\033[J"

# What a stranger may make this process read, show or allocate.
_MAX_ANSWER_BYTES = 2**26
_MAX_RANKS = 100_000
_MAX_CHARACTERS = 300
_MAX_INTEGER = 2**63
_CHILD_MEMORY_BYTES = 2**30

_STDERR = 2

_ACTIVITIES = ("computing", "data", "waiting")
_HEADER = ("rank", "host", "steps/s", *_ACTIVITIES, "memory", "line")

States = Mapping[int, RankState]
"""Rank -> its state."""
Shares = Mapping[str, float]
"""Activity -> the part of its time that a rank spends with it."""


@dataclass(frozen=True)
class _Facts:
    """What `LiveFacts` says of a rank.

    Args:
        host: name of the machine.
        world_size: number of ranks of the run.
        at_s: time of these facts, by the rank's clock.
        steps: number of optimizer steps so far.
        looks: activity -> how often the watchdog has seen the rank in it.
        waits_s: for how long the rank has waited; 0: it does not wait.
        memory_bytes: memory of the rank.
    """

    host: str
    world_size: int
    at_s: float
    steps: int
    looks: Mapping[str, int]
    waits_s: float
    memory_bytes: int


_FACT_NAMES = {field.name for field in dataclasses.fields(_Facts)}


def show(run: str | None, *, once: bool) -> int:
    """Print a table of the ranks every 5 s until Ctrl-C, or once.

    Args:
        run: HOST:PORT of a run's store, or the path of one; None: the runs of this user on this
            machine.
        once: print one table.

    Returns:
        The exit code: 1 if there is no run.
    """
    while True:
        addresses = [run] if run else sorted(listed_runs())
        states_before = ask(addresses)
        answering = [address for address in addresses if states_before[address]]
        if not answering:
            sys.stderr.write(
                "no run of several processes answers; `parallelize top HOST:PORT` asks one on "
                "another machine, or on a system other than Linux, where not all runs are listed\n"
            )
            return 1
        time.sleep(_INTERVAL_S)
        texts = []
        for address, states in ask(answering).items():
            text = _table_or_fault(states_before[address], states)
            texts.append(f"{_printable(address)}\n{text}\n")
        if not once:
            sys.stdout.write(_CLEAR_SCREEN)
        sys.stdout.write("\n".join(texts))
        sys.stdout.flush()
        if once:
            return 0


def _table_or_fault(before: States, after: States) -> str:
    """Return the table of a run: the states of a stranger may contradict each other in any way."""
    try:
        return table(before, after)
    except Exception as exc:  # noqa: BLE001  # see above
        return f"its ranks say what cannot be: {type(exc).__name__}"


@dataclass(frozen=True)
class _Question:
    """A child process that asks the ranks of a run.

    Args:
        address: of the run's store.
        child: the process, a daemon of this one.
        answer: where the answer of the child arrives.
    """

    address: str
    child: Any
    answer: Connection

    @classmethod
    def put_to(cls, address: str) -> _Question:
        """Start a process that asks the ranks of a run."""
        # Forked: torch is imported in this process.
        context: Any = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_ask_in_child, args=[address, sender], daemon=True)
        child.start()
        # Now the child has the only sender, so that its end can be noticed.
        sender.close()
        return cls(address, child, receiver)

    def close(self) -> None:
        """End the process."""
        self.child.kill()
        self.child.join()
        self.answer.close()


def ask(addresses: Collection[str]) -> dict[str, States]:
    """Ask where all ranks of runs are, for at most 5 s in all; the runs go on undisturbed.

    Args:
        addresses: HOST:PORT of a run's store, or the path of one.

    Returns:
        For each address the states of the ranks that answer in time. A line on stderr names a store
        that is silent, or that says what no run says.
    """
    end_s = time.monotonic() + _ASKING_S
    questions = [_Question.put_to(address) for address in addresses]
    states: dict[str, States] = {address: {} for address in addresses}
    unanswered: dict[Any, _Question] = {question.answer: question for question in questions}
    while unanswered:
        ready = wait(list(unanswered), max(0.0, end_s - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            question = unanswered.pop(connection)
            try:
                answer = question.answer.recv_bytes(_MAX_ANSWER_BYTES)
                states[question.address] = _states_of_answer(answer)
            except (EOFError, OSError, ValueError):
                _complain(question.address, "says what no run of this library says")
    for question in unanswered.values():
        _complain(question.address, f"does not answer within {_ASKING_S:g} s")
    for question in questions:
        question.close()
    return states


def _complain(address: str, text: str) -> None:
    sys.stderr.write(f"{_printable(address)} {text}\n")


# In the child process


def _ask_in_child(address: str, answer: Connection) -> None:
    """Ask the ranks of a run, and send the texts of their states as JSON.

    Nothing is sent if the store lies, so that this process raises.
    """
    # torch prints its C++ stack, to the descriptor, when it cannot connect.
    with open(os.devnull, "wb") as devnull:  # noqa: PTH123  # a descriptor is needed
        os.dup2(devnull.fileno(), _STDERR)
    _limit_memory()
    answer.send_bytes(json.dumps(_texts_of_run(address)).encode())


def _limit_memory() -> None:
    """Let a request for more memory fail: a store may announce an answer of any length."""
    # Not all systems have the module, the file and the limit.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _CHILD_MEMORY_BYTES
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def _texts_of_run(address: str) -> list[str]:
    """Return the texts of the states of a run's ranks; none if nobody answers."""
    end_s = time.monotonic() + _RANKS_ANSWER_S
    store = _connect(address)
    if store is None:
        return []
    for prefix in _watched_blocks(store):
        # No rank answers for a block that has ended.
        texts = _ask_ranks(dist.PrefixStore(prefix, store), end_s)
        if texts:
            return texts
    return []


def _connect(address: str) -> Any:
    """Return the store at an address; None: there is none, or none any more."""
    if Path(address).is_file():
        return dist.FileStore(address, -1)
    host, _, port_text = address.rpartition(":")
    host = host.strip("[]")
    try:
        port = int(port_text)
        # Where nobody listens, torch would try for long.
        socket.create_connection((host, port), _CONNECT_S).close()
    except (ValueError, OSError):
        return None
    timeout = timedelta(seconds=_RANKS_ANSWER_S)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _watched_blocks(store: Any) -> Iterator[str]:
    """Yield the prefixes of the keys of watchdogs in a store, the latest first."""
    prefix_of_number: dict[int, str] = {}
    for key in store.list_keys():
        match = re.fullmatch(r"(.*parallelize/watch/(\d{1,9}))/asked", key)
        if match is not None:
            prefix_of_number[int(match[2])] = match[1]
    for number in sorted(prefix_of_number, reverse=True):
        yield prefix_of_number[number]


def _ask_ranks(store: Any, end_s: float) -> list[str]:
    """Ask the ranks of a block; return the texts of the states of those that answer in time."""
    number = store.add("asked", 1)
    text_of_rank: dict[int, str] = {}
    # The first answer, which is rank 0's, says how many ranks there are.
    world_size = 1
    while len(text_of_rank) < world_size and time.monotonic() < end_s:
        time.sleep(0.1)
        for rank in range(world_size):
            if rank in text_of_rank or not store.check([f"state/{rank}"]):
                continue
            text = store.get(f"state/{rank}").decode()
            state = state_of(text)
            # A state may be an answer to an earlier question.
            if state.answers >= number and state.facts:
                text_of_rank[rank] = text
                world_size = state.facts.world_size
    return list(text_of_rank.values())


# What a stranger may have written


def _states_of_answer(answer: bytes) -> States:
    states = map(state_of, json.loads(answer))
    return {state.rank: state for state in states}


def state_of(text: str) -> RankState:
    """Return the state of a rank from its JSON, with printable characters only.

    Args:
        text: may come from anybody.

    Raises:
        ValueError: it is no state of a rank.
    """
    try:
        fields = list(json.loads(text))
        rank, status, location, operation, collectives, groups, is_blocked = fields[:7]
        since, answers, facts, wait_kind, block, statements = fields[7:]
        return RankState(
            rank=_integer(rank, _MAX_RANKS),
            status=_printable(status),
            location=_printable(location),
            operation=_printable(operation),
            collectives=[_collective(*values) for values in collectives],
            groups=list(map(_printable, groups)),
            is_blocked=is_blocked is True,
            since=_integer(since),
            answers=_integer(answers),
            facts=None if facts is None else _facts(**facts),
            wait_kind=WaitKind(wait_kind),
            block=_printable(block),
            statements=[_statement(*values) for values in statements],
        )
    except (TypeError, RecursionError) as exc:
        raise ValueError(f"no state of a rank: {exc}") from None


def _statement(statement_kind: str, line: str, text: str, _exits: object) -> Statement:
    return Statement(StatementKind(statement_kind), _printable(line), _printable(text))


def _collective(
    counter: str,
    seq: int,
    signature: str,
    is_completed: bool,  # noqa: FBT001  # as in JSON
) -> Collective:
    return Collective(
        _printable(counter), _integer(seq), _printable(signature), is_completed is True
    )


def _facts(**fields: Any) -> _Facts:
    """Return the facts of a rank; a missing or additional fact is a TypeError."""
    if fields.keys() != _FACT_NAMES or not isinstance(fields["looks"], dict):
        raise TypeError(f"facts {sorted(fields)}")
    looks = {name: _integer(fields["looks"].get(name, 0)) for name in _ACTIVITIES}
    return _Facts(
        host=_printable(fields["host"]),
        world_size=_integer(fields["world_size"], _MAX_RANKS),
        at_s=_seconds(fields["at_s"]),
        steps=_integer(fields["steps"]),
        looks=looks,
        waits_s=_seconds(fields["waits_s"]),
        memory_bytes=_integer(fields["memory_bytes"]),
    )


def _integer(value: object, maximum: int = _MAX_INTEGER) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise TypeError("no number of that size")
    return value


def _seconds(value: object) -> float:
    # A bool is an instance of int, and no time.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError("no time")
    return float(value)


def _printable(text: object) -> str:
    """Return a text without the characters that a terminal obeys, and not longer than some lines.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(text, str):
        raise TypeError("no text")
    return "".join(map(_shown, text[:_MAX_CHARACTERS]))


def _shown(character: str) -> str:
    return character if character.isprintable() else "?"


# The table


def table(before: States, after: States) -> str:
    """Return a line for each rank, and the verdict.

    Args:
        before: the states some seconds earlier.
        after: the states now.
    """
    ranks = sorted(before.keys() & after.keys())
    if not ranks:
        return "the run has ended"
    awaited = awaited_ranks(after)
    shares: dict[int, Shares] = {}
    rows: list[tuple[str, ...]] = [_HEADER]
    for rank in ranks:
        facts: _Facts = after[rank].facts
        earlier_facts: _Facts = before[rank].facts
        shares[rank] = _shares(earlier_facts, facts)
        seconds = facts.at_s - earlier_facts.at_s
        steps_per_s = 0.0
        if seconds > 0:
            steps_per_s = (facts.steps - earlier_facts.steps) / seconds
        line = f"{after[rank].location} in {after[rank].operation}"
        if awaited.get(rank):
            line += f", for {list_ranks(awaited[rank])} since {facts.waits_s:.0f} s"
        percentages = [f"{shares[rank][activity]:.0%}" for activity in _ACTIVITIES]
        memory = f"{facts.memory_bytes / 2**30:.1f} GiB"
        rows.append((str(rank), facts.host, f"{steps_per_s:.1f}", *percentages, memory, line))
    return "\n".join([*_aligned(rows), verdict(after, shares)])


def _shares(before: _Facts, after: _Facts) -> Shares:
    """Return the shares of a rank's time between two moments."""
    looks = {name: after.looks[name] - before.looks[name] for name in _ACTIVITIES}
    total = max(1, sum(looks.values()))
    return {name: number / total for name, number in looks.items()}


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return a line for each row, with columns of equal widths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return lines


def verdict(states: States, shares: Mapping[int, Shares]) -> str:
    """Say in one line who waits for whom for long, or which rank the others wait for.

    Args:
        states: the states of all ranks.
        shares: for each rank the shares of "computing", "data" and "waiting" in its time.
    """
    if any(state.status == "waiting" for state in states.values()):
        return waiting_line(states, max(states) + 1)
    # The ranks wait for each other in each step, so that all make as many steps: a rank that waits
    # less takes longer for its own work.
    busy_share = {rank: 1 - share["waiting"] for rank, share in shares.items()}
    median = statistics.median(busy_share.values()) if busy_share else 0.0
    slowest = max(busy_share, key=busy_share.__getitem__, default=0)
    if median == 0 or busy_share[slowest] < _SLOW_FACTOR * median:
        return "no rank is much slower than the others"
    data_share = {rank: share["data"] for rank, share in shares.items()}
    excess = busy_share[slowest] - median
    data_excess = data_share[slowest] - statistics.median(data_share.values())
    place = "outside of its data loader"
    if 2 * data_excess >= excess:
        place = "in its data loader"
    factor = busy_share[slowest] / median
    return f"rank {slowest} is {factor:.1f} times slower than the median {place}"
