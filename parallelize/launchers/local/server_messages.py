"""What a caller, a fork server and a worker say to each other.

    caller                          fork server                   worker
      │  StartWorkers ───────────────> │
      │                                │ forks ────────────────────> │
      │  <────────────── WorkersReport │                             │ waits
      │  RunWorkers ─────────────────> │  WorkerRequest ───────────> │
      │                                │                             │ runs what its file says
      │  <────────────── WorkersReport │ <──────────────── it ends ──┘
      │  EndWorkers ─────────────────> │
      │  <─────────────── WorkersEnded │
      │  LeaveCall ──────────────────> │

The workers are forked while the caller pickles the call, so they wait for what they run. A report
is sent again whenever a worker has ended. WorkersRefused replaces the first report if the workers
cannot be forked. SignalWorkers may come at any time.

Each call has a socket of its own between caller and server. It carries `Request`s one way, and
`Reply`s the other way. Each worker has a pipe from the server, for one `WorkerRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StartWorkers:
    """Fork workers, which wait for their requests.

    Args:
        number: how many.
        folder: the call's folder, which the server removes if the caller is killed.
    """

    number: int
    folder: str


@dataclass(frozen=True)
class WorkerRequest:
    """What one worker runs.

    Args:
        current_folder: the caller's current folder, which becomes that of the worker.
        path: a file with a pickled `WorkerCall`.
    """

    current_folder: str
    path: str


@dataclass(frozen=True)
class RunWorkers:
    """Let the workers run.

    Args:
        requests: one for each worker, in the order in which they were forked.
    """

    requests: Sequence[WorkerRequest]


@dataclass(frozen=True)
class SignalWorkers:
    """Send a signal to workers that handle it.

    Args:
        number: of the signal: SIGINT after Ctrl-C, SIGUSR1 or SIGUSR2.
        pids: the process ids of the workers.
    """

    number: int
    pids: Sequence[int]


@dataclass(frozen=True)
class EndWorkers:
    """End the workers, and what they have started.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    grace_s: float


@dataclass(frozen=True)
class LeaveCall:
    """The caller says nothing more, and has removed the call's folder."""


@dataclass(frozen=True)
class WorkersReport:
    """The workers, in the order in which they were forked.

    Args:
        pids: their process ids.
        exitcodes: as in multiprocessing, the negative number of a signal; None: it has not ended.
    """

    pids: Sequence[int]
    exitcodes: Sequence[int | None]


@dataclass(frozen=True)
class WorkersRefused:
    """The workers cannot be forked.

    Args:
        reason: what the kernel says.
    """

    reason: str


@dataclass(frozen=True)
class WorkersEnded:
    """All workers and their groups have ended; other processes may have their numbers now."""


@dataclass(frozen=True)
class WorkerCall:
    """What a worker calls once it has read its file.

    Args:
        function: importable by its name, so that the server itself needs no torch.
        arguments: of the function.
    """

    function: Callable[..., None]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class ServerImports:
    """What a fork server imports, as names of modules.

    Args:
        torch: torch and what a worker needs of this package, before any worker is forked.
        packages: what the caller has imported of other packages, before any worker is forked, too;
            a module that cannot be imported is left to the workers.
        later: what only some functions need, such as torch's compiler; see `fork_server`.
    """

    torch: Sequence[str] = ()
    packages: Sequence[str] = ()
    later: Sequence[str] = ()


Request = StartWorkers | RunWorkers | SignalWorkers | EndWorkers | LeaveCall
Reply = WorkersReport | WorkersRefused | WorkersEnded
