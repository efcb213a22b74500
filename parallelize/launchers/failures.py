"""Builds the caller's exception from the failures of the workers: the root cause, with rank, host and traceback."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from parallelize.call.outcome import Outcome, error_text, format_error
from parallelize.errors import ParallelizeError, SyncError, WorkerError, add_note, list_ranks
from parallelize.hang_detection.stack_frames import call_site_in

# Errors of a rank whose peer is lost, raised directly or re-raised: torch's types, and gloo's plain RuntimeErrors.
_PEER_LOST = re.compile(
    r"^(torch\.distributed\.Dist\w*Error: |RuntimeError: .*gloo/)", re.MULTILINE
)
# gloo's message before it aborts the process; faulthandler then prints each thread's stack, the main thread's last.
_GLOO_SIZE_MISMATCH = re.compile(
    r"gloo::EnforceNotMet.*?(op\.preamble[^\n]*?)\. Received data size", re.DOTALL
)
_STACK_HEADER = "(most recent call first):"
# What faulthandler prints: the signal, the stacks of threads, and all extension modules. The main thread's is the last;
# the one that has failed is "Current", unless it is of a library, without Python.
_FATAL = re.compile(
    r"^(Fatal Python error: .*\n)(?s:.*?(?=^Current)|.*(?=^Thread))(.*\n(?:  .*\n){,12})(?s:.*)",
    re.MULTILINE,
)
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


def ended(
    rank: int, host: str, pid: int, exitcode: int, *, seen_at: float, output: tuple[str, str]
) -> Outcome:
    """Return the outcome of a worker process that has ended without writing one; it has no traceback.

    Args:
        rank: global rank of the worker.
        host: name of its host.
        pid: its process ID.
        exitcode: as in multiprocessing: the negative signal number if a signal killed it.
        seen_at: when its end was noticed, in seconds since the epoch.
        output: the ends of its stdout and its stderr.
    """
    error: Exception = _worker_error(rank, host, exitcode, why="it ended without an exception")
    # The end of each stream; stderr is last, because it usually contains the reason.
    ends = (_FATAL.sub(r"\1\2", text).splitlines()[-_TAIL_LINES:] for text in output)
    tail = "\n".join(line for end in ends for line in end)
    mismatch = _GLOO_SIZE_MISMATCH.search(output[1])
    if mismatch is not None:
        line = call_site_in("".join(output[1].rpartition(_STACK_HEADER)[1:]))
        error = SyncError(
            f"rank {rank} received data of another size than its collective expects, at {line or 'an unknown line'}",
            why=f"ranks are in different collectives, or pass tensors of different shapes or dtypes ({mismatch[1]})",
            fix="make the same calls on every rank, with the same shapes and dtypes in the same order",
        )
    elif tail:
        add_note(error, f"last lines of rank {rank}:\n{tail}")
    return Outcome(rank, host, pid, error=error, failed_at=seen_at)


def caller_exception(
    outcomes: Sequence[Outcome], *, world_size: int, earlier: Sequence[BaseException] = ()
) -> BaseException:
    """Return the exception to raise in the caller: the earliest root cause, with rank, host and traceback as notes.

    Args:
        outcomes: those that ranks have written, and of those that have ended without one.
        world_size: number of ranks.
        earlier: the exceptions of the previous attempts.
    """
    failed = sorted(
        (each for each in outcomes if each.error is not None), key=lambda each: each.failed_at
    )
    cause = next(filter(is_cause, failed), failed[0])
    error, notes = _error_of(cause, world_size)
    by_rank = {each.rank: each for each in outcomes}
    others = [rank for rank in range(world_size) if rank != cause.rank]
    names_lines = isinstance(error, SyncError) and not cause.traceback
    texts = {rank: _describe_rank(by_rank.get(rank), names_lines=names_lines) for rank in others}
    notes.append(f"the others: {_group_ranks(texts)}" if texts else "no other rank exists")
    notes += (
        f"attempt {attempt} had failed with {_one_line(before)}"
        for attempt, before in enumerate(earlier)
    )
    for note in notes:
        add_note(error, note)
    if isinstance(error, WorkerError):
        error.rank, error.host = cause.rank, cause.host
    return error


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


def _error_of(outcome: Outcome, world_size: int) -> tuple[BaseException, list[str]]:
    error = outcome.error
    assert error is not None
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        exitcode = -signal.SIGTERM if was_stopped(outcome) else code
        error = _worker_error(
            outcome.rank, outcome.host, exitcode, why=f"SystemExit({error.code!r})"
        )
    if not outcome.traceback:
        return error, []
    where = f"rank {outcome.rank} of {world_size} on {outcome.host} (pid {outcome.pid}) raised it:"
    # Python shows the exception itself above its notes.
    return error, [where, outcome.traceback.removesuffix(format_error(error, None)).rstrip()]


def _worker_error(rank: int, host: str, exitcode: int, *, why: str) -> WorkerError:
    name = _signal_name(exitcode)
    fix = _FIX_BY_SIGNAL.get(
        name or "", "raise an exception instead, so that its reason can be shown here"
    )
    error = WorkerError(f"rank {rank} on {host} {_describe_exit(exitcode)}", why=why, fix=fix)
    error.exitcode, error.signal_name = exitcode, name
    return error


def _signal_name(exitcode: int) -> str | None:
    known = {each.value: each.name for each in signal.Signals}
    return known.get(-exitcode, f"signal {-exitcode}") if exitcode < 0 else None


def _describe_exit(exitcode: int) -> str:
    name = _signal_name(exitcode)
    return f"was ended by {name}" if name else f"ended with exit code {exitcode}"


def _describe_rank(outcome: Outcome | None, *, names_lines: bool) -> str:
    """Describe in a few words how a rank other than the root cause ended."""
    line = call_site_in(outcome.traceback) if outcome is not None else ""
    if outcome is None or was_stopped(outcome):
        return "stopped" + (f" at {line}" if line and names_lines else "")
    error = outcome.error
    if error is None:
        return "had returned"
    if isinstance(error, WorkerError) and error.exitcode is not None:
        return _describe_exit(error.exitcode)
    if _is_connection_loss(outcome):
        return "lost the connection" + (f" at {line}" if line else "")
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    reason = error_text(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {reason[:120]}" if reason else type(error).__name__


def _group_ranks(texts: dict[int, str]) -> str:
    """Join the texts of all ranks into one line; ranks with the same text share an entry."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{list_ranks(each)}: {text}" for text, each in ranks.items())
