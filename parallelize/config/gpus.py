"""The value of `gpus=`: which GPUs of each node a request names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from parallelize.errors import Fault

__all__ = ["Gpus", "parse_gpus"]

_GRAMMAR = "an int (how many), a list of indices, -1 or 'auto' (all), '4' (how many), '0,2' or '3,' (indices), 0 (none)"
_MAX_COUNT = 65535
_NUMBER = r"[0-9]{1,4}"


@dataclass(frozen=True)
class Gpus:
    """The requested GPUs of each node: a number, or indices, or all GPUs if both fields are None.

    Args:
        count: number of GPUs, from index 0 on.
        indices: indices of the GPUs in this order, as the process sees them (after CUDA_VISIBLE_DEVICES).
    """

    count: int | None = None
    indices: tuple[int, ...] | None = None

    ALL: ClassVar[Gpus]
    NONE: ClassVar[Gpus]

    def __str__(self) -> str:
        """Return a string that `parse_gpus` parses into an equal object."""
        if self.indices is None:
            return "auto" if self.count is None else str(self.count)
        text = ",".join(str(index) for index in self.indices)
        return f"{text}," if len(self.indices) == 1 else text

    @property
    def as_option(self) -> str:
        """The option as the user writes it: "gpus=4", "gpus=[0, 2]", "gpus='auto'"."""
        if self.indices is None:
            return "gpus='auto'" if self.count is None else f"gpus={self.count}"
        return f"gpus={list(self.indices)}"

    @property
    def has_duplicates(self) -> bool:
        """Whether a GPU is named more than once."""
        return len(set(self.indices or ())) < len(self.indices or ())

    def indices_on(self, available: int) -> Sequence[int]:
        """Return the requested indices on a node with `available` GPUs; some may not exist there."""
        if self.indices is not None:
            return self.indices
        return range(available if self.count is None else self.count)

    def missing_on(self, available: int) -> str:
        """Return a text with the requested indices above `available` - 1: "4 to 7" or "5, 9"; empty if all exist."""
        beyond = [index for index in self.indices or () if index >= available]
        if self.count is not None and self.count > available:
            return f"{available} to {self.count - 1}" if self.count - 1 > available else f"{available}"
        return ", ".join(map(str, beyond))


Gpus.ALL = Gpus()
Gpus.NONE = Gpus(count=0)


def parse_gpus(value: object) -> Gpus | Fault:
    """Parse the user's value of `gpus`; return a Fault if the value is invalid.

    Args:
        value: an int (how many), a sequence of indices, -1 or "auto" (all), "4" (how many), "0,2" or "3," (indices),
            0 or an empty sequence (none). A bool is refused: `gpus=True` specifies neither how many nor which.
    """
    if isinstance(value, Gpus):
        return value
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return _parse_count(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return _parse_indices(value)
    return Fault(f"gpus={value!r}", f"its type {type(value).__name__} is not valid", f"use {_GRAMMAR}")


def _parse_count(value: int) -> Gpus | Fault:
    if value < -1:
        return Fault(f"gpus={value!r}", "-1 is the only negative number with a meaning: all GPUs", f"use {_GRAMMAR}")
    if value > _MAX_COUNT:
        return Fault(f"gpus={value!r}", "it is the number of GPUs per node, and no node has so many", f"use {_GRAMMAR}")
    return Gpus.ALL if value == -1 else Gpus(count=value)


def _parse_text(value: str) -> Gpus | Fault:
    text = value.strip()
    if text in ("auto", "-1"):
        return Gpus.ALL
    if re.fullmatch(_NUMBER, text):
        return Gpus(count=int(text))
    if re.fullmatch(rf"{_NUMBER}(\s*,\s*{_NUMBER})*\s*,?", text):
        return _parse_indices([int(part) for part in text.split(",") if part.strip()])
    return Fault(f"gpus={value!r}", "it is neither a number nor a list of indices", f"use {_GRAMMAR}")


def _parse_indices(value: Sequence[object]) -> Gpus | Fault:
    indices: list[int] = []
    wrong: list[object] = []
    for item in value:
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            indices.append(item)
        else:
            wrong.append(item)
    if wrong:
        why = f"not an index of a GPU (they count from 0): {', '.join(map(repr, wrong))}"
        return Fault(f"gpus={list(value)!r}", why, f"use {_GRAMMAR}")
    return Gpus(indices=tuple(indices)) if indices else Gpus.NONE
