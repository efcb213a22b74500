"""Startup summary: one line that rank 0 logs when training starts.

    Net: 400,010 parameters; 4 processes on 4 cuda device(s); batches: 32 x 4 processes = 128 global; 1.5 MiB of
    gradients all-reduced a step; fp32

It is logged in the first forward pass that records gradients: models and loaders are registered by then.
Logging makes no collective call.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.parameter import UninitializedParameter

from parallelize.config.explain import precision_summary
from parallelize.plugins.base import Engine
from parallelize.runtime.context import Runtime, active

__all__ = ["ActiveLoader", "StartupSummary", "announced", "size_text"]

_log = logging.getLogger("parallelize")
_IS_LOGGED = "startup summary logged"  # in Runtime.flags
_ANNOUNCED_AFTER_S = 1.0


@contextlib.contextmanager
def announced(text: str) -> Iterator[None]:
    """Write a line to stderr, if it is a terminal, when the block has run for a second."""

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
            sys.stderr.write(f"parallelize: {text}\n")

    timer = threading.Timer(_ANNOUNCED_AFTER_S, write)
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
        """Add a model of the block with its engine, or replace the engine of an added model."""
        self._engines[model] = engine

    def log_once(self) -> None:
        """Log the summary on rank 0, once per run, unless the run has a single process and device."""
        self.is_over = True
        flags = (active() or self._run).flags
        is_single = self._run.world.world_size == 1 and len(self._run.devices) == 1
        if _IS_LOGGED in flags or is_single or not self._run.world.is_main:
            return
        flags.add(_IS_LOGGED)
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", self.text())

    def text(self) -> str:
        """Return the summary line."""
        parameters = [each for model in self._engines for each in model.parameters()]
        parameters = [each for each in parameters if not isinstance(each, UninitializedParameter)]
        batches = sorted({each.batch_sizes for each in _active_loaders if each.batch_sizes})
        size = self._run.world.world_size
        names = " + ".join(type(model).__name__ for model in self._engines)
        phrases = [
            f"{names}: {_parameter_counts(parameters)}",
            f"{size} process{'es' * (size > 1)} on {size * len(self._run.devices)} {self._run.device.type} device(s)",
            f"batches: {' and '.join(batches)}" if batches else "",
            *_traffic(self._engines.values()),
            precision_summary(self._run.layout).partition(":")[0],
        ]
        return "; ".join(phrase for phrase in phrases if phrase)


def _traffic(engines: Iterable[Engine]) -> Iterator[str]:
    traffic = [each for engine in engines if (each := engine.traffic()) is not None]
    for operation in dict.fromkeys(each.operation for each in traffic):
        sent = sum(each.gradient_bytes for each in traffic if each.operation == operation)
        yield f"{size_text(sent)} of gradients {operation} a step"
    gathered = sum(each.gathered_bytes for each in traffic)
    if gathered:
        yield f"{size_text(gathered)} of parameters gathered a step"


def size_text(size_bytes: float) -> str:
    """Format a number of bytes, such as "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def _parameter_counts(parameters: Sequence[nn.Parameter]) -> str:
    total = sum(each.numel() for each in parameters)  # numel() of a sharded parameter counts all shards
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    return f"{_count_text(total)} parameters" + (
        "" if trained == total else f", {_count_text(trained)} of them trained"
    )


def _count_text(count: int) -> str:
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:,.1f} M"
