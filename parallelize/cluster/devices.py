"""Which devices a request means, and what this machine has: the one place that probes hardware."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from parallelize.errors import Fault

__all__ = ["Gpus", "Hardware", "compose_mask", "parse_gpus", "probe"]

GRAMMAR = "an int (how many), a list of indices, -1 or 'auto' (all), '4' (how many), '0,2' or '3,' (indices), 0 (none)"
_MOST = 65535
_NUMBER = r"[0-9]{1,4}"


@dataclass(frozen=True)
class Gpus:
    """The GPUs of each node that a request names.

    One of the fields is set, or neither: all GPUs of the node.

    Args:
        count: the first so many.
        indices: these, in this order, as the process sees them (after CUDA_VISIBLE_DEVICES).
    """

    count: int | None = None
    indices: tuple[int, ...] | None = None

    ALL: ClassVar[Gpus]
    NONE: ClassVar[Gpus]

    def __str__(self) -> str:
        """A string that `parse_gpus` reads back as the same request."""
        if self.indices is None:
            return "auto" if self.count is None else str(self.count)
        text = ",".join(str(index) for index in self.indices)
        return f"{text}," if len(self.indices) == 1 else text

    @property
    def asked(self) -> str:
        """The option as a user writes it: "gpus=4", "gpus=[0, 2]", "gpus='auto'"."""
        if self.indices is None:
            return "gpus='auto'" if self.count is None else f"gpus={self.count}"
        return f"gpus={list(self.indices)}"

    @property
    def has_duplicates(self) -> bool:
        """Whether a GPU is named more than once."""
        return len(set(self.indices or ())) < len(self.indices or ())

    def of(self, available: int) -> Sequence[int]:
        """The indices meant on a node that has `available` GPUs; may name more than there are."""
        if self.indices is not None:
            return self.indices
        return range(available if self.count is None else self.count)

    def missing(self, available: int) -> str:
        """The indices meant that such a node does not have, as text: "4 to 7" or "5, 9"; empty if it has all."""
        beyond = [index for index in self.indices or () if index >= available]
        if self.count is not None and self.count > available:
            return f"{available} to {self.count - 1}" if self.count - 1 > available else f"{available}"
        return ", ".join(map(str, beyond))


Gpus.ALL = Gpus()
Gpus.NONE = Gpus(count=0)


@dataclass(frozen=True)
class Hardware:
    """The accelerators of this machine.

    Args:
        device_type: torch's name for them ("cuda", "mps", ...), "cpu" if there are none.
        count: how many this process sees.
    """

    device_type: str = "cpu"
    count: int = 0


def probe() -> Hardware:
    """What this machine has.

    Devices are counted, no context is made on any. On CUDA the count comes from NVML where that works: then neither
    is the driver initialised, so that a later fork may still use the GPUs, and CUDA_VISIBLE_DEVICES may still change.
    `torch.accelerator.is_available` would do both.

    Source: https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#poison-fork-in-multiprocessing
    """
    accelerator = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    return Hardware() if accelerator is None or count == 0 else Hardware(accelerator.type, count)


def parse_gpus(value: object) -> Gpus | Fault:
    """The request that a user's `gpus` value means, or what is wrong with it.

    Args:
        value: an int (how many), a sequence of indices, -1 or "auto" (all), "4" (how many), "0,2" or "3," (indices),
            0 or an empty sequence (none). A bool is no number here: `gpus=True` says neither how many nor which.
    """
    if isinstance(value, Gpus):
        return value
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return _parse_count(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return _parse_indices(value)
    return Fault(f"gpus={value!r}", f"a {type(value).__name__} names no devices", f"use {GRAMMAR}")


def _parse_count(value: int) -> Gpus | Fault:
    if value < -1:
        return Fault(f"gpus={value!r}", "-1 is the only negative number with a meaning: all GPUs", f"use {GRAMMAR}")
    if value > _MOST:
        return Fault(f"gpus={value!r}", "it counts the GPUs of one node, which has fewer", f"use {GRAMMAR}")
    return Gpus.ALL if value == -1 else Gpus(count=value)


def _parse_text(value: str) -> Gpus | Fault:
    text = value.strip()
    if text in ("auto", "-1"):
        return Gpus.ALL
    if re.fullmatch(_NUMBER, text):
        return Gpus(count=int(text))
    if re.fullmatch(rf"{_NUMBER}(\s*,\s*{_NUMBER})*\s*,?", text):
        return _parse_indices([int(part) for part in text.split(",") if part.strip()])
    return Fault(f"gpus={value!r}", "it is neither a number nor a list of indices", f"use {GRAMMAR}")


def _parse_indices(value: Sequence[object]) -> Gpus | Fault:
    indices: list[int] = []
    wrong: list[object] = []
    for item in value:
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            indices.append(item)
        else:
            wrong.append(item)
    if wrong:
        why = f"no index of a GPU, those count from 0: {', '.join(map(repr, wrong))}"
        return Fault(f"gpus={list(value)!r}", why, f"use {GRAMMAR}")
    return Gpus(indices=tuple(indices)) if indices else Gpus.NONE


def compose_mask(mask: str | None, indices: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for the GPUs `indices` of a process that sees the devices of `mask`.

    Entries of a mask may be indices, GPU UUIDs or MIG UUIDs; they are picked, never replaced.

    Args:
        mask: the variable as it is now; None: every GPU of the machine is visible.
        indices: positions among the visible devices.
    """
    if mask is None:
        return ",".join(str(index) for index in indices)
    entries = [entry.strip() for entry in mask.split(",") if entry.strip()]
    return ",".join(entries[index] for index in indices)
