"""What the user asked of `shard_loader`: parsed once, every fault of the request in one error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parallelize.data.sampler_arithmetic import TAILS, Tail
from parallelize.errors import ConfigError, Fault, did_you_mean

__all__ = ["BATCHES", "DIVIDES", "Batch", "Divides", "LoaderOptions", "no_fraction"]

Batch = Literal["per_process", "global"]
BATCHES: tuple[Batch, ...] = ("per_process", "global")

Divides = Literal["nothing", "workers", "processes"]
"""What an iterable dataset divides its data over by itself: "nothing", the "workers" that get_worker_info() tells of,
or "processes" (and workers)."""
DIVIDES: tuple[Divides, ...] = ("nothing", "workers", "processes")


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The options of `shard_loader`, as documented there.

    Raises:
        ConfigError: every fault of them.
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
                yield Fault(
                    f"{name}={value!r}", "there is no such choice", did_you_mean(str(value), filter(None, known))
                )
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < 2**63):
            yield Fault(f"seed={self.seed!r}", "a seed is a whole number from 0 to 2**63 - 1", "use seed=0")
        if self.limit is not None and not _is_limit(self.limit):
            yield Fault(
                f"limit={self.limit!r}",
                "it is neither a number of batches nor a fraction of them",
                "use limit=100 for the first 100 batches of each process, limit=0.1 for a tenth of them, or limit=None",
            )
        if not _is_one_of(self.progress, bool, str):
            yield Fault(f"progress={self.progress!r}", "it is neither on, off nor a label", "use progress='train'")
        if not _is_one_of(self.report, bool):
            yield Fault(f"report={self.report!r}", "it is neither on nor off", "use True or False")
        if not _is_one_of(self.to_device, bool):
            yield Fault(f"to_device={self.to_device!r}", "it is neither on nor off", "use True or False")
        if not (_is_whole(self.prefetch) and 0 <= self.prefetch <= 64):
            yield Fault(
                f"prefetch={self.prefetch!r}",
                "it counts batches on the device ahead of the loop, from 0 to 64",
                "use prefetch=2",
            )


def no_fraction(limit: float, name: str) -> ConfigError:
    """What there is to say of a fraction of something without a length.

    Args:
        limit: the fraction.
        name: of the thing, as the user knows it.
    """
    return ConfigError(
        f"limit={limit!r} with {name}, which has no length",
        why="there is no whole of which it could be a fraction",
        fix="use a number of batches, as in limit=100",
    )


def _is_one_of(value: object, *types: type) -> bool:
    return isinstance(value, types)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_limit(value: object) -> bool:
    if isinstance(value, float):
        return 0.0 < value <= 1.0
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
