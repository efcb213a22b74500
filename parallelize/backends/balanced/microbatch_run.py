"""The run of one micro-batch through the stages, as a row of segments with autograd graphs of their own.

    model.forward   ── a ──── b ──── c ──── d ──>      ordinary Python, in the micro-batch's thread
    stage              0   │     1     │   0           by the module that is entered
    segments        [  A   ] [    B    ] [ C ]

What B uses of A is cut out of A's graph: a leaf on A's device takes its place, and B works on a copy of the leaf (a
clone, or a transfer to B's device). Backward goes segment by segment; the leaf's gradient is where A's backward begins:

    A:  x ── a ──> t                    t.backward(leaf.grad)
                   ┆ detach             ^
    B:             leaf ── copy ── b    leaf.grad, from B's backward

Thus each segment's backward can run in the thread of its stage, at its own time. Whatever order of stages a forward
takes (skips, loops, branches that depend on data), it only makes more segments.

Tensors carry the number of the segment that made them, not a reference to it: nothing here forms a cycle.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.batchnorm import Moments
from parallelize.backends.balanced.microbatch_rng import Draws, Streams
from parallelize.backends.balanced.segment import OUTSIDE, Import, Segment, Stage, is_differentiable, reaches
from parallelize.backends.balanced.stage_lock import Turnstile
from parallelize.backends.balanced.stage_parameters import Shadows

__all__ = ["Tape", "active"]

_MARK = "_pipeline_segment"


class _Here(threading.local):
    """The run that this thread is in."""

    tape: Tape | None = None


_here = _Here()


def active() -> Tape | None:
    """The run that this thread is in, or None."""
    return _here.tape


@contextlib.contextmanager
def _running(tape: Tape | None) -> Iterator[None]:
    before, _here.tape = _here.tape, tape
    try:
        yield
    finally:
        _here.tape = before


class Tape:
    """One micro-batch's run.

    Args:
        index: number of the micro-batch.
        stages: all of them.
        routes: id of a module -> the stage of each of its calls; calls beyond are where the last is.
        shadows: of this forward.
        turnstiles: one per stage; None: the only micro-batch there is waits for nobody.
        seed: of its random numbers; None: it draws none.
    """

    def __init__(
        self,
        index: int,
        *,
        stages: Sequence[Stage],
        routes: Mapping[int, Sequence[int]],
        shadows: Shadows,
        turnstiles: Sequence[Turnstile] | None = None,
        seed: int | None = None,
    ) -> None:
        self.index = index
        self.moments = Moments()
        self.outside = Segment(OUTSIDE)
        self.segment = self.outside
        self.segments: list[Segment] = []
        self._owners = {self.outside.key: self.outside}
        self._stages = stages
        self._devices = frozenset(stage.device for stage in stages)
        self._routes = routes
        self._calls: dict[int, int] = {}
        self._shadows = shadows
        self._turnstiles = turnstiles
        self._seed = seed
        self._is_again = False
        # Told of each segment in which they begin: all that is computed now is theirs.
        self._pieces: list[Callable[[Segment], None]] = []
        self._has_computed = False

    @property
    def device(self) -> torch.device:
        """Where the micro-batch is."""
        return self._stages[self.segment.stage].device

    def run(self, call: Callable[[], Any], *, crossing: contextlib.AbstractContextManager[Any]) -> Any:
        """Call the model's forward.

        Args:
            call: it, with the micro-batch's inputs.
            crossing: sees every operation, and calls `local` and `claim`.
        """
        try:
            with _running(self), self._drawing():
                self.move_to(0)
                with crossing:
                    return call()
        finally:
            self._leave()
            for turnstile in self._turnstiles or ():
                turnstile.pass_by(self.index)

    @contextlib.contextmanager
    def again(
        self, segment: Segment, streams: Streams, crossing: contextlib.AbstractContextManager[Any]
    ) -> Iterator[None]:
        """A part of a segment, computed once more during its backward: same inputs, same random numbers."""
        before = self.segment, segment.streams, self._is_again
        self.segment, segment.streams, self._is_again = segment, streams.fork(), True
        self.moments.is_recording = False
        try:
            with _running(self), self._drawing(), crossing:
                yield
        finally:
            self.segment, segment.streams, self._is_again = before

    @contextlib.contextmanager
    def in_one_piece(self, begin: Callable[[Segment], None]) -> Iterator[None]:
        """What is computed meanwhile is one segment's.

        Args:
            begin: given the segment; once more if a module moves the micro-batch before anything is computed.
        """
        if not self._pieces:
            self._has_computed = False
        self._pieces.append(begin)
        begin(self.segment)
        try:
            yield
        finally:
            self._pieces.pop()

    def arrive(self, module: nn.Module) -> None:
        """A module is about to run: its stage is where the micro-batch goes on."""
        route = self._routes.get(id(module))
        if route is None or self._is_again:
            return
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        stage = route[min(call, len(route) - 1)]
        if stage != self.segment.stage:
            self.move_to(stage)

    def move_to(self, stage: int) -> None:
        """Leave the stage and wait for another; begin a segment there."""
        self._leave()
        if self._turnstiles is not None:
            self._turnstiles[stage].enter(self.index)
        place = self._stages[stage]
        if place.device.type != "cpu":
            torch.accelerator.set_device_index(place.device.index or 0)
        elif place.cores and sys.platform == "linux":
            # A stage whose micro-batches hop between cores leaves its weights in the wrong caches.
            os.sched_setaffinity(0, place.cores)
        self.segment = Segment(stage)
        if self._seed is not None:
            self.segment.streams = Streams(hash((self._seed, self.index, len(self.segments))) % 2**63)
        self.segments.append(self.segment)
        self._owners[self.segment.key] = self.segment
        for begin in self._pieces:
            begin(self.segment)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor in the segment that runs."""
        key = getattr(tensor, _MARK, None)
        if key == self.segment.key:
            return tensor
        owner = self._owners.get(key)  # type: ignore[arg-type]  # None is no key, and get() then says None
        if owner is not None:
            return self._imported(tensor, owner)
        if tensor.requires_grad and not tensor.is_leaf and key is None and self._has_made(tensor):
            # Made in the dark, by a scripted function or another library: it belongs to whoever uses it first.
            self.claim(tensor)
            return tensor
        # Arguments of a checkpoint come back as other objects, parameters do not.
        is_known = not isinstance(tensor, nn.Parameter) or self._shadows.knows(tensor, stage=self.segment.stage)
        if self._is_again and tensor.requires_grad and not is_known:
            raise refusals.other_weights(tuple(tensor.shape))
        shadow = self._shadows.of(tensor, stage=self.segment.stage)
        dtype = self._shadows.dtype_of(tensor)
        return shadow if shadow.dtype is dtype else self._cast(shadow, dtype)

    def claim(self, tensor: torch.Tensor) -> None:
        """The segment that runs has made a tensor."""
        self._has_computed = True
        if getattr(tensor, _MARK, None) not in self._owners:
            setattr(tensor, _MARK, self.segment.key)

    def is_made_here(self, tensor: torch.Tensor) -> bool:
        """Whether the segment that runs has made a tensor, so that all that depends on it is in the segment too."""
        return getattr(tensor, _MARK, None) == self.segment.key

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A piece of the user's inputs, from where segments import it."""
        setattr(tensor, _MARK, self.outside.key)
        return tensor

    def hand_out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """An output as it is now, and the leaf whose gradient it waits for; None if it waits for none.

        A parameter, and what else is not made here, is returned as it is.
        """
        owner = self._owners.get(getattr(tensor, _MARK, None))  # type: ignore[arg-type]  # see `local`
        if owner is None:
            return tensor, None
        latest, owner = self._latest(tensor, owner)
        return latest, owner.export(latest) if is_differentiable(latest) else None

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor will be when the segment that runs uses it."""
        return self.device if tensor.device in self._devices else tensor.device

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """The type that a tensor will have when the segment that runs uses it."""
        return self._shadows.dtype_of(tensor)

    def abort(self) -> None:
        """Send all micro-batches home."""
        for turnstile in self._turnstiles or ():
            turnstile.abort()

    @property
    def is_in_piece(self) -> bool:
        """Whether what is computed now is computed twice, in one segment."""
        return self._is_again or bool(self._pieces)

    @property
    def is_bound(self) -> bool:
        """Whether the micro-batch must stay in the segment that runs."""
        return self.is_in_piece and (self._is_again or self._has_computed)

    @property
    def is_again(self) -> bool:
        """Whether a part of a segment is computed once more."""
        return self._is_again

    def _leave(self) -> None:
        if self._turnstiles is not None and self.segment.stage != OUTSIDE:
            self._turnstiles[self.segment.stage].leave()
        self.segment = self.outside

    def _drawing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._seed is None else Draws(lambda: self.segment.streams)

    def _cast(self, shadow: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A parameter in half precision; once per segment, so that its gradient is one of the segment's."""
        known = self.segment.casts.get(id(shadow))
        if known is None:
            with torch.enable_grad():
                known = self.segment.casts[id(shadow)] = shadow.to(dtype)
            setattr(known, _MARK, self.segment.key)
        return known

    def _has_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's history ends in this run; else it is the user's, and gets its gradient as a parameter."""
        if self._shadows.knows(tensor, stage=self.segment.stage):
            return False
        ours = self._shadows.ids | {id(leaf) for each in self._owners.values() for _, leaf in each.exports}
        return reaches(tensor, ours)

    def _imported(self, tensor: torch.Tensor, owner: Segment) -> torch.Tensor:
        known = self.segment.imports.get(id(tensor))
        if known is not None:
            return known.local
        source, owner = self._latest(tensor, owner)
        device = self.device
        if is_differentiable(source):
            with torch.enable_grad():
                leaf = owner.export(source)
                local = leaf.clone() if leaf.device == device else leaf.to(device)
        elif source.device == device:
            return source  # changes in place are seen by everybody, as ever
        else:
            local = source.to(device)
        setattr(local, _MARK, self.segment.key)
        self.segment.imports[id(tensor)] = Import(tensor, local)
        return local

    def _latest(self, tensor: torch.Tensor, owner: Segment) -> tuple[torch.Tensor, Segment]:
        """The copy of a tensor that another segment has changed in place, else the tensor itself."""
        found = tensor, owner
        for segment in self.segments:
            for each in segment.imports.values():
                if not each.is_changed:
                    continue
                if each.source is tensor:
                    found = each.local, segment
                elif each.source.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                    raise refusals.changed_view(tuple(tensor.shape))
        return found
