"""The caller's keyboard for pdb in the ranks: one rank owns it, others that have stopped wait.

`worker/keyboard.py` draws what processes and the caller send each other, and says its words.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from parallelize.worker.keyboard import INTERRUPT, Activity, ScriptNames, debugger_path

_OUTPUT_S = 0.1
"""Until the output that a rank has printed before it stopped is shown."""

_LONGEST_LITERAL = 10_000
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (tuple, list, set, dict)


def open_keyboard(folder: Path, world_size: int) -> Keyboard | None:
    """Return a Keyboard if this thread can ask a user, in a terminal or a notebook; else None."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    # A notebook's input() says if it cannot ask.
    is_notebook = hasattr(shell, "kernel")
    is_terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or not (is_notebook or is_terminal):
        return None
    with contextlib.suppress(OSError):  # the temporary folder's path is too long for a socket
        return Keyboard(folder, world_size)
    return None


@dataclass
class _Process:
    """A process in which a debugger was started.

    Args:
        connection: to the process.
        rank: its rank; that of the rank that has started it.
        activity: what it does.
        text: what it has printed, and the user has not seen yet.
        place: the line of its debugger that says where it is: "> train.py(12)train()".
    """

    connection: Connection
    rank: int = -1
    activity: Activity = Activity.RUNS
    text: str = ""
    place: str = ""

    def receive(self) -> None:
        """Receive one message.

        Raises:
            EOFError: the process has ended.
            OSError: as EOFError.
        """
        subject, value = json.loads(self.connection.recv_bytes())
        if subject == "rank":
            self.rank = value
        elif subject == "does":
            self.activity = Activity(value)
        else:
            # It may have been running, and has stopped now.
            self.activity = Activity.WORKS
            self.text += value
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
        self._processes: list[_Process] = []
        # The rank that has the keyboard; -1: none has had it.
        self._owner = -1

    def __exit__(self, *_: object) -> None:
        """Show what processes have said at last, and close all connections."""
        self._receive()
        self._socket.close()
        for process in self._processes:
            process.connection.close()

    def look(self) -> None:
        """Show what ranks have to say, and ask the user once if one of them asks for a line."""
        self._receive()
        process = self._next_to_ask()
        if process is None:
            return
        if process.rank != self._owner:
            time.sleep(_OUTPUT_S)
        self._owner = process.rank
        self._ask(process)

    def _receive(self) -> None:
        """Receive all messages of processes, and accept those that have just stopped."""
        has_received = True
        while has_received:
            has_received = False
            process_by_connection: dict[Any, _Process] = {}
            for process in self._processes:
                process_by_connection[process.connection] = process
            for ready in wait([self._socket, *process_by_connection], 0):
                has_received = True
                if ready is self._socket:
                    self._accept()
                else:
                    self._receive_from(process_by_connection[ready])

    def _accept(self) -> None:
        """Accept a process that stops for the first time."""
        accepted, _address = self._socket.accept()
        connection = Connection(accepted.detach())
        self._processes.append(_Process(connection))
        # The debugged process may have ended.
        with contextlib.suppress(OSError):
            connection.send_bytes(names_of_script().dumps())

    def _receive_from(self, process: _Process) -> None:
        """Receive one message of a process, or find out that the process has ended."""
        try:
            process.receive()
        except (EOFError, OSError):
            self._processes.remove(process)
            process.activity = Activity.RUNS
        if process.activity is Activity.RUNS:
            # It will not ask soon: it ends, or the commands of a breakpoint have let it go on.
            _show(process.text)
            process.text = ""

    def _next_to_ask(self) -> _Process | None:
        """Return the process whose line the user is to type; None: no process may ask now."""
        asking = [process for process in self._processes if process.activity is Activity.ASKS]
        for process in asking:
            if process.rank == self._owner:
                return process
        for process in self._processes:
            if process.rank == self._owner and process.activity is Activity.WORKS:
                return None
        return min(asking, key=lambda process: process.rank, default=None)

    def _ask(self, process: _Process) -> None:
        """Show the text of a process, ask the user for its line, and send it or do what it says."""
        text, newline, prompt = process.text.rpartition("\n")
        _show(text + newline)
        process.text = prompt
        line = _read(f"[rank {process.rank}] {prompt}")
        command, _, argument = line.strip().partition(" ")
        if line.strip() == "ranks":
            self._show_ranks()
        elif command == "rank" and argument.isdigit():
            self._go_to(int(argument))
        else:
            process.text = ""
            process.activity = Activity.WORKS
            with contextlib.suppress(OSError):  # it was ended while the user typed
                process.connection.send_bytes(line.encode())

    def _show_ranks(self) -> None:
        """Say what each rank does; of one that asks, where it is."""
        texts: dict[int, str] = {}
        for process in self._processes:
            if process.activity is Activity.WAITS:
                texts[process.rank] = "waits in a collective"
        for process in self._processes:
            if process.activity is Activity.ASKS:
                texts[process.rank] = process.place
        for rank in range(self._world_size):
            _show(f"rank {rank} {texts.get(rank, 'runs')}\n")

    def _go_to(self, rank: int) -> None:
        """Give the keyboard to a rank, if it asks."""
        for process in self._processes:
            if process.rank == rank and process.activity is Activity.ASKS:
                self._owner = rank
                return
        _show(f"rank {rank} has not stopped\n")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _read(prompt: str) -> str:
    """Return a line of the user; "" at the end of input, INTERRUPT after Ctrl-C."""
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


