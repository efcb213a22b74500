"""pdb in a rank: the text that it prints goes to the caller, whose keyboard gives it its lines.

The words of this file and of `launchers/local/keyboard.py`:

    caller      the process of the user's program, which has the keyboard
    process     a rank, or a process that it has started, such as one that reads for a DataLoader
    to stop     to ask for a line, where the program has a breakpoint or an exception

A process connects when it stops for the first time. It sends JSON, (what, value):

    process  ── rank, 1 ────────────>  caller
    process <── names of the script ── caller
    process  ── text, "> train.py" ──> caller      it WORKS; shown when it asks, or runs on
    process  ── does, ASKS ──────────> caller
    process <── a line of the user ─── caller

What a process does, in an Activity, decides who has the keyboard next:

             stops                 gets a line
    RUNS ───────────────> ASKS ───────────────────> WORKS
      ^                    ^ ^                      │ │ │
      │                    │ └── asks again ────────┘ │ │ is in a collective
      │                    └──── asks again ── WAITS <──┘
      │                                          │    │
      └── `c`, `q`, the end of the function ─────┴────┘

A command may take long, and keeps the keyboard: the process is in WORKS. In WAITS, another rank
that has stopped may have to go on first: it gets the keyboard if it asks.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import importlib
import io
import json
import os
import pdb
import re
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import override

from parallelize.run import context

INTERRUPT = "\x03"
"""The caller's answer when Ctrl-C was pressed at the prompt."""

_PACKAGE = __name__.partition(".")[0] + "."
_ROOM = __name__.rpartition(".")[0] + "."
_NAME_ERROR = re.compile(r"(NameError: name '(\w+)' is not defined.*)")


class Activity(enum.StrEnum):
    """What a process does that has stopped at least once."""

    ASKS = "asks"
    """It asks for a line of the user."""

    WORKS = "works"
    """It does what a line says, and will ask again, or say that it runs."""

    WAITS = "waits"
    """It does what a line says, and was seen in a collective, where it may wait for other ranks."""

    RUNS = "runs"
    """It goes on without the keyboard; a breakpoint may stop it again."""


@dataclass(frozen=True)
class ScriptNames:
    """The names of the caller's `__main__`, which the workers' has only if the function uses them.

    Args:
        references: name -> module and qualified name of what can be imported: "numpy:", "math:sin".
        literals: name -> a literal of a plain value.
        missing: names of all else.
    """

    references: Mapping[str, str] = field(default_factory=dict)
    literals: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()

    def dumps(self) -> bytes:
        """Return the names as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def loads(text: bytes) -> ScriptNames:
        """Return the names from their JSON."""
        return ScriptNames(**json.loads(text))

    def object_of(self, name: str) -> object:
        """Return what a name is in one process.

        Raises:
            LookupError: it is missing.
            ImportError: its module cannot be imported here.
        """
        if name in self.literals:
            return ast.literal_eval(self.literals[name])
        module, _, path = self.references[name].partition(":")
        imported: object = importlib.import_module(module)
        if path:
            imported = functools.reduce(getattr, path.split("."), imported)
        return imported


def debugger_path(folder: Path) -> Path:
    """Return the path of the socket on which the caller waits for processes that stop."""
    return folder / "debugger"


def debug_with_caller(folder: Path, rank: int) -> None:
    """Let `breakpoint()`, `pdb.set_trace()` and `pdb.post_mortem()` in this process ask the caller.

    Args:
        folder: folder of the run.
        rank: rank of this process.
    """
    keyboard = _Keyboard(folder, rank)

    class RankPdb(_KeyboardPdb):
        def __init__(self, completekey: str = "tab", *_streams: Any, **options: Any) -> None:
            super().__init__(keyboard, completekey, **options)

    pdb.Pdb = RankPdb  # type: ignore[misc]  # all functions of pdb make one of these


def inspect_error(error: BaseException) -> None:
    """Stop where an error was raised."""
    debugger = pdb.Pdb()
    print(f"{type(error).__name__}: {error}", file=debugger.stdout)
    debugger.reset()
    debugger.interaction(None, error.__traceback__)


class _Keyboard(io.TextIOBase):
    """The caller's keyboard and screen, as a stream of this process.

    A child that was forked has a copy of it, and connects for itself.

    Args:
        folder: folder of the run.
        rank: rank of this process.

    Attributes:
        names: names of the caller's script; known when the first line has come.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._pid_of_connection = 0
        self.names: ScriptNames | None = None
        self._begin()

    def _begin(self) -> None:
        """Set the state of a process that has not stopped."""
        self._pid = os.getpid()
        self._connection: Connection | None = None
        self._activity = Activity.RUNS
        # The watchdog's thread sends, too.
        self._lock = threading.Lock()

    def _connected(self) -> Connection:
        """Return the connection to the caller, which the first stop of this process makes."""
        if self._pid != os.getpid():
            self._begin()
        if self._connection is None:
            self._connection = Client(str(debugger_path(self._folder)), "AF_UNIX")
            self.names = None
            self._connection.send_bytes(_message("rank", self._rank))
            run = context.active()
            if run is not None:
                run.watchdog.on_collective = self.say_waiting
        return self._connection

    def _say(self, activity: Activity, *, instead_of: Collection[Activity]) -> None:
        """Say what this process does now, if it did one of some things before."""
        connection = self._connected()
        with self._lock:
            if self._activity in instead_of:
                self._activity = activity
                connection.send_bytes(_message("does", activity))

    def say_running(self) -> None:
        """Say that this process goes on without the keyboard, if it has stopped before."""
        has_stopped = self._pid == os.getpid() and self._connection is not None
        if has_stopped:
            self._say(Activity.RUNS, instead_of=list(Activity))

    def say_waiting(self) -> None:
        """Say that this process is in a collective, if it has the keyboard; for the watchdog."""
        with contextlib.suppress(OSError):  # the caller has ended
            self._say(Activity.WAITS, instead_of=[Activity.WORKS])

    @override
    def write(self, text: str) -> int:
        if text:
            shown = _NAME_ERROR.sub(self._with_hint, text)
            connection = self._connected()
            with self._lock:
                # The caller takes a text as a sign of that.
                self._activity = Activity.WORKS
                connection.send_bytes(_message("text", shown))
        return len(text)

    def _with_hint(self, name_error: re.Match[str]) -> str:
        """Return the text of a NameError, with what is known of the name."""
        line, name = name_error.groups()
        if self.names is None or name not in self.names.missing:
            return line
        return (
            f"{line}\n`{name}` was not sent to the workers: the function does not mention it. "
            f"A line `{name}` in the function sends it."
        )

    @override
    def readline(self, size: int = -1) -> str:  # type: ignore[override]  # the whole line, for pdb
        self._say(Activity.ASKS, instead_of=list(Activity))
        connection = self._connected()
        if self.names is None:
            self.names = ScriptNames.loads(connection.recv_bytes())
        line = connection.recv_bytes().decode()
        self._activity = Activity.WORKS
        if line == INTERRUPT:
            raise KeyboardInterrupt
        return line

    @contextlib.contextmanager
    def as_terminal(self) -> Iterator[None]:
        """Let `input` and what is printed use this keyboard, as `interact` does."""
        streams = sys.stdin, sys.stdout, sys.stderr
        terminal: Any = self
        sys.stdin = sys.stdout = sys.stderr = terminal
        try:
            yield
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams


