"""The SSH launcher: runs a call on hosts that `ssh` reaches, without a scheduler and without a shared disk.

caller     ssh gpu1, ssh gpu2, ...     versions, modules         the call       output, outcomes
             │                             ▲    │                   │              ▲
agent 0..n   python -m ... ────────────────┘    └───────────────────┴── NodeCall ──┘

The agents are the nodes of the call. An agent ends, with all that it has started, when its connection does.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, ClassVar

import torch

from parallelize.call.logs import handle_records
from parallelize.call.outcome import Outcome
from parallelize.call.pickling import pickled_by_value
from parallelize.call.task import Task
from parallelize.cluster.code_owner import is_user_module
from parallelize.cluster.store import listen
from parallelize.cluster.world import Node
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.config.options import hosts as host_names
from parallelize.errors import ConfigError, LaunchError
from parallelize.launchers.batch_launcher import BatchLauncher, NodeCall, outcomes_of
from parallelize.launchers.stop_signals import StopSignals
from parallelize.plugins.options import Parse, command, path, variables
from parallelize.version import __version__

_HOST = re.compile(r"(?P<name>[^:\s]+)(?::(?P<gpus>\d+))?")
# No passwords are asked for. A connection that is lost ends within 4 s.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=4", "ServerAliveInterval=1", "ServerAliveCountMax=3")
# Python reads variables, of which PYTHONPATH may be one, when it starts.
_START = (
    "import json, os, sys; os.environ.update(json.loads(open(0, 'rb', 0, closefd=False).readline())); "
    "os.execv(sys.executable, [sys.executable, '-m', 'parallelize.launchers.ssh'])"
)
_BEAT_EVERY_S = 1.0
_LOST_AFTER_S = (
    60.0  # without a beat; a caller that is stopped for less, such as a laptop's, continues
)
_LEAVE_GRACE_S = 10.0  # for the other agents, after the first outcome
_END_TIMEOUT_S = 30.0  # for the workers of an agent, after its connection has ended

_log = logging.getLogger("parallelize")


@dataclass(frozen=True, kw_only=True)
class SSHLauncher(BatchLauncher):
    """Runs each call on hosts, as nodes; `@distributed(hosts=[...])` is short for this.

    `ssh <host>` must work without a password, and Python, torch and this package must be there in the same versions.
    The call is sent through the connection; the caller's own modules, too, if a host lacks them.

    Args:
        hosts: names as for `ssh`, such as "gpu1" or "me@gpu1", the first with rank 0; "gpu1:8" uses 8 GPUs there. A
            list, or a text with commas.
        python: path of the interpreter on the hosts; None: that of this program.
        env: environment variables of the ranks, besides those that a login on the host has.
        ssh: the command, with options, such as `("ssh", "-p", "2222")` or "ssh -p 2222".
    """

    name = "ssh"
    option_parsers: ClassVar[Mapping[str, Parse]] = {
        "hosts": host_names,
        "python": path,
        "env": variables,
        "ssh": command,
    }

    hosts: str | Sequence[str] = ()
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    ssh: str | Sequence[str] = ("ssh",)

    def plan(self, config: Config) -> Layout:
        """Return the layout of a call on these hosts.

        Raises:
            ConfigError: a host's name or number of GPUs is invalid, or contradicts the options.
        """
        found = [_HOST.fullmatch(each) for each in self.hosts]
        gpus = {each["gpus"] for each in found if each}
        if not found or None in found or len(gpus) > 1:
            raise ConfigError(
                f"hosts={list(self.hosts)}",
                why="it must name at least one host, and each with the same number of GPUs, if with any",
                fix="use hosts=['gpu1:8', 'me@gpu2:8'], or hosts=['gpu1', 'gpu2'] with gpus=8",
            )
        if config.num_nodes not in (None, len(found)):
            raise ConfigError(
                f"num_nodes={config.num_nodes} with {len(found)} hosts",
                why="a host is a node",
                fix="drop num_nodes=",
            )
        config = config.changed(num_nodes=len(found))
        return super().plan(config.changed(gpus=number) if (number := gpus.pop()) else config)

    def submit(
        self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]
    ) -> list[Any]:
        """Raise ConfigError: hosts have no queue."""
        del tasks, at_most, environ
        raise ConfigError(
            "a job with hosts=",
            why="hosts have no queue",
            fix="call the function, or use a scheduler",
        )

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Make the call on the hosts, show its output, and return the outcomes.

        Raises:
            ConfigError: a host has other versions than this machine.
            LaunchError: a host cannot be reached, or its connection has ended.
            BaseException: what the call has raised, with rank, host and traceback as notes.
        """
        del node, environ  # hosts= names the nodes; env= has their variables
        with StopSignals().handled() as signals, contextlib.ExitStack() as ended:
            hosts = [ended.enter_context(_connected(name, self)) for name in self.names]
            lacking = set[str]()
            for each in hosts:
                lacking |= each.check()
            signals.interrupt = functools.partial(_tell_all, hosts, "interrupt")
            with pickled_by_value(lacking):
                call = NodeCall.of(task)
            return outcomes_of(_result(call, hosts))

    @property
    def names(self) -> list[str]:
        """The names of the hosts, as for `ssh`."""
        return [each.partition(":")[0] for each in self.hosts]


