"""What was decided for a model: to look at, to keep, to pass back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from parallelize.backends.balanced.schedule import ideal_speedup
from parallelize.errors import ConfigError

__all__ = ["Plan", "plan", "remember", "signature"]

_FORMAT = 1
_BAR = 24

_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is divided over devices, what that was predicted to give, and why.

    `print(plan)` draws it. `save` and `load` keep it; `BalancedBackend(plan=plan)` uses it without measuring again.

    Args:
        model: name of the model's class.
        signature: of its parameters; another model needs another plan.
        samples: in the batch that was measured.
        events: names of the submodules that are placed as a whole, in the order of their calls.
        bounds: the events of stage j are `bounds[j]` to `bounds[j + 1]`.
        devices: of each stage.
        microbatches: how many a batch is cut into, at most.
        recompute: whether activations are computed again in backward.
        forward_s: of one micro-batch in each stage.
        backward_s: of one micro-batch in each stage.
        memory_bytes: of each stage, as far as it was predicted.
        unsplit_s: of a step on one device; None: none holds the model.
        predicted_s: of a step by this plan.
        measured_s: of a step by this plan; None: it was not tried.
        is_split: whether the model is divided; otherwise it is left alone on its one device.
        why: what decided, in a sentence.
        draws: whether the model draws random numbers.
        evaluated: names of the modules that were in evaluation mode: what they do in training was not seen.
        whole_inputs: names of tensors among the inputs that are not per sample.
        output_dims: pairs of an output's position and its batch dimension, None if it has none.
        output_form: how many dimensions each output had then, None where it was no tensor; None: that is not known.
    """

    model: str
    signature: str
    samples: int
    events: tuple[str, ...]
    bounds: tuple[int, ...]
    devices: tuple[str, ...]
    microbatches: int
    recompute: bool = False
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    unsplit_s: float | None = None
    predicted_s: float | None = None
    measured_s: float | None = None
    is_split: bool = True
    why: str = ""
    draws: bool = True
    evaluated: tuple[str, ...] = ()
    whole_inputs: tuple[str, ...] = ()
    output_dims: tuple[tuple[int, int | None], ...] = ()
    output_form: tuple[int | None, ...] | None = None

    @property
    def speedup(self) -> float | None:
        """How many times as fast as one device, measured where it was, else predicted; None: not known."""
        step = self.measured_s or self.predicted_s
        return None if self.unsplit_s is None or not step else self.unsplit_s / step

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what `save` has written.

        Raises:
            ConfigError: the file is no plan of this version.
        """
        try:
            return _checked(cls(**_values(json.loads(Path(path).read_text()))))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{os.fspath(path)} holds no plan: {error}",
                why="it was not written by Plan.save of this version",
                fix="leave plan= out to measure again, then save parallelize.plan(model)",
            ) from error

    def __str__(self) -> str:
        if not self.is_split:
            return f"{self.model}: not divided, on {self.devices[0]}\n  why: {self.why}"
        stages = [self._stage(index) for index in range(len(self.devices))]
        return "\n".join([self._headline(), *_aligned(stages), f"  why: {self.why}"])

    def _headline(self) -> str:
        ideal = ideal_speedup(len(self.devices), self.microbatches)
        speed = "" if self.speedup is None else f", {self.speedup:.2f}x as fast as one device"
        again = ", activations recomputed" if self.recompute else ""
        return (
            f"{self.model}: {len(self.devices)} stages, {self.microbatches} micro-batches{again}{speed} "
            f"(ideal {ideal:.2f}x)"
        )

    def _stage(self, index: int) -> list[str]:
        begin, end = self.bounds[index], self.bounds[index + 1]
        names = self.events[begin:end]
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        row = [f"  {index}", self.devices[index], span]
        if self.forward_s:
            both = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
            row.append(_share("time", both, index))
        if any(self.memory_bytes):
            row.append(f"{_share('memory', self.memory_bytes, index)} {self.memory_bytes[index] / 2**20:.1f} MiB")
        return row


def plan(model: nn.Module) -> Plan:
    """How a model under `backend="balanced"` is divided over its devices; `print` it to see the stages drawn.

        with parallel_model(model, backend="balanced"):
            loss_of(model(x)).backward()
            print(parallelize.plan(model))

    Args:
        model: one that is, or was, in such a block and has run a batch there.

    Raises:
        ConfigError: there is no plan yet.
    """
    found = _plans.get(model)
    if found is None:
        raise ConfigError(
            f"plan({type(model).__name__})",
            why="a plan is made from the first batch that the model sees under backend='balanced'",
            fix="run one batch first: with parallel_model(model, backend='balanced'): model(x)",
        )
    return found


def remember(model: nn.Module, found: Plan) -> None:
    """Let `plan(model)` find a plan."""
    _plans[model] = found


def signature(model: nn.Module) -> str:
    """The same for models of the same submodules and parameters."""
    parts = [(name, type(module).__name__) for name, module in model.named_modules()]
    sizes = [(name, tuple(each.shape), str(each.dtype)) for name, each in model.named_parameters()]
    return hashlib.sha256(repr((parts, sizes)).encode()).hexdigest()[:16]


def _values(written: dict[str, Any]) -> dict[str, Any]:
    if written.pop("format", None) != _FORMAT:
        raise TypeError(f"its format is not {_FORMAT}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in written.items()}
    return {**values, "output_dims": tuple((position, dim) for position, dim in values["output_dims"])}


def _checked(found: Plan) -> Plan:
    """The same; a TypeError or ValueError where it is none that `Plan.save` has written."""
    kinds: dict[type | tuple[type, ...], tuple[str, ...]] = {
        str: ("model", "signature", "why"),
        int: ("samples", "microbatches"),
        bool: ("recompute", "is_split", "draws"),
        (int, float, type(None)): ("unsplit_s", "predicted_s", "measured_s"),
    }
    of_each: dict[type | tuple[type, ...], tuple[str, ...]] = {
        str: ("events", "devices", "evaluated", "whole_inputs"),
        int: ("bounds",),
        (int, float): ("forward_s", "backward_s", "memory_bytes"),
    }
    wrong = [name for kind, names in kinds.items() for name in names if not isinstance(getattr(found, name), kind)]
    for kind, names in of_each.items():
        for name in names:
            value = getattr(found, name)
            if not isinstance(value, tuple) or not all(isinstance(each, kind) for each in value):
                wrong.append(name)
    if wrong:
        raise TypeError(f"{', '.join(wrong)} is of another type")
    stages = len(found.devices)
    steps = [found.forward_s, found.backward_s, found.memory_bytes]
    if not stages or found.microbatches < 1 or any(each and len(each) != stages for each in steps):
        raise ValueError("its stages do not fit each other")
    if len(found.forward_s) != len(found.backward_s):
        raise ValueError("its times do not fit each other")
    ends = [0, *found.bounds[1:-1], len(found.events)]
    if found.is_split and (len(found.bounds) != stages + 1 or list(found.bounds) != sorted(set(ends))):
        raise ValueError("its bounds do not fit its events and devices")
    return found


def _share(what: str, values: Sequence[float], index: int) -> str:
    share = values[index] / max(sum(values), 1e-12)
    filled = round(share * _BAR)
    return f"{'█' * filled}{'·' * (_BAR - filled)} {share:4.0%} of {what}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
