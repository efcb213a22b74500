"""The caller's exception, of the failures of the workers: the cause, with rank, host and traceback.

One failure makes other ranks fail: they lose the connection, wait for a rank that is gone, or are
stopped by the launcher. So the first rank to end is not always the cause:

    how a rank has ended                                         End                is a cause
    its function has returned                                    RETURNED           no
    the launcher has stopped it by SIGTERM                       STOPPED            no
    a collective has failed, since a peer was lost               LOST_CONNECTION    no
    an error that says what another rank has raised              REPEATED           no
    its process has ended without an outcome                     DIED               yes
    its function has raised anything else, also a SyncError      RAISED             yes
    that explains a lost connection

Of several causes, the earliest counts, and without a cause the earliest failure. The notes of the
exception say how the other ranks have ended.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Sequence
from operator import attrgetter

from parallelize.call.outcome import Outcome, format_error, is_peer_lost
from parallelize.errors import (
    ParallelizeError,
    SyncError,
    WorkerError,
    add_note,
    error_text,
    list_ranks,
)
from parallelize.hang_detection.stack_frames import call_site_in

# gloo's message before it aborts the process; faulthandler then prints each thread's stack, the
# main thread's last.
_GLOO_SIZE_MISMATCH = re.compile(
    r"gloo::EnforceNotMet.*?(op\.preamble[^\n]*?)\. Received data size", re.DOTALL
)
_STACK_HEADER = "(most recent call first):"
# What faulthandler prints: the signal, the stacks of threads, and all extension modules. The stack
# of the main thread is the last one. The stack of the thread that has failed begins with "Current",
# unless the thread is of a library, without Python. Kept are the signal and up to 12 lines of the
# stack of the failed thread, or else of the main thread.
_FATAL = re.compile(
    r"^(Fatal Python error: .*\n)(?s:.*?(?=^Current)|.*(?=^Thread))(.*\n(?:  .*\n){,12})(?s:.*)",
    re.MULTILINE,
)
_TAIL_LINES = 20
_MOST_CHARACTERS = 120
_FIX_BY_SIGNAL = {
    "SIGKILL": "if you did not send it, the kernel did: look for 'Out of memory' in its log, and "
    "use less memory",
    "SIGABRT": "a library aborted the process: its reason is in the rank's output. If that names "
    "NCCL's watchdog, a collective timed out or a GPU failed: make the same calls on every rank, "
    "or increase timeout=",
    "SIGBUS": "usually /dev/shm is full, through which DataLoader workers send batches: make it "
    "larger (docker run --shm-size=8g), or use fewer workers",
    "SIGSEGV": "a compiled extension failed: its stack is in the rank's output",
    "SIGTERM": "if you did not send it, the machine did: look in the log of its job scheduler",
}


class End(enum.Enum):
    """How a rank has ended, see the table above."""

    RETURNED = enum.auto()
    STOPPED = enum.auto()
    LOST_CONNECTION = enum.auto()
    REPEATED = enum.auto()
    DIED = enum.auto()
    RAISED = enum.auto()


_CAUSES = frozenset({End.DIED, End.RAISED})


def end_of(outcome: Outcome) -> End:
    """Return how a rank has ended, by its outcome."""
    error = outcome.error
    if error is None:
        return End.RETURNED
    if outcome.was_stopped:
        return End.STOPPED
    if is_peer_lost(error, outcome.traceback):
        return End.LOST_CONNECTION
    if isinstance(error, ParallelizeError) and error.is_secondary:
        return End.REPEATED
    if isinstance(error, WorkerError) and error.exitcode is not None:
        return End.DIED
    return End.RAISED


def is_cause(outcome: Outcome) -> bool:
    """Return whether a rank has failed by itself, and not since another rank has."""
    return end_of(outcome) in _CAUSES


def outcome_of_dead_worker(
    rank: int, host: str, pid: int, exitcode: int, *, seen_at: float, output: tuple[str, str]
) -> Outcome:
    """Return the outcome of a worker process that has ended without writing one.

    It has no traceback.

    Args:
        rank: global rank of the worker.
        host: name of its host.
        pid: its process ID.
        exitcode: as in multiprocessing: the negative signal number if a signal killed it.
        seen_at: when its end was noticed, in seconds since the epoch.
        output: the ends of its stdout and its stderr.
    """
    _, stderr = output
    mismatch = _GLOO_SIZE_MISMATCH.search(stderr)
    if mismatch is not None:
        error: Exception = _error_of_size_mismatch(rank, stderr, numbers=mismatch[1])
        return Outcome(rank, host, pid, error=error, failed_at=seen_at)
    error = _worker_error(rank, host, exitcode, why="it ended without an exception")
    # stderr is last, because it usually has the reason.
    last_lines: list[str] = []
    for text in output:
        last_lines += _FATAL.sub(r"\1\2", text).splitlines()[-_TAIL_LINES:]
    if last_lines:
        add_note(error, "\n".join([f"last lines of rank {rank}:", *last_lines]))
    return Outcome(rank, host, pid, error=error, failed_at=seen_at)


def _error_of_size_mismatch(rank: int, stderr: str, *, numbers: str) -> SyncError:
    """Return the error of a rank that gloo has aborted, since it has got data of another size.

    Args:
        rank: global rank of the worker.
        stderr: the end of its stderr, with gloo's message and the stacks of its threads.
        numbers: the sizes, in gloo's words.
    """
    _, header, stack_of_main_thread = stderr.rpartition(_STACK_HEADER)
    line = call_site_in(header + stack_of_main_thread) or "an unknown line"
    return SyncError(
        f"rank {rank} received data of another size than its collective expects, at {line}",
        why="ranks are in different collectives, or pass tensors of different shapes or dtypes "
        f"({numbers})",
        fix="make the same calls on every rank, with the same shapes and dtypes in the same order",
    )


def caller_exception(
    outcomes: Sequence[Outcome], *, world_size: int, earlier: Sequence[BaseException] = ()
) -> BaseException:
    """Return the exception to raise in the caller: that of the cause, with notes on all ranks.

    It is a SystemExit if all ranks have called sys.exit(): then the program exits, too.

    Args:
        outcomes: those that ranks have written, and those of workers that died; at least one has
            an error.
        world_size: number of ranks.
        earlier: the exceptions of the previous attempts.
    """
    program_exit = _program_exit(outcomes, world_size)
    if program_exit is not None:
        return program_exit
    cause = _cause_of(outcomes)
    error = _error_of(cause)
    notes = []
    if cause.traceback:
        # Python shows the exception itself above its notes.
        trace = cause.traceback.removesuffix(format_error(error, None)).rstrip()
        place = f"rank {cause.rank} of {world_size} on {cause.host} (pid {cause.pid})"
        notes += [f"{place} raised it:", trace]
    notes.append(_describe_other_ranks(outcomes, cause, world_size))
    for attempt, error_before in enumerate(earlier):
        notes.append(f"attempt {attempt} had failed with {_one_line(error_before)}")
    for note in notes:
        add_note(error, note)
    if isinstance(error, WorkerError):
        error.rank = cause.rank
        error.host = cause.host
    return error


def _program_exit(outcomes: Sequence[Outcome], world_size: int) -> SystemExit | None:
    """Return rank 0's exit if all ranks have exited; None: the call has failed.

    Another rank's error code is not lost: if rank 0 has exited without one, the call has failed.
    """
    if len(outcomes) < world_size or not all(outcome.is_exit for outcome in outcomes):
        return None
    outcome_of_rank_0 = min(outcomes, key=attrgetter("rank"))
    error = outcome_of_rank_0.error
    return error if isinstance(error, SystemExit) else None


def _cause_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the earliest outcome that is a cause, or else the earliest one with an error."""
    failures = [outcome for outcome in outcomes if outcome.error is not None]
    failures.sort(key=lambda outcome: outcome.failed_at)
    return next(filter(is_cause, failures), failures[0])


