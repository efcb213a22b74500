"""Pipeline: runs batches of a model by its plan, in micro-batches, and checks on some of them that this is the same.

One thread issues all micro-batches through the unmodified model, one after another, in one autograd graph. On
accelerators the devices then work on different micro-batches; on the CPU nothing overlaps: it exists for tests.

Spot checks: batches 1, 2, 4, 8, ... 64 and then every 64th of each kind (mode, method, arguments) run a few samples
whole and in two micro-batches, in the same modes. Losses and outputs are compared; if forward draws random numbers or
normalizes over the batch, in evaluation mode. A difference in the first check, or a forward that changes state, makes
such batches run whole. A difference in a later one is a SyncError, since batches before it were split.
"""

from __future__ import annotations

import types
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelize.backends.balanced.microbatch import Staged
from parallelize.backends.balanced.transfer import to_device
from parallelize.backends.batches import (
    Batch,
    Dims,
    WholeReason,
    difference,
    joined_dims,
    joined_outputs,
)
from parallelize.backends.model_state import ModelState
from parallelize.errors import SyncError
from parallelize.plugins.base import Inner
from parallelize.torch_patches.transforms import is_in_transform

__all__ = ["Pipeline"]

_CHECKED_SAMPLES = 4
_CHECKED_EVERY = 64  # batches, at last
_KEEPING_NOTHING = frozenset({"parallelize", "torch", "transformers"})
"""Packages whose hooks keep nothing of what they see."""


