"""The line that rank 0 logs when a run begins to train: what is known only inside of it.

    Net: 400,010 parameters; batches: 32 x 4 processes = 128 global; 1.5 MiB of gradients all-reduced a step; fp32;
    each process holds 1.5 MiB of parameters + 1.5 MiB of gradients + the optimizer's state

It is said at the first forward that records gradients, when models and loaders are known and before the optimizer has
taken its memory: a run that then fails for lack of memory has said how much it needed. Nothing collective happens.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from parallelize.config.explain import precision_row
from parallelize.plugins.base import Engine
from parallelize.runtime.context import Runtime, active

__all__ = ["Reading", "StartLine", "reading", "size_text"]

_log = logging.getLogger("parallelize")


class Reading:
    """A loader that is being read, for as long as whoever reads keeps this.

    Args:
        arithmetic: how the batches of the processes add up, as a phrase.
    """

    def __init__(self, arithmetic: str) -> None:
        self.arithmetic = arithmetic


_readings: weakref.WeakSet[Reading] = weakref.WeakSet()


def reading(arithmetic: str) -> Reading:
    """Have a loader's arithmetic in the line, if what is returned is still kept when it is said."""
    opened = Reading(arithmetic)
    _readings.add(opened)
    return opened


class StartLine:
    """What will be said of the models of one block.

    Args:
        run: this process's part of the run.
        optimizers: those the user named.
    """

    def __init__(self, run: Runtime, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._run = run
        self._optimizers = optimizers
        self._engines: dict[nn.Module, Engine] = {}

    def joined(self, model: nn.Module, engine: Engine) -> None:
        """A model of the block has this engine now."""
        self._engines[model] = engine

    def say(self) -> None:
        """Log it: on rank 0, once in a run, and where there is more than one process or device."""
        told = (active() or self._run).told
        is_alone = self._run.world.world_size == 1 and len(self._run.devices) == 1
        if "start" in told or is_alone or not self._run.world.is_main:
            return
        told.add("start")
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", self.text())

    def text(self) -> str:
        """The line."""
        parameters = [each for model in self._engines for each in model.parameters()]
        parameters = [each for each in parameters if not isinstance(each, UninitializedParameter)]
        batches = sorted({each.arithmetic for each in _readings if each.arithmetic})
        names = " + ".join(type(model).__name__ for model in self._engines)
        phrases = [
            f"{names}: {_counted(parameters)}",
            f"batches: {' and '.join(batches)}" if batches else "",
            *_traffic(self._engines.values()),
            precision_row(self._run.layout).partition(":")[0],
            f"each process holds {self._memory(parameters)}",
        ]
        return "; ".join(phrase for phrase in phrases if phrase)

    def _memory(self, parameters: Sequence[nn.Parameter]) -> str:
        trained = _held_bytes(each for each in parameters if each.requires_grad)
        terms = [f"{size_text(_held_bytes(parameters))} of parameters", f"{size_text(trained)} of gradients"]
        states = [_state_bytes(each) for each in self._optimizers]
        known = [each for each in states if each is not None]
        is_known = states != [] and len(known) == len(states)
        terms.append(f"{size_text(sum(known))} of the optimizer's state" if is_known else "the optimizer's state")
        device = self._run.device
        if device.type == "cpu":
            return " + ".join(terms)
        _, total = torch.accelerator.get_memory_info(device)
        return f"{' + '.join(terms)}, beside activations, of {size_text(total)}"


def _traffic(engines: Iterable[Engine]) -> Iterator[str]:
    sent = [found for engine in engines if (found := engine.traffic()) is not None]
    for how in dict.fromkeys(each.how for each in sent):
        yield f"{size_text(sum(each.gradient_bytes for each in sent if each.how == how))} of gradients {how} a step"
    gathered = sum(each.gathered_bytes for each in sent)
    if gathered:
        yield f"{size_text(gathered)} of parameters gathered a step"


def size_text(size_bytes: float) -> str:
    """Bytes as a person reads them: "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def _counted(parameters: Sequence[nn.Parameter]) -> str:
    total = sum(each.numel() for each in parameters)  # of a parameter in parts: the whole's
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    return f"{_count_text(total)} parameters" + (
        "" if trained == total else f", {_count_text(trained)} of them trained"
    )


def _count_text(count: int) -> str:
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:,.1f} M"


def _held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What lies in this process: of a tensor in parts its own part."""
    return sum(getattr(each, "_local_tensor", each).nbytes for each in tensors)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """What its state takes, or will take after its first step; None: not known."""
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    if held:
        return _held_bytes(held)
    copies = [_copies(optimizer, group) for group in optimizer.param_groups]
    if any(math.isnan(each) for each in copies):
        return None
    trained = [[each for each in group["params"] if each.requires_grad] for group in optimizer.param_groups]
    return int(sum(each * _held_bytes(group) for each, group in zip(copies, trained, strict=True)))


def _copies(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> float:
    """How many tensors of its size the state of a parameter holds; nan: not known."""
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return 3 if group["amsgrad"] else 2
    if type(optimizer) is torch.optim.SGD:
        return 1 if group["momentum"] else 0
    return math.nan
