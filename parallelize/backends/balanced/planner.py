"""From a model and its first batch to a plan.

1  place      whole on the loop's device if it fits there, else spread by bytes: just so that it can run
2  observe    time every submodule once; the atoms are those that take a small part of the whole
3  profile    each atom, forward and backward, on two sizes of micro-batch
4  choose     the schedule with the least predicted step, under every device's memory
5  try        the best few, beside the undivided model; if they do not win, the model is left alone
6  compare    outputs of micro-batches with those of the whole batch

Submodules and parameters run their hooks meanwhile; buffers, generators and gradients are as before when it is done.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from parallelize.backends.balanced import refusals, state_snapshot, units
from parallelize.backends.balanced.costs import Profile, Spot
from parallelize.backends.balanced.initial_placement import at, spread
from parallelize.backends.balanced.microbatch_split_join import batch_size, take, uneven
from parallelize.backends.balanced.opaque_inputs import divisible
from parallelize.backends.balanced.plan import Plan, signature
from parallelize.backends.balanced.plan_validation import Trial, threads
from parallelize.backends.balanced.profiling import Bench, bytes_of_modules, profile, seconds_of_modules
from parallelize.backends.balanced.schedule import Memory, Schedule, best, candidates, fits_whole, needed_cap
from parallelize.backends.balanced.side_effects import bearing_parts, observed, ordinary
from parallelize.backends.balanced.stage_placement import Placement
from parallelize.backends.balanced.stage_threads import places
from parallelize.backends.balanced.user_forward import Forward

__all__ = ["Planner", "Wishes"]

_log = logging.getLogger(__name__)

# A pipeline that wins less than this is not worth its trouble.
_GAIN = 1.03
_TRIED = 2


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """One kind of atoms: what they divide, into how many parts per device (None: into all there are)."""

    of: Literal["time", "bytes"]
    parts: int | None
    recompute: bool


_BALANCED = _Attempt(of="time", parts=8, recompute=False)
_FRUGAL = _Attempt(of="bytes", parts=2, recompute=True)
_FINEST = _Attempt(of="bytes", parts=None, recompute=False)
# What recompute= allows.
_ATTEMPTS: Mapping[bool | str, Sequence[_Attempt]] = {
    "auto": (_BALANCED, _FRUGAL, _FINEST, replace(_FINEST, recompute=True)),
    True: (replace(_FRUGAL, of="time"), _FRUGAL, replace(_FINEST, recompute=True)),
    False: (_BALANCED, _FINEST),
}


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user has decided.

    Args:
        microbatches: how many; None: what is fastest.
        recompute: activations in backward: True, False, or "auto": if nothing fits otherwise.
        optimizer_state: bytes that the optimizer keeps, per byte of a trained parameter.
        batch_dim: of the inputs.
    """

    microbatches: int | None = None
    recompute: bool | Literal["auto"] = "auto"
    optimizer_state: float = 2.0
    batch_dim: int = 0


@dataclass(frozen=True)
class _Found:
    schedule: Schedule
    profile: Profile
    memory: Memory
    dims: Mapping[int, int | None]
    form: tuple[int | None, ...]


