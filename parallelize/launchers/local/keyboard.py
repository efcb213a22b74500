"""The caller's keyboard for pdb in a rank: one rank has it, the others that have stopped wait for it.

rank   ── text ──> shown when the rank has the keyboard       "> train.py(12)train()"
rank   ── ""   ──> it waits for a line                        "[rank 1] (Pdb) "
rank  <── line ─── that the user has typed
"""

from __future__ import annotations

import builtins
import contextlib
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from parallelize.worker.keyboard import INTERRUPT, debugger_path

_OUTPUT_S = 0.1  # until the output that a rank has printed before it stopped is shown
_STEP_S = 0.5  # a rank that does not stop again within this time leaves the keyboard to others


def open_keyboard(folder: Path, world_size: int) -> Keyboard | None:
    """Return a Keyboard if this thread can ask a user, in a terminal or in a notebook; else None."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    is_notebook = hasattr(shell, "kernel")  # its input() says if it cannot ask
    is_terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not (is_notebook or is_terminal):
        return None
    with contextlib.suppress(OSError):  # the temporary folder's path is too long for a socket
        return Keyboard(folder, world_size)
    return None


class _Stopped:
    """A rank in which a debugger has been started."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.rank = connection, int(connection.recv_bytes())
        self.text, self.place, self.is_asking = "", "", False

    def receive(self) -> None:
        text = self.connection.recv_bytes().decode()
        self.is_asking = not text
        self.text += text
        for line in self.text.splitlines():
            if line.startswith("> "):
                self.place = line


class Keyboard(contextlib.AbstractContextManager[None]):
    """Asks the user for the lines of the ranks that have stopped.

    Args:
        folder: folder of the run.
        world_size: number of ranks.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self._world_size = world_size
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(debugger_path(folder)))
        self._socket.listen(64)
        self._stopped: list[_Stopped] = []
        self._owner: _Stopped | None = None
        self._step_end_s = 0.0

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for stopped in self._stopped:
            stopped.connection.close()

    def look(self) -> None:
        """Show what ranks have to say, and ask the user once if one of them waits for a line."""
        by_connection: dict[Any, _Stopped] = {each.connection: each for each in self._stopped}
        for ready in wait([self._socket, *by_connection], 0):
            if ready is self._socket:
                self._stopped.append(_Stopped(Connection(self._socket.accept()[0].detach())))
                continue
            try:
                by_connection[ready].receive()
            except (EOFError, OSError):  # the process has ended
                self._stopped.remove(by_connection[ready])
        asking = sorted(
            (each for each in self._stopped if each.is_asking), key=lambda each: each.rank
        )
        if self._owner in asking:
            self._ask(self._owner, asking)
        elif asking and time.monotonic() > self._step_end_s:
            self._owner = asking[0]
            time.sleep(_OUTPUT_S)
            self._ask(self._owner, asking)

    def _ask(self, owner: _Stopped, asking: list[_Stopped]) -> None:
        text, newline, prompt = owner.text.rpartition("\n")
        _show(text + newline)
        owner.text = prompt
        line = _read(f"[rank {owner.rank}] {prompt}")
        command, _, argument = line.strip().partition(" ")
        if line.strip() == "ranks":
            places = {each.rank: each.place for each in asking}
            for rank in range(self._world_size):
                _show(f"rank {rank} {places.get(rank, 'runs')}\n")
        elif command == "rank" and argument.isdigit():
            self._owner = next((each for each in asking if each.rank == int(argument)), owner)
            if self._owner.rank != int(argument):
                _show(f"rank {argument} has not stopped\n")
        else:
            owner.text, owner.is_asking, self._step_end_s = "", False, time.monotonic() + _STEP_S
            with contextlib.suppress(OSError):  # it was ended while the user typed
                owner.connection.send_bytes(line.encode())


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _read(prompt: str) -> str:
    """Return a line of the user; "" at the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - with which input() edits lines

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(prompt) + "\n"
    except KeyboardInterrupt:
        _show("\n")
        return INTERRUPT
    except EOFError:
        return ""
    finally:
        signal.signal(signal.SIGINT, handler)
