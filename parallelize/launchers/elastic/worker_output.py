"""What workers print: each rank's streams in files, shown live where the user wants to see them."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest

__all__ = ["RankFiles", "Stream", "open_standard_streams", "shown"]

_LOOK_EVERY_S = 0.03


def open_standard_streams() -> None:
    """Let 0, 1 and 2 be open, for good: closed (`>&-`), their numbers go to the next files and sockets.

    Workers redirect 1 and 2, whatever that has become.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            lowest_free = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(lowest_free, True)  # noqa: FBT003 - it takes no keyword


class RankFiles(LogsSpecs):
    """Names for the files that torch elastic redirects output to: rank3.out, rank3.err; rank3.1.out after a restart.

    Args:
        folder: where they are; made if needed.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """Where the files are."""
        return str(self._folder)

    def path(self, rank: int, attempt: int, stream: str) -> Path:
        """The file of one rank's stream ("out" or "err") in one attempt."""
        again = f".{attempt}" if attempt else ""
        return self._folder / f"rank{rank}{again}.{stream}"

    def texts(self, rank: int, attempt: int) -> tuple[str, str]:
        """What a rank has printed in one attempt, to stdout and to stderr; "" if it is not of this node."""
        out, err = (self.path(rank, attempt, stream) for stream in ("out", "err"))
        return _text(out), _text(err)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of one attempt, by local rank, as torch elastic asks for them; what an earlier run left is gone."""
        outs, errs, errors = {}, {}, {}
        for local_rank, env in envs.items():
            rank, attempt = int(env["RANK"]), int(env["TORCHELASTIC_RESTART_COUNT"])
            outs[local_rank] = str(self.path(rank, attempt, "out"))
            errs[local_rank] = str(self.path(rank, attempt, "err"))
            errors[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = str(self._folder / f".rank{rank}.error.json")
            if not attempt:
                self._forget(rank)
        return LogsDest(stdouts=outs, stderrs=errs, error_files=errors)

    def _forget(self, rank: int) -> None:
        """Remove what an earlier run left: it would be shown as this one's until a worker empties it."""
        for path in self._folder.iterdir():
            if re.fullmatch(rf"rank{rank}(\.\d+)?\.(out|err)", path.name):
                path.unlink()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


@dataclass
class Stream:
    """One file being shown.

    Args:
        path: the file; may not exist yet.
        to: where its text goes; None: this process has no such stream.
        prefix: put before each line; "": text goes on as it comes, so that progress bars stay what they are.
    """

    path: Path
    to: TextIO | None
    prefix: str = ""
    _offset: int = 0
    _pending: str = ""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def forward(self, *, last: bool) -> None:
        """Pass on what is new: under a prefix whole lines, else whole characters; the `last` time everything."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        self._offset += len(new)
        text = self._pending + self._decoder.decode(new, final=last)
        end = len(text) if last or not self.prefix else max(text.rfind("\n"), text.rfind("\r")) + 1
        self._pending = text[end:]
        self._show(text[:end])

    def _show(self, text: str) -> None:
        if self.prefix:
            # Of what a bar wrote over itself since the last look, the last state is enough.
            lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
            text = "".join(f"{self.prefix}{line}\n" for line in lines if line.strip())
        if not text or self.to is None:
            return
        encoding = getattr(self.to, "encoding", None) or "utf-8"
        with contextlib.suppress(Exception):  # closed, or the user's own and no whole stream; the file has it all
            self.to.write(text.encode(encoding, errors="replace").decode(encoding))
            self.to.flush()


@contextlib.contextmanager
def shown(streams: Sequence[Stream]) -> Iterator[None]:
    """Show the streams while the block runs, and the rest of them at its end."""
    done = threading.Event()

    def follow() -> None:
        while not done.wait(_LOOK_EVERY_S):
            for stream in streams:
                stream.forward(last=False)

    follower = threading.Thread(target=follow, name="parallelize-output", daemon=True)
    follower.start()
    try:
        yield
    finally:
        done.set()
        follower.join()
        for stream in streams:
            stream.forward(last=True)
