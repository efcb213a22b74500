"""Activations that are computed again in backward instead of being kept."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize.backends.balanced.crossing import Crossing
from parallelize.backends.balanced.segment import Segment
from parallelize.backends.balanced.tape import Tape, active

__all__ = ["recomputing"]


@contextlib.contextmanager
def recomputing(atoms: Sequence[nn.Module]) -> Iterator[None]:
    """While a forward runs, let these modules keep their inputs only."""
    hidden = [(atom, atom.__dict__.get("forward")) for atom in atoms]
    for atom in atoms:
        # Past nn.Module.__setattr__: a class may have its own opinion about attributes.
        atom.__dict__["forward"] = functools.partial(_checkpointed, atom.forward)
    try:
        yield
    finally:
        for atom, forward in hidden:
            if forward is None:
                del atom.__dict__["forward"]
            else:
                atom.__dict__["forward"] = forward


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tape = active()
    if tape is None or tape.is_again or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # the segment's generators are restored instead
        context_fn=lambda: (contextlib.nullcontext(), _Again(tape)),
        **kwargs,
    )


class _Again(contextlib.AbstractContextManager[None]):
    """The place of a module in its micro-batch, taken once more in backward.

    The graph that holds this is held by the tape: it refers to the tape weakly, or a forward whose backward never comes
    would stay in memory.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = weakref.ref(tape)
        self._segment: weakref.ref[Segment] = weakref.ref(tape.segment)
        self._streams = tape.segment.streams.fork()
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        tape, segment = self._tape(), self._segment()
        assert tape is not None  # its backward is running
        assert segment is not None
        self._entered.enter_context(tape.again(segment, self._streams, Crossing(tape)))

    def __exit__(self, *exc: object) -> None:
        self._entered.close()
