"""Builds the caller's exception from the failures of the workers: the root cause, with rank, host and traceback."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from parallelize.call.task import Outcome, error_text, format_error
from parallelize.errors import ParallelizeError, SyncError, WorkerError, add_note, list_ranks
from parallelize.hang_detection.stack_frames import call_site_in

__all__ = ["WorkerExit", "caller_exception", "is_cause", "was_stopped"]

# Errors of a rank whose peer is lost, raised directly or re-raised: torch's types, and gloo's plain RuntimeErrors.
_PEER_LOST = re.compile(r"^(torch\.distributed\.Dist\w*Error: |RuntimeError: .*gloo/)", re.MULTILINE)
# gloo's message before it aborts the process; faulthandler then prints each thread's stack, the main thread's last.
_GLOO_SIZE_MISMATCH = re.compile(r"gloo::EnforceNotMet.*?(op\.preamble[^\n]*?)\. Received data size", re.DOTALL)
_STACK_HEADER = "(most recent call first):"
_TAIL_LINES = 20
_FIX_BY_SIGNAL = {
    "SIGKILL": "if you did not send it, the kernel did: look for 'Out of memory' in its log, and use less memory",
    "SIGABRT": "a library aborted the process: its reason is in the rank's output. If that names NCCL's watchdog, a "
    "collective timed out or a GPU failed: make the same calls on every rank, or increase timeout=",
    "SIGBUS": "usually /dev/shm is full, through which DataLoader workers send batches: make it larger (docker run "
    "--shm-size=8g), or use fewer workers",
    "SIGSEGV": "a compiled extension failed: its stack is in the rank's output",
    "SIGTERM": "if you did not send it, the machine did: look in the log of its job scheduler",
}


@dataclass(frozen=True)
class WorkerExit:
    """A worker process that exited without returning, and without being stopped by the agent.

    Args:
        rank: global rank of the worker.
        host: name of its host.
        pid: its process ID.
        exitcode: as in multiprocessing: the negative signal number if a signal killed it.
        seen_at: when the agent noticed, in seconds since the epoch.
        output: the ends of its stdout and its stderr.
    """

    rank: int
    host: str
    pid: int
    exitcode: int
    seen_at: float
    output: tuple[str, str] = ("", "")


def caller_exception(
    outcomes: Sequence[Outcome],
    exits: Sequence[WorkerExit],
    *,
    world_size: int,
    earlier: Sequence[BaseException] = (),
) -> BaseException:
    """Return the exception to raise in the caller: the earliest root cause, with rank, host and traceback as notes.

    Args:
        outcomes: the outcomes that ranks have written.
        exits: workers that exited without returning, as the agents noticed them.
        world_size: number of ranks.
        earlier: the exceptions of the previous attempts.
    """
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    silent = {each.rank: each for each in exits if each.rank not in {outcome.rank for outcome in failed}}
    cause = _first_cause(failed, list(silent.values()))
    if isinstance(cause, WorkerExit):
        error, notes = _error_of_exit(cause, outcomes)
    else:
        error, notes = _error_of_outcome(cause, world_size)
    others = [rank for rank in range(world_size) if rank != cause.rank]
    texts = {rank: _describe_rank(by_rank.get(rank), silent.get(rank)) for rank in others}
    notes.append(f"the others: {_group_ranks(texts)}" if texts else "no other rank exists")
    notes += (f"attempt {attempt} had failed with {_one_line(before)}" for attempt, before in enumerate(earlier))
    for note in notes:
        add_note(error, note)
    if isinstance(error, WorkerError):
        error.rank, error.host = cause.rank, cause.host
    return error


def _first_cause(failed: Sequence[Outcome], silent: Sequence[WorkerExit]) -> Outcome | WorkerExit:
    """Return the earliest failure that is not secondary; an exit may be noticed after secondary errors it causes."""
    first_cause = min(filter(is_cause, failed), key=lambda each: each.failed_at, default=None)
    first_exit = min(silent, key=lambda each: each.seen_at, default=None)
    if first_cause is not None and (first_exit is None or first_cause.failed_at <= first_exit.seen_at):
        return first_cause
    return first_exit or min(failed, key=lambda each: each.failed_at)


def was_stopped(outcome: Outcome) -> bool:
    """Return whether a rank was ended by SIGTERM, which the agent sends to stop workers."""
    return isinstance(outcome.error, SystemExit) and outcome.error.code == 128 + signal.SIGTERM


def is_cause(outcome: Outcome) -> bool:
    """Return whether a rank failed by itself: not by SIGTERM, a lost connection or an error marked as secondary."""
    if outcome.error is None or was_stopped(outcome) or _is_connection_loss(outcome):
        return False
    return not (isinstance(outcome.error, ParallelizeError) and outcome.error.is_secondary)


def _is_connection_loss(outcome: Outcome) -> bool:
    # A SyncError that was raised from a connection error explains that error and is kept.
    return bool(_PEER_LOST.search(outcome.traceback)) and not isinstance(outcome.error, SyncError)


def _error_of_outcome(outcome: Outcome, world_size: int) -> tuple[BaseException, list[str]]:
    error = outcome.error
    assert error is not None
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        exitcode = -signal.SIGTERM if was_stopped(outcome) else code
        error = _worker_error(outcome.rank, outcome.host, exitcode, why=f"SystemExit({error.code!r})")
    where = f"rank {outcome.rank} of {world_size} on {outcome.host} (pid {outcome.pid}) raised it:"
    # Python shows the exception itself above its notes.
    return error, [where, outcome.traceback.removesuffix(format_error(error, None)).rstrip()]


def _error_of_exit(worker_exit: WorkerExit, outcomes: Sequence[Outcome]) -> tuple[BaseException, list[str]]:
    _, err = worker_exit.output
    mismatch = _GLOO_SIZE_MISMATCH.search(err)
    if mismatch is not None:
        return _size_mismatch_error(worker_exit, mismatch[1], err, outcomes)
    error = _worker_error(worker_exit.rank, worker_exit.host, worker_exit.exitcode, why="it ended without an exception")
    # The end of each stream; stderr is last, because it usually contains the reason.
    tail = "\n".join(line for text in worker_exit.output for line in text.splitlines()[-_TAIL_LINES:])
    return error, [f"last lines of rank {worker_exit.rank}:\n{tail}"] if tail else []


def _size_mismatch_error(
    worker_exit: WorkerExit, message: str, err: str, outcomes: Sequence[Outcome]
) -> tuple[SyncError, list[str]]:
    """Build the error for a process that gloo aborted after receiving more data than its collective expects."""
    stack = err[err.rindex(_STACK_HEADER) if _STACK_HEADER in err else 0 :]
    lines = {worker_exit.rank: call_site_in(stack), **{each.rank: call_site_in(each.traceback) for each in outcomes}}
    where = "; ".join(f"rank {rank} was at {line}" for rank, line in sorted(lines.items()) if line)
    error = SyncError(
        f"rank {worker_exit.rank} received data of another size than its collective expects{where and f': {where}'}",
        why=f"ranks are in different collectives, or pass tensors of different shapes or dtypes ({message.strip()})",
        fix="make the same calls on every rank, with the same shapes and dtypes in the same order",
    )
    return error, [f"rank {worker_exit.rank} on {worker_exit.host} (pid {worker_exit.pid}) was ended by gloo"]


def _worker_error(rank: int, host: str, exitcode: int, *, why: str) -> WorkerError:
    name = _signal_name(exitcode)
    fix = _FIX_BY_SIGNAL.get(name or "", "raise an exception instead, so that its reason can be shown here")
    error = WorkerError(f"rank {rank} on {host} {_describe_exit(exitcode)}", why=why, fix=fix)
    error.exitcode, error.signal_name = exitcode, name
    return error


def _signal_name(exitcode: int) -> str | None:
    known = {each.value: each.name for each in signal.Signals}
    return known.get(-exitcode, f"signal {-exitcode}") if exitcode < 0 else None


def _describe_exit(exitcode: int) -> str:
    name = _signal_name(exitcode)
    return f"was ended by {name}" if name else f"ended with exit code {exitcode}"


def _describe_rank(outcome: Outcome | None, worker_exit: WorkerExit | None) -> str:
    """Describe in a few words how a rank other than the root cause ended."""
    if worker_exit is not None:
        return _describe_exit(worker_exit.exitcode)
    if outcome is None or was_stopped(outcome):
        return "stopped"
    if outcome.error is None:
        return "had returned"
    return "lost the connection" if _is_connection_loss(outcome) else _one_line(outcome.error)


def _one_line(error: BaseException) -> str:
    reason = error_text(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {reason[:120]}" if reason else type(error).__name__


def _group_ranks(texts: dict[int, str]) -> str:
    """Join the texts of all ranks into one line; ranks with the same text share an entry."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{list_ranks(each)}: {text}" for text, each in ranks.items())
