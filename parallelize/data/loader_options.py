"""The options of `shard_loader`, and their validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from parallelize.data.sampler_arithmetic import TAILS, Tail
from parallelize.errors import ConfigError, Fault, did_you_mean

__all__ = ["Batch", "Divides", "LoaderOptions", "check_drop_last", "check_length_options"]

Batch = Literal["per_process", "global"]

Divides = Literal["nothing", "workers", "processes"]
"""How an iterable dataset shards itself: not at all ("nothing"), over the "workers" that get_worker_info() returns, or
over the "processes" (and workers)."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The options of `shard_loader`, as documented there.

    Raises:
        ConfigError: options are invalid; the error lists all of them.
    """

    tail: Tail = "pad"
    batch: Batch = "per_process"
    seed: int | None = None
    limit: float | None = None
    progress: bool | str = False
    to_device: bool = True
    prefetch: int = 2
    divides: Divides | None = None

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise ConfigError.of(faults)

    def _faults(self) -> Iterator[Fault]:
        choices = (("tail", TAILS), ("batch", get_args(Batch)), ("divides", (None, *get_args(Divides))))
        for name, known in choices:
            value = getattr(self, name)
            if value not in known:
                yield Fault(f"{name}={value!r}", "the value is unknown", did_you_mean(str(value), filter(None, known)))
        seed, label, limit = self.seed, self.progress, self.limit
        is_fraction = isinstance(limit, float) and 0.0 < limit <= 1.0
        others = (
            ("seed", seed is None or _is_int(seed, 0, 2**63), "a seed is an integer from 0 to 2**63 - 1", "seed=0"),
            (
                "limit",
                limit is None or is_fraction or _is_int(limit, 1),
                "it is neither a number of batches nor a fraction of them",
                "limit=100 for the first 100 batches of each process, limit=0.1 for a tenth of them, or limit=None",
            ),
            ("progress", isinstance(label, (bool, str)), "it is neither a bool nor a label", "progress='train'"),
            ("to_device", isinstance(self.to_device, bool), "it is not a bool", "True or False"),
            (
                "prefetch",
                _is_int(self.prefetch, 0, 65),
                "it is the number of batches copied to the device ahead of the loop, from 0 to 64",
                "prefetch=2",
            ),
        )
        for name, is_valid, why, fix in others:
            if not is_valid:
                yield Fault(f"{name}={getattr(self, name)!r}", why, f"use {fix}")


def check_drop_last(options: LoaderOptions, *, drop_last: bool) -> None:
    """Raise a ConfigError for tail="exact" with a loader that leaves out samples."""
    if drop_last and options.tail == "exact":
        raise ConfigError(
            "tail='exact' with DataLoader(drop_last=True)",
            why="tail='exact' yields each sample once, and drop_last=True leaves out the last ones",
            fix="use DataLoader(drop_last=False), or tail='drop'",
        )


def check_length_options(options: LoaderOptions, name: str, *, needs_limit: bool = True) -> None:
    """Raise a ConfigError for options that need the length of data that has none, which the error calls `name`."""
    if options.tail == "weighted":
        raise ConfigError(
            f"tail='weighted' with {name}",
            why="the weight of a process's last batch depends on the number of samples, which is unknown",
            fix="use tail='pad' or 'drop', or a map-style dataset with a sampler whose __len__ bounds its samples",
        )
    if needs_limit and isinstance(options.limit, float):
        raise ConfigError(
            f"limit={options.limit!r} with {name}",
            why="a fraction needs the total number of batches",
            fix="use a number of batches, as in limit=100",
        )


def _is_int(value: Any, low: int, end: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < end
