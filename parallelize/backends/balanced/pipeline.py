"""Pipeline: runs batches of a model by its plan, in micro-batches, and checks on some of them that this is the same.

One thread issues all micro-batches through the unmodified model, one after another, in one autograd graph. On
accelerators the devices then work on different micro-batches; on the CPU nothing overlaps: it exists for tests.

Spot checks: batches 1, 2, 4, 8, ... 64 and then every 64th of each kind (mode, method, arguments) run a few samples
whole and in two micro-batches, in the same modes. Losses and outputs are compared; if forward draws random numbers or
normalizes over the batch, in evaluation mode. A difference in the first check, or a forward that changes state, makes
such batches run whole. A difference in a later one is a SyncError, since batches before it were split.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced.batch import (
    Batch,
    Dims,
    RunsWhole,
    copy_inputs,
    difference,
    joined_dims,
    joined_outputs,
)
from parallelize.backends.balanced.microbatch import Staged
from parallelize.backends.balanced.state import ModelState
from parallelize.backends.balanced.transfer import to_device
from parallelize.errors import ConfigError, SyncError
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import leaves

__all__ = ["CHECKS", "Pipeline"]

_SAMPLES = 4  # of a spot check
_EVERY = 64  # batches, at last
CHECKS = f"batches 1, 2, 4, ... {_EVERY} and every {_EVERY}th run {_SAMPLES} samples whole, too: below 1 % of an epoch"
_KEEPING_NOTHING = frozenset({"parallelize", "torch", "transformers"})
"""Packages whose hooks keep nothing of what they see."""


@dataclass
class _Kind:
    """What is known of batches that have the same mode, method and arguments."""

    batches: int = 0
    whole_inputs: set[int] = field(default_factory=set)
    reason: RunsWhole | None = None  # why they run whole
    # By the numbers of dimensions of an output's leaves: how these are joined.
    dims: dict[Any, Dims] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """Runs each batch of a model through the stages of a plan.

    Args:
        inner: holds the model.
        staged: the model on the devices of its stages.
        microbatches: most micro-batches of a batch.
        batch_dim: batch dimension of the inputs.
        device: that of the inputs and of the outputs.
    """

    inner: Inner
    staged: Staged
    microbatches: int
    batch_dim: int
    device: torch.device
    refusal: RunsWhole | None = None  # why the latest batch has run whole
    _kinds: dict[Any, _Kind] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)  # the refusals of which the user was warned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a batch."""
        # Mixed precision casts the weights once for all micro-batches: to the session, they are one forward.
        batch = types.MethodType(lambda _model, *args, **kwargs: self._run((args, kwargs)), self.inner.model)
        return self.inner.session.forward(batch, *args, **kwargs)

    def _run(self, inputs: Any) -> Any:
        self.refusal, kind = None, _Kind()
        # Now: a copy for each micro-batch would wait for the last stage of the one before.
        inputs = to_device(inputs, self.staged.input_device)
        try:
            if self.microbatches > 1:
                batch = Batch(inputs, dim=self.batch_dim)
                modes = self.inner.method, self.inner.model.training, torch.is_grad_enabled()
                kind = self._kinds.setdefault((*modes, *batch.kind), kind)
                return self._run_split(batch, kind)
        except RunsWhole as error:
            self.refusal = error
        with self.staged.batch():
            output = to_device(self._outputs(Batch(inputs, dim=None), 1)[0], self.device)
        kind.reason, text = self.refusal, str(self.refusal)  # only now: forward itself does not fail
        if self.refusal is not None and torch.is_grad_enabled() and text not in self._told:
            self._told.add(text)
            warnings.warn(f"batches like this one are not split into micro-batches: {text}", stacklevel=2)
        return output

    def _run_split(self, batch: Batch, kind: _Kind) -> Any:
        batch.whole |= kind.whole_inputs
        kind.whole_inputs, kind.batches = batch.whole, kind.batches + 1
        if kind.reason is not None:
            raise kind.reason
        self._refuse_hooks()
        number, norms = kind.batches, self.staged.norms
        if number % _EVERY == 0 or (number < _EVERY and number & (number - 1) == 0):
            self._check(batch, kind)
        # Batch norm trains on two samples at least.
        count = max(1, min(self.microbatches, batch.size // (1 + norms.is_training)))
        with self.staged.batch(), self._refusing_writes():
            outputs = self._outputs(batch, count)
        form = _form(outputs[0])
        if form not in kind.dims:
            self._check(batch, kind)
        dims = kind.dims.get(form, ())
        return joined_outputs(outputs, dims, batch=batch, sizes=batch.sizes(count), device=self.device)

    def _outputs(self, batch: Batch, count: int) -> list[Any]:
        call = self.inner.bind_method(self.inner.method, self.inner.model)
        return [self.staged.run(call, inputs) for inputs in batch.split(count)]

    def _check(self, batch: Batch, kind: _Kind, most: int = _SAMPLES) -> None:
        """Compare some samples whole with their micro-batches, and learn how outputs are joined.

        Raises:
            RunsWhole: forward changes state or fails on a part of a batch, or outputs differ at the first time.
            SyncError: outputs differ, and did not before.
        """
        is_first, state = not kind.dims, ModelState(self.inner.model, self.staged.devices)
        samples = Batch(copy_inputs(batch.first(min(most, batch.size))), dim=self.batch_dim)
        samples.whole, found, classes = batch.whole, None, iter(("-", "torch.nn.", ""))
        try:
            while found is None:
                found = self._difference(samples, state, kind, next(classes, None))
        except torch.OutOfMemoryError:
            if most == 2:
                raise
        finally:
            state.restore()
        if found is None:  # there is no memory for as many samples
            self._check(batch, kind, most // 2)
            return
        what = f"the output of micro-batches differs from that of the batch by {found:.3g}"
        why = "a sample's output depends on other samples, as by a limit per batch"
        fix = "compute what depends on all samples outside of the model"
        if found and is_first:
            raise RunsWhole(what, why=why, fix=fix)
        if found:
            raise SyncError(
                f"{what}, which it did not in batch 1",
                why=f"{why}, or an attribute or argument has changed: batches up to {kind.batches} may be wrong",
                fix=f"{fix}; or use BalancedBackend(microbatches=1), which splits no batch",
            )

    def _difference(self, samples: Batch, state: ModelState, kind: _Kind, classes: str | None) -> float | None:
        """Return the largest difference of outputs; None if random numbers are drawn, or batch norm normalizes.

        Modules whose class begins with `classes` are in evaluation mode; None: no prefix is left.
        """
        if classes is None:
            return 0.0
        state.restore()
        try:
            parts, whole, is_comparable, changed = self._both(samples, state, classes)
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RunsWhole(
                f"forward fails on a part of the batch ({type(error).__name__})",
                why="every tensor as long as the first one is split along the batch, also inside lists",
                fix="give tensors that are not per sample another length, set BalancedBackend(batch_dim=...), use no "
                "constant batch size in forward",
            ) from error
        if changed:
            raise RunsWhole(
                f"forward changes {', '.join(changed[:5])} of the model",
                why="each micro-batch would change it",
                fix="change it outside of forward, and pass values between modules as arguments and return values",
            )
        row, sizes = leaves(whole), samples.sizes(2)
        dims = joined_dims(row, [leaves(each) for each in parts])
        kind.dims.setdefault(_form(whole), dims)
        if not is_comparable:
            return None
        joined = leaves(joined_outputs(parts, dims, batch=samples, sizes=sizes, device=self.device))
        return max(map(difference, row, joined), default=0.0)

    def _both(self, samples: Batch, state: ModelState, classes: str) -> tuple[list[Any], Any, bool, list[str]]:
        """Return the outputs of micro-batches and of all samples, whether they compare, and what has changed."""
        with (
            warnings.catch_warnings(),
            _evaluating(self.inner.model, classes),
            self.staged.batch(is_counted=False),
            state.watching(),
        ):
            warnings.simplefilter("ignore")  # the batch itself gives forward's warnings
            parts = self._outputs(samples, 2)
            filled = ModelState(self.inner.model, self.staged.devices)  # has caches that the first forward fills
            with filled.watching():
                whole = self._outputs(samples, 1)[0]
            is_comparable = not state.draws() and not self.staged.norms.is_training
        return to_device(parts, self.device), to_device(whole, self.device), is_comparable, filled.changed()

    def _refuse_hooks(self) -> None:
        """Refuse hooks of the user's inside the model, which may keep what they see: it would be a part."""
        for name, module in self.staged.inside:
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if hooks and {getattr(each, "__module__", "").split(".")[0] for each in hooks} - _KEEPING_NOTHING:
                raise RunsWhole(
                    f"{name} of the model has a forward hook",
                    why="it would see one micro-batch at a time",
                    fix="return what it needs from forward",
                )

    @contextlib.contextmanager
    def _refusing_writes(self) -> Iterator[None]:
        """Refuse a forward that changes a tensor of the model in place, in all micro-batches, and did not before."""
        tensors = self.staged.tensors
        before = [each._version for each in tensors.values()]
        yield
        changed = [name for (name, each), old in zip(tensors.items(), before, strict=True) if each._version != old]
        if changed:
            raise SyncError(
                f"forward has changed {', '.join(changed[:5])} of the model, which it did not in earlier batches",
                why="each micro-batch has changed it",
                fix="change it outside of forward, or use BalancedBackend(microbatches=1), which splits no batch",
            )


def _form(output: Any) -> Any:
    return tuple(each.dim() if isinstance(each, torch.Tensor) else None for each in leaves(output))


@contextlib.contextmanager
def _evaluating(model: nn.Module, classes: str) -> Iterator[None]:
    """Set the modules whose class is defined in `classes`, a prefix, to evaluation mode, and back."""
    modes = [(each, each.training) for each in model.modules()]
    for each, is_training in modes:
        each.training = is_training and not type(each).__module__.startswith(classes)
    try:
        yield
    finally:
        for each, is_training in modes:
            each.training = is_training
