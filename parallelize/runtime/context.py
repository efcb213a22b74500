"""This process's World, Config and devices while a run lasts, in the one contextvar."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from parallelize.cluster.devices import probe
from parallelize.cluster.world import World, detect
from parallelize.config.config import Config
from parallelize.config.layout import Layout, lay_out
from parallelize.hang_detection.watchdog import Watch
from parallelize.runtime.process_group import process_group

__all__ = [
    "Runtime",
    "activate",
    "active",
    "current",
    "current_world",
    "device",
    "is_main",
    "local_rank",
    "outside",
    "rank",
    "world_size",
]


@dataclass(frozen=True)
class Runtime:
    """One process of a run.

    Args:
        world: this process among the others.
        layout: the request, and what every local rank drives.
        told: names of what the user was told already, and is told once in a run.
        watch: finds out for whom this process waits, while it is one of several.
    """

    world: World
    layout: Layout
    told: set[str] = field(default_factory=set, compare=False, repr=False)
    watch: Watch = field(default_factory=Watch, compare=False, repr=False)

    @property
    def config(self) -> Config:
        """The request."""
        return self.layout.config

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices this process drives."""
        return self.layout.devices[self.world.local_rank]

    @property
    def device(self) -> torch.device:
        """The device on which this process's model and batches are."""
        return self.devices[0]


_active: ContextVar[Runtime | None] = ContextVar("parallelize_runtime", default=None)


def active() -> Runtime | None:
    """The run this code is part of, or None outside of one."""
    return _active.get()


def current() -> Runtime:
    """The run this code is part of; outside of one, what a launcher's variables say, else a world of one.

    Raises:
        ConfigError: a launcher's variables contradict themselves, or PARALLELIZE_<OPTION> variables do.
    """
    runtime = _active.get()
    if runtime is not None:
        return runtime
    world = current_world()
    return Runtime(world, lay_out(Config.parse().merged(os.environ), probe(), world))


def current_world() -> World:
    """Who this process is; nothing about devices is asked, so that a rank can be told where a device cannot."""
    runtime = _active.get()
    return runtime.world if runtime is not None else detect(os.environ) or World()


@contextlib.contextmanager
def activate(runtime: Runtime) -> Iterator[Runtime]:
    """Make this process part of a run: contextvar, current device, process group; all given back at the end."""
    token = _active.set(runtime)
    try:
        with _on_device(runtime.device), process_group(runtime.world, runtime.layout, runtime.watch, told=runtime.told):
            yield runtime
    finally:
        _active.reset(token)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Let a block see the run around it as a program sees the launcher that has placed it: by its variables alone.

    The process group stays. A decorated function that is called in the block joins the run with options of its own.
    """
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


@contextlib.contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def rank() -> int:
    """Number of this process among all, from 0; 0 in a script that nobody launched."""
    return current_world().rank


def world_size() -> int:
    """Processes in all; 1 in a script that nobody launched."""
    return current_world().world_size


def local_rank() -> int:
    """Number of this process on its node, from 0."""
    return current_world().local_rank


def device() -> torch.device:
    """The device on which this process's model and batches are."""
    return current().device


def is_main() -> bool:
    """Whether this process is rank 0: the one that should write files."""
    return current_world().is_main
