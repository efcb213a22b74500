"""Pipeline: runs batches of a model by its plan, in micro-batches where these compute the same.

One thread issues all micro-batches through the unmodified model, one after another, in one autograd
graph. On accelerators the devices then work on different micro-batches; on the CPU nothing
overlaps: it exists for tests.

    a batch of a new kind ──> its first two micro-batches are compared with the whole of their
                              samples
                              ├── equal ──> batches of this kind are split
                              │             └── the outputs of one cannot be joined ──┐
                              └── a difference, or a forward that changes state ──────┴──> batches
                                  of this kind run whole, and a warning gives the reason

Glossary:

    kind       batches that have the same method, modes and arguments
    split      run in micro-batches, whose outputs are joined
    whole      run in one forward
    sample     what a batch has several of
    dims       the dimension in which each output is joined
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

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
from parallelize.plugins.base import Inner
from parallelize.run.containers import map_leaves, tensors_in
from parallelize.run.generators import RNGState
from parallelize.torch_patches.transforms import is_in_transform

_KEEPING_NOTHING = frozenset({"parallelize", "torch", "transformers"})
"""Packages whose hooks keep nothing of what they see."""

_IN_TRANSFORM = WholeReason(
    "forward is inside a transform of torch.func",
    why="a transform hides the values of a batch, by which micro-batches are compared with it",
    fix="transform what is computed outside of the model's forward",
)


@dataclass
class _Verdict:
    """What is known of batches of one kind.

    Args:
        division: how the outputs of micro-batches are joined, or why its batches run whole; None:
            none of its batches has been compared.
        has_run_whole: whether one of its batches has.
    """

    division: Dims | WholeReason | None = None
    has_run_whole: bool = False


@dataclass(frozen=True)
class _Comparison:
    """The outputs of micro-batches, compared with the output of all of their samples.

    Args:
        dims: how they are joined.
        difference: the largest one, relative to the largest value; 0: it is rounding.
    """

    dims: Dims
    difference: float


class _ComparisonMode(Enum):
    """In which modes micro-batches are compared with the whole of their samples.

    Where forward draws random numbers, as dropout does, or batch norm uses the moments of a batch,
    micro-batches never equal the whole. Then torch's modules, and in the end all modules, are in
    evaluation mode. The user's modules come last: samples may depend on each other in training
    only.
    """

    OF_THE_BATCH = auto()
    TORCH_MODULES_EVALUATE = auto()
    ALL_MODULES_EVALUATE = auto()

    def enter(self, model: nn.Module) -> None:
        """Change the modes of a model's modules."""
        for module in model.modules():
            if self is _ComparisonMode.TORCH_MODULES_EVALUATE:
                module.training &= not type(module).__module__.startswith("torch.nn.")
            elif self is _ComparisonMode.ALL_MODULES_EVALUATE:
                module.training = False


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """Runs each batch of a model through the stages of a plan.

    Args:
        inner: holds the model.
        staged: the model on the devices of its stages.
        microbatches: most micro-batches of a batch.
        batch_dim: batch dimension of the inputs.

    Attributes:
        joins_several: whether a forward has returned several joined outputs with gradients.
    """

    inner: Inner
    staged: Staged
    microbatches: int
    batch_dim: int
    joins_several: bool = False
    _verdicts: dict[Any, _Verdict] = field(default_factory=dict)
    _warned_reasons: set[WholeReason] = field(default_factory=set)

    def __post_init__(self) -> None:
        # The first one is the model itself.
        _, *self._submodules = self.inner.model.named_modules()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a batch."""

        def run(_model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._run((args, kwargs))

        # Mixed precision casts the weights once for all micro-batches: to it, they are one forward.
        return self.inner.session.forward(types.MethodType(run, self.inner.model), *args, **kwargs)

    def _run(self, inputs: Any) -> Any:
        # At once: a copy for each micro-batch would wait for the last stage of the one before.
        inputs = to_device(inputs, self.staged.input_device)
        if self.microbatches == 1:
            return self._run_whole(Batch.whole(inputs))
        batch = Batch.of(inputs, self.batch_dim)
        if isinstance(batch, WholeReason):
            return self._run_whole(Batch.whole(inputs), batch)
        microbatches = min(self.microbatches, batch.size // self.staged.norms.least_samples)
        if microbatches < 2:
            return self._run_whole(batch)
        reason = self._reason_of_call()
        if reason is not None:
            return self._run_whole(batch, reason)
        verdict = self._verdict_on(batch)
        division = verdict.division
        if division is None:
            division = self._compare(batch, microbatches)
        if not isinstance(division, WholeReason):
            verdict.division = division
            output = self._run_split(batch, microbatches, division)
            if not isinstance(output, WholeReason):
                return output
            division = output
        output = self._run_whole(batch, division)
        # Not before: a forward that fails on the whole batch, too, tells nothing of the kind.
        verdict.division = division
        return output

    def _verdict_on(self, batch: Batch) -> _Verdict:
        """Return what is known of the batches of the same kind."""
        modes = self.inner.method, self.inner.model.training, torch.is_grad_enabled()
        return self._verdicts.setdefault((*modes, *batch.signature()), _Verdict())

    def _reason_of_call(self) -> WholeReason | None:
        """Return why this batch cannot be split, whatever its kind is; None: it may be.

        A hook of the user's inside the model may keep what it sees, which would be a part.
        """
        if is_in_transform():
            return _IN_TRANSFORM
        for name, module in self._submodules:
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
            for hook in hooks:
                package = str(getattr(hook, "__module__", "")).partition(".")[0]
                if package not in _KEEPING_NOTHING:
                    return WholeReason(
                        f"{name} of the model has a hook",
                        why="it would see one micro-batch at a time",
                        fix="return what it needs from forward",
                    )
        return None

    def _run_whole(self, batch: Batch, reason: WholeReason | None = None) -> Any:
        """Run a batch in one forward, and warn the user once of the reason."""
        verdict = self._verdict_on(batch)
        with self.staged.batch():
            output = self.staged.run_once(
                self._forward(), batch.inputs, is_first=not verdict.has_run_whole
            )
            output = to_device(output, self.staged.output_device)
        verdict.has_run_whole = True
        if reason is not None and torch.is_grad_enabled() and reason not in self._warned_reasons:
            self._warned_reasons.add(reason)
            text = f"batches like this one are not split into micro-batches: {reason}"
            warnings.warn(text, stacklevel=2)
        return output

    def _run_split(self, batch: Batch, microbatches: int, dims: Dims) -> Any | WholeReason:
        """Return the output of a batch, or why the outputs of its micro-batches cannot be joined.

        Then the batch has left nothing behind: it draws its random numbers again when it runs
        whole.
        """
        random_numbers = RNGState(self.staged.devices)
        with self.staged.batch():
            outputs = self._outputs(batch, microbatches)
            device = self.staged.output_device
            joined = joined_outputs(outputs, dims, batch=batch, device=device)
            if isinstance(joined, WholeReason):
                random_numbers.restore()
                self.staged.norms.forget_batch()
                return joined
        with_gradients = [tensor for tensor in tensors_in(joined) if tensor.requires_grad]
        self.joins_several |= len(with_gradients) > 1
        return joined

    def _outputs(self, batch: Batch, microbatches: int) -> list[Any]:
        """Return the outputs of the micro-batches, each on the device of its last unit."""
        forward = self._forward()
        parts = batch.parts(batch.sizes(microbatches))
        return [self.staged.run(forward, inputs) for inputs in parts]

    def _forward(self) -> Callable[..., Any]:
        return self.inner.bind_method(self.inner.method, self.inner.model)

    def _compare(self, batch: Batch, microbatches: int) -> Dims | WholeReason:
        """Compare two micro-batches with the whole of their samples.

        Args:
            batch: the first one of its kind.
            microbatches: their number; fewer samples than two of them have are compared if there is
                no memory for these.

        Returns:
            How the outputs of batches of this kind are joined, or why these are not split.
        """
        first, second, *_ = batch.sizes(microbatches)
        samples = first + second
        least = 2 * self.staged.norms.least_samples
        while True:
            try:
                return self._compare_samples(batch.trial(samples))
            except torch.OutOfMemoryError:
                # Neither is there memory for the batch, which has more samples.
                if samples == least:
                    raise
            samples = max(least, samples // 2)

    def _compare_samples(self, samples: Batch) -> Dims | WholeReason:
        """As `_compare`; the model and the random generators are as before afterwards."""
        state = ModelState(self.inner.model, self.staged.devices)
        dims_by_mode: list[Dims] = []
        try:
            for mode in _ComparisonMode:
                state.restore()
                mode.enter(self.inner.model)
                compared = self._compare_now(samples, state)
                if isinstance(compared, WholeReason):
                    return compared
                dims_by_mode.append(compared.dims)
                is_exact = not state.draws() and not self.staged.norms.is_training
                if is_exact and compared.difference:
                    return _dependent_samples(compared.difference)
                if is_exact:
                    break
        finally:
            state.restore()
        # Those of the batch's own modes, in which its outputs are joined.
        return dims_by_mode[0]

    def _compare_now(self, samples: Batch, state: ModelState) -> _Comparison | WholeReason:
        """Compare the outputs of two micro-batches in the current modes of the model."""
        outputs = self._whole_and_parts(samples, state)
        if isinstance(outputs, WholeReason):
            return outputs
        whole, parts = outputs
        dims = joined_dims(whole, parts[0])
        device = self.staged.output_device
        joined = joined_outputs(parts, dims, batch=samples, device=device)
        if isinstance(joined, WholeReason):
            return joined
        unequal = difference(whole, joined, dims)
        if isinstance(unequal, WholeReason):
            return unequal
        return _Comparison(dims, unequal)

    def _whole_and_parts(
        self, samples: Batch, state: ModelState
    ) -> tuple[Any, list[Any]] | WholeReason:
        """Return the output of all samples, without its graph, and those of two micro-batches.

        One graph at a time is held, so that the batch itself needs more memory.

        Args:
            samples: of both micro-batches.
            state: of the model, which learns what forward changes.
        """
        try:
            with (
                warnings.catch_warnings(),
                self.staged.batch(is_counted=False),
                state.watching(),
            ):
                # The batch itself gives forward's warnings.
                warnings.simplefilter("ignore")
                whole = map_leaves(self._detached, self._outputs(samples, 1)[0])
                # The first forward may fill caches, which later ones only read.
                state_with_caches = ModelState(self.inner.model, self.staged.devices)
                with state_with_caches.watching():
                    parts = self._outputs(samples, 2)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a forward may raise anything
            return WholeReason(
                f"forward fails on a part of the batch ({type(error).__name__})",
                why="every tensor as long as the first one is split along the batch, also inside "
                "lists",
                fix="give tensors that are not per sample another length, set "
                "BalancedBackend(batch_dim=...), use no constant batch size in forward",
            )
        changed = state_with_caches.changed()
        if changed:
            return WholeReason(
                f"forward changes {', '.join(changed[:5])} of the model",
                why="each micro-batch would change it",
                fix="change it outside of forward, and pass values between modules as arguments "
                "and return values",
            )
        return whole, parts

    def _detached(self, leaf: Any) -> Any:
        """Return a tensor without its graph, where the outputs are needed."""
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(self.staged.output_device)
        return leaf


def _dependent_samples(unequal: float) -> WholeReason:
    return WholeReason(
        f"the output of micro-batches differs from that of the batch by {unequal:.3g}",
        why="a sample's output depends on other samples, as by a limit per batch",
        fix="compute what depends on all samples outside of the model",
    )
