"""torch's checkpoint inside a micro-batch: a region of its forward, which is computed once more in backward.

    segment A          segment B
    [ a ── b ── ]──>[ ( c ── d ) ── e ]       ( ) a region: of what c and d compute nothing is kept
                      └ random numbers go on from here, both times

torch computes a region again in the thread whose backward needs it, a stage's. There it takes its micro-batch's place
in the segment: with the same shadows, tensors of other segments and random numbers. Since a segment's backward is one
of its own, a region belongs to one segment: its first module may move the micro-batch, later ones do not.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint as torchs

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.microbatch_run import Tape, active
from parallelize.backends.balanced.segment import Segment

__all__ = ["divisible_checkpoints", "reentrant"]

_Crossing = Callable[[Tape], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def divisible_checkpoints(crossing: _Crossing) -> Iterator[None]:
    """While this lasts, regions inside micro-batches are computed again in their place.

    Args:
        crossing: sees every operation of a tape.
    """
    home: Any = torchs
    original = home._checkpoint_without_reentrant_generator

    def generator(fn: Any, preserve_rng_state: Any, context_fn: Any, *more: Any, **kwargs: Any) -> Any:
        tape = active()
        if tape is None:
            return original(fn, preserve_rng_state, context_fn, *more, **kwargs)

        def contexts() -> tuple[Any, Any]:
            ahead, again = context_fn()
            place = _Place(tape, crossing, again)
            return _ahead(tape, place, ahead), place

        # The global generators, which torch would restore, are not those that a micro-batch draws from.
        return original(fn, False, contexts, *more, **kwargs)  # noqa: FBT003  # before positional arguments of the user's

    home._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        if home._checkpoint_without_reentrant_generator is generator:
            home._checkpoint_without_reentrant_generator = original


def reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: FBT001  # torch's order
    """What `checkpoint(use_reentrant=True)` computes, without a backward inside of backward, which nobody would see."""
    if torch.is_grad_enabled():
        torchs.check_backward_validity(args)  # warns: without an input that wants a gradient, nothing gets one
    wants = any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
    with contextlib.nullcontext() if wants else torch.no_grad():
        return torchs.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextlib.contextmanager
def _ahead(tape: Tape, place: _Place, users: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with tape.in_one_piece(place.begin), users:
        yield


class _Place(contextlib.AbstractContextManager[None]):
    """The place of a region in its micro-batch, taken once more in backward.

    The graph that holds this is held by the tape: it refers to the tape weakly, or a forward whose backward never comes
    would stay in memory.
    """

    def __init__(self, tape: Tape, crossing: _Crossing, users: contextlib.AbstractContextManager[Any]) -> None:
        self._tape = weakref.ref(tape)
        self._crossing = crossing
        self._users = users
        self._entered = contextlib.ExitStack()

    def begin(self, segment: Segment) -> None:
        """The region is about to be computed for the first time."""
        self._segment = weakref.ref(segment)
        self._streams = segment.streams.fork()

    def __enter__(self) -> None:
        tape, segment = self._tape(), self._segment()
        if tape is None or segment is None:  # their backward would hold them
            raise refusals.escaped()
        self._entered.enter_context(tape.again(segment, self._streams, self._crossing(tape)))
        self._entered.enter_context(self._users)

    def __exit__(self, *exc: object) -> None:
        self._entered.close()
