"""What a forward does besides computing: which numbers it draws, what it leaves on the model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from parallelize.backends.balanced import refusals, state_snapshot
from parallelize.backends.balanced.microbatch_split_join import cut
from parallelize.backends.balanced.opaque_inputs import written_to
from parallelize.backends.balanced.profiling import Bench, Timings
from parallelize.errors import ConfigError
from parallelize.runtime.containers import map_leaves

__all__ = ["bearing_parts", "observed", "ordinary"]


@contextlib.contextmanager
def bearing_parts(bench: Bench, inputs: Any, *, microbatches: int | None) -> Iterator[None]:
    """While parts of a batch run for the first time: what only they cannot bear is said to come from cutting.

    Args:
        bench: runs the model.
        inputs: the whole batch.
        microbatches: how many there will be; None: not known yet.

    Raises:
        ConfigError: forward fails on a part, and not on the whole.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if microbatches == 1 or not _bears(bench, inputs):
            raise
        raise refusals.cut_wrongly(cut(inputs, dim=bench.batch_dim), error) from error


def observed(bench: Bench, inputs: Any, *, microbatches: int | None) -> Bench:
    """The bench, knowing whether the model draws random numbers in the modes that its submodules are in.

    Args:
        bench: runs the model.
        inputs: of a micro-batch.
        microbatches: how many there will be at the same time; None: not known yet.

    Raises:
        ConfigError: forward leaves something on the model, or in an object among its inputs, for other micro-batches.
    """
    if state_snapshot.draws_python(lambda: bench.run(inputs)):
        warnings.warn(
            f"forward of {type(bench.model).__name__} draws from random or numpy.random: under backend='balanced' "
            "which micro-batch draws first is left to chance. Draw with torch, or before the model is called.",
            stacklevel=2,
        )
    plain = replace(bench, draws=False)
    draws = state_snapshot.draws_torch(lambda: plain.run(inputs), frozenset(stage.device for stage in bench.stages))
    bench = replace(bench, draws=draws)
    if microbatches != 1:
        runs: list[Timings] = []
        changed = state_snapshot.changes(bench.model, lambda: runs.append(bench.run(inputs)))
        if changed:
            raise refusals.stateful(changed)
        for name in runs[0].changed_inputs:
            raise written_to(inputs, name)
    return bench


def _bears(bench: Bench, inputs: Any) -> bool:
    try:
        bench.run(inputs)
    except Exception:  # noqa: BLE001  # the model's own, which the part has raised too
        return False
    return True


def ordinary(inputs: Any) -> Any:
    """Inputs that autograd may keep: a tensor made in inference mode is copied."""
    return map_leaves(_ordinary, inputs)


def _ordinary(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_inference() else leaf