@dataclass
class _Kind:
    """What is known of batches that have the same mode, method and arguments."""

    batches: int = 0
    reason: WholeReason | None = None  # why they run whole
    dims: Dims | None = None  # how outputs are joined


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """Runs each batch of a model through the stages of a plan.

    Args:
        inner: holds the model.
        staged: the model on the devices of its stages.
        microbatches: most micro-batches of a batch.
        batch_dim: batch dimension of the inputs.
    """

    inner: Inner
    staged: Staged
    microbatches: int
    batch_dim: int
    refusal: WholeReason | None = None  # why the latest batch has run whole
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
        if self.microbatches > 1:
            batch = Batch.of(inputs, self.batch_dim)
            if isinstance(batch, WholeReason):
                self.refusal = batch
            else:
                modes = self.inner.method, self.inner.model.training, torch.is_grad_enabled()
                kind = self._kinds.setdefault((*modes, *batch.signature()), kind)
                output = self._run_split(batch, kind)
                if not isinstance(output, WholeReason):
                    return output
                self.refusal = output
        with self.staged.batch():
            output = to_device(self._outputs(Batch.whole(inputs), 1)[0], self.staged.output_device)
        kind.reason, text = self.refusal, str(self.refusal)  # only now: forward itself does not fail
        if self.refusal is not None and torch.is_grad_enabled() and text not in self._told:
            self._told.add(text)
            warnings.warn(f"batches like this one are not split into micro-batches: {text}", stacklevel=2)
        return output

    def _run_split(self, batch: Batch, kind: _Kind) -> Any | WholeReason:
        kind.batches += 1
        if kind.reason is not None:
            return kind.reason
        if is_in_transform():
            return WholeReason(
                "forward is inside a transform of torch.func",
                why="a transform hides the values of a batch, by which micro-batches are checked",
                fix="transform what is computed outside of the model's forward",
            )
        refusal = self._refuse_hooks()
        number = kind.batches
        is_checked = number % _CHECKED_EVERY == 0 or (number < _CHECKED_EVERY and number & (number - 1) == 0)
        if refusal is None and is_checked:
            refusal = self._check(batch, kind)
        if refusal is not None:
            return refusal
        # Batch norm trains on two samples at least.
        count = max(1, min(self.microbatches, batch.size // (1 + self.staged.norms.is_training)))
        tensors = self.staged.tensors
        versions = [each._version for each in tensors.values()]
        with self.staged.batch():
            outputs = self._outputs(batch, count)
            pairs = zip(tensors.items(), versions, strict=True)
            changed = [name for (name, each), version in pairs if each._version != version]
        if changed:
            raise SyncError(
                f"forward has changed {', '.join(changed[:5])} of the model, which it did not in earlier batches",
                why="each micro-batch has changed it",
                fix="change it outside of forward, or use BalancedBackend(microbatches=1), which splits no batch",
            )
        return joined_outputs(outputs, kind.dims or (), batch=batch, device=self.staged.output_device)

    def _outputs(self, batch: Batch, count: int) -> list[Any]:
        call = self.inner.bind_method(self.inner.method, self.inner.model)
        return [self.staged.run(call, inputs) for inputs in batch.split(count)]

    def _check(self, batch: Batch, kind: _Kind) -> WholeReason | None:
        """Compare some samples whole with their micro-batches, and learn how outputs are joined.

        Returns why the batch runs whole: forward changes state or fails on a part of a batch, or outputs differ at
        the first time.

        Raises:
            SyncError: outputs differ, and did not before.
        """
        is_first, number, found = kind.dims is None, min(_CHECKED_SAMPLES, batch.size), None
        while found is None:
            try:
                found = self._difference(batch.trial(number), kind)
            except torch.OutOfMemoryError:  # more samples than a micro-batch has
                if number <= 2:
                    raise
            number //= 2
        if isinstance(found, WholeReason):
            return found
        what = f"the output of micro-batches differs from that of the batch by {found:.3g}"
        why = "a sample's output depends on other samples, as by a limit per batch"
        fix = "compute what depends on all samples outside of the model"
        if found and is_first:
            return WholeReason(what, why=why, fix=fix)
        if found:
            raise SyncError(
                f"{what}, which it did not in batch 1",
                why=f"{why}, or an attribute or argument has changed: batches up to {kind.batches} may be wrong",
                fix=f"{fix}; or use BalancedBackend(microbatches=1), which splits no batch",
            )
        return None

    def _difference(self, samples: Batch, kind: _Kind) -> float | WholeReason:
        """Return the difference of outputs; if they cannot be compared in these modes, that in evaluation mode."""
        state, device = ModelState(self.inner.model, self.staged.devices), self.staged.output_device
        try:
            # Modules of classes that begin so are in evaluation mode.
            for classes in ("-", "torch.nn.", ""):
                state.restore()
                for each in self.inner.model.modules():
                    each.training &= not type(each).__module__.startswith(classes)
                both = self._both(samples, state)
                if isinstance(both, WholeReason):
                    return both
                parts, whole = both
                dims = joined_dims(whole, parts[0])
                kind.dims = kind.dims or dims
                joined = joined_outputs(parts, dims, batch=samples, device=device)
                if isinstance(joined, WholeReason):
                    return joined
                found = difference(whole, joined, dims)
                if isinstance(found, WholeReason):
                    return found
                if not (state.draws() or self.staged.norms.is_training):
                    return found
        finally:
            state.restore()
        return 0.0

    def _both(self, samples: Batch, state: ModelState) -> tuple[list[Any], Any] | WholeReason:
        """Return the outputs of two micro-batches, and of all samples."""
        try:
            with warnings.catch_warnings(), self.staged.batch(is_counted=False), state.watching():
                warnings.simplefilter("ignore")  # the batch itself gives forward's warnings
                parts = self._outputs(samples, 2)
                filled = ModelState(self.inner.model, self.staged.devices)  # has caches that the first forward fills
                with filled.watching():
                    whole = self._outputs(samples, 1)[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return WholeReason(
                f"forward fails on a part of the batch ({type(error).__name__})",
                why="every tensor as long as the first one is split along the batch, also inside lists",
                fix="give tensors that are not per sample another length, set BalancedBackend(batch_dim=...), use no "
                "constant batch size in forward",
            )
        if changed := filled.changed():
            return WholeReason(
                f"forward changes {', '.join(changed[:5])} of the model",
                why="each micro-batch would change it",
                fix="change it outside of forward, and pass values between modules as arguments and return values",
            )
        return parts, to_device(whole, self.staged.output_device)

    def _refuse_hooks(self) -> WholeReason | None:
        """Refuse hooks of the user's inside the model, which may keep what they see: it would be a part."""
        for name, module in self.staged.inside:
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if hooks and {getattr(each, "__module__", "").split(".")[0] for each in hooks} - _KEEPING_NOTHING:
                return WholeReason(
                    f"{name} of the model has a forward hook",
                    why="it would see one micro-batch at a time",
                    fix="return what it needs from forward",
                )
        return None
