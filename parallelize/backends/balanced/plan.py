"""Plan: which stage runs which submodules, why, and how long a step takes; can be printed, saved and reused."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn

from parallelize.backends.balanced.hardware import device_out_of_memory
from parallelize.errors import ConfigError

__all__ = ["Plan", "PlannerOptions", "ideal_speedup", "plan", "remember", "signature"]

_FORMAT = 2
_BAR = 24
_FIX = "drop plan=, or remove its file, to profile again; to save a plan: parallelize.plan(model).save(path)"
_NUMBERS: Any = {float: (int, float)}
_BYTES = "predicted bytes:"

_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """The options of BalancedBackend that affect the plan; `microbatches=None`: choose the fastest number."""

    microbatches: int | None = None
    recompute: bool | Literal["auto"] = "auto"
    optimizer_state: float = 2.0
    batch_dim: int = 0
    memory: int | tuple[int, ...] | None = None
    max_pipelines: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Split of a model over devices, with its predicted and measured times and the reason for it.

    `print(plan)` draws the stages. `save` and `load` write and read JSON. `BalancedBackend(plan=plan)` uses a plan
    without profiling.

    Args:
        model: name of the model's class.
        signature: hash of submodules and parameter shapes; the plan can be used for models with the same signature.
        samples: number of samples in the profiled batch.
        events: name of the unit (a submodule that is not split further) of each call, in call order.
        bounds: split points; stage j runs `events[bounds[j]:bounds[j + 1]]`.
        devices: device of each stage, one pipeline after another.
        microbatches: maximum number of micro-batches per batch.
        recompute: whether activations are recomputed in backward.
        forward_s: predicted seconds of one micro-batch's forward in each stage.
        backward_s: predicted seconds of one micro-batch's backward in each stage.
        memory_bytes: predicted bytes of each stage of each pipeline.
        unsplit_s: measured seconds of a step on one device; None: the model does not fit on one device.
        predicted_s: predicted seconds of a step by this plan.
        measured_s: measured seconds of a step by this plan; None: not measured.
        is_split: whether the model is split; otherwise it runs unchanged on the one device in `devices`.
        why: why the model is split this way, or not split.
        whole_inputs: names of input tensors that are not per sample, and are therefore not split.
        pipelines: number of pipelines, which have the same stages; micro-batch i runs in pipeline i % pipelines.
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
    whole_inputs: tuple[str, ...] = ()
    pipelines: int = 1

    @property
    def speedup(self) -> float | None:
        """Return the speedup over one device, measured if possible, else predicted; None: not known."""
        step = self.measured_s or self.predicted_s
        return None if self.unsplit_s is None or not step else self.unsplit_s / step

    @contextlib.contextmanager
    def explaining_out_of_memory(self) -> Iterator[None]:
        """Raise an out-of-memory error of a step with the bytes that the plan predicts."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if _BYTES in str(error):
                raise
            pairs = zip(self.devices, self.memory_bytes, strict=False)
            predicted = ", ".join(f"{size:.0f} on {device}" for device, size in pairs) or "not known"
            text = ConfigError(
                f"{device_out_of_memory(error) or 'a device'} is out of memory in a step of backend='balanced'",
                why=f"{_BYTES} {predicted}, "
                f"for batches of {self.samples} samples like the first one; {str(error).splitlines()[0]}",
                fix="use smaller batches, BalancedBackend(recompute=True), the true optimizer_state=, or a smaller "
                "memory= than these bytes, for which the model is planned again",
            )
            raise torch.OutOfMemoryError(str(text)) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, in a folder that is made if needed; a file that exists is replaced as a whole.

        Raises:
            ConfigError: the file cannot be written.
        """
        part = Path(f"{os.fspath(path)}.{os.getpid()}.part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise ConfigError(
                f"the plan cannot be written to {os.fspath(path)}: {error.strerror}",
                why="plan= and Plan.save take the path of a file that this process may write",
                fix="choose another path, or drop plan=",
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` has written.

        Raises:
            ConfigError: the file was not written by `save` of this version.
        """
        try:
            return _validate(cls(**_values(json.loads(Path(path).read_text()))))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{os.fspath(path)} is not a plan: {error}",
                why="it was not written by Plan.save of this version",
                fix=_FIX,
            ) from error

    def __str__(self) -> str:
        if not self.is_split:
            return f"{self.model}: not split, on {self.devices[0]}\n  why: {self.why}"
        count = len(self.devices) // self.pipelines
        ideal = ideal_speedup(count, self.microbatches, self.pipelines)
        speed = "" if self.speedup is None else f", {self.speedup:.2f}x as fast as one device"
        again = ", activations recomputed" if self.recompute else ""
        shape = f"{count} stages" if self.pipelines == 1 else f"{self.pipelines} pipelines of {count} stages"
        headline = f"{self.model}: {shape}, {self.microbatches} micro-batches{again}{speed} (ideal {ideal:.2f}x)"
        return "\n".join([headline, *_aligned([*map(self._stage, range(count))]), f"  why: {self.why}"])

    def _stage(self, index: int) -> list[str]:
        begin, end = self.bounds[index], self.bounds[index + 1]
        names = self.events[begin:end]
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        stages = len(self.devices) // self.pipelines
        row = [f"  {index}", " ".join(self.devices[index::stages]), span]
        if self.forward_s:
            both = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
            row.append(_bar_text("time", both, index))
        if any(self.memory_bytes):
            sizes = self.memory_bytes[:stages]  # the first pipeline needs the most
            row.append(f"{_bar_text('memory', sizes, index)} {sizes[index] / 2**20:.1f} MiB")
        return row


