"""Simulates the ranks of a world in one process, one after the other; or starts a script as each of them."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import socket
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.distributed import HashStore

from parallelize import distributed
from parallelize.agreement.plain_values import encoded
from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.hang_detection.from_rank_0 import FirstTold, ValuesOfRank0
from parallelize.run.context import Runtime
from parallelize.run.generators import global_generators
from parallelize.run.surroundings import running

__all__ = [
    "TORCHRUN",
    "Checks",
    "as_rank",
    "free_port",
    "keep_sigchld_handler",
    "outcomes_of",
    "outputs_of_ranks",
    "own_generators",
    "running_pids",
    "values",
    "wait_for",
    "without_leak_report",
]


_STORE = HashStore()
"""What simulated ranks 0 have told."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""Python's arguments before a script that two ranks of torchrun run."""


def free_port() -> int:
    """Return a port of loopback that was free, and that no connection gets by chance: those are from 32768 on."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(free.getsockname()[1])


def outputs_of_ranks(script: Path, *arguments: Any, world_size: int = 2, per_node: int = 1) -> list[str]:
    """Run a script, which may import tests, as each rank of a world on loopback, and wait; return their outputs."""
    port, tests, running = free_port(), Path(__file__).parent, []
    for rank in range(world_size):
        node, local = divmod(rank, per_node)
        world = World(rank, local, node, world_size, per_node, "127.0.0.1", port)
        paths = os.pathsep.join([str(tests), str(tests.parent)])
        environ = {**os.environ, **world.env(), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), *map(str, arguments)]
        running.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * world_size, "\n".join(outputs)
    return outputs


def wait_for(fact: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until a fact is true, or fail."""
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end, f"not within {timeout_s:g} s"
        time.sleep(0.02)


def running_pids(pids: Iterable[int]) -> list[int]:
    """Return those that still run; a zombie process does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


class _SimulatedRank0(ValuesOfRank0):
    """What rank 0 has told, or would tell if its generators had the states of this rank's."""

    def wait(self, topic: str, number: int) -> bytes:
        if self._store.check([f"from rank 0/{topic}/{number}"]):
            return super().wait(topic, number)
        generators = global_generators([torch.device("cpu")])
        return zlib.compress(encoded({name: access.get() for name, access in generators.items()}))

    def first_told(self, topic: str, text: str) -> FirstTold:
        """Return this rank's text: worlds of real processes compare data."""
        return FirstTold(self._rank, text)


@contextlib.contextmanager
def as_rank(rank: int, world_size: int, **options: Any) -> Iterator[None]:
    """Run the block as one rank of a world whose other ranks do not exist; collectives are not possible.

    Simulate rank 0 first: the others read in the order that it has drawn. Without a rank 0, they read as if its
    generators had the states of theirs.
    """
    config = Config.parse(processes=world_size, **options)
    world = World(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    runtime = Runtime(world, compute_layout(config, Hardware()))
    runtime.watchdog.values_of_rank_0 = _SimulatedRank0(_STORE, rank, world_size, timeout_s=5.0)
    with running(runtime):
        yield


@contextlib.contextmanager
def own_generators(seed: int) -> Iterator[Callable[[], Any]]:
    """Seed the global generators in the block, as those of a rank; yields a function that tells their states."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    try:
        yield lambda: (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes())
    finally:
        random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])


def outcomes_of(checks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run checks one after the other on this rank; return what each returns, or its traceback as text."""
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the test reports it
            found[name] = traceback.format_exc()
    return found


class Checks(dict[str, Callable[[], Any]]):
    """Functions that the ranks of one launch run one after the other; each is registered by a decorator.

    Args:
        options: options of the launch.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self[run.__name__] = run
        return run

    @functools.cached_property
    def outcomes(self) -> list[dict[str, Any]]:
        """What each function has returned, or its traceback as text, by rank."""
        ranks: list[dict[str, Any]] = distributed(**self._options)(outcomes_of).all_ranks(dict(self))
        return ranks

    def assert_holds(self, name: str) -> None:
        """Assert that a function has raised nothing on any rank."""
        for each in self.outcomes:
            assert each[name] is None, each[name]


def values(batches: Iterable[torch.Tensor]) -> list[Any]:
    """Return the elements of one-dimensional batches as a list."""
    return [value for batch in batches for value in batch.tolist()]


def keep_sigchld_handler() -> None:
    """Install the SIGCHLD handler that torch installs with the first DataLoader workers and never removes."""
    torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()


def without_leak_report(errors: str) -> str:
    """Return a program's stderr without what nanobind prints at exit: triton, with torch 2.15, leaks objects."""
    return re.sub(r"^(nanobind: | - |See https://nanobind).*\n?", "", errors, flags=re.MULTILINE)