def _message(subject: str, value: object) -> bytes:
    return json.dumps([subject, value]).encode()


def _module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs; "": it has none."""
    name: str = frame.f_globals.get("__name__", "")
    return name


class _KeyboardPdb(pdb.Pdb):
    """A debugger that uses the caller's keyboard, and says when it runs on.

    Args:
        keyboard: the caller's keyboard.
        completekey: as for pdb.Pdb.
        options: as for pdb.Pdb.
    """

    def __init__(self, keyboard: _Keyboard, completekey: str, **options: Any) -> None:
        # nosigint: Ctrl-C interrupts all ranks, and not one of them.
        options |= {"stdin": keyboard, "stdout": keyboard, "nosigint": True}
        super().__init__(completekey, **options)
        self._keyboard = keyboard
        # Objects of the script that a line has named, by name.
        self._lent: dict[str, object] = {}
        # Where they are now: the globals of a frame, and the name.
        self._places_of_lent: list[tuple[dict[str, object], str]] = []

    @override
    def interaction(self, frame: FrameType | None, *exception: Any) -> None:
        """Ask for lines until one lets the program go on."""
        try:
            super().interaction(frame, *exception)
        finally:
            self._take_back()
        is_post_mortem = frame is None
        if is_post_mortem:
            self._keyboard.say_running()

    @override
    def setup(self, f: FrameType | None, tb: TracebackType | None) -> Any:
        """Find the frame of the prompt; names that were lent before may be displayed there."""
        result = super().setup(f, tb)
        self._lend(self._lent)
        return result

    @override
    def get_stack(
        self, f: FrameType | None, t: TracebackType | None
    ) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the frames from the user's function on, and which of them has the prompt."""
        stack, current = super().get_stack(f, t)
        first = 0
        for place, (frame, _line) in enumerate(stack):
            # The last frame of `parallelize.worker` has called the user's function.
            if _module_of(frame).startswith(_ROOM):
                first = place + 1
        # The prompt is before the function, as in `parallelize.worker` itself.
        if first > current:
            return stack, current
        return stack[first:], current - first

    @override
    def onecmd(self, line: str) -> bool:
        """Do what a line says."""
        names = self._keyboard.names or ScriptNames()
        words = re.findall(r"\w+", line)
        if words[:1] == ["interact"]:
            words = [*names.literals, *names.references]
        with self._keyboard.as_terminal():
            self._lend(words)
            return super().onecmd(line)

    def _lend(self, words: Any) -> None:
        """Add names of the script to the globals of the prompt, until the program goes on.

        In one process, the globals would have them. They are taken back, because the end of the
        call would report them as changes of the function.

        Args:
            words: words of a line; those that are no names of the script are left alone.
        """
        names = self._keyboard.names
        frame: FrameType | None = self.curframe
        if names is None or frame is None or _module_of(frame) != "__main__":
            return
        for word in words:
            # A module may not be found in this process.
            with contextlib.suppress(LookupError, ImportError, AttributeError):
                if word not in frame.f_globals:
                    lent = self._lent[word] if word in self._lent else names.object_of(word)
                    frame.f_globals[word] = self._lent[word] = lent
                    self._places_of_lent.append((frame.f_globals, word))

    def _take_back(self) -> None:
        """Remove the lent names, except those that the user has set to something else."""
        for namespace, name in self._places_of_lent:
            if namespace.get(name) is self._lent[name]:
                del namespace[name]
        self._places_of_lent.clear()

    @override
    def stop_here(self, frame: FrameType) -> bool:
        """Return whether to stop in a frame that is stepped through: not in one of this package."""
        module = _module_of(frame)
        if module.startswith(_ROOM):
            # The user's function has ended.
            self.set_continue()
            return False
        return not module.startswith(_PACKAGE) and super().stop_here(frame)

    @override
    def set_continue(self) -> None:
        """Let the program run until a breakpoint."""
        super().set_continue()
        self._keyboard.say_running()

    @override
    def set_quit(self) -> None:
        """End the program."""
        super().set_quit()
        self._keyboard.say_running()