def plan(model: nn.Module) -> Plan:
    """Return the plan by which `backend="balanced"` splits a model over devices; `print` it to see the stages.

        with parallel_model(model, backend="balanced"):
            loss_of(model(x)).backward()
            print(parallelize.plan(model))

    Args:
        model: has run a batch inside a block like this one; the block may have ended.

    Raises:
        ConfigError: the model has no plan, because it has not run a batch yet.
    """
    found = _plans.get(model)
    if found is None:
        raise ConfigError(
            f"plan({type(model).__name__})",
            why="a plan is made from the first batch that the model runs under backend='balanced'",
            fix="run one batch first: with parallel_model(model, backend='balanced'): model(x)",
        )
    return found


def ideal_speedup(stages: int, microbatches: int, pipelines: int = 1) -> float:
    """Return the speedup of equal stages over one device if only filling and draining the pipelines cost time."""
    return stages * microbatches / (math.ceil(microbatches / pipelines) + stages - 1)


def remember(model: nn.Module, found: Plan) -> None:
    """Store a plan, which `plan(model)` then returns."""
    _plans[model] = found


def signature(model: nn.Module) -> str:
    """Return a hash that is equal for models with the same submodules and parameter shapes."""
    parts = [(name, type(module).__name__) for name, module in model.named_modules()]
    sizes = [(name, tuple(each.shape), str(each.dtype)) for name, each in model.named_parameters()]
    return hashlib.sha256(repr((parts, sizes)).encode()).hexdigest()[:16]


def _values(written: dict[str, Any]) -> dict[str, Any]:
    if written.pop("format", None) != _FORMAT:
        raise TypeError(f"its format is not {_FORMAT}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in written.items()}


def _validate(found: Plan) -> Plan:
    """Return the plan; raise TypeError or ValueError if a value has the wrong type or length."""
    wrong = []
    for name, kind in get_type_hints(Plan).items():
        value, first = getattr(found, name), (*get_args(kind), kind)[0]
        values = value if get_origin(kind) is tuple and isinstance(value, tuple) else (value,)
        is_none = value is None and type(None) in get_args(kind)
        if not is_none and not all(isinstance(each, _NUMBERS.get(first, first)) for each in values):
            wrong.append(name)
    if wrong:
        raise TypeError(f"wrong type of {', '.join(wrong)}")
    stages, rest = divmod(len(found.devices), max(1, found.pipelines))
    if not stages or rest or not 1 <= found.pipelines <= found.microbatches:
        raise ValueError("it needs a device for each stage of each pipeline, and a micro-batch for each pipeline")
    times = len(found.forward_s), len(found.backward_s)
    if times not in {(0, 0), (stages, stages)} or len(found.memory_bytes) not in {0, len(found.devices)}:
        raise ValueError("it needs two times of each stage, and a memory size per device")
    ends = [0, *found.bounds[1:-1], len(found.events)]
    if found.is_split and (len(found.bounds) != stages + 1 or list(found.bounds) != sorted(set(ends))):
        raise ValueError("its bounds do not match its events and devices")
    return found


def _bar_text(what: str, values: Sequence[float], index: int) -> str:
    share = values[index] / max(sum(values), 1e-12)
    filled = round(share * _BAR)
    return f"{'█' * filled}{'·' * (_BAR - filled)} {share:4.0%} of {what}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