@dataclass(eq=False)
class _Host:
    """An agent on a host, as the caller sees it.

    Args:
        name: name of the host.
        python: the interpreter there.
        process: `ssh`.
        connection: what the agent reads and writes.
        words: a file with what `ssh` and the host have said.
        address: address of the host, and a free port there; found by `check`.
    """

    name: str
    python: str
    process: subprocess.Popen[bytes]
    connection: Connection
    words: IO[bytes]
    address: tuple[str, int] = ("", 0)

    def tell(self, what: Any) -> None:
        """Send something to the agent; if its connection has ended, the next `hear` finds that."""
        with contextlib.suppress(OSError):
            self.connection.send(what)

    def hear(self) -> Any:
        """Return what the agent says next.

        Raises:
            LaunchError: its connection has ended.
        """
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.words.seek(0)
        said = self.words.read().decode(errors="replace").strip().splitlines()
        raise LaunchError(
            f"the connection to host {self.name} has ended",
            why="; ".join(said[-3:]) or f"ssh has ended with code {self.process.poll()}",
            fix=f"try: ssh -o BatchMode=yes {self.name} {self.python} -c 'import parallelize'",
        )

    def check(self) -> set[str]:
        """Compare the versions there and here; return the caller's modules that the host lacks.

        Raises:
            ConfigError: versions differ.
            LaunchError: the host cannot be reached.
        """
        own = {
            each.partition(".")[0]
            for each, module in sys.modules.items()
            if is_user_module(each) and module.__spec__
        }
        own = {
            each for each in own & sys.modules.keys() if "remote_module_" not in each
        }  # torch writes it
        self.tell((str(Path.cwd()), sys.path, own))
        versions, self.address, lacking = self.hear()
        for name, ours in _versions().items():
            if versions[name] != ours:
                raise ConfigError(
                    f"{name} {versions[name]} on host {self.name}, and {ours} on this machine",
                    why="functions and models are sent as this machine has them",
                    fix="install the same versions, or name another interpreter: SSHLauncher(python='/path/of/python')",
                )
        if lacking:
            _log.info(
                "sent to host %s, which lacks them: %s", self.name, ", ".join(sorted(lacking))
            )
        return set(lacking)


