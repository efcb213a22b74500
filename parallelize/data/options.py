"""The options of `shard_loader`, and the position in a loader's data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from parallelize.data.units import Tail
from parallelize.errors import ConfigError, Fault, did_you_mean

Batch = Literal["per_process", "global"]

Divides = Literal["nothing", "workers", "processes"]
"""How data shards itself: not at all, over the "workers" that get_worker_info() returns, or over
the "processes" (and workers)."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The options of `shard_loader`, as documented there.

    Args:
        tail: what happens to samples that do not divide evenly; None: it depends on `batch`, and on
            whether gradients are enabled.
        batch: whether a batch of the user's loader is for each process, or for all.
        seed: of the orders, in place of the states of the generators; None: these.
        limit: number, or fraction, of the batches of an epoch; None: all.
        progress: whether to show a bar, or its label.
        to_device: whether to move batches to the process's device.
        prefetch: number of batches to copy ahead.
        divides: how the data divides itself; None: as the data tells.

    Raises:
        ConfigError: options are invalid; the error lists all of them.
    """

    tail: Tail | None = None
    batch: Batch = "per_process"
    seed: int | None = None
    limit: float | None = None
    progress: bool | str = False
    to_device: bool = True
    prefetch: int = 1
    divides: Divides | None = None

    def __post_init__(self) -> None:
        faults = []
        for name, choices in (("tail", Tail), ("batch", Batch), ("divides", Divides)):
            fault = _fault_of_choice(name, getattr(self, name), get_args(choices))
            if fault is not None:
                faults.append(fault)
        limit = self.limit
        is_fraction = type(limit) is float and 0 < limit <= 1
        is_number = _is_count(limit) and limit != 0
        for name, is_valid, fix in (
            ("seed", self.seed is None or _is_count(self.seed), "an integer below 2**63"),
            ("limit", limit is None or is_fraction or is_number, "100 batches, or 0.1 of them"),
            ("prefetch", _is_count(self.prefetch), "a number of batches to copy ahead"),
            (
                "progress",
                isinstance(self.progress, (bool, str)),
                "True, False, or the label of the bar",
            ),
            ("to_device", isinstance(self.to_device, bool), "True or False"),
        ):
            if not is_valid:
                value = getattr(self, name)
                fault = Fault(f"{name}={value!r}", "the value is not known", f"pass {fix}")
                faults.append(fault)
        if faults:
            raise ConfigError.of(faults)


def _fault_of_choice(name: str, value: Any, choices: tuple[str, ...]) -> Fault | None:
    if isinstance(value, str) and value in choices:
        return None
    if value is None and name != "batch":
        return None
    fix = did_you_mean(str(value), choices)
    return Fault(f"{name}={value!r}", "the value is not known", fix)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


@dataclass(frozen=True)
class Position:
    """A position in the data, at which a pass starts.

    It is the same on all processes, and for any number of them: it counts the units of all.

    Args:
        epoch: number of the pass, from 0.
        start: number of its units that are already consumed; each `Source` defines its unit.
        order: hash of the order of an interrupted pass.
        states: states of the random generators at the beginning of an interrupted pass, as text.
    """

    epoch: int = 0
    start: int = 0
    order: str = ""
    states: str = ""
