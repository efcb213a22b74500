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
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import override

from parallelize.agreement.gather import gather_objects
from parallelize.backends.auto.choice import Choice, choose, saved_choices
from parallelize.backends.auto.trial import facts_of, rates_of, tried
from parallelize.cluster.world import World
from parallelize.plugins.base import Backend, Engine, Inner
from parallelize.plugins.options import Parse, bytes_of_device, choice, path
from parallelize.plugins.registry import find
from parallelize.run.containers import leaves
from parallelize.run.context import current
from parallelize.torch_patches.module_tensors import all_parameters
from parallelize.torch_patches.step import AfterStep, after_step, parameters_of
from parallelize.torch_patches.transforms import refuse_transform

__all__ = ["AutoBackend"]

_log = logging.getLogger("parallelize")
_UNTIL_CHOSEN = Choice("ddp", {})
_STEPS = 10
"""Optimizer steps whose mean duration, without the first, is compared with the prediction."""


@dataclass(frozen=True, kw_only=True)
class AutoBackend(Backend):
    """The fastest engine that fits, by the bytes and seconds of the model's first batch.

    Until the first forward with gradients the model runs as under "ddp". Then its forward and backward are measured on
    each rank's device, with what the links between the ranks take, and bytes and seconds of every candidate are
    predicted. The fastest one that leaves a tenth of the memory free goes on, as if it had been named: the measurement
    leaves nothing behind. A model whose parameters and gradients do not fit on a device is sharded, or split, at once.

    Candidates with one process per device are "ddp" and "fsdp", with and without resharding after forward, over all
    ranks or over those of a node. With one process per node they are its first device, "dp" ("ddp2" over several
    nodes) and "balanced", which are run on the batch.

    Rank 0 logs the predictions as a table, and after ten optimizer steps what was measured. `print(f.explain())` shows
    the table of a choice that was saved.

    Args:
        memory: usable bytes of each device; None: what is free, on the CPU for one process of the node, within the
            limits of `ulimit -v` and `ulimit -d`.
        plan: file (JSON) in which the choice is kept: it is read instead of measuring the same model, with batches of
            about the same size and as large a state of optimizers, on as many devices of the same kind. Delete it to
            choose again. None: the choice is kept for the run.
        process_per: whether one process drives one "device" or all devices of a "node".
    """

    name = "auto"
    process_per: Literal["device", "node"] = "device"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset({"O0", "O1", "O3"})}
    places_model = True
    shards_gradients = True
    option_parsers: ClassVar[Mapping[str, Parse]] = {
        "process_per": choice("device", "node"),
        "memory": bytes_of_device,
        "plan": path,
    }
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
        self._options, self._inner, self._places = options, inner, places
        self._world: World = places["world"]
        self._device: torch.device = places["devices"][0]
        self._reporting, self._times = contextlib.ExitStack(), list[float]()
        choices = current().state.engine_choices
        if options.plan not in choices:
            choices[options.plan] = saved_choices(options.plan)
        self._kept = choices[options.plan]
        self._facts = functools.partial(
            facts_of, inner.model, self._world, places["devices"], options.memory, places["restore"]
        )
        is_large = next(all_parameters(inner.model)).is_meta
        for facts in self._of_ranks(self._facts()):
            is_large |= facts["parameters"] + facts["gradients"] > facts["memory"]
        if is_large:
            self._decide(None)
        else:
            self._take(_UNTIL_CHOSEN)

    @override
    def choose(self, inputs: Any) -> None:
        refuse_transform(
            "backend='auto' measures the model on the first batch, and a transform hides its values",
            fix="call the model once with a plain batch before, or use backend='ddp'",
        )
        with torch.compiler.set_stance("force_eager"):
            self._decide(inputs)

    def _decide(self, inputs: Any) -> None:
        """Go on with the choice that is kept, or choose by the facts of all ranks, measured unless inputs is None."""
        facts, world, model = self._facts(), self._world, type(self._inner.model).__name__
        kind = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type
        numbers = sum(each.numel() for each in leaves(inputs) if isinstance(each, torch.Tensor))
        devices = len(self._places["devices"])
        state = facts["optimizer state"] / max(1, facts["gradients"])
        key = (
            f"{model}, {facts['parameters']} bytes, {state:.1f} as many in optimizers, "
            f"batches of up to {1 << numbers.bit_length()} numbers, {world.world_size} processes, each with {devices} "
            f"{kind}, memory={self._options.memory}"
        )
        balanced: dict[str, Any] = {"memory": self._options.memory, "optimizer_state": state}
        kept = self._kept.get(key)
        ranks = self._of_ranks((None if kept is None else tuple(kept), world.local_world_size))
        fields, in_node = ranks[0]
        choice = None if fields is None else Choice(*fields)
        if choice is None:
            if inputs is not None:
                engines = {"dp": find("backends", "ddp2")(), "balanced": find("backends", "balanced")(**balanced)}
                found = tried(facts, self._inner, inputs, self._places, engines if devices > 1 else {})
                facts, balanced["plan"] = found
            in_node = in_node if all(size == in_node for _, size in ranks) else 1
            ranks = self._of_ranks(facts | rates_of(world, self._device, in_node))
            worst = {key: (min if key == "memory" else max)(each[key] for each in ranks) for key in ranks[0]}
            choice = choose(worst, model, world.world_size, in_node, devices)
            self._report(key, choice)
        self._take(choice, balanced=balanced)
        self.is_chosen, self.why = True, f"backend='auto' has chosen {choice}"

    def _take(self, choice: Choice, **options: Mapping[str, Any]) -> None:
        """Go on with an engine, and have its attributes; options: of an engine, beside those of the choice."""
        if choice.engine != self._choice.engine:
            backend = find("backends", choice.engine)(**choice.options, **options.get(choice.engine, {}))
            if not backend.places_model:
                self._inner.model.to(self._device)
            self._engine: Engine = backend.engine(self._inner, **self._places)
            for each in ("module", "local", "reduction", "replicas", "keeps_parameters", "refresh", "no_sync"):
                setattr(self, each, getattr(self._engine, each))
        self._choice = choice

    def _report(self, key: str, choice: Choice) -> None:
        """Keep a choice; on rank 0, log it, and after some steps what was measured."""
        self._kept[key] = choice
        if self._world.is_main:
            _log.info("%s", choice.table)
            self._reporting.enter_context(after_step(AfterStep.MEASURE, self._after_step))
            if self._options.plan is not None:
                Path(self._options.plan).write_text(json.dumps(self._kept, indent=1))

    def _of_ranks(self, value: Any) -> list[Any]:
        return gather_objects(value) if self._world.world_size > 1 else [value]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Log how long steps have taken, and the memory of an accelerator, beside the prediction."""
        # A hook of torch cannot leave while it runs, so that it stays until the block ends.
        is_reported = len(self._times) == _STEPS
        if is_reported or {*parameters_of(optimizer)}.isdisjoint(all_parameters(self._inner.model)):
            return
        self._times.append(time.perf_counter())
        if len(self._times) == _STEPS:
            step_s = (self._times[-1] - self._times[0]) / (_STEPS - 1)
            peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
            memory = f", at most {peak / 2**30:.3f} GiB allocated" if peak else ""
            _log.info("%s predicted; measured: %.1f ms%s", self._choice, step_s * 1000, memory)

    @property
    @override
    def is_replica(self) -> bool:
        return self._engine.is_replica

    @property
    @override
    def holds_buffers(self) -> bool:
        return self._engine.holds_buffers

    @override
    def close(self, *, failed: bool) -> None:
        self._reporting.close()
        self._engine.close(failed=failed)
