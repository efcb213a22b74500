"""Startup summary: one line that rank 0 logs when training starts.

    Net: 400,010 parameters; 4 processes on 4 cuda device(s); batches: 32 x 4 processes = 128
    global; 1.5 MiB of gradients averaged a step; fp32

It is logged in the first forward pass that records gradients: models and loaders are registered by
then. Logging makes no collective call.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from parallelize.config.explain import precision_summary
from parallelize.plugins.base import Engine
from parallelize.run.context import Runtime, active_or
from parallelize.torch_patches.module_tensors import all_parameters

_log = logging.getLogger("parallelize")
_ANNOUNCED_AFTER_S = 1.0
"""Time after which a block that delays the start of a program is announced."""


def announce(text: str) -> None:
    """Write a line about this program's start to stderr."""
    # The terminal may be closed, and a program without a console has no stderr.
    with contextlib.suppress(OSError, ValueError, AttributeError):
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


class StartupSummary:
    """The summary of the models in one parallel_model block.

    Args:
        run: the run in this process, with the options of the block.

    Attributes:
        is_over: whether the first forward has called `log_once`; later forwards need not.
    """

    def __init__(self, run: Runtime) -> None:
        self._run = run
        self._engines: dict[nn.Module, Engine] = {}
        self.is_over = False

    def add_model(self, model: nn.Module, engine: Engine) -> None:
        """Add a model of the block with its engine."""
        self._engines[model] = engine

    def log_once(self) -> None:
        """Log the summary on rank 0, once per run, unless the run is one process on one device."""
        self.is_over = True
        # A block with options of its own has its own Runtime. The line is logged once for the run
        # around all blocks.
        state = active_or(self._run).state
        world = self._run.world
        if state.has_logged_summary or self._is_single() or not world.is_main:
            return
        state.has_logged_summary = True
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", self.text())

    def _is_single(self) -> bool:
        """Return whether one process runs whole batches on one device: `logical=` divides them."""
        is_one_device = self._run.world.world_size == 1 and len(self._run.devices) == 1
        return is_one_device and not self._run.config.logical

    def text(self) -> str:
        """Return the summary line."""
        sizes = _sizes_of_parameters(self._engines)
        phrases = [self._phrase_of_parameters(sizes), self._phrase_of_processes()]
        phrases += self._phrases_of_batches()
        if self._run.world.world_size > 1:
            phrases.append(f"{size_text(sizes.sent_bytes)} of gradients averaged a step")
        # A run on the CPU asks no driver. A layout that is only to be explained may have GPUs that
        # this machine lacks.
        if self._run.device.type == "cuda" and torch.cuda.is_available():
            phrases += _phrases_of_missing_peers(self._run.devices)
        precision, _, _ = precision_summary(self._run.layout).partition(":")
        phrases.append(precision)
        for engine in self._engines.values():
            if engine.why:
                phrases.append(engine.why)
        return "; ".join(phrases)

    def _phrase_of_parameters(self, sizes: _SizesOfParameters) -> str:
        names = " + ".join(type(model).__name__ for model in self._engines)
        phrase = f"{names}: {_count_text(sizes.numbers)} parameters"
        if sizes.trained_numbers != sizes.numbers:
            phrase += f", {_count_text(sizes.trained_numbers)} of them trained"
        return phrase

    def _phrase_of_processes(self) -> str:
        world_size = self._run.world.world_size
        processes = "process" if world_size == 1 else "processes"
        device_count = world_size * len(self._run.devices)
        devices = f"{device_count} {self._run.device.type} device(s)"
        return f"{world_size} {processes} on {devices}"

    def _phrases_of_batches(self) -> list[str]:
        phrases = []
        logical = self._run.config.logical
        if logical:
            reason = "for the same bits at any number of processes"
            phrases.append(f"each batch in {logical} parts, {reason}")
        # Loaders belong to the run around all blocks, as in `log_once`.
        batch_sizes = active_or(self._run).loaders.active_batch_sizes()
        if batch_sizes:
            phrases.append(f"batches: {' and '.join(batch_sizes)}")
        return phrases


@dataclass
class _SizesOfParameters:
    """Sizes of the parameters of models. A sharded parameter counts with its full size.

    Attributes:
        numbers: how many numbers all parameters have.
        trained_numbers: how many numbers the parameters with requires_grad have.
        sent_bytes: size of their gradients in the dtype in which the ranks average them.
    """

    numbers: int = 0
    trained_numbers: int = 0
    sent_bytes: int = 0


def _sizes_of_parameters(engines: dict[nn.Module, Engine]) -> _SizesOfParameters:
    sizes = _SizesOfParameters()
    for model, engine in engines.items():
        # None: gradients are sent in the dtype of their parameter.
        sent_dtype = None
        if engine.reduction is not None:
            sent_dtype = engine.reduction.dtype
        for parameter in all_parameters(model):
            numbers = parameter.numel()
            sizes.numbers += numbers
            if parameter.requires_grad:
                sizes.trained_numbers += numbers
                sizes.sent_bytes += numbers * (sent_dtype or parameter.dtype).itemsize
    return sizes


def _phrases_of_missing_peers(gpus: Sequence[torch.device]) -> list[str]:
    """Return a phrase with the pairs of GPUs that cannot read each other's memory, if any."""
    pairs = []
    for first, second in itertools.combinations(gpus, 2):
        if not torch.cuda.can_device_access_peer(first, second):
            pairs.append(f"{first.index} and {second.index}")
    if not pairs:
        return []
    return [f"no peer access between GPUs {', '.join(pairs)}: copies go through the host"]


def size_text(size_bytes: float) -> str:
    """Format a number of bytes, such as "1.5 MiB"."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        size_bytes /= 1024
        if size_bytes < 1024:
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 1024:.1f} TiB"


def _count_text(count: int) -> str:
    if count < 1_000_000:
        return f"{count:,}"
    return f"{count / 1e6:,.1f} M"