def _error_of(outcome: Outcome) -> BaseException:
    """Return the error of an outcome; a WorkerError for SystemExit, which has no message."""
    error = outcome.error
    assert error is not None
    if not isinstance(error, SystemExit):
        return error
    exitcode = error.code if isinstance(error.code, int) else 1
    if end_of(outcome) is End.STOPPED:
        exitcode = -signal.SIGTERM
    why = f"SystemExit({error.code!r})"
    return _worker_error(outcome.rank, outcome.host, exitcode, why=why)


def _describe_other_ranks(outcomes: Sequence[Outcome], cause: Outcome, world_size: int) -> str:
    """Say in one line how the ranks beside the cause have ended; the same text is said once."""
    # Ranks that were stopped in another collective than that of the cause: their lines tell why.
    names_lines = isinstance(cause.error, SyncError) and not cause.traceback
    outcome_of_rank = {outcome.rank: outcome for outcome in outcomes}
    ranks_by_text: dict[str, list[int]] = {}
    for rank in range(world_size):
        if rank != cause.rank:
            outcome = outcome_of_rank.get(rank)
            text = _describe_rank(outcome, names_lines=names_lines)
            if outcome is not None and _is_same_report(outcome.error, cause.error):
                text = "the same error"
            ranks_by_text.setdefault(text, []).append(rank)
    if not ranks_by_text:
        return "no other rank exists"
    entries = [f"{list_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    return f"the others: {'; '.join(entries)}"


def _is_same_report(error: BaseException | None, shown: BaseException | None) -> bool:
    """Whether two ranks have got the same SyncError, as all do that wait for each other."""
    return isinstance(error, SyncError) and repr(error) == repr(shown)


def _describe_rank(outcome: Outcome | None, *, names_lines: bool) -> str:
    """Describe in a few words how a rank other than the cause has ended.

    Args:
        outcome: its outcome; None: the launcher has stopped it before it could write one.
        names_lines: whether to name the line at which it was stopped.
    """
    if outcome is None:
        return "stopped"
    error = outcome.error
    line = call_site_in(outcome.traceback)
    at_line = f" at {line}" if line else ""
    match end_of(outcome):
        case End.RETURNED:
            return "had returned"
        case End.STOPPED:
            return "stopped" + at_line if names_lines else "stopped"
        case End.LOST_CONNECTION:
            return "lost the connection" + at_line
        case End.DIED:
            assert isinstance(error, WorkerError)
            assert error.exitcode is not None
            return _describe_exit(error.exitcode)
    assert error is not None
    return _one_line(error)


def _worker_error(rank: int, host: str, exitcode: int, *, why: str) -> WorkerError:
    """Return the error of a process that ended by itself or by a signal, with how to mend it."""
    signal_name = _signal_name(exitcode)
    fix = "raise an exception instead, so that its reason can be shown here"
    if signal_name in _FIX_BY_SIGNAL:
        fix = _FIX_BY_SIGNAL[signal_name]
    error = WorkerError(f"rank {rank} on {host} {_describe_exit(exitcode)}", why=why, fix=fix)
    error.exitcode = exitcode
    error.signal_name = signal_name
    return error


def _describe_exit(exitcode: int) -> str:
    signal_name = _signal_name(exitcode)
    if signal_name is not None:
        return f"was ended by {signal_name}"
    return f"ended with exit code {exitcode}"


def _signal_name(exitcode: int) -> str | None:
    """Return the name of the signal that has ended a process; None: it has exited by itself."""
    if exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:  # a real-time signal
        return f"signal {-exitcode}"


def _one_line(error: BaseException) -> str:
    """Return the type of an error, and the beginning of the first line of its text."""
    name = type(error).__name__
    reason = error_text(error).strip().partition("\n")[0]
    if not reason:
        return name
    if len(reason) > _MOST_CHARACTERS:
        # Between words, if there are several.
        words, _, _part_of_word = reason[:_MOST_CHARACTERS].rpartition(" ")
        reason = reason[:_MOST_CHARACTERS]
        if words:
            reason = f"{words} ..."
    return f"{name}: {reason}"
