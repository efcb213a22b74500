"""Run of one micro-batch through the stages: a sequence of segments with separate autograd graphs.

    model.forward   ── a ──── b ──── c ──── d ──>      ordinary Python, in the micro-batch's thread
    stage              0   │     1     │   0           given by the called module
    segments        [  A   ] [    B    ] [ C ]

If B uses a tensor t of A, A's graph ends at t: t is detached to a leaf on A's device, and B uses a copy of the leaf (a
clone, or a transfer to B's device). B's backward computes the leaf's gradient, from which A's backward then starts:

    A:  x ── a ──> t                    t.backward(leaf.grad)
                   ┆ detach             ^
    B:             leaf ── copy ── b    leaf.grad, from B's backward

So each segment's backward can run separately in its stage's thread. A micro-batch may visit stages in any order (skip
connections, loops, data-dependent branches): each move adds a segment.

A tensor stores its segment's number; a reference to the segment would form a reference cycle.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.batchnorm import Moments
from parallelize.backends.balanced.microbatch_rng import Generators, SegmentRNGMode
from parallelize.backends.balanced.segment import (
    USER_STAGE,
    Import,
    Segment,
    Stage,
    is_differentiable,
    reaches,
    version,
)
from parallelize.backends.balanced.stage_parameters import StageParameters
from parallelize.backends.balanced.stage_threads import StageLock

__all__ = ["MicrobatchRun", "active_run"]

_SEGMENT_KEY = "_pipeline_segment"


class _ActiveRun(threading.local):
    """Thread-local variable: the run of the micro-batch that the current thread executes."""

    run: MicrobatchRun | None = None


_active = _ActiveRun()


def active_run() -> MicrobatchRun | None:
    """Return the run of the micro-batch that the current thread executes, or None."""
    return _active.run


@contextlib.contextmanager
def _activated(run: MicrobatchRun | None) -> Iterator[None]:
    before, _active.run = _active.run, run
    try:
        yield
    finally:
        _active.run = before


class MicrobatchRun:
    """Forward of one micro-batch through the stages, and recomputation of its segments in backward.

    Args:
        routes: id of a module -> the stages of its first, second, ... call; further calls use the last entry.
        stage_locks: one lock per stage; None if no other micro-batch runs at the same time.
        seed: seed of the micro-batch's random numbers; None if forward draws none.
    """

    def __init__(
        self,
        index: int,
        *,
        stages: Sequence[Stage],
        routes: Mapping[int, Sequence[int]],
        stage_parameters: StageParameters,
        stage_locks: Sequence[StageLock] | None = None,
        seed: int | None = None,
    ) -> None:
        self.index = index
        self.moments = Moments()
        self.user_segment = Segment(USER_STAGE)
        self.segment = self.user_segment
        self.segments: list[Segment] = []
        self._segments_by_key = {self.user_segment.key: self.user_segment}
        self._stages = stages
        self._devices = frozenset(stage.device for stage in stages)
        self._routes = routes
        self._calls: dict[int, int] = {}
        self._stage_parameters = stage_parameters
        self._stage_locks = stage_locks
        self._seed = seed
        self.is_recomputing = False  # whether backward is recomputing a part of a segment
        # The `on_segment` of each open checkpoint region.
        self._region_callbacks: list[Callable[[Segment], None]] = []
        self._region_has_computed = False
        self.open_regions = contextlib.ExitStack()  # closed at the end of forward

    @property
    def device(self) -> torch.device:
        """Return the device of the current stage."""
        return self._stages[self.segment.stage].device

    def call_forward(self, call: Callable[[], Any], *, transfer: contextlib.AbstractContextManager[Any]) -> Any:
        """Run `call`, the model's forward, beginning on stage 0; the context `transfer` intercepts its operations."""
        try:
            with _activated(self), self._rng_mode():
                self.move_to(0)
                with transfer, self.open_regions:
                    return call()
        finally:
            self._leave_stage()
            for stage_lock in self._stage_locks or ():
                stage_lock.finish(self.index)

    @contextlib.contextmanager
    def recomputing(
        self, segment: Segment, generators: Generators, transfer: contextlib.AbstractContextManager[Any]
    ) -> Iterator[None]:
        """Make a segment current again, with the RNG states of `generators`, while backward recomputes a part of it."""
        before = self.segment, segment.generators, self.is_recomputing
        self.segment, segment.generators, self.is_recomputing = segment, generators.fork(), True
        self.moments.is_recording = False
        try:
            with _activated(self), self._rng_mode(), transfer:
                yield
        finally:
            self.segment, segment.generators, self.is_recomputing = before

    @contextlib.contextmanager
    def single_segment(self, on_segment: Callable[[Segment], None]) -> Iterator[None]:
        """Keep the operations of a checkpoint region in one segment.

        Args:
            on_segment: called with the current segment, and again if the region's first module begins another segment.
        """
        if not self._region_callbacks:
            self._region_has_computed = False
        self._region_callbacks.append(on_segment)
        on_segment(self.segment)
        try:
            yield
        finally:
            self._region_callbacks.pop()

    def enter_module(self, module: nn.Module) -> None:
        """Move the micro-batch to the stage of a module that is about to run."""
        route = self._routes.get(id(module))
        if route is None or self.is_recomputing:
            return
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        stage = route[min(call, len(route) - 1)]
        if stage != self.segment.stage:
            self.move_to(stage)

    def move_to(self, stage: int) -> None:
        """Release the current stage, wait for `stage`, and begin a segment there."""
        self._leave_stage()
        if self._stage_locks is not None:
            self._stage_locks[stage].acquire(self.index)
        self._stages[stage].bind_thread()
        self.segment = Segment(stage)
        if self._seed is not None:
            self.segment.generators = Generators(hash((self._seed, self.index, len(self.segments))) % 2**63)
        self.segments.append(self.segment)
        self._segments_by_key[self.segment.key] = self.segment
        for on_segment in self._region_callbacks:
            on_segment(self.segment)

    def localize(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the current segment's version of a tensor: itself, an imported copy of it, or a stage parameter."""
        key = getattr(tensor, _SEGMENT_KEY, None)
        if key == self.segment.key:
            return tensor
        owner = self._segments_by_key.get(key)  # type: ignore[arg-type]  # get(None) returns None
        if owner is not None:
            return self._import(tensor, owner)
        if tensor.requires_grad and not tensor.is_leaf and key is None and self._derives_from_run(tensor):
            # Produced without interception, by a scripted function or another library: assign it to this segment.
            self.mark_produced(tensor)
            return tensor
        # In a recomputation, arguments are new tensor objects, but parameters are the same objects as in forward.
        is_known = not isinstance(tensor, nn.Parameter) or self._stage_parameters.has(tensor, stage=self.segment.stage)
        if self.is_recomputing and tensor.requires_grad and not is_known:
            raise refusals.other_parameters(tuple(tensor.shape))
        stage_parameter = self._stage_parameters.get(tensor, stage=self.segment.stage)
        dtype = self._stage_parameters.dtype_of(tensor)
        return stage_parameter if stage_parameter.dtype is dtype else self._cast_parameter(stage_parameter, dtype)

    def mark_produced(self, tensor: torch.Tensor) -> None:
        """Mark a tensor as produced by the current segment, unless a segment of this run has produced it."""
        self._region_has_computed = True
        if getattr(tensor, _SEGMENT_KEY, None) not in self._segments_by_key:
            setattr(tensor, _SEGMENT_KEY, self.segment.key)

    def is_produced_here(self, tensor: torch.Tensor) -> bool:
        """Return whether the current segment has produced a tensor, and thus everything computed from it so far."""
        return getattr(tensor, _SEGMENT_KEY, None) == self.segment.key

    def mark_inputs(self, flat_inputs: Sequence[Any]) -> None:
        """Mark the tensors among the inputs as produced by the user, so that segments import them."""
        for leaf in flat_inputs:
            if isinstance(leaf, torch.Tensor):
                setattr(leaf, _SEGMENT_KEY, self.user_segment.key)

    def export_output(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the latest version of an output, and the leaf for its gradient, None if not differentiable.

        An output that this run has not produced, such as a parameter, is returned unchanged, without a leaf.
        """
        owner = self._segments_by_key.get(getattr(tensor, _SEGMENT_KEY, None))  # type: ignore[arg-type]  # see `localize`
        if owner is None:
            return tensor, None
        latest, owner = self._latest_version(tensor, owner)
        return latest, owner.export(latest) if is_differentiable(latest) else None

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that a tensor will be on when the current segment uses it."""
        return self.device if tensor.device in self._devices else tensor.device

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype that a tensor will have when the current segment uses it."""
        return self._stage_parameters.dtype_of(tensor)

    def abort(self) -> None:
        """Raise Aborted in all micro-batches of this forward when they next wait for a stage."""
        for stage_lock in self._stage_locks or ():
            stage_lock.abort()

    @property
    def is_in_region(self) -> bool:
        """Return whether the current operations belong to a checkpoint region."""
        return self.is_recomputing or bool(self._region_callbacks)

    @property
    def must_stay_in_segment(self) -> bool:
        """Return whether an open checkpoint region keeps the micro-batch in the current segment."""
        return self.is_in_region and (self.is_recomputing or self._region_has_computed)

    def _leave_stage(self) -> None:
        if self._stage_locks is not None and self.segment.stage != USER_STAGE:
            self._stage_locks[self.segment.stage].release()
        self.segment = self.user_segment

    def _rng_mode(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._seed is None else SegmentRNGMode(lambda: self.segment.generators)

    def _cast_parameter(self, stage_parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a stage parameter, cast to `dtype` once per segment, so that its gradient is accumulated once."""
        known = self.segment.casts.get(id(stage_parameter))
        if known is None:
            with torch.enable_grad():
                known = self.segment.casts[id(stage_parameter)] = stage_parameter.to(dtype)
            setattr(known, _SEGMENT_KEY, self.segment.key)
        return known

    def _derives_from_run(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was computed inside this run; other tensors are handled like parameters."""
        if self._stage_parameters.has(tensor, stage=self.segment.stage):
            return False
        exported = {id(leaf) for each in self._segments_by_key.values() for _, leaf in each.exports}
        return reaches(tensor, self._stage_parameters.ids | exported)

    def _import(self, tensor: torch.Tensor, owner: Segment) -> torch.Tensor:
        known = self.segment.imports.get(id(tensor))
        if known is not None:
            return known.copy
        source, owner = self._latest_version(tensor, owner)
        device = self.device
        if is_differentiable(source):
            with torch.enable_grad():
                leaf = owner.export(source)
                copy = leaf.clone() if leaf.device == device else leaf.to(device)
        elif source.device == device:
            return source  # not copied, so that both segments see changes in place
        else:
            copy = source.to(device)
        setattr(copy, _SEGMENT_KEY, self.segment.key)
        self.segment.imports[id(tensor)] = Import(tensor, copy, version(copy))
        return copy

    def _latest_version(self, tensor: torch.Tensor, owner: Segment) -> tuple[torch.Tensor, Segment]:
        """Return the latest version of a tensor, and the version's segment: a copy changed in place, or the tensor."""
        found = tensor, owner
        for segment in self.segments:
            for each in segment.imports.values():
                if not each.is_changed:
                    continue
                if each.source is tensor:
                    found = each.copy, segment
                elif each.source.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                    raise refusals.changed_view(tuple(tensor.shape))
        return found
