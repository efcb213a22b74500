"""stdout and stderr of the workers: redirected to a file per rank, and copied live to the caller's streams."""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from parallelize.call.logs import handle_records

_POLL_EVERY_S = 0.03
_END_BYTES = 64 << 10


def open_standard_streams() -> None:
    """Open the file descriptors 0, 1 and 2 on /dev/null if they are closed (`>&-`).

    Otherwise the next files and sockets would get these numbers, and workers, which redirect 1 and 2, would close them.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            lowest_free = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(lowest_free, True)  # noqa: FBT003 - set_inheritable takes no keyword


def rank_file(folder: Path, rank: int, stream: str) -> Path:
    """Return the file of a rank's stream, "out" or "err", or of its log records, "log"."""
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
        return ""  # the worker was ended before it opened its files


@dataclass
class OutputTail:
    """Copies new text of a file to a stream.

    Args:
        path: the file; may not exist yet.
        to: the stream; None: this process has no such stream.
        prefix: added to each line; "": text is copied unchanged, which keeps progress bars intact.
    """

    path: Path
    to: TextIO | None
    prefix: str = ""
    _offset: int = 0
    _pending: str = ""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def forward(self, *, is_last: bool) -> None:
        """Copy new text: complete lines if there is a prefix, else complete characters; everything if `is_last`."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        self._offset += len(new)
        text = self._pending + self._decoder.decode(new, final=is_last)
        end = (
            len(text) if is_last or not self.prefix else max(text.rfind("\n"), text.rfind("\r")) + 1
        )
        self._pending = text[end:]
        self._write(text[:end])

    def _write(self, text: str) -> None:
        if self.prefix:
            # If a progress bar overwrote its line several times, keep the final state.
            lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
            text = "".join(f"{self.prefix}{line}\n" for line in lines if line.strip())
        if not text or self.to is None:
            return
        encoding = getattr(self.to, "encoding", None) or "utf-8"
        with contextlib.suppress(
            Exception
        ):  # the stream may be closed or lack methods; the file keeps the text
            self.to.write(text.encode(encoding, errors="replace").decode(encoding))
            self.to.flush()


@dataclass
class RecordTail(OutputTail):
    """Lets the caller's loggers handle the log records in a file; rank 0's without a prefix.

    Args:
        at_least: lowest level of records that are handled.
    """

    at_least: int = 0

    def _write(self, text: str) -> None:
        handle_records(
            text, prefix="" if self.prefix == "[rank 0] " else self.prefix, at_least=self.at_least
        )


@contextlib.contextmanager
def forwarded(tails: Sequence[OutputTail]) -> Iterator[None]:
    """Copy new text of the files in a thread while the block runs, and the remaining text when the block ends."""
    done = threading.Event()

    def forward_new() -> None:
        while not done.wait(_POLL_EVERY_S):
            for tail in tails:
                tail.forward(is_last=False)

    context = contextvars.copy_context()  # which the caller's filters of log records may read
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
