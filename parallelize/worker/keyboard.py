"""pdb in a rank: the text that it prints goes to the caller, whose keyboard gives it its lines."""

from __future__ import annotations

import io
import os
import pdb
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from typing_extensions import override

INTERRUPT = "\x03"  # the caller's answer when Ctrl-C was pressed at the prompt


def debugger_path(folder: Path) -> Path:
    """Return the path of the socket on which the caller waits for ranks that have stopped."""
    return folder / "debugger"


def debug_with_caller(folder: Path, rank: int) -> None:
    """Let `breakpoint()`, `pdb.set_trace()` and `pdb.post_mortem()` in this process ask the caller.

    Args:
        folder: folder of the run.
        rank: rank of this process.
    """
    keyboard = _Keyboard(folder, rank)

    class RankPdb(pdb.Pdb):
        def __init__(self, completekey: str = "tab", *_streams: Any, **kwargs: Any) -> None:
            # nosigint: Ctrl-C interrupts all ranks, and not one of them.
            kwargs |= {"stdin": keyboard, "stdout": keyboard, "nosigint": True}
            super().__init__(completekey, **kwargs)

    pdb.Pdb = RankPdb  # type: ignore[misc]  # all functions of pdb make one of these


def inspect_error(error: BaseException) -> None:
    """Stop where an error was raised."""
    debugger = pdb.Pdb()
    print(f"{type(error).__name__}: {error}", file=debugger.stdout)
    debugger.reset()
    debugger.interaction(None, error.__traceback__)


class _Keyboard(io.TextIOBase):
    """The caller's keyboard and screen, as a stream of this process: a DataLoader's worker connects for itself."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._owner = folder, rank, 0

    def _connected(self) -> Connection:
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._connection = Client(str(debugger_path(self._folder)), "AF_UNIX")
            self._connection.send_bytes(str(self._rank).encode())
        return self._connection

    @override
    def write(self, text: str) -> int:
        if text:
            self._connected().send_bytes(text.encode())
        return len(text)

    @override
    def readline(self, size: int = -1) -> str:  # type: ignore[override]  # the whole line, as pdb asks for
        self._connected().send_bytes(b"")
        line = self._connected().recv_bytes().decode()
        if line == INTERRUPT:
            raise KeyboardInterrupt
        return line
