"""The SSH launcher: runs a call on hosts that `ssh` reaches, without a scheduler or a shared disk.

    agent       the program that ssh starts on a host: `python -m parallelize.launchers.ssh`
    connection  the agent's stdin and stdout, through ssh

    caller                                    agent, on each host
    ------                                    -------------------
    variables, search path, modules    ──>
                                       <──    versions, an address, the modules that it lacks
    the call, its node and a key       ──>    NodeCall.run: the agents are the nodes of the call
    "beat", "interrupt"                ──>
                                       <──    output, log records, and at last the outcome

An agent ends, with all that it has started, when its connection does.
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

from parallelize.call.importable import pickled_by_value
from parallelize.call.logs import handle_records
from parallelize.call.outcome import Outcome
from parallelize.call.task import Task
from parallelize.cluster.code_owner import is_user_module
from parallelize.cluster.store import free_port
from parallelize.cluster.world import Node
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.config.options import hosts as host_names
from parallelize.errors import ConfigError, LaunchError
from parallelize.launchers.batch_launcher import BatchLauncher, NodeCall, outcomes_of
from parallelize.launchers.stop_signals import StopSignals
from parallelize.plugins.options import Parse, command, path, variables
from parallelize.version import __version__

_HOST = re.compile(r"[^:\s]+(?::(?P<gpus>\d+))?")
# No passwords are asked for. A connection that is lost ends within 4 s.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=4", "ServerAliveInterval=1", "ServerAliveCountMax=3")
# A program that sets the variables and then becomes the agent: Python reads its own variables, such
# as PYTHONPATH, only when it starts. Its stdin is read without a buffer, which would take more than
# the line, and what follows is for the agent.
_START = (
    "import json, os, sys; "
    "os.environ.update(json.loads(open(0, 'rb', 0, closefd=False).readline())); "
    "os.execv(sys.executable, [sys.executable, '-m', 'parallelize.launchers.ssh'])"
)
_BEAT_EVERY_S = 1.0
_LOST_AFTER_S = 60.0
"""Without a beat; a caller that is stopped for less, such as a laptop's, continues."""
_LEAVE_GRACE_S = 10.0
"""For the other agents, after the first outcome."""
_END_TIMEOUT_S = 30.0
"""For the workers of an agent, after its connection has ended."""

_log = logging.getLogger("parallelize")