def names_of_script() -> ScriptNames:
    """Return the names of this program's `__main__`, for the prompts of its ranks."""
    references: dict[str, str] = {}
    literals: dict[str, str] = {}
    missing: list[str] = []
    for name, value in list(vars(sys.modules["__main__"]).items()):
        if name.startswith("_"):
            continue
        literal = _literal_of(value)
        reference = _reference_to(name, value)
        if literal:
            literals[name] = literal
        elif reference:
            references[name] = reference
        else:
            missing.append(name)
    return ScriptNames(references, literals, missing)


def _literal_of(value: object) -> str:
    """Return the literal of a plain value; "": it has none, or a long one."""
    if not _is_plain(value):
        return ""
    literal = repr(value)
    # A float may be inf, and a set empty: their texts are no literals.
    with contextlib.suppress(ValueError):
        if len(literal) <= _LONGEST_LITERAL and ast.literal_eval(literal) == value:
            return literal
    return ""


def _is_plain(value: object, depth: int = 3) -> bool:
    """Whether a value is a number, a text, or a small container of them."""
    if type(value) in (str, bytes):
        text: Any = value
        return len(text) <= _LONGEST_LITERAL
    if type(value) in _SCALARS:
        return True
    if type(value) not in _CONTAINERS or depth == 0:
        return False
    container: Any = value
    # Each element has a character at least, and a comma.
    if len(container) > _LONGEST_LITERAL // 2:
        return False
    parts = [*container]
    if isinstance(container, Mapping):
        parts += container.values()
    return all(_is_plain(part, depth - 1) for part in parts)


def _reference_to(name: str, value: Any) -> str:
    """Return the module and the qualified name by which a value is imported; "": it cannot be.

    Args:
        name: its name in the script.
        value: the value.
    """
    if isinstance(value, ModuleType):
        is_importable = sys.modules.get(value.__name__) is value
        return f"{value.__name__}:" if is_importable else ""
    qualified_name = module_of_value = None
    # An object of the user may raise anything where it makes its attributes.
    with contextlib.suppress(Exception):
        qualified_name = value.__qualname__
        module_of_value = value.__module__
    script = sys.modules["__main__"]
    for module_name in (module_of_value, *list(sys.modules)):
        module = sys.modules.get(str(module_name))
        # multiprocessing has another name for the script.
        if module is None or module is script:
            continue
        names_of_module = getattr(module, "__dict__", {})
        # In the module that `from module import name` has named, or where it was defined.
        for path in (qualified_name, name):
            if isinstance(path, str) and names_of_module.get(path) is value:
                return f"{module_name}:{path}"
    return ""
