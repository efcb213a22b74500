"""Where each rank was last seen: published before anybody asks, as a stopped rank cannot answer.

    SeenFiles    one node: one file per rank, in the private folder of the call
    SeenKeys     several nodes, or a program of torchrun or srun: one key per rank, in a TCPStore

The watchdog of a rank writes at most twice a second, and only if the rank has moved. A new record
takes the place of the old one, so neither the file nor the store grows.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import socket
import zlib
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from parallelize.cluster.code_owner import is_user_frame
from parallelize.hang_detection.stack_frames import Stack, call_site

# JSON needs six bytes for a character that is not ASCII. Beside its line a record has up to 250.
_LINE_CHARACTERS = 120
_RECORD_BYTES = 1024
_CHECKSUM_BYTES = 8
_STATE_FIELD, _START_FIELD = 0, 19
"""Indices in /proc/<pid>/stat behind the name: `state`, `starttime` (proc_pid_stat(5))."""


class Process(NamedTuple):
    """A process on some machine.

    Args:
        machine: boot of the kernel, and namespace of process numbers; "" where there is no /proc.
        host: name of the machine.
        pid: number of the process, which means this process on that machine only.
        started: when it started, in ticks of the kernel: its number may be used again later.
    """

    machine: str
    host: str
    pid: int
    started: int

    @staticmethod
    def current() -> Process:
        """Return the calling process."""
        pid, host = os.getpid(), socket.gethostname()
        try:
            return Process(_machine(), host, pid, int(_stat(pid)[_START_FIELD]))
        except OSError:
            return Process("", host, pid, 0)

    def name(self) -> str:
        """Return how a message names the process: "process 4711 on gpu1"."""
        return f"process {self.pid} on {self.host}"

    def is_here(self) -> bool:
        """Whether the process is, or was, one of this machine, so that its state can be known."""
        return bool(self.machine) and self.machine == _machine()

    def state(self) -> str:
        """Return the kernel's letter for the state of a process that is here.

        "T": stopped by a signal; "t": by a tracer; "X": it has ended.
        """
        try:
            fields = _stat(self.pid)
        except OSError:
            return "X"
        is_same = int(fields[_START_FIELD]) == self.started
        return fields[_STATE_FIELD].replace("Z", "X") if is_same else "X"


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat behind the name, which may have spaces and ")"."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


_CERTAIN = {
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger or tracer",
    "X": "has ended",
}
"""What a rank does that will not answer, by the state of its process."""


class LastSeen(NamedTuple):
    """What is known of a rank without its answer.

    Args:
        process: the process of the rank.
        line: where its main thread was at the latest look: "train.py:41 in all_reduce".
    """

    process: Process
    line: str

    def dumps(self) -> bytes:
        """Return the record as JSON."""
        return json.dumps([self.process, self.line[:_LINE_CHARACTERS]]).encode()

    @staticmethod
    def loads(text: bytes) -> LastSeen:
        """Return a record from its JSON."""
        process, line = json.loads(text)
        return LastSeen(Process(*process), line)

    def certain(self) -> str:
        """Say in a verb phrase why a rank will not answer, and its line; "": it is not certain."""
        if not self.process.is_here():
            return ""
        reason = _CERTAIN.get(self.process.state())
        if reason is None:
            return ""
        return f"{reason} ({self.process.name()}), last seen at {self.line}"

    def silence(self, *, had_time: bool) -> str:
        """Say in a verb phrase that a rank has not answered, and where it was.

        Args:
            had_time: whether a rank that can answer would have done so.
        """
        silence = "has not answered"
        if had_time:
            causes = "is stopped, or in compiled code that holds the GIL"
            if not self.process.is_here():
                causes = "is stopped, in compiled code that holds the GIL, or cut off from others"
            silence = f"does not answer ({self.process.name()} {causes})"
        return f"{silence}, last seen at {self.line}"


class SeenRecords(Protocol):
    """The records of all ranks, of which each rank writes its own."""

    def write(self, seen: LastSeen) -> None:
        """Publish where this rank is, in place of what it has published before."""

    def read(self, rank: int) -> LastSeen | None:
        """Return what a rank has published; None if nothing."""

    def close(self) -> None:
        """Release what this process holds; what it has published stays."""


class SeenFiles:
    """Records in files of a fixed size, each overwritten in place.

    Args:
        folder: the folder of the call, which only its user may read.
        rank: rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._file = os.open(self._path(rank), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def _path(self, rank: int) -> Path:
        return self._folder / f"seen.{rank}"

    def write(self, seen: LastSeen) -> None:
        """Publish where this rank is."""
        text = seen.dumps().ljust(_RECORD_BYTES - _CHECKSUM_BYTES)
        # POSIX lets a reader see a part of a write that goes on; by the checksum it reads again.
        with contextlib.suppress(OSError):  # the disk is full
            os.pwrite(self._file, b"%08x" % zlib.crc32(text) + text, 0)

    def read(self, rank: int) -> LastSeen | None:
        """Return what a rank has published; None if nothing, or if three looks met a write."""
        for _ in range(3):
            try:
                record = self._path(rank).read_bytes()
            except OSError:
                return None
            checksum, text = record[:_CHECKSUM_BYTES], record[_CHECKSUM_BYTES:]
            if checksum == b"%08x" % zlib.crc32(text):
                return LastSeen.loads(text)
        return None

    def close(self) -> None:
        """Close this rank's file."""
        os.close(self._file)


class SeenKeys:
    """Records in a store, under one key per rank.

    Args:
        store: a store whose `set` replaces a value: `can_overwrite`.
        rank: rank of this process.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank

    def write(self, seen: LastSeen) -> None:
        """Publish where this rank is."""
        self._store.set(f"seen/{self._rank}", seen.dumps().decode())

    def read(self, rank: int) -> LastSeen | None:
        """Return what a rank has published; None if nothing."""
        key = f"seen/{rank}"
        return LastSeen.loads(self._store.get(key)) if self._store.check([key]) else None

    def close(self) -> None:
        """Leave the store to the watchdog."""


class OwnRecord:
    """The record of this rank, which is written only if its line has changed.

    Args:
        records: the records of all ranks; None: there is no place for them.
    """

    def __init__(self, records: SeenRecords | None) -> None:
        self._records = records
        self._process = Process.current()
        self._line = ""

    def write(self, line: str) -> None:
        """Publish the main thread's line, "train.py:41 in all_reduce".

        Args:
            line: the line; "": the user's program has not begun, or has ended.
        """
        if self._records is not None and line not in ("", self._line):
            self._line = line
            self._records.write(LastSeen(self._process, line))

    def close(self) -> None:
        """Release what this process holds."""
        if self._records is not None:
            self._records.close()


def can_overwrite(store: Any) -> bool:
    """Whether a store can hold records: a FileStore appends each value, and grows without end."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)


def line_of_stack(stack: Stack, call: str) -> str:
    """Return the user's innermost line with its call, "train.py:41 in all_reduce"; "": none."""
    if not any(is_user_frame(frame) for frame, _ in stack):
        return ""
    return _line(call_site(stack), call)


def line_of_function(function: Any) -> str:
    """Return the first line of a function, "train.py:40 in train"; "" if it is not Python code."""
    with contextlib.suppress(ValueError):  # it wraps itself
        function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    return _line(f"{Path(code.co_filename).name}:{code.co_firstlineno}", code.co_name)


def _line(location: str, call: str) -> str:
    return f"{location} in {call}" if call else location