class Planner:
    """Plans one model.

    Args:
        module: what runs a micro-batch: the user's forward, in the block's precision.
        model: the user's.
        spots: the devices.
        home: where the loop has its targets.
        placement: moves the model.
        wishes: the user's.
    """

    def __init__(
        self,
        module: Forward,
        *,
        model: nn.Module,
        spots: Sequence[Spot],
        home: torch.device,
        placement: Placement,
        wishes: Wishes,
    ) -> None:
        self._module = module
        self._model = model
        self._spots = list(spots)
        self._home = home
        self._placement = placement
        self._wishes = wishes
        self._devices = frozenset(torch.device(spot.device) for spot in spots)

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """The plan for batches like this one.

        Raises:
            ConfigError: a model that cannot be divided, or that fits nowhere.
        """
        untouched = state_snapshot.untouched(self._model, self._devices)
        with torch.inference_mode(mode=False), torch.enable_grad(), untouched:
            inputs = ordinary((args, kwargs))
            self._samples = batch_size(inputs, dim=self._wishes.batch_dim)
            if self._wishes.microbatches != 1:
                divisible(inputs, samples=self._samples, dim=self._wishes.batch_dim)
            self._whole_inputs = tuple(sorted(uneven(inputs, dim=self._wishes.batch_dim)))
            return self._plan(inputs)

    def _plan(self, inputs: Any) -> Plan:
        weight = 1 + _trained_share(self._model) * (1 + self._wishes.optimizer_state)
        stages, table = spread(self._model, self._spots, home=self._home, bytes_per_byte=weight)
        self._placement.put(units.homes(self._model, table), stages)
        with threads(stages, microbatches=1) as workers:
            bench = Bench(
                module=self._module,
                model=self._model,
                stages=stages,
                routes=table,
                workers=workers,
                batch_dim=self._wishes.batch_dim,
            )
            if not table:
                return self._alone("it calls no submodules between which it could be divided")
            microbatches = self._wishes.microbatches
            with bearing_parts(bench, inputs, microbatches=microbatches):
                bench = observed(bench, self._part(inputs), microbatches=microbatches)
                if not bench.run(self._part(inputs)).events:
                    return self._alone("all of its submodules are called in one checkpoint, which is not divided")
                found = self._fitting(bench, inputs)
        trial = Trial(
            module=self._module,
            model=self._model,
            inputs=inputs,
            placement=self._placement,
            home=self._home,
            batch_dim=self._wishes.batch_dim,
        )
        if len(stages) == 1 and fits_whole(found.profile, at(self._home, self._spots), memory=found.memory):
            self._placement.put(units.homes(self._model, table), stages)
            found = replace(found, profile=replace(found.profile, unsplit_s=trial.undivided_s()))
        plan = self._chosen(found, trial, draws=bench.draws)
        if plan.is_split:
            trial.compare(plan)
            _log.info("%s", plan)
        return plan

    def _fitting(self, bench: Bench, inputs: Any) -> _Found:
        """The best schedule of the first kind of atoms with which anything fits.

        Small atoms balance best; large ones keep least when they are recomputed; the smallest there are fit where
        nothing else does. The cap that an error names is of atoms that are chosen by their bytes: those that are chosen
        by their time are others at every call, and so would be the cap.

        Raises:
            ConfigError: nothing fits.
        """
        part = self._part(inputs)
        seconds = seconds_of_modules(bench, part)
        kept = bytes_of_modules(bench, part, called=seconds)
        tops = units.separate(self._model, kept, at_most=math.inf)
        wholes: dict[str, tuple[Mapping[int, float], float]] = {
            "time": (seconds, sum(bench.run(part).forward_s)),
            "bytes": (kept, sum(kept.get(id(each), 0.0) for each in tops)),
        }
        where = {id(module): stage for module, stage in units.homes(self._model, bench.routes)}
        needed = math.inf
        for attempt in _ATTEMPTS[self._wishes.recompute]:
            costs, total = wholes[attempt.of]
            at_most = total / (attempt.parts * len(self._spots)) if attempt.parts else -1.0
            found = units.separate(self._model, costs, at_most=at_most)
            divided = replace(bench, routes={id(module): [where[id(module)]] for module in found})
            self._placement.put(units.homes(self._model, divided.routes), bench.stages)
            is_whole = self._wishes.microbatches == 1
            measured, dims, form = profile(divided, inputs, samples=self._samples, is_whole=is_whole)
            measured = replace(measured, trained_share=_trained_share(self._model))
            memory = Memory(optimizer_state=self._wishes.optimizer_state, recompute=attempt.recompute)
            choose: dict[str, Any] = {"microbatches": self._wishes.microbatches, "memory": memory}
            schedule = best(measured, self._spots, **choose)
            if schedule is not None:
                return _Found(schedule, measured, memory, dims, form)
            if attempt.of == "bytes":
                needed = min(needed, needed_cap(measured, self._spots, **choose))
        raise refusals.too_large(needed, [spot.device for spot in self._spots], is_measured=True)

    def _part(self, inputs: Any) -> Any:
        """What a micro-batch may be."""
        count = 1 if self._wishes.microbatches == 1 else 2
        return take(inputs, max(1, self._samples // count), dim=self._wishes.batch_dim)

    def _chosen(self, found: _Found, trial: Trial, *, draws: bool) -> Plan:
        plan = self._described(found, found.schedule, draws=draws)
        unsplit_s, predicted_s = found.profile.unsplit_s, found.schedule.predicted_s
        if self._wishes.microbatches is not None or unsplit_s is None:
            return plan
        if len(plan.devices) == 1:
            count = len(self._spots)
            return self._alone(
                "there is one device" if count == 1 else f"no division over {count} devices is faster", plan
            )
        if unsplit_s < _GAIN * predicted_s:
            return self._alone(f"a step takes {_ms(unsplit_s)}, divided it would take {_ms(predicted_s)}", plan)
        others = [self._described(found, each, draws=draws) for each in self._alternatives(found)]
        tried = [replace(each, measured_s=trial.divided_s(each)) for each in [plan, *others][:_TRIED]]
        plan = min(tried, key=lambda each: each.measured_s or math.inf)
        if unsplit_s < _GAIN * (plan.measured_s or math.inf):
            return self._alone(f"a step takes {_ms(unsplit_s)}, divided {_ms(plan.measured_s or math.inf)}", plan)
        return plan

    def _alternatives(self, found: _Found) -> list[Schedule]:
        """Other numbers of micro-batches, the best predictions first."""
        every = candidates(found.profile, self._spots, microbatches=None, memory=found.memory)
        best_of: dict[int, Schedule] = {found.schedule.microbatches: found.schedule}
        for each in sorted(every, key=lambda each: each.predicted_s):
            if len(each.spots) > 1:
                best_of.setdefault(each.microbatches, each)
        return list(best_of.values())[1:]

    def _described(self, found: _Found, schedule: Schedule, *, draws: bool) -> Plan:
        measured = found.profile
        fits = measured.unsplit_s is not None
        return Plan(
            model=type(self._model).__name__,
            signature=signature(self._model),
            samples=measured.samples,
            events=tuple(event.atom for event in measured.events),
            bounds=schedule.bounds,
            devices=tuple(spot.device for spot in schedule.spots),
            microbatches=schedule.microbatches,
            recompute=schedule.recompute,
            forward_s=schedule.forward_s,
            backward_s=schedule.backward_s,
            memory_bytes=schedule.memory_bytes,
            unsplit_s=measured.unsplit_s,
            predicted_s=schedule.predicted_s,
            why="of all divisions this has the shortest predicted step"
            + ("; the model fits on one device, where backend='ddp' is normally faster" if fits else "")
            + ("; without recomputing, no division fits" if schedule.recompute else ""),
            draws=draws,
            evaluated=tuple(name for name, module in self._model.named_modules() if not module.training),
            whole_inputs=self._whole_inputs,
            output_dims=tuple(found.dims.items()),
            output_form=found.form,
        )

    def _alone(self, why: str, plan: Plan | None = None) -> Plan:
        self._placement.put(units.homes(self._model, {}), places([self._home]))
        found = plan or Plan(
            model=type(self._model).__name__,
            signature=signature(self._model),
            samples=self._samples,
            events=(),
            bounds=(0,),
            devices=(str(self._home),),
            microbatches=1,
        )
        alone = replace(
            found, is_split=False, devices=(str(self._home),), why=f"no gain: {why}; consider backend='ddp'"
        )
        _log.warning("%s", alone)
        return alone


def _trained_share(model: nn.Module) -> float:
    total = sum(each.numel() for each in model.parameters())
    return sum(each.numel() for each in model.parameters() if each.requires_grad) / max(1, total)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
