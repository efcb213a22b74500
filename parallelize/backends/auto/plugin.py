"""The "auto" backend: the fastest engine that fits, chosen at the first forward of a block with gradients."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from parallelize.backends.auto.choice import Choice, Facts, choose, saved_choices
from parallelize.backends.auto.trial import facts_of, links_of, tried
from parallelize.cluster.world import World
from parallelize.plugins.base import Backend, Engine, Inner
from parallelize.plugins.registry import find
from parallelize.runtime.context import current
from parallelize.torch_patches.step import after_step, parameters_of

__all__ = ["AutoBackend"]

_log = logging.getLogger("parallelize")
_UNTIL_CHOSEN = Choice("ddp", {})
_STEPS = 10
"""Optimizer steps whose mean duration, without the first, is compared with the prediction."""


@dataclass(frozen=True, kw_only=True)
class AutoBackend(Backend):
    """The fastest engine that fits, "ddp" or one of "fsdp", by the bytes and seconds of the model's first batch.

    Until the first forward with gradients the model runs as under "ddp". Then its forward and backward are measured on
    each rank's device, with what the links between the ranks take, and bytes and seconds of every candidate are
    predicted. The fastest one that leaves a tenth of the memory free goes on, as if it had been named: the measurement
    leaves nothing behind. A model whose parameters alone do not fit on a device is sharded at once.

    Rank 0 logs the predictions as a table, and after ten optimizer steps what was measured. `print(f.explain())` shows
    the table of a choice that was saved.

    Args:
        memory: usable bytes of each device; None: what is free, on the CPU for one process of the node, within the
            limits of `ulimit -v` and `ulimit -d`.
        plan: file (JSON) in which the choice is kept: it is read instead of measuring the same model on as many
            devices of the same kind. Delete it to choose again, as for larger batches. None: it is kept for the run.
    """

    name = "auto"
    process_per = "device"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset({"O0", "O1", "O3"})}
    places_model = True
    shards_gradients = True
    memory: int | None = None
    plan: str | None = None

    @property
    @override
    def note(self) -> str:
        tables = "\n".join(each.table for each in saved_choices(self.plan).values())
        return tables or "the engine is chosen at the first forward; the table is logged at logging.INFO"

    @override
    def engine(self, inner: Inner, **places: Any) -> Engine:
        """Return an engine that runs the model as "ddp" does until the choice is made."""
        return _AutoEngine(self, inner, **places)


class _AutoEngine(Engine):
    """Has the attributes of the engine that runs the model, which `choose` may replace.

    Args:
        options: options of the backend.
        inner: calls the user's forward.
        **places: other arguments of `Backend.engine`.
    """

    is_chosen = False
    _choice = Choice("", {})  # no engine yet

    def __init__(self, options: AutoBackend, inner: Inner, **places: Any) -> None:
        world: World
        model, world, device = inner.model, places["world"], places["devices"][0]
        self._inner, self._world, self._device, self._path = inner, world, device, options.plan
        self._places, n = places, world.world_size
        self._reporting, self._times = contextlib.ExitStack(), list[float]()
        self._facts = functools.partial(facts_of, model, world, device, options.memory, places["restore"])
        facts, kind = self._facts(), torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._key = (
            f"{type(model).__name__}, {facts['parameters']} bytes, {n} processes, {kind}, memory={options.memory}"
        )
        self._kept = current().states.setdefault(f"{__name__} {options.plan}", saved_choices(options.plan))
        ranks = self._of_ranks((facts, self._kept.get(self._key)))
        if ranks[0][1] is not None:
            self._take(ranks[0][1])
        elif (
            any(each["parameters"] + each["gradients"] > each["memory"] for each, _ in ranks)
            or next(model.parameters()).is_meta
        ):
            self._decide(facts)
        else:
            self._take(_UNTIL_CHOSEN)

    @override
    def choose(self, inputs: Any) -> None:
        with torch.compiler.set_stance("force_eager"):
            self._decide(tried(self._facts(), self._inner, inputs, self._world, self._device))

    def _decide(self, facts: Facts) -> None:
        """Choose by the facts of all ranks, and go on with the choice."""
        ranks = self._of_ranks(facts | links_of(self._world, self._device))
        worst = {key: (min if key == "memory" else max)(each[key] for each in ranks) for key in ranks[0]}
        self._take(choose(worst, type(self._inner.model).__name__, self._world.world_size))
        if self._world.is_main:
            _log.info("%s", self._choice.table)
            self._reporting.callback(after_step(self._after_step).remove)
            if self._path is not None:
                Path(self._path).write_text(json.dumps(self._kept, indent=1))

    def _take(self, choice: Choice) -> None:
        """Go on with an engine, and have its attributes."""
        if choice.engine != self._choice.engine:
            backend = find("backends", choice.engine)(**choice.options)
            if not backend.places_model:
                self._inner.model.to(self._device)
            self._engine: Engine = backend.engine(self._inner, **self._places)
            for each in ("module", "local", "reduction", "replicas", "keeps_parameters", "refresh", "no_sync"):
                setattr(self, each, getattr(self._engine, each))
        self._choice = choice
        if choice is not _UNTIL_CHOSEN:
            self._kept[self._key] = choice
            self.is_chosen, self.why = True, f"backend='auto' has chosen {choice}"

    def _of_ranks(self, value: Any) -> list[Any]:
        found = [value] * self._world.world_size
        if len(found) > 1:
            dist.all_gather_object(found, value)
        return found

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Log how long steps have taken, and the memory of an accelerator, beside the prediction."""
        if not {*parameters_of(optimizer)}.isdisjoint(self._inner.model.parameters()):
            self._times.append(time.perf_counter())
        if len(self._times) == _STEPS:
            self._reporting.close()
            step_s = (self._times[-1] - self._times[0]) / (_STEPS - 1)
            peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
            memory = f", at most {peak / 2**30:.3f} GiB allocated" if peak else ""
            _log.info("%s predicted; measured: %.1f ms%s", self._choice, step_s * 1000, memory)

    @property
    @override
    def is_replica(self) -> bool:
        return self._engine.is_replica

    @override
    def close(self, *, failed: bool) -> None:
        self._reporting.close()
        self._engine.close(failed=failed)
