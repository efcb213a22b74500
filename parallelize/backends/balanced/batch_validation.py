"""Validation of micro-batches: compares them with the full batch, for every new kind of batch.

A kind is new if a module is in another mode, an argument has another name or number of dimensions, grad mode has
changed, or the output has another form. Then the full batch runs through the stages, too, which shows:

side effects    state stored on the model, changed input objects, random numbers
dimensions      in which dimension each output is joined
values          whether the micro-batches compute the same: in the current modes, or, if these draw random numbers or
                normalize over a batch, in evaluation mode
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.microbatch_split_join import (
    Dims,
    infer_batch_dims,
    join_outputs,
    output_form,
    scalar_weights,
)
from parallelize.backends.balanced.opaque_inputs import (
    changed_input_error,
    changed_inputs,
    copy_opaque_inputs,
    snapshot,
)
from parallelize.backends.balanced.side_effects import (
    ModelState,
    RNGState,
    changed_attributes,
    changed_gradients,
    python_rng_state,
)
from parallelize.runtime.containers import leaves

__all__ = ["BatchKind", "BatchValidation", "SplitRows"]

# The largest relative difference of outputs that counts as rounding, by dtype.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass
class BatchKind:
    """What is known of a kind of batch.

    Args:
        draws: whether forward draws random numbers.
        buffers: names of the buffers that forward changes, equally in every micro-batch.
        assumed_means: positions of scalars of which only the comparison shows that they are means over samples.
        dims: form of the output -> the dimensions in which outputs are joined.
    """

    draws: bool = False
    buffers: tuple[str, ...] = ()
    assumed_means: set[int] = field(default_factory=set)
    dims: dict[tuple[int | None, ...], Dims] = field(default_factory=dict)


@dataclass(frozen=True)
class SplitRows:
    """Outputs of micro-batches: a flat list for each of them, and the micro-batches' sizes."""

    rows: list[list[Any]]
    sizes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class BatchValidation:
    """Runs a batch in micro-batches and as a whole, and compares; the model's state is restored.

    Args:
        model: the user's model.
        whole: returns the output for inputs that are not split.
        split: returns the outputs of micro-batches, given the inputs and the buffers that each of them changes.
        devices: devices of the stages; outputs are compared on the first one.
        normalizes: whether batch norm normalizes each micro-batch.
    """

    model: nn.Module
    whole: Callable[[Any], Any]
    split: Callable[[Any, Sequence[str]], SplitRows]
    devices: Sequence[torch.device]
    normalizes: bool

    def run(self, inputs: Any) -> BatchKind:
        """Return what is known of batches like these inputs.

        Raises:
            ConfigError: forward has side effects that micro-batches would see, or micro-batches compute something else.
        """
        before, drawn = ModelState(self.model, self.devices), python_rng_state()
        with before.restored(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step itself gives forward's warnings
            first = self._whole(inputs)
            before.restore()
            rng = RNGState(self.devices)
            second, buffers = self._whole_again(inputs)
            kind = BatchKind(rng.has_changed(), buffers)
            before.restore()
            is_comparable = not kind.draws and not self.normalizes
            self._compare(kind, inputs, first, second, compares_values=is_comparable)
            if not is_comparable:
                before.restore()
                self.model.eval()
                self._compare(kind, inputs, self._whole(inputs), self._whole(inputs), compares_values=True)
        if python_rng_state() != drawn:
            warnings.warn(
                f"forward of {type(self.model).__name__} draws from random or numpy.random: under backend='balanced' "
                "micro-batches draw other numbers than the full batch would. Draw with torch, or before the call.",
                stacklevel=2,
            )
        for position in sorted(kind.assumed_means):
            warnings.warn(
                f"output {position} of {type(self.model).__name__} is a scalar whose operations do not show what it "
                "averages over: under backend='balanced' it is taken for a mean over samples, which is true for this "
                "batch. If it is not for others, compute it outside of the model.",
                stacklevel=2,
            )
        return kind

    def _whole(self, inputs: Any) -> list[Any]:
        return _detached(self.whole(copy_opaque_inputs(inputs)))

    def _whole_again(self, inputs: Any) -> tuple[list[Any], tuple[str, ...]]:
        """Return the outputs of the full batch, and the buffers that change; a first run has filled lasting caches."""
        copied = copy_opaque_inputs(inputs)
        contents = snapshot(copied)
        with changed_gradients(self.model) as accumulated, changed_attributes(self.model) as changed:
            output = _detached(self.whole(copied))
        if accumulated:
            raise refusals.inner_backward(accumulated)
        if not {*changed} <= dict(self.model.named_buffers()).keys():
            raise refusals.stateful(changed)
        for name in changed_inputs(copied, contents):
            raise changed_input_error(inputs, name)
        return output, tuple(changed)

    def _compare(
        self, kind: BatchKind, inputs: Any, first: list[Any], second: list[Any], *, compares_values: bool
    ) -> None:
        split = self.split(copy_opaque_inputs(inputs), kind.buffers)
        form = output_form(second)
        if any(output_form(row) != form for row in split.rows):
            return  # micro-batches return different values: joining them raises an error or a placeholder
        dims = kind.dims.setdefault(form, infer_batch_dims(second, split.rows))
        is_random = any(_difference(*pair) > 0 for pair in zip(first, second, strict=True))
        if not compares_values or is_random:
            return
        weights = scalar_weights(split.rows, split.sizes, inputs=inputs)
        joined = join_outputs(split.rows, device=self.devices[0], dims=dims, weights=weights)
        for position, (one, other) in enumerate(zip(second, joined, strict=True)):
            difference = _difference(one, other)
            if difference > 0:
                raise refusals.not_sample_by_sample(position, difference)
        for position, (_, count) in weights.items():
            values = [row[position] for row in split.rows]
            if count.kind == "unknown" and values[0].requires_grad and any(each != values[0] for each in values):
                kind.assumed_means.add(position)


def _detached(output: Any) -> list[Any]:
    return [each.detach() if isinstance(each, torch.Tensor) else each for each in leaves(output)]


def _difference(one: Any, other: Any) -> float:
    """Return the largest difference of two outputs, relative to the largest value of `one`; 0 if it is rounding."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0
    if one.shape != other.shape:
        return math.inf
    if not one.is_floating_point() or one.numel() == 0:
        return 0.0
    wide, narrow = (each.detach().double().cpu().nan_to_num() for each in (one, other))
    relative = ((wide - narrow).abs().max() / wide.abs().max().clamp_min(1e-6)).item()
    return relative if relative > _ROUNDING.get(one.dtype, 5e-2) else 0.0