@dataclass(frozen=True, kw_only=True)
class SSHLauncher(BatchLauncher):
    """Runs each call on hosts, as nodes; `@distributed(hosts=[...])` is short for this.

    `ssh <host>` must work without a password, and Python, torch and this package must be there in
    the same versions. The call is sent through the connection; the caller's own modules, too, if a
    host lacks them.

    Args:
        hosts: names as for `ssh`, such as "gpu1" or "me@gpu1", the first with rank 0; "gpu1:8" uses
            8 GPUs there. A list, or a text with commas.
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
        number_of_hosts = len(self.hosts)
        matches = [_HOST.fullmatch(host) for host in self.hosts]
        # None is a number here, too: that of hosts that are named without one.
        numbers_of_gpus = {match["gpus"] for match in matches if match is not None}
        if None in matches or len(numbers_of_gpus) != 1:
            raise ConfigError(
                f"hosts={list(self.hosts)}",
                why="it must name at least one host, and each with the same number of GPUs, if "
                "with any",
                fix="use hosts=['gpu1:8', 'me@gpu2:8'], or hosts=['gpu1', 'gpu2'] with gpus=8",
            )
        if config.num_nodes not in (None, number_of_hosts):
            raise ConfigError(
                f"num_nodes={config.num_nodes} with {number_of_hosts} hosts",
                why="a host is a node",
                fix="drop num_nodes=",
            )
        config = config.changed(num_nodes=number_of_hosts)
        (number,) = numbers_of_gpus
        if number:
            config = config.changed(gpus=number)
        return super().plan(config)

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
        # hosts= names the nodes, and env= has their variables.
        del node, environ
        with StopSignals().handled() as signals, contextlib.ExitStack() as ended:
            hosts = []
            for host_and_gpus in self.hosts:
                name = host_and_gpus.partition(":")[0]
                hosts.append(ended.enter_context(_started_agent(name, self)))
            # All hosts are asked before the call is pickled: one that lacks a module needs it in
            # the pickle, and one with other versions must get no call.
            lacking = set[str]()
            for host in hosts:
                lacking |= host.compare_with_this_machine()
            with pickled_by_value(lacking):
                call = NodeCall.of(task.renewed())
            _send_call(call, hosts)
            # Not before: Ctrl-C while a call is sent would put the word into the middle of it.
            signals.interrupt = functools.partial(_tell_all, hosts, "interrupt")
            return outcomes_of(_results(hosts))


@dataclass(eq=False)
class _Host:
    """An agent on a host, as the caller sees it.

    Args:
        name: name of the host.
        python: the interpreter there.
        process: `ssh`.
        connection: what the agent reads and writes.
        stderr: a file with what `ssh` and the host have written to stderr.
        address: address of the host, and a free port there; the agent's first answer has them.
    """

    name: str
    python: str
    process: subprocess.Popen[bytes]
    connection: Connection
    stderr: IO[bytes]
    address: tuple[str, int] = ("", 0)

    def send(self, message: Any) -> None:
        """Send a message to the agent.

        If the connection has ended, the next `receive` says so, with what the host has written.
        """
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        """Return the agent's next message.

        Raises:
            LaunchError: its connection has ended.
        """
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            pass
        # What it has written is complete when ssh has ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        raise LaunchError(
            f"the connection to host {self.name} has ended",
            why="; ".join(lines[-3:]) or f"ssh has ended with code {self.process.poll()}",
            fix=f"try: ssh -o BatchMode=yes {self.name} {self.python} -c 'import parallelize'",
        )

    def compare_with_this_machine(self) -> set[str]:
        """Compare the versions there and here; return the caller's modules that the host lacks.

        Raises:
            ConfigError: versions differ.
            LaunchError: the host cannot be reached.
        """
        self.send((str(Path.cwd()), sys.path, _modules_of_user()))
        versions, self.address, lacking = self.receive()
        for name, version_here in _versions().items():
            if versions[name] != version_here:
                raise ConfigError(
                    f"{name} {versions[name]} on host {self.name}, "
                    f"and {version_here} on this machine",
                    why="functions and models are sent as this machine has them",
                    fix="install the same versions, or name another interpreter: "
                    "SSHLauncher(python='/path/of/python')",
                )
        if lacking:
            names = ", ".join(sorted(lacking))
            _log.info("sent to host %s, which lacks them: %s", self.name, names)
        return set(lacking)


def _modules_of_user() -> set[str]:
    """Return the top-level modules that the caller has imported from files of its own."""
    names = set[str]()
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        # torch writes modules of this name.
        is_generated = "remote_module_" in top
        if top in sys.modules and not is_generated and is_user_module(name) and module.__spec__:
            names.add(top)
    return names


@contextlib.contextmanager
def _started_agent(name: str, launcher: SSHLauncher) -> Iterator[_Host]:
    """Start the agent on a host; end it with the block, by the end of its connection."""
    python = launcher.python or sys.executable
    options = [f"-o{option}" for option in _OPTIONS]
    command = [*launcher.ssh, "-T", *options, name, shlex.join([python, "-c", _START])]
    caller_end, ssh_end = socket.socketpair()
    with tempfile.TemporaryFile() as stderr, caller_end, ssh_end:
        try:
            # A session of its own: it gets no Ctrl-C from the terminal.
            process = subprocess.Popen(
                command,
                stdin=ssh_end.fileno(),
                stdout=ssh_end.fileno(),
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as exc:
            raise LaunchError(
                f"no {command[0]}",
                why=str(exc),
                fix="install OpenSSH's client",
            ) from None
        ssh_end.close()
        # The agent's first line has its variables, since ssh passes none on by itself. If ssh has
        # ended already, the first `receive` says so.
        with contextlib.suppress(OSError):
            caller_end.sendall(json.dumps(dict(launcher.env)).encode() + b"\n")
        with process, Connection(caller_end.detach()) as connection:
            yield _Host(name, python, process, connection, stderr)


def _send_call(call: NodeCall, hosts: Sequence[_Host]) -> None:
    """Send the call to the hosts, each of which makes it as a node."""
    # The ranks sign with this key what they send each other. It comes through ssh, which encrypts.
    key = secrets.token_hex(16)
    for node, host in enumerate(hosts):
        host.send((call, Node(*hosts[0].address, node), key))


def _results(hosts: Sequence[_Host]) -> list[bytes]:
    """Show the output of the call until it ends; return the hosts' results, in their order.

    After the first result, the other hosts have `_LEAVE_GRACE_S`: their ranks may be lost, and the
    first result then says why.
    """
    # Connection -> node, for the agents whose outcome has not come. The others may end.
    running: dict[Any, int] = {host.connection: node for node, host in enumerate(hosts)}
    results = dict[int, bytes]()
    end_s = float("inf")
    while running and time.monotonic() < end_s:
        for connection in wait(list(running), _BEAT_EVERY_S):
            node = running[connection]
            subject, content = hosts[node].receive()
            if subject == "outcome":
                results[node] = content
                del running[connection]
                end_s = min(end_s, time.monotonic() + _LEAVE_GRACE_S)
            else:
                _show(subject, content)
        # An agent that receives nothing for `_LOST_AFTER_S` ends: its caller is gone.
        _tell_all(hosts, "beat")
    return [results[node] for node in sorted(results)]


def _show(subject: str, content: Any) -> None:
    """Show log records, or a text of stdout or stderr."""
    if subject == "records":
        handle_records(content, prefix="", at_least=0)
        return
    stream = getattr(sys, subject)
    stream.write(content)
    stream.flush()


def _tell_all(hosts: Sequence[_Host], message: str) -> None:
    for host in hosts:
        host.send(message)


# On a host


class _Stream(io.TextIOBase):
    """Sends what is written to it to the caller, as that of stdout, stderr or the loggers."""

    def __init__(self, name: str, connection: Connection, lock: threading.Lock) -> None:
        self._name = name
        self._connection = connection
        self._lock = lock

    def write(self, text: str) -> int:
        """Send a text."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send((self._name, text))
        return len(text)


