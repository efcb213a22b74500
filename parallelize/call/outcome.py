"""Outcome: the result of a call on one rank, sent back to the caller."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from parallelize.call.pickle_cases import LOCKS
from parallelize.call.pickling import dump, load
from parallelize.call.random_states import RandomStates
from parallelize.call.reachable import is_a
from parallelize.call.tracebacks import shorten_chain
from parallelize.call.unpicklable import Part
from parallelize.cluster.world import World
from parallelize.errors import ParallelizeError, SyncError, WorkerError, error_text

_CPU = torch.device("cpu")
_FIX_VALUE = "return plain values, tensors, modules or state_dicts"
# Errors of a rank whose peer is lost, raised directly or re-raised: torch's types, and gloo's plain
# RuntimeErrors.
_PEER_LOST = re.compile(
    r"^(torch\.distributed\.Dist\w*Error: |RuntimeError: .*gloo/)", re.MULTILINE
)


@dataclass(frozen=True)
class Outcome:
    """The result of a call on one rank: a value or an error.

    Args:
        rank: global rank.
        host: host name of the worker.
        pid: process ID of the worker.
        value: the function's return value.
        error: the exception that the function raised, or a WorkerError that replaces it; None: the
            function returned.
        traceback: the worker's traceback as text; "" if the function returned.
        failed_at: time of the exception in seconds since the epoch, taken before any teardown; inf:
            there was none.
        states: states of what the call trained, by their index in Task.stateful; rank 0 only.
        unreturned: names of other things that the call changed; rank 0 only.
        evaluated: the number that the function returned, as text, if it has evaluated this rank's
            samples.
        is_interrupted: whether Ctrl-C has interrupted the function, which has then returned; rank 0
            only.
        has_exited: whether the function has called sys.exit(), or sys.exit(0), in place of a
            return.
        random_states: where the function left the global generators, for the caller's; rank 0 only;
            None: the call leaves the caller's alone.
    """

    rank: int
    host: str
    pid: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    failed_at: float = torch.inf
    states: Mapping[int, Any] = field(default_factory=dict)
    unreturned: Sequence[str] = ()
    evaluated: str | None = None
    is_interrupted: bool = False
    has_exited: bool = False
    random_states: RandomStates | None = None

    @property
    def was_stopped(self) -> bool:
        """Whether SIGTERM has ended the function, as launchers send it to stop workers."""
        return isinstance(self.error, SystemExit) and self.error.code == 128 + signal.SIGTERM

    @property
    def is_exit(self) -> bool:
        """Whether the function has called sys.exit(), with any code or text."""
        return self.has_exited or (isinstance(self.error, SystemExit) and not self.was_stopped)

    @classmethod
    def returned(cls, world: World, value: object, **attributes: Any) -> Outcome:
        """Build the outcome of a function that returned, with these attributes."""
        return cls(world.rank, socket.gethostname(), os.getpid(), value=value, **attributes)

    @classmethod
    def raised(cls, world: World, error: BaseException) -> Outcome:
        """Build the outcome of a function that has just raised `error`."""
        trace, now = error.__traceback__, time.time()
        shorten_chain(error)
        text = format_error(error, error.__traceback__ or trace)
        return cls.returned(world, None, error=error, traceback=text, failed_at=now)

    def write(self, file: Path | io.BytesIO) -> None:
        """Write the outcome; a WorkerError replaces an exception that cannot be pickled.

        Raises:
            WorkerError: the return value cannot be pickled.
        """
        if is_a(self.value, LOCKS):
            raise WorkerError(
                "the returned value cannot be pickled",
                why=f"a {type(self.value).__name__!r} object is for the threads of one process",
                fix=_FIX_VALUE,
            )
        parts = (
            Part("the returned value", self.value),
            Part("the state of an optimizer", self.states),
        )
        try:
            dump(self, file, parts=parts, raises=WorkerError, fix=_FIX_VALUE)
            if self.error is not None and isinstance(file, Path):
                load(file, device=_CPU)
        except Exception as exc:
            if self.error is None:
                raise
            # A failure must reach the caller whatever its exception is.
            why = f"{type(exc).__name__}: {error_text(exc)}"
            if isinstance(exc, ParallelizeError):
                why = exc.faults[0].why
            error = WorkerError(
                f"{type(self.error).__name__}: {error_text(self.error)}",
                why=f"a worker raised this exception, which cannot be pickled: {why}",
                fix="see the worker's traceback; to catch the exception by its type, keep only "
                "plain values in its attributes",
            )
            dump(dataclasses.replace(self, error=error), file)

    def dumps(self) -> bytes:
        """Pickle the outcome for another rank of this program; raise the same errors as `write`."""
        buffer = io.BytesIO()
        self.write(buffer)
        return buffer.getvalue()

    @classmethod
    def read(cls, source: Path | bytes, *, device: torch.device = _CPU) -> Outcome:
        """Read an outcome.

        Args:
            source: file that `write` has written, or the bytes of `dumps`.
            device: device for tensors that were not on the CPU.

        Raises:
            WorkerError: the outcome cannot be unpickled in this process.
        """
        try:
            outcome: Outcome = load(source, device=device)
        except Exception as exc:
            raise WorkerError(
                "the return value of a worker cannot be unpickled in the calling process",
                why=f"{type(exc).__name__}: {error_text(exc)}",
                fix=_FIX_VALUE,
            ) from exc
        return outcome


def format_error(error: BaseException, trace: TracebackType | None) -> str:
    """Return what Python prints for an exception with this traceback, with causes and notes."""
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # noqa: BLE001 - a SyntaxError whose attributes have wrong types
        frames = "".join(traceback.format_tb(trace))
        last = f"{type(error).__name__}: {error_text(error)}"
        return f"Traceback (most recent call last):\n{frames}{last}\n"


def is_peer_lost(error: BaseException, text: str) -> bool:
    """Return whether a collective has failed because a peer was lost, and nothing explains it.

    Args:
        error: the error. A SyncError explains the lost connection that it was raised from.
        text: what Python prints for it, see `format_error`.
    """
    return _PEER_LOST.search(text) is not None and not isinstance(error, SyncError)
