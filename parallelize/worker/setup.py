"""What a launcher gives a worker process: its setup, and the files of a call's folder.

task              the call: function, arguments, layout
outcome.<rank>    the rank has returned: its value, and what comes back with it
error.<rank>      the rank has failed
store.<rank>      the rank's link to the file in which the ranks meet
"""

from __future__ import annotations

import linecache
import multiprocessing
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallelize.call.logs import LogSettings
from parallelize.call.random_states import RandomStates
from parallelize.call.settings import Settings, absolute_search_path
from parallelize.cluster.store import STORE_FILE
from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.run.rendezvous import Rendezvous


@dataclass(frozen=True)
class WorkerSetup:
    """What a launcher passes to each worker process of a call, beside its rank.

    Args:
        folder: private folder of this run, with the task file; workers write their outcomes there.
        environ: the caller's environment variables, with the launcher's changes.
        devices: first device of each local rank. Argument tensors of an accelerator are loaded on
            it.
        start_method: default multiprocessing start method in the worker, such as for DataLoader
            workers.
        logs: the caller's loggers.
        settings: the caller's settings of torch and warnings.
        random_states: states of the caller's random generators.
        sources: lines of code that is in no file, such as a notebook's cells, as `linecache` keeps
            them.
        path: the caller's sys.path.
        argv: the caller's sys.argv.
        authkey: the caller's key for connections of multiprocessing, such as those of a manager.
        key: a secret of the run's ranks; None: they have none, or PARALLELIZE_KEY.
        has_file_store: whether the ranks, all on this node, meet in a file in the folder, and not
            in a TCPStore.
        has_keyboard: whether the caller gives its keyboard to debuggers.
        shares_outcome: whether each node has a launcher, which needs rank 0's outcome.
    """

    folder: str
    environ: Mapping[str, str]
    devices: tuple[torch.device, ...]
    start_method: str
    logs: LogSettings
    settings: Settings
    random_states: RandomStates
    sources: Mapping[str, Any]
    path: Sequence[str]
    argv: Sequence[str]
    authkey: bytes
    key: bytes | None = None
    has_file_store: bool = False
    has_keyboard: bool = False
    shares_outcome: bool = False

    @classmethod
    def capture(cls, layout: Layout, *, folder: str, environ: Mapping[str, str]) -> WorkerSetup:
        """Return the setup of a call's workers, with the settings of this process."""
        # The caller's own, or else Python's default: "fork" until 3.13, "forkserver" since 3.14.
        default_method = multiprocessing.get_all_start_methods()[0]
        start_method = multiprocessing.get_start_method(allow_none=True) or default_method
        return cls(
            folder=folder,
            environ=environ,
            devices=tuple(devices_of_rank[0] for devices_of_rank in layout.renumbered().devices),
            start_method=start_method,
            logs=LogSettings.capture(),
            settings=Settings.capture(),
            random_states=RandomStates.capture(layout.devices[0]),
            sources=_sources_without_file(),
            path=absolute_search_path(),
            argv=sys.argv,
            authkey=bytes(multiprocessing.current_process().authkey),
            key=secrets.token_bytes(32),
        )

    def rendezvous(self, rank: int) -> Rendezvous:
        """Return how a rank meets the others.

        Each rank reaches the file by a link of its own, so that `StopHandler` can cut it off alone.
        """
        if not self.has_file_store:
            return Rendezvous(self.key)
        link = Path(self.folder, f"{STORE_FILE}.{rank}")
        link.symlink_to(STORE_FILE)
        return Rendezvous(self.key, link)

    def outcome_path(self, world: World) -> Path:
        """Return where a rank writes its outcome: that of a leader is held until it is shared."""
        folder = Path(self.folder)
        if self.shares_outcome and world.local_rank == 0:
            return held_path(folder)
        return outcome_path(folder, world.rank)


def task_path(folder: Path) -> Path:
    """Return the path of the task file in a run's folder."""
    return folder / "task"


def outcome_path(folder: Path, rank: int) -> Path:
    """Return the path of the outcome of a rank that has returned."""
    return folder / f"outcome.{rank}"


def held_path(folder: Path) -> Path:
    """Return the path of the outcome of a leader that has not shared it yet."""
    return folder / "held"


def outcome_paths(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return the paths of a rank's outcome file: if the function returns, and if it fails."""
    return outcome_path(folder, rank), folder / f"error.{rank}"


def _sources_without_file() -> dict[str, Any]:
    """Return the entries of `linecache` whose code is in no file: they have no time of change."""
    return {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}
