"""Validation of micro-batches: compares them with the full batch, for every new kind of batch.

A kind is new if a module has another mode, value of a Boolean or str attribute, forward hook or pre-hook, an argument
another name, number of dimensions, or value (see `Switches`), an output another form, or grad mode has changed. The
full batch runs through the stages, too:

side effects    tensors used outside of the output, state stored on the model or its parameters, random numbers
dimensions      in which dimension each output is joined
values          whether the micro-batches compute the same outputs and gradients: in the current modes, or, if these
                draw random numbers or normalize over a batch, with torch's own modules in evaluation mode
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.backward import compute_gradients, has_reentrant_checkpoint
from parallelize.backends.balanced.batch import copy_inputs
from parallelize.backends.balanced.microbatch_run import user_hooks
from parallelize.backends.balanced.outputs import (
    Dims,
    Form,
    differ,
    difference,
    infer_batch_dims,
    is_equal,
    join_outputs,
    output_form,
    rounding,
    scalar_weights,
)
from parallelize.backends.balanced.side_effects import CapturedTensors, ModelState, replaceable_buffers
from parallelize.errors import ConfigError
from parallelize.runtime.containers import leaves
from parallelize.runtime.rng_state import RNGState

__all__ = ["BatchKind", "BatchValidation"]

_MAX_VALUES = 4096  # of each parameter's gradient that are compared


@dataclass
class BatchKind:
    """What is known of a kind of batch."""

    pipelines: int = 1  # in which such batches run
    draws: bool = False  # whether forward draws random numbers
    buffers: tuple[str, ...] = ()  # names of those that forward may change, equally in every micro-batch; often none
    is_reentrant: bool = False  # whether a reentrant checkpoint computes gradients by itself
    has_graph: bool = False  # whether an output of the full batch requires grad
    has_warned: bool = False
    in_evaluation: bool = False  # whether outputs and gradients were compared in evaluation mode, in two more steps
    # Positions of scalars of which only the comparison shows that they are means over samples.
    assumed_means: set[int] = field(default_factory=set)
    # For each form of the output: how outputs are joined, and the full batch's outputs that are not per sample.
    dims: dict[Form, Dims] = field(default_factory=dict)
    constants: dict[Form, dict[int, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Whole:
    """A run of the full batch: its outputs, see `_detached`, and the gradients of a sum of those in `used`."""

    values: list[Any]
    used: set[int]
    gradients: dict[str, torch.Tensor]
    draws: bool


@dataclass(frozen=True, kw_only=True)
class BatchValidation:
    """Runs a batch in micro-batches and as a whole, and compares; the model's state is restored."""

    model: nn.Module
    inputs: Any
    whole: Callable[[Any], Any]  # returns the output for inputs that are not split
    # Returns a flat list of outputs of each micro-batch, and the micro-batches' sizes.
    split: Callable[[BatchKind], tuple[list[list[Any]], Sequence[int]]]
    devices: Sequence[torch.device]  # of the stages; outputs are compared on the first one
    normalizes: bool  # whether batch norm normalizes each micro-batch
    adds_unknown: bool  # see `scalar_weights`

    def run(self) -> BatchKind:
        """Return what is known of batches like this one.

        Raises:
            CannotSplitError: forward has side effects that micro-batches would see, or they compute something else.
            ConfigError: forward accumulates gradients.
        """
        before = ModelState(self.model, self.devices)
        with before.restored(keeps_caches=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step itself gives forward's warnings
            with before.watching():
                first = self._whole(is_compared=not self.normalizes)
            if before.written:
                raise refusals.stateful(sorted(before.written))
            before.restore()
            kind, rng = BatchKind(), RNGState(self.devices)
            second = self._whole_again(kind)
            kind.has_graph = any(map(_requires_grad, second))
            kind.draws = rng.has_changed()
            kind.in_evaluation = kind.draws or self.normalizes
            buffers = {name: self.model.get_buffer(name).clone() for name in kind.buffers}
            before.restore()
            self._compare(kind, first, second, compares_values=not kind.in_evaluation)
            different = [name for name, each in buffers.items() if not is_equal(each, self.model.get_buffer(name))]
            if different:
                raise refusals.stateful(different)
            if kind.in_evaluation:
                before.restore()
                with torch.backends.cudnn.flags(enabled=False):  # cuDNN has no backward of an RNN in evaluation mode
                    self._compare_in_evaluation(kind)
            is_random = before.python_rng.has_changed() or (not kind.draws and differ(first.values, second))
        texts = [
            f"output {position} of {type(self.model).__name__} is a scalar whose operations do not show what it "
            "averages over: under backend='balanced' it is taken for a mean over samples, which is true for this "
            "batch. If it is not for others, compute it outside of the model; if it is a sum, use "
            "parallel_model(average='sum')."
            for position in sorted(kind.assumed_means)
        ]
        if is_random:
            texts.append(
                f"forward of {type(self.model).__name__} draws from random or numpy.random, or a generator of its own: "
                "under backend='balanced' micro-batches draw other numbers than the full batch would, and are not "
                "compared with it. Draw with torch's default generator, or before the call."
            )
        for text in texts:
            warnings.warn(text, stacklevel=2)
        kind.has_warned = bool(texts)
        return kind

    def _compare_in_evaluation(self, kind: BatchKind) -> None:
        """Compare with torch's own modules in evaluation mode or, if forward still draws numbers, all modules.

        Not by `eval`, which may change more than the mode: LoRA merges weights there.
        """
        every = list(self.model.modules())
        own = [m for m in every if isinstance(m, _BatchNorm) or type(m).__module__.startswith("torch.nn.modules.")]
        for modules in (own, every):
            for each in modules:
                vars(each)["training"] = False
            rng = RNGState(self.devices)
            try:
                first = self._whole()
            except (ConfigError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise refusals.CannotSplitError(
                    f"forward fails in evaluation mode ({type(error).__name__})",
                    why="micro-batches of a forward that draws random numbers are compared with the batch in that mode",
                    fix="let forward run in evaluation mode, too",
                ) from error
            if not rng.has_changed() or modules is not own:
                second = self._whole(is_compared=False).values if first.draws else first.values
                self._compare(kind, first, second, compares_values=True)
                return

    def _whole(self, *, is_compared: bool = True) -> _Whole:
        """Run the full batch, with a backward if `is_compared` and no random numbers are drawn."""
        rng = RNGState(self.devices, has_python=True)
        output = leaves(self.whole(copy_inputs(self.inputs)))
        draws = rng.has_changed()
        used = {i for i, each in enumerate(output) if _differentiable([each])}
        used = used if is_compared and not draws and not has_reentrant_checkpoint(_differentiable(output)) else set()
        return _Whole(_detached(output), used, self._gradients(output, used), draws)

    def _whole_again(self, kind: BatchKind) -> list[Any]:
        """Return the outputs of the full batch, and record side effects; a first run has filled lasting caches."""
        captured, inputs = CapturedTensors(self.model), copy_inputs(self.inputs)
        tensors = [each for each in leaves(inputs) if isinstance(each, torch.Tensor) and not each.is_inference()]
        given = [(each, each._version) for each in tensors]
        before = ModelState(self.model, self.devices)
        with captured.watching():
            output = self.whole(inputs)
        accumulated, kind.buffers = before.changed_gradients(), tuple(before.changed())
        if any(version != each._version for each, version in given):
            raise refusals.CannotSplitError(
                "forward changes an argument in place",
                why="micro-batches are slices of one tensor, which autograd then takes for changed",
                fix="copy the argument first",
            )
        kind.is_reentrant = has_reentrant_checkpoint(_differentiable(leaves(output)))
        output = _detached(output)
        if accumulated:
            raise ConfigError(
                f"forward accumulates gradients of {', '.join(accumulated[:5])}",
                why="a backward of each micro-batch would add to them, also while the pipeline is planned",
                fix="call torch.autograd.grad in forward instead of backward; or use backend='ddp'",
            )
        replaceable = replaceable_buffers(self.model)
        if not {*kind.buffers} <= {*replaceable}:
            raise refusals.stateful(kind.buffers)
        if kind.buffers:  # such as a count, by which others change in some later batch
            kind.buffers = tuple(dict.fromkeys((*kind.buffers, *replaceable)))
        places = captured.names()
        if places:
            hooked = [name for name, each in self.model.named_modules() if user_hooks(each)]
            hooks = f"; modules with forward hooks: {', '.join(hooked[:5])}" if hooked else ""
            raise refusals.CannotSplitError(
                f"tensors that {', '.join(places[:5])} computed are used outside of the output of forward{hooks}",
                why="they would have the samples of one micro-batch, and a loss on them the gradients of these",
                fix="return them from forward; keep numbers instead of tensors; remove the hooks",
            )
        return output

    def _compare(self, kind: BatchKind, first: _Whole, second: list[Any], *, compares_values: bool) -> None:
        rows, sizes = self.split(kind)
        if any(output_form(row) != output_form(second) for row in rows):
            return  # micro-batches return different values: joining them returns placeholders
        weights = scalar_weights(rows, sizes, inputs=self.inputs, adds_unknown=self.adds_unknown)
        dims = kind.dims.setdefault(output_form(second, weights), infer_batch_dims(second, rows))
        # Numbers, and tensors that are joined only if they are equal in all micro-batches.
        unsplit = [i for i, each in enumerate(second) if each is not None and i not in weights and dims.get(i) is None]
        constants = {i: second[i] for i in unsplit if not _requires_grad(second[i])}
        kind.constants.setdefault(output_form(second, weights), constants)
        for position, value in constants.items():
            parts = [row[position] for row in rows]
            if all(is_equal(each, parts[0]) for each in parts) and not is_equal(parts[0], value):
                raise refusals.not_sample_by_sample(f"output {position} of the model", math.inf)
        if not compares_values or differ(first.values, second):
            return
        joined = join_outputs(rows, device=self.devices[0], dims=dims, weights=weights)
        for position, (one, other) in enumerate(zip(second, joined, strict=True)):
            found = difference(one, other)
            if found > 0:
                raise refusals.not_sample_by_sample(f"output {position} of the model", found)
        for position, (_, count) in weights.items():
            values = [row[position] for row in rows]
            is_assumed = count.kind == "unknown" and not self.adds_unknown and values[0].requires_grad
            if is_assumed and any(each.item() != values[0].item() for each in values):
                kind.assumed_means.add(position)
        if torch.is_grad_enabled() and not kind.is_reentrant:
            self._compare_gradients(first, joined)

    def _gradients(self, output: Sequence[Any], used: Collection[int]) -> dict[str, torch.Tensor]:
        """Return some values of each parameter's gradient, of a weighted sum of the outputs at the positions `used`.

        Some, so that only one pass's gradients are in memory.
        """
        named = {name: each for name, each in self.model.named_parameters() if each.requires_grad and each.is_leaf}
        if not named or not used:
            return {}
        outputs = [output[i] for i in sorted(used)]
        ranges = [torch.arange(each.numel(), device=each.device) for each in outputs]
        seeds = [one.cos().view(each.shape).to(each.dtype) for one, each in zip(ranges, outputs, strict=True)]
        found = compute_gradients(outputs, seeds, inputs=[*named.values()])
        sampled = {}
        for (name, parameter), each in zip(named.items(), found, strict=True):
            flat = (torch.zeros_like(parameter) if each is None else each.to_dense()).flatten()
            sampled[name] = flat[:: max(1, flat.numel() // _MAX_VALUES)].clone()
        return sampled

    def _compare_gradients(self, whole: _Whole, joined: Sequence[Any]) -> None:
        """Compare gradients of the same weighted sum of all outputs that can be joined; one graph at a time exists."""
        pairs = enumerate(zip(whole.values, joined, strict=True))
        used = {i for i, (one, other) in pairs if _requires_grad(one) and _differentiable([other])}
        found, expected = self._gradients(joined, used), whole.gradients
        if used != whole.used:  # another output cannot be joined
            expected = self._gradients(leaves(self.whole(copy_inputs(self.inputs))), used)
        values = [each.abs().max().item() for each in expected.values() if each.numel()]
        largest = max(values, default=0.0)
        tolerance = 4 * max((rounding(whole.values[i]) for i in used), default=0.0)
        for name, one in expected.items():
            relative = difference(one, found[name], rounding=tolerance, least=1e-3 * largest)
            if relative > 0:
                raise refusals.not_sample_by_sample(f"the gradient of {name}", relative)


def _detached(output: Any) -> list[Any]:
    """Return the leaves of an output: tensors without graphs, but requiring grad as before; None for objects."""
    found = (each if isinstance(each, (torch.Tensor, bool, int, float, str)) else None for each in leaves(output))
    return [
        each.detach().requires_grad_(each.grad_fn is not None) if isinstance(each, torch.Tensor) else each
        for each in found
    ]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [each for each in values if isinstance(each, torch.Tensor) and each.grad_fn is not None]
