"""Watch of optimizer steps: compares the gradients across ranks whose averaging is not recorded.

A gradient that an engine has averaged passes. Any other one is compared: if it is equal on all ranks, because the user
has averaged it or because it does not depend on the batch, it passes, too. All gradients are compared in some steps (1,
2, 4, 8, ...), and after these the weights, which finds gradients that were changed after their averaging, now or in an
earlier step. Weights are not compared before: each rank may perturb its own until the step, as m-SAM does.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parallelize.errors import SyncError
from parallelize.inplace.forward_routing import routed_parameter_ids
from parallelize.inplace.gradient_origins import (
    ASSIGNED,
    BYPASSED,
    CHANGED,
    REPLACED,
    UNFROZEN,
    UNMANAGED,
    GradientTracker,
    Reason,
    origins,
    record,
)
from parallelize.plugins.base import Session
from parallelize.runtime.gradients import change_closure, followed_by, is_capturing, is_in_backward, parameters_of
from parallelize.runtime.rank_comparison import Meeting, differences, differs_by_rounding, unequal_error

__all__ = ["claim_gradients", "leave_gradient", "leave_gradients", "watch_steps"]


_accumulations, _params = attrgetter("accumulations"), itemgetter("params")


class _Suspect(NamedTuple):
    """A gradient to compare; `reason` is None if an engine has averaged it."""

    name: str
    parameter: torch.Tensor
    reason: Reason | None


@dataclass(eq=False)
class _Plan:
    """What to check before the steps of one optimizer.

    Args:
        held: all parameters of the optimizer.
        generation: number of changes of the watched models, as far as the plan knows them.
        checked: name, parameter, and the reason for a gradient of unknown origin.
        always: those whose gradients are never averaged by an engine.
        untracked: those in `checked` that no tracker records, such as frozen ones.
        trackers: of the models whose parameters the optimizer holds.
        checks: number of checks so far.
        checks_before_step: this number before the running or latest step.
        accumulations: of these models before the latest step; -1: no step yet.
        stepped: the averaged parameters of the running step, if all gradients were compared in it.
    """

    held: list[Any] = field(default_factory=list)
    generation: int = -1
    checked: list[tuple[str, Any, Reason]] = field(default_factory=list)
    always: list[tuple[str, Any, Reason]] = field(default_factory=list)
    untracked: list[tuple[str, Any, Reason]] = field(default_factory=list)
    trackers: list[GradientTracker] = field(default_factory=list)
    checks: int = 0
    checks_before_step: int = 0
    accumulations: int = -1
    stepped: list[_Suspect] = field(default_factory=list)


class _Left(NamedTuple):
    """A gradient of unknown origin, after the block in which it was computed."""

    name: str
    gradient: ref[torch.Tensor]
    reason: Reason


class _StepWatch:
    """Hooks on all optimizer steps, while models are in blocks and until the gradients that they leave are freed."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[nn.Module, GradientTracker | None, Session]] = {}
        self._generation = 0
        self._plans: WeakKeyDictionary[torch.optim.Optimizer, _Plan] = WeakKeyDictionary()
        self._left: dict[int, _Left] = {}
        self._handles = contextlib.ExitStack()
        self._is_installed = False

    @contextlib.contextmanager
    def watching(self, model: nn.Module, tracker: GradientTracker | None, session: Session) -> Iterator[None]:
        """Watch, while the context lasts, the steps of all optimizers that hold a parameter of a model in a block.

        Args:
            model: the model.
            tracker: knows which gradients its engine has averaged; None: the engine shards parameters.
            session: knows the master parameters that optimizers hold for the model's.
        """
        self._watched[id(model)] = model, tracker, session
        self._generation += 1
        self._update_hooks()
        try:
            yield
        finally:
            del self._watched[id(model)]
            self._generation += 1
            self._update_hooks()

    def leave(self, parameter: torch.Tensor, name: str, reason: Reason) -> None:
        """Watch a gradient after its block, until it is freed or replaced."""
        if parameter.grad is not None:
            # A weak reference keeps no gradient alive.
            gradient = ref(parameter.grad, functools.partial(self._forget, id(parameter)))
            self._left[id(parameter)] = _Left(name, gradient, reason)
            self._update_hooks()

    def claim_all(self, model: nn.Module) -> None:
        """Record, at the entry of a block, why gradients of a model from an earlier block may differ between ranks."""
        for parameter in model.parameters():
            left = self._left.pop(id(parameter), None)
            origins.pop(id(parameter), None)
            if left is not None and left.gradient() is parameter.grad:
                record(parameter, left.reason)

    def leave_all(self, model: nn.Module) -> None:
        """Watch the gradients of a model that its engine has not averaged, at the end of its block."""
        for name, parameter in model.named_parameters():
            gradient, reason = origins.pop(id(parameter), (None, None))
            if gradient is not None and reason is not None and gradient() is parameter.grad:
                self.leave(parameter, f"{name} of {type(model).__name__}", reason)
        if not self._watched:
            self._plans.clear()
            origins.clear()

    def _forget(self, parameter_id: int, _: Any) -> None:
        self._left.pop(parameter_id, None)
        self._update_hooks()

    def _update_hooks(self) -> None:
        is_needed = bool(self._watched or self._left)
        if is_needed is self._is_installed:
            return
        self._is_installed = is_needed
        if is_needed:
            self._handles.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            self._handles.callback(register_optimizer_step_post_hook(self._after_step).remove)
        else:
            self._handles.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check an optimizer's gradients before its step, or at the end of each call of the step's closure."""
        plan = self._plan_of(optimizer) if self._watched else None
        if self._left:
            self._compare(optimizer, self._left_suspects(optimizer))
        if plan is None:
            return None
        if plan.trackers and is_in_backward():
            raise SyncError(
                f"{type(optimizer).__name__}.step() inside backward, on parameters that are in a parallel_model block",
                why="the averaging of gradients over the ranks is complete only when backward ends",
                fix="call step() after backward(), not from a hook in it",
            )
        plan.checks_before_step, plan.stepped = plan.checks, []
        if len(args) > 1 or kwargs:
            check = functools.partial(self._check, optimizer, plan)
            checked = change_closure(functools.partial(followed_by, check), args, kwargs)
            if checked is not None:
                return checked
        self._check(optimizer, plan)
        return None

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        plan = self._plans.get(optimizer)
        if plan is None or not (plan.checked or plan.always):
            return
        if plan.checks == plan.checks_before_step:  # the optimizer has not called its closure
            self._check(optimizer, plan)
        plan.accumulations = sum(map(_accumulations, plan.trackers))
        for index, rank in differences([each.parameter for each in plan.stepped]):
            name, weight, _ = plan.stepped[index]
            if not differs_by_rounding(weight):
                when = f"after step {plan.checks} of {type(optimizer).__name__} (compared after steps 1, 2, 4, ...)"
                raise unequal_error(name, rank, when=when)

    def _plan_of(self, optimizer: torch.optim.Optimizer) -> _Plan | None:
        """Return the plan of an optimizer; None if it holds no parameter of a watched model."""
        plan = self._plans.get(optimizer) or self._plans.setdefault(optimizer, _Plan())
        held = list(chain.from_iterable(map(_params, optimizer.param_groups)))
        is_current = plan.generation == self._generation and len(plan.held) == len(held)
        if not is_current or not all(map(is_, held, plan.held)):
            plan.held, plan.generation = held, self._generation
            self._fill(plan, type(optimizer).__name__)
        return plan if plan.checked or plan.always else None

    def _fill(self, plan: _Plan, optimizer_name: str) -> None:
        plan.checked, plan.always, plan.trackers = [], [], []
        model_of = {
            id(parameter): (f"{name} of {type(model).__name__}", name, tracker)
            for model, tracker, _ in self._watched.values()
            for name, parameter in model.named_parameters()
        }
        masters = {key: id(each) for *_, session in self._watched.values() for key, each in session.masters().items()}
        parameter_ids = [masters.get(id(each), id(each)) for each in plan.held]
        if not any(each in model_of for each in parameter_ids):
            return
        routed_ids = routed_parameter_ids()
        position = {key: index for index, key in enumerate(model_of)}
        # In the models' order: the parameters of an optimizer that was given a set have another order on each rank.
        held = sorted(zip(parameter_ids, plan.held, strict=True), key=lambda each: position.get(each[0], len(position)))
        for parameter_id, each in held:
            full_name, name, tracker = model_of.get(parameter_id, ("", "", None))
            if tracker is not None and id(each) in masters:
                plan.always.append((full_name, each, BYPASSED))
            elif tracker is not None:
                plan.checked.append((full_name, each, ASSIGNED if tracker.averages(name) else UNFROZEN))
                if tracker not in plan.trackers:
                    plan.trackers.append(tracker)
            # A DTensor belongs to a model in an fsdp block, even while a full parameter is registered in its place.
            elif id(each) not in routed_ids and not hasattr(each, "full_tensor"):
                plan.always.append((f"a parameter of shape {tuple(each.shape)} in {optimizer_name}", each, UNMANAGED))
        tracked = {id(each) for tracker in plan.trackers for each in tracker.parameters}
        plan.untracked = [each for each in plan.checked if id(each[1]) not in tracked]

    def _check(self, optimizer: torch.optim.Optimizer, plan: _Plan) -> None:
        plan.checks += 1
        are_averaged = True
        for tracker in plan.trackers:
            are_averaged = tracker.has_averaged_all() and are_averaged
        is_assigned = plan.accumulations == sum(map(_accumulations, plan.trackers))
        # Nothing can be read while a CUDA graph is captured.
        is_sampled = not plan.checks & (plan.checks - 1) and not is_capturing()
        are_averaged = are_averaged and not is_assigned and not is_sampled
        if are_averaged and not plan.always and not plan.untracked:
            return
        if not are_averaged:
            for tracker in plan.trackers:
                tracker.store_averaged()
        always = [_Suspect(*each) for each in plan.always if each[1].requires_grad or each[1].grad is not None]
        suspects: list[_Suspect] = []
        for name, parameter, reason in plan.untracked if are_averaged else plan.checked:
            gradient = parameter.grad
            if gradient is None:
                continue
            origin = origins.get(id(parameter))
            if is_assigned or origin is None:
                suspects.append(_Suspect(name, parameter, reason))
            elif origin[0]() is not gradient:
                suspects.append(_Suspect(name, parameter, REPLACED if origin[1] is None else ASSIGNED))
            elif origin[1] is not None or is_sampled:
                suspects.append(_Suspect(name, parameter, origin[1]))
        self._compare(optimizer, always + suspects)
        plan.stepped = suspects if is_sampled else plan.stepped

    def _left_suspects(self, optimizer: torch.optim.Optimizer) -> list[_Suspect]:
        held = [(each, self._left[id(each)]) for each in parameters_of(optimizer) if id(each) in self._left]
        return [_Suspect(left.name, each, left.reason) for each, left in held if left.gradient() is each.grad]

    def _compare(self, optimizer: torch.optim.Optimizer, suspects: Sequence[_Suspect]) -> None:
        if not suspects:
            return
        unknown = [each for each in suspects if each.reason is not None]
        first = unknown[0] if unknown else suspects[0]
        reason = first.reason or CHANGED
        if not dist.is_initialized():
            raise reason.error(first.name, ", and no process group is left in which it could be compared")
        names = [each.name for each in unknown]
        digest = zlib.crc32(repr((names, len(suspects))).encode())
        listed = first.name if len(suspects) == 1 else f"{first.name} and {len(suspects) - 1} more"
        absent = Meeting(f"{type(optimizer).__name__}.step with the gradient of {listed} ({digest:08x})").wait()
        if absent:
            raise _absent_error(first, absent)
        for index, rank in differences([each.parameter.grad for each in suspects]):
            found = suspects[index]
            if found.reason is not None or not differs_by_rounding(found.parameter.grad):
                raise (found.reason or CHANGED).error(found.name, f": it differs between rank 0 and rank {rank}")


_watch = _StepWatch()
claim_gradients = _watch.claim_all
leave_gradient = _watch.leave
leave_gradients = _watch.leave_all
watch_steps = _watch.watching


def _absent_error(suspect: _Suspect, absent: str) -> SyncError:
    """Build the error for a gradient that only some ranks compare."""
    reason = suspect.reason
    fix = "make the same backward passes and steps on every rank, without `if rank() == 0`"
    if reason is not None:
        error = f"the gradient of {suspect.name} is not averaged over the ranks, and cannot be compared: {absent}"
        return SyncError(error, why=reason.why, fix=f"{fix}; or {reason.fix}")
    why = "the gradients of one rank come from other backward passes than those of another"
    return SyncError(f"ranks step on different gradients: {absent}", why=why, fix=fix)
