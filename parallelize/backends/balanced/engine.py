"""One model's pipeline while a block lasts: planned when the first batch comes, given back at the end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from parallelize.backends.balanced import refusals, units
from parallelize.backends.balanced.hardware import spots
from parallelize.backends.balanced.microbatch_run import active
from parallelize.backends.balanced.opaque_inputs import carriers
from parallelize.backends.balanced.pipeline import Pipeline
from parallelize.backends.balanced.plan import Plan, remember, signature
from parallelize.backends.balanced.plan_validation import wired
from parallelize.backends.balanced.planner import Planner, Wishes
from parallelize.backends.balanced.stage_placement import Placement
from parallelize.backends.balanced.stage_threads import Workers, places
from parallelize.backends.balanced.stage_transfer import watching
from parallelize.backends.balanced.user_forward import Forward
from parallelize.backends.ddp_engine import Averaging, averaging_engine
from parallelize.plugins.base import Engine, Inner
from parallelize.runtime.containers import map_leaves

__all__ = ["BalancedEngine", "Request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user has asked for, and where it runs.

    Args:
        devices: of the pipeline.
        home: where the loop has its targets.
        memory: bytes to use of each device.
        wishes: for the plan.
        plan: an earlier one; None: one is made.
        averaging: how gradients are averaged over other processes; None: there are none.
    """

    devices: tuple[torch.device, ...]
    home: torch.device
    memory: int | tuple[int, ...] | None
    wishes: Wishes
    plan: Plan | None
    averaging: Averaging | None


class BalancedEngine(Engine):
    """One model's pipeline.

    Args:
        inner: calls the user's forward.
        request: where and how.
    """

    spreads_inputs = True
    is_rebuildable = False

    def __init__(self, inner: Inner, request: Request) -> None:
        self.module = _Entry(inner, self)
        self.local = _Entry(inner, self, is_local=True)
        self.averages = request.averaging is not None
        self._inner = inner
        self._forward = Forward(inner)
        self._request = request
        self._reduced: Engine | None = None
        self._running: nn.Module | None = None
        self._is_paused = False
        self._given_back = contextlib.ExitStack()
        self._placement = Placement(inner.model)
        self._given_back.enter_context(watching())
        self._given_back.enter_context(self._placement.at_work())

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_local: bool) -> Any:
        """A batch through the pipeline; the first one plans it."""
        if self._running is None:
            if (is_local and self.averages) or (not torch.is_grad_enabled() and carriers((args, kwargs))):
                # A rank that evaluates before anybody has trained is alone: it cannot ask for a plan. Nor can one be
                # made with a cache that forward fills.
                return _Whole(self._inner, device=self._where(), home=self._request.home)(*args, **kwargs)
            self._begin(args, kwargs)
        assert self._running is not None  # begun
        if self._reduced is None or is_local:
            return self._running(*args, **kwargs)
        return self._reduced.module(*args, **kwargs)

    @override
    def is_reduced(self, *, in_backward: bool) -> bool:
        return self._reduced is None or self._reduced.is_reduced(in_backward=in_backward)

    @override
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            with contextlib.nullcontext() if self._reduced is None else self._reduced.no_sync():
                yield
        finally:
            self._is_paused = before
            self._synchronise()

    @override
    def close(self, *, failed: bool) -> None:
        try:
            if self._reduced is not None:
                self._reduced.close(failed=failed)
        finally:
            self._given_back.close()
            self._running = None

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model, request = self._inner.model, self._request
        plan = self._agreed(args, kwargs)
        remember(model, plan)
        if plan.is_split:
            running: nn.Module = self._pipeline(plan)
        else:
            self._placement.put(units.homes(model, {}), places([request.home]))
            running = _Whole(self._inner, device=request.home, home=request.home)
        if request.averaging is not None:
            self._reduced = averaging_engine(request.averaging, running, inner=self._inner, device=request.home)
            self._synchronise()
        self._running = running

    def _pipeline(self, plan: Plan) -> Pipeline:
        model, request = self._inner.model, self._request
        wiring = wired(plan, model, batch_dim=request.wishes.batch_dim, home=request.home)
        self._placement.put(units.homes(model, wiring.routes), wiring.stages)
        workers = Workers(wiring.stages, microbatches=plan.microbatches)
        self._given_back.callback(workers.close)
        is_given = request.plan is not None
        return Pipeline(self._inner, self._forward, plan=plan, wiring=wiring, workers=workers, is_given=is_given)

    def _where(self) -> torch.device:
        return next((each.device for each in self._inner.model.parameters()), self._request.home)

    def _agreed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """The plan of rank 0, on every rank."""
        given = self._request.plan
        if given is not None:
            self._check(given)
            return given
        if not self.averages:
            return self._made(args, kwargs)
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                found = [self._made(args, kwargs)]
            except Exception as error:  # noqa: BLE001  # raised below, on every rank: the others must not wait for a plan
                found = [error]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], Exception):
            raise found[0]
        plan: Plan = found[0]
        return plan

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        request = self._request
        planner = Planner(
            self._forward,
            model=self._inner.model,
            spots=spots(request.devices, memory=request.memory, model=self._inner.model),
            home=request.home,
            placement=self._placement,
            wishes=request.wishes,
        )
        return planner.plan(args, kwargs)

    def _check(self, plan: Plan) -> None:
        model = self._inner.model
        mine = signature(model)
        if plan.signature != mine:
            raise refusals.another_model(f"{plan.model} {plan.signature}", f"{type(model).__name__} {mine}")
        there = {str(device) for device in (*self._request.devices, self._request.home)}
        if not set(plan.devices) <= there:
            raise refusals.another_model(f"devices {', '.join(plan.devices)}", f"a run on {', '.join(sorted(there))}")

    def _synchronise(self) -> None:
        """Let the next backward average, or not: a no_sync may have begun before there was anything to pause."""
        module = None if self._reduced is None else self._reduced.module
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module.require_backward_grad_sync = not self._is_paused


class _Entry(nn.Module):
    """What a routed call runs, from the first batch to the last."""

    def __init__(self, inner: Inner, engine: BalancedEngine, *, is_local: bool = False) -> None:
        super().__init__()
        self._inner = inner
        self._engine = engine
        self._is_local = is_local

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if active() is not None:  # the model calls itself
            return self._inner.with_weights(*args, **kwargs)
        return self._engine.run(args, kwargs, is_local=self._is_local)


class _Whole(nn.Module):
    """The model, left alone on one device."""

    def __init__(self, inner: Inner, *, device: torch.device, home: torch.device) -> None:
        super().__init__()
        self.inner = inner
        self._device = device
        self._home = home

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_leaves(functools.partial(_moved, device=self._device), (args, kwargs))
        output = self.inner(*args, **kwargs)
        return (
            output if self._device == self._home else map_leaves(functools.partial(_moved, device=self._home), output)
        )


def _moved(leaf: Any, *, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
