"""Output and log records of the workers: each rank writes files, which the caller shows live.

    rank<n>.out, .err    stdout and stderr of the rank's process, with all that its children write
    rank<n>.records      its log records, and how much it had written to the others before each

The files lie in the call's folder, and leave with it. With `logs="folder"`, the caller copies them
to a text file for each rank there.
"""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from parallelize.call.logs import RecordMark, handle_record, read_mark, text_of_record

_POLL_EVERY_S = 0.03
_END_BYTES = 64 << 10


def open_standard_streams() -> None:
    """Open the file descriptors 0, 1 and 2 on /dev/null if they are closed (`>&-`).

    Otherwise the next files and sockets would get these numbers, and workers, which redirect 1 and
    2, would close them.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            lowest_free = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(lowest_free, True)  # noqa: FBT003 - set_inheritable takes no keyword


def rank_file(folder: Path, rank: int, stream: str) -> Path:
    """Return the file of a rank's stream, "out" or "err", or of its log records, "records"."""
    return folder / f"rank{rank}.{stream}"


def read_output(folder: Path, rank: int) -> tuple[str, str]:
    """Return the ends of a rank's stdout and stderr."""
    return _read_end(rank_file(folder, rank, "out")), _read_end(rank_file(folder, rank, "err"))


def _read_end(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _END_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        # The worker was ended before it opened its files.
        return ""


class _Text(Protocol):
    """What text is copied to; a program may have replaced `sys.stdout` by any object."""

    def write(self, text: str, /) -> object:
        """Write a text."""


class _Tail(Protocol):
    """What is followed while the workers run."""

    def forward(self, *, is_last: bool) -> None:
        """Show what is new.

        Args:
            is_last: whether nothing more will be written.
        """


@dataclass
class OutputTail:
    """Copies new text of a file to a stream.

    Args:
        path: the file; may not exist yet.
        to: the stream; None: this process has no such stream.
        prefix: added to each line; "": text is copied unchanged, which keeps progress bars intact.
    """

    path: Path
    to: Any
    prefix: str = ""
    _offset: int = 0
    _pending: str = ""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def forward(self, *, is_last: bool, end: int | None = None) -> None:
        """Copy new text: complete lines if there is a prefix, else complete characters.

        Args:
            is_last: whether everything is copied.
            end: byte of the file up to which is copied; None: all that it has.
        """
        content = self._read(end)
        text = self._pending + self._decoder.decode(content, final=is_last)
        length = len(text)
        if self.prefix and not is_last:
            length = max(text.rfind("\n"), text.rfind("\r")) + 1
        self._pending = text[length:]
        self._write(text[:length])

    def _read(self, end: int | None) -> bytes:
        if end is not None and end <= self._offset:
            return b""
        size = -1
        if end is not None:
            size = end - self._offset
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read(size)
        except FileNotFoundError:
            return b""
        self._offset += len(content)
        return content

    def _write(self, text: str) -> None:
        if self.prefix:
            # If a progress bar overwrote its line several times, keep the final state.
            states = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
            text = "".join(f"{self.prefix}{state}\n" for state in states if state.strip())
        if not text or self.to is None:
            return
        encoding = getattr(self.to, "encoding", None) or "utf-8"
        # The stream may be closed, or lack methods; the file keeps the text.
        with contextlib.suppress(Exception):
            self.to.write(text.encode(encoding, errors="replace").decode(encoding))
            self.to.flush()


class RankOutput:
    """Shows what a rank writes and logs, in the order of time.

    Args:
        folder: folder of the rank's files.
        rank: its number.
        logs: as the option `logs=`: "rank0", "all", or the folder of text files.
        text_file: file of the rank's output and records as text; None: there is none.
    """

    def __init__(self, folder: Path, rank: int, logs: str, text_file: Path | None) -> None:
        is_shown = rank == 0 or logs == "all"
        self._files = rank_file(folder, rank, "out"), rank_file(folder, rank, "err")
        # Those of stdout, and those of stderr.
        self._tails: tuple[list[OutputTail], list[OutputTail]] = ([], [])
        self._text_file = None
        if logs == "all":
            self._add_tails(sys.stdout, sys.stderr, f"[rank {rank}] ")
        elif is_shown:
            self._add_tails(sys.stdout, sys.stderr, "")
        if text_file is not None:
            self._text_file = _TextFile(text_file)
            self._add_tails(self._text_file, self._text_file, "")
        self._records = OutputTail(rank_file(folder, rank, "records"), self)
        self._incomplete_line = ""
        self._marks: list[RecordMark] = []
        self._prefix_of_records = ""
        if rank > 0:
            self._prefix_of_records = f"[rank {rank}] "
        self._lowest_level = logging.NOTSET
        if not is_shown:
            self._lowest_level = logging.WARNING

    def _add_tails(self, stdout: _Text | None, stderr: _Text | None, prefix: str) -> None:
        for tails, path, stream in zip(self._tails, self._files, (stdout, stderr), strict=True):
            tails.append(OutputTail(path, stream, prefix))

    def write(self, text: str) -> None:
        """Take new text of the file of records."""
        lines = (self._incomplete_line + text).split("\n")
        self._incomplete_line = lines.pop()
        marks = [read_mark(line) for line in lines]
        self._marks += [mark for mark in marks if mark is not None]

    def flush(self) -> None:
        """Do nothing: text is taken at once."""

    def forward(self, *, is_last: bool) -> None:
        """Show what is new, up to the output that the files have now.

        The sizes of the output are looked up before the records are read. So each record that was
        logged before that output is read, and shown first.
        """
        sizes = list(map(_size, self._files))
        self._records.forward(is_last=is_last)
        for mark in self._marks:
            self._copy_output(mark.sizes)
            if mark.record is not None:
                self._show(mark.record)
        self._marks.clear()
        self._copy_output(sizes)
        if is_last:
            for tail in (*self._tails[0], *self._tails[1]):
                tail.forward(is_last=True)

    def _copy_output(self, sizes: Sequence[int]) -> None:
        for tails, size in zip(self._tails, sizes, strict=True):
            for tail in tails:
                tail.forward(is_last=False, end=size)

    def _show(self, record: Mapping[str, Any]) -> None:
        if self._text_file is not None:
            self._text_file.write(text_of_record(record) + "\n")
        handle_record(record, prefix=self._prefix_of_records, at_least=self._lowest_level)


def _size(path: Path) -> int:
    """Return how many bytes a file has; none if the rank has not made it yet."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


class _TextFile:
    """A text file to which is appended, so that it can be followed, and is never overwritten."""

    encoding = "utf-8"

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError), self._path.open("a", encoding=self.encoding) as file:
            file.write(text)

    def flush(self) -> None:
        """Do nothing: the file is closed after each text."""


def outputs_of_ranks(folder: Path, ranks: Sequence[int], logs: str, call: str) -> list[RankOutput]:
    """Return what shows the output and the records of some ranks of a call.

    Args:
        folder: the folder of their files, which is made.
        ranks: their numbers.
        logs: as the option `logs=`.
        call: a name of this attempt of the call, which is that of its folder in `logs`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if logs in ("rank0", "all"):
        return [RankOutput(folder, rank, logs, text_file=None) for rank in ranks]
    text_folder = Path(logs, call)
    text_folder.mkdir(parents=True, exist_ok=True)
    return [RankOutput(folder, rank, logs, text_folder / f"rank{rank}.log") for rank in ranks]


@contextlib.contextmanager
def forwarded(tails: Sequence[_Tail]) -> Iterator[None]:
    """Show new text in a thread while the block runs, and the rest when the block ends."""
    done = threading.Event()

    def forward_new() -> None:
        while not done.wait(_POLL_EVERY_S):
            for tail in tails:
                tail.forward(is_last=False)

    # The caller's filters of log records may read variables of its context.
    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=[forward_new], name="parallelize-output", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for tail in tails:
            tail.forward(is_last=True)