@contextlib.contextmanager
def _connected(name: str, launcher: SSHLauncher) -> Iterator[_Host]:
    """Start an agent on a host; end it with the block."""
    python = launcher.python or sys.executable
    options = [f"-o{each}" for each in _OPTIONS]
    command = [*launcher.ssh, "-T", *options, name, shlex.join([python, "-c", _START])]
    own, given = socket.socketpair()
    number = given.fileno()
    with tempfile.TemporaryFile() as words, own, given:
        try:
            # A session of its own: it gets no Ctrl-C from the terminal.
            process = subprocess.Popen(
                command, stdin=number, stdout=number, stderr=words, start_new_session=True
            )
        except OSError as exc:
            raise LaunchError(
                f"no {command[0]}", why=str(exc), fix="install OpenSSH's client"
            ) from None
        given.close()
        with contextlib.suppress(OSError):  # if ssh has ended already, `hear` finds that
            own.sendall(json.dumps(dict(launcher.env)).encode() + b"\n")
        with process, Connection(own.detach()) as connection:
            yield _Host(name, python, process, connection, words)


def _result(call: NodeCall, hosts: Sequence[_Host]) -> bytes:
    """Make the call on the hosts, and show its output; return its result, which is the same on all of them."""
    key, found, end = secrets.token_hex(16), dict[int, bytes](), float("inf")
    for number, each in enumerate(hosts):
        each.tell((call, Node(*hosts[0].address, number), key))
    numbers: Mapping[Any, int] = {each.connection: number for number, each in enumerate(hosts)}
    while len(found) < len(hosts) and time.monotonic() < end:
        running = [each for each in numbers if numbers[each] not in found]
        for ready in wait(running, _BEAT_EVERY_S):
            what, value = hosts[numbers[ready]].hear()
            if what == "outcome":
                found[numbers[ready]], end = value, min(end, time.monotonic() + _LEAVE_GRACE_S)
            elif what == "records":
                handle_records(value, prefix="", at_least=0)
            else:
                stream = getattr(sys, what)
                stream.write(value)
                stream.flush()
        _tell_all(hosts, "beat")
    return found[min(found)]


def _tell_all(hosts: Sequence[_Host], what: str) -> None:
    for each in hosts:
        each.tell(what)


# On a host


class _Stream(io.TextIOBase):
    """Sends what is written to it to the caller, as that of stdout, stderr or the loggers."""

    def __init__(self, name: str, connection: Connection, lock: threading.Lock) -> None:
        self._name, self._connection, self._lock = name, connection, lock

    def write(self, text: str) -> int:
        """Send a text."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send((self._name, text))
        return len(text)


def _versions() -> dict[str, str]:
    python = "{}.{}".format(*sys.version_info)
    return {
        "Python": python,
        "torch": torch.__version__.partition("+")[0],
        "parallelize": __version__,
    }


def _address() -> tuple[str, int]:
    """Return the address at which the caller has reached this host, and a free port there."""
    address = os.environ["SSH_CONNECTION"].split()[2]  # client, its port, server, its port
    with listen(address, 0) as free:
        return address, int(free.getsockname()[1])


def _obey(commands: Connection) -> None:
    """Interrupt the call if the caller says so; end this process when the caller is gone."""
    with contextlib.suppress(EOFError, OSError):
        while commands.poll(_LOST_AFTER_S):
            if commands.recv() == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)  # the launcher ends the workers
    time.sleep(_END_TIMEOUT_S)
    os._exit(1)


def _serve() -> None:
    """Be the agent of one call."""
    commands, replies = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    lock = threading.Lock()  # of the replies
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor is needed
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what is printed by others than the ranks
    folder, path, modules = commands.recv()
    with contextlib.suppress(OSError):
        os.chdir(folder)
    sys.path += [each for each in path if each not in sys.path]
    replies.send(
        (
            _versions(),
            _address(),
            {each for each in modules - sys.modules.keys() if find_spec(each) is None},
        )
    )
    call, node, key = commands.recv()
    os.environ["PARALLELIZE_KEY"] = key
    sys.stdout, sys.stderr = (_Stream(name, replies, lock) for name in ("stdout", "stderr"))
    threading.Thread(target=_obey, args=[commands], name="parallelize-ssh", daemon=True).start()
    outcome = call.run(node, _Stream("records", replies, lock).write)
    with lock:
        replies.send(("outcome", outcome))


if __name__ == "__main__":
    _serve()
