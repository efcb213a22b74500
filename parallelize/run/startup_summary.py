"""Startup summary: one line that rank 0 logs when training starts.

    Net: 400,010 parameters; 4 processes on 4 cuda device(s); batches: 32 x 4 processes = 128 global; 1.5 MiB of
    gradients averaged a step; fp32

It is logged in the first forward pass that records gradients: models and loaders are registered by then.
Logging makes no collective call.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from parallelize.config.explain import precision_summary
from parallelize.plugins.base import Engine
from parallelize.run.context import Runtime, active
from parallelize.torch_patches.module_tensors import all_parameters

__all__ = ["ActiveLoader", "StartupSummary", "announce", "announced", "size_text"]

_log = logging.getLogger("parallelize")
_ANNOUNCED_AFTER_S = 1.0


def announce(text: str) -> None:
    """Write a line about this program's start to stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the terminal may be closed; there is no stderr
        sys.stderr.write(f"parallelize: {text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def announced(text: str) -> Iterator[None]:
    """Write a line to stderr, if it is a terminal, when the block has run for a second."""
    timer = threading.Timer(_ANNOUNCED_AFTER_S, announce, [text])
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class ActiveLoader:
    """A loader that is being iterated; the summary includes it while this object exists.

    Args:
        batch_sizes: local and global batch size, such as "32 x 4 processes = 128 global".
    """

    def __init__(self, batch_sizes: str) -> None:
        self.batch_sizes = batch_sizes
        _active_loaders.add(self)


_active_loaders: weakref.WeakSet[ActiveLoader] = weakref.WeakSet()


class StartupSummary:
    """The summary of the models in one parallel_model block.

    Args:
        run: the run in this process.
    """

    def __init__(self, run: Runtime) -> None:
        self._run = run
        self._engines: dict[nn.Module, Engine] = {}
        self.is_over = False

    def add_model(self, model: nn.Module, engine: Engine) -> None:
        """Add a model of the block with its engine."""
        self._engines[model] = engine

    def log_once(self) -> None:
        """Log the summary on rank 0, once per run, unless the run has a single process and device."""
        self.is_over = True
        # A block with options of its own has another Runtime; the line is logged once for the run around it.
        state, world = (active() or self._run).state, self._run.world
        is_single = world.world_size == 1 and len(self._run.devices) == 1 and not self._run.config.logical
        if state.has_logged_summary or is_single or not world.is_main:
            return
        state.has_logged_summary = True
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", self.text())

    def text(self) -> str:
        """Return the summary line."""
        count = trained = sent = 0
        for model, engine in self._engines.items():
            dtype = engine.reduction.dtype if engine.reduction is not None else None
            for each in all_parameters(model):
                number = each.numel()  # of a sharded parameter, it counts all shards
                count += number
                trained += number * each.requires_grad
                sent += number * each.requires_grad * (dtype or each.dtype).itemsize
        batches = sorted({each.batch_sizes for each in _active_loaders if each.batch_sizes})
        size, kind, devices = self._run.world.world_size, self._run.device.type, self._run.devices
        # A run on the CPU asks no driver. A layout may have GPUs that this machine lacks, to be explained.
        has_gpus = kind == "cuda" and torch.cuda.is_available()
        pairs = itertools.combinations(devices if has_gpus else (), 2)
        apart = [f"{a.index} and {b.index}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
        logical = self._run.config.logical
        phrases = [
            f"{' + '.join(type(model).__name__ for model in self._engines)}: {_count_text(count)} parameters"
            + ("" if trained == count else f", {_count_text(trained)} of them trained"),
            f"{size} process{'es' * (size > 1)} on {size * len(devices)} {kind} device(s)",
            f"each batch in {logical} parts, for the same bits at any number of processes" if logical else "",
            f"batches: {' and '.join(batches)}" if batches else "",
            f"{size_text(sent)} of gradients averaged a step" if size > 1 else "",
            f"no peer access between GPUs {', '.join(apart)}: copies go through the host" if apart else "",
            precision_summary(self._run.layout).partition(":")[0],
            *(each.why for each in self._engines.values()),
        ]
        return "; ".join(phrase for phrase in phrases if phrase)


def size_text(size_bytes: float) -> str:
    """Format a number of bytes, such as "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def _count_text(count: int) -> str:
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:,.1f} M"