def _versions() -> dict[str, str]:
    """Return what must be equal on the hosts; builds of torch for other devices may differ."""
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": torch.__version__.partition("+")[0],
        "parallelize": __version__,
    }


def _address() -> tuple[str, int]:
    """Return the address at which the caller has reached this host, and a free port there."""
    _client, _port, address, _port_of_sshd = os.environ["SSH_CONNECTION"].split()
    return address, free_port(address)


def _follow_commands(commands: Connection) -> None:
    """Interrupt the call if the caller says so; end this process when the caller is gone.

    A thread of the agent runs this while the call runs.
    """
    with contextlib.suppress(EOFError, OSError):
        while commands.poll(_LOST_AFTER_S):
            if commands.recv() == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
    # The launcher's handler ends the workers. If that takes too long, nothing is waited for.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_TIMEOUT_S)
    os._exit(1)


def _serve() -> None:
    """Be the agent of one call."""
    # The connection is moved away from stdin and stdout, which the user's code may read and write.
    commands = Connection(os.dup(0), writable=False)
    replies = Connection(os.dup(1), readable=False)
    lock_of_replies = threading.Lock()
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor is needed
        os.dup2(nothing.fileno(), 0)
    # What other code writes to stdout must not stand in the connection. The ranks' output comes
    # through sys.stdout, see below.
    os.dup2(2, 1)
    folder, search_path, modules = commands.recv()
    with contextlib.suppress(OSError):
        os.chdir(folder)
    # Modules in folders that this host has, too, are imported from there, and are not sent.
    sys.path += [entry for entry in search_path if entry not in sys.path]
    lacking = {name for name in modules - sys.modules.keys() if find_spec(name) is None}
    replies.send((_versions(), _address(), lacking))
    call, node, key = commands.recv()
    # The launcher writes what the ranks print to these.
    sys.stdout = _Stream("stdout", replies, lock_of_replies)
    sys.stderr = _Stream("stderr", replies, lock_of_replies)
    threading.Thread(
        target=_follow_commands,
        args=[commands],
        name="parallelize-ssh",
        daemon=True,
    ).start()
    records = _Stream("records", replies, lock_of_replies)
    outcome = call.run(node, records.write, key=key)
    with lock_of_replies:
        replies.send(("outcome", outcome))


if __name__ == "__main__":
    _serve()
