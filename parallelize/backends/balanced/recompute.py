"""Activations that are computed again in backward instead of being kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize.backends.balanced.microbatch_run import active

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
    if tape is None or tape.is_in_piece or not torch.is_grad_enabled():
        return forward(*args, **kwargs)  # inside a checkpoint of the user's nothing is kept anyway
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
