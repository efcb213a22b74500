"""The options of `shard_loader`, and their validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parallelize.data.sampler_arithmetic import TAILS, Tail
from parallelize.errors import ConfigError, Fault, did_you_mean

__all__ = [
    "BATCHES",
    "DIVIDES",
    "Batch",
    "Divides",
    "LoaderOptions",
    "check_iterable_options",
    "fraction_without_length_error",
]

Batch = Literal["per_process", "global"]
BATCHES: tuple[Batch, ...] = ("per_process", "global")

Divides = Literal["nothing", "workers", "processes"]
"""How an iterable dataset shards itself: not at all ("nothing"), over the "workers" that get_worker_info() returns, or
over the "processes" (and workers)."""
DIVIDES: tuple[Divides, ...] = ("nothing", "workers", "processes")


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
    report: bool = False
    to_device: bool = True
    prefetch: int = 2
    divides: Divides | None = None

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise ConfigError.of(faults)

    def _faults(self) -> Iterator[Fault]:
        choices = (
            ("tail", self.tail, TAILS),
            ("batch", self.batch, BATCHES),
            ("divides", self.divides, (None, *DIVIDES)),
        )
        for name, value, known in choices:
            if value not in known:
                yield Fault(f"{name}={value!r}", "the value is unknown", did_you_mean(str(value), filter(None, known)))
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**63):
            yield Fault(f"seed={self.seed!r}", "a seed is an integer from 0 to 2**63 - 1", "use seed=0")
        if self.limit is not None and not _is_limit(self.limit):
            yield Fault(
                f"limit={self.limit!r}",
                "it is neither a number of batches nor a fraction of them",
                "use limit=100 for the first 100 batches of each process, limit=0.1 for a tenth of them, or limit=None",
            )
        if not _is_one_of(self.progress, bool, str):
            yield Fault(f"progress={self.progress!r}", "it is neither a bool nor a label", "use progress='train'")
        for name, flag in (("report", self.report), ("to_device", self.to_device)):
            if not _is_one_of(flag, bool):
                yield Fault(f"{name}={flag!r}", "it is not a bool", "use True or False")
        if not (_is_int(self.prefetch) and 0 <= self.prefetch <= 64):
            yield Fault(
                f"prefetch={self.prefetch!r}",
                "it is the number of batches copied to the device ahead of the loop, from 0 to 64",
                "use prefetch=2",
            )


def check_iterable_options(options: LoaderOptions, name: str, *, has_length: bool) -> None:
    """Check that data without indices supports the options.

    Raises:
        ConfigError: an option needs the indices or the length.
    """
    if options.tail == "weighted":
        raise ConfigError(
            f"tail='weighted' with {name}",
            why="the weight of a process's last batch depends on the number of samples, which is unknown",
            fix="use tail='pad' or 'drop', or a DataLoader of a map-style dataset",
        )
    if options.batch == "global":
        raise ConfigError(
            f"batch='global' with {name}",
            why="batches are not split between processes: each process, or worker, makes its own",
            fix="use batch='per_process', and the batch size of one process",
        )
    if isinstance(options.limit, float) and not has_length:
        raise fraction_without_length_error(options.limit, name)


def fraction_without_length_error(limit: float, name: str) -> ConfigError:
    """Build the error for a limit that is a fraction of data without a length."""
    return ConfigError(
        f"limit={limit!r} with {name}, which has no length",
        why="a fraction needs the total number of batches",
        fix="use a number of batches, as in limit=100",
    )


def _is_one_of(value: object, *types: type) -> bool:
    return isinstance(value, types)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_limit(value: object) -> bool:
    if isinstance(value, float):
        return 0.0 < value <= 1.0
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
