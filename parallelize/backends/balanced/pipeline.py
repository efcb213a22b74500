"""Pipeline: runs a model by its plan, as a module that DistributedDataParallel can wrap."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.backward import GraphEntries, connect, mark_joined
from parallelize.backends.balanced.batch import Batch, Switches, copy_inputs, opaque_inputs, rebuild
from parallelize.backends.balanced.batch_validation import BatchKind, BatchValidation
from parallelize.backends.balanced.executor import Executor
from parallelize.backends.balanced.microbatch_run import StagedModel, user_hooks
from parallelize.backends.balanced.outputs import (
    OutputBuffers,
    Weights,
    is_equal,
    join_outputs,
    output_form,
    scalar_weights,
)
from parallelize.backends.balanced.plan import Plan, remember
from parallelize.backends.balanced.side_effects import check_writes, write_counts
from parallelize.backends.balanced.stage_threads import StageThreads, is_bound_to_thread, stages_on
from parallelize.backends.balanced.units import border_units, unit_routes
from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import leaves
from parallelize.runtime.rng_state import RNGState
from parallelize.torch_patches.backward import Order, subscribed

__all__ = ["Pipeline"]

_log = logging.getLogger(__name__)


def _code(hook: Any) -> Any:
    """Return what is equal for hooks that a loop registers anew for each step."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__code__", type(hook))


def _may_be_clamped(weights: Weights, sizes: Sequence[int]) -> bool:
    """Return whether a sum of several samples is divided by 1 or less: the divisor may be `count.clamp(min=1)`."""
    return any(
        part * count.count <= 1.0
        for parts, count in weights.values()
        if count.kind == "mean" and count.loss == "Sum" and isinstance(count.count, float)
        for part, size in zip(parts, sizes, strict=True)
        if isinstance(part, float) and size > 1
    )


class Pipeline(nn.Module):
    """Runs each batch of a model through the stages of a plan; its hooks and threads end with `close`.

    Args:
        inner: holds the model, which is on the devices of its stages.
        output_device: device of the inputs and of the outputs.
    """

    refusal: ConfigError | None = None  # why the latest kind of batch that is not split is not
    restriction: ConfigError | None = None  # why the latest kind that only the first pipeline runs has no others

    def __init__(self, inner: Inner, plan: Plan, *, batch_dim: int, output_device: torch.device) -> None:
        super().__init__()
        self.inner = inner
        self._plan = plan
        self._batch_dim = batch_dim
        self.kinds: dict[Any, BatchKind | None] = {}  # by `_key`; None: such batches are not split
        self._switches = Switches()
        self._moded = list(inner.model.modules())
        self._cleanup = contextlib.ExitStack()
        stages = stages_on([torch.device(device) for device in plan.devices])
        calls = inner.model, plan.events, plan.bounds
        self._staged = StagedModel(
            inner.model,
            stages,
            unit_routes(*calls),
            output_device=output_device,
            borders=border_units(*calls),
            pipelines=plan.pipelines,
        )
        self._cleanup.callback(self._staged.close)
        units = [inner.model.get_submodule(name) for name in dict.fromkeys(plan.events)] if plan.recompute else []
        self._threads = None
        if {stage.device.type for stage in stages} == {"cpu"} and plan.microbatches > 1:
            threads = contextlib.closing(StageThreads(stages, microbatches=plan.microbatches))
            self._threads = self._cleanup.enter_context(threads)
        self._executor = Executor(inner, self._staged, tuple(each for each in units if each not in self._staged.norms))
        entries = GraphEntries(plan.explaining_out_of_memory)
        self._cleanup.enter_context(subscribed(Order.BEGIN, entries.check))

    def close(self) -> None:
        """Remove the hooks, and end the threads."""
        self._cleanup.close()

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a batch."""
        # Mixed precision casts the weights once for all micro-batches: to the session, they are one forward.
        whole = types.MethodType(lambda _model, *args, **kwargs: self._run((args, kwargs)), self.inner.model)
        return self.inner.session.forward(whole, *args, **kwargs)

    def _run(self, inputs: Any) -> Any:
        if self._plan.microbatches == 1:
            return self._executor.run_whole(inputs)
        key, most = self._key(inputs), 1 if self._plan.recompute else self._plan.pipelines
        while self.kinds.get(key, self) is not None:
            known = self.kinds.get(key)
            pipelines = most if known is None else min(most, known.pipelines)
            try:
                batch = self._batch(inputs)
                if self._microbatches(batch) == 1:
                    break
                if key not in self.kinds:
                    self.kinds[key] = self._validate(batch, pipelines)
                kind = self.kinds[key]
                if kind is not None:
                    kind.pipelines = pipelines
                    self._check_parameter_hooks(kind)
                    return self._run_microbatches(batch, kind)
            except refusals.CannotSplitError as error:
                if pipelines > 1:
                    most, self.restriction = 1, error
                    _log.warning("batches like this one run in one pipeline: %s", str(error).splitlines()[0])
                    continue
                self.kinds[key], self.refusal = None, error
                if torch.is_grad_enabled():
                    warnings.warn(f"batches like this one are not split into micro-batches: {error}", stacklevel=2)
        return self._executor.run_whole(inputs)

    def _key(self, inputs: Any) -> Any:
        """Return what distinguishes kinds of batches, see `batch_validation`."""
        flags = [value for each in self._moded for value in vars(each).values() if type(value) in {bool, str}]
        of_all = nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks
        hooks = [*(hook for m in self._moded for hook in user_hooks(m)), *(each for h in of_all for each in h.values())]
        # Not the hooks' ids: a loop may register the same function anew for each step.
        codes, switches = tuple(map(_code, hooks)), self._switches.key(inputs)
        return tuple(flags), codes, switches, torch.is_grad_enabled(), self.inner.method

    def _check_parameter_hooks(self, kind: BatchKind) -> None:
        """Raise CannotSplitError if a reentrant checkpoint would call hooks of parameters for each micro-batch."""
        named = self.inner.model.named_parameters() if kind.is_reentrant else ()
        hooked = [name for name, each in named if each._backward_hooks or each._post_accumulate_grad_hooks]
        if hooked:
            raise refusals.CannotSplitError(
                f"parameters with hooks, {', '.join(hooked[:5])}, under torch.utils.checkpoint with use_reentrant=True",
                why="a reentrant checkpoint calls them with the gradient of one micro-batch at a time",
                fix="use checkpoint(..., use_reentrant=False)",
            )

    def _run_microbatches(self, batch: Batch, kind: BatchKind) -> Any:
        threads = self._threads_for(kind)
        is_bounded = threads is not None and torch.is_grad_enabled()
        rng, writes = RNGState(self._staged.devices), write_counts(self._moded)
        buffers = [(each, each.clone()) for each in map(self.inner.model.get_buffer, kind.buffers)]
        split = batch.split(self._microbatches(batch), is_bounded=is_bounded)
        # Forward-mode derivatives, and outputs on several devices, are concatenated.
        known = {} if is_bound_to_thread() or kind.pipelines > 1 else kind.dims
        joined = OutputBuffers(known, split.sizes, device=self._staged.output_device)
        try:
            outputs, moments = self._executor.run(
                split, threads=threads, buffers=kind.buffers, pipelines=kind.pipelines, on_output=joined.copy
            )
            check_writes(self.inner.model, writes, known=kind.buffers)
            kind.draws = kind.draws or (threads is not None and rng.has_changed())
            rows = [list(leaves(output)) for output in outputs]
            counts = [str(each) for each in sorted({len(row) for row in rows})]
            if len(counts) > 1:
                self._staged.norms.update(moments)
                return refusals.UnjoinedOutput(f"micro-batches return {' and '.join(counts)} values", "they differ")
            weights = scalar_weights(rows, split.sizes, inputs=batch.inputs, adds_unknown=self.inner.average == "sum")
            form = output_form(rows[0], weights)
            if form not in kind.dims or _may_be_clamped(weights, split.sizes):
                found = self._validate(batch, kind.pipelines) or BatchKind()
                kind.dims[form], kind.constants[form] = found.dims.get(form, {}), found.constants.get(form, {})
        except refusals.CannotSplitError:  # the batch runs again, whole
            rng.restore()
            for buffer, value in buffers:
                buffer.copy_(value)
            raise
        self._staged.norms.update(moments)
        if threads is not None and is_bounded:
            connect(rows, bounds=split.bounds, run=functools.partial(threads.run, is_backward=True))
        joined.replace_stand_ins(rows, kind.dims[form])
        values = join_outputs(rows, device=self._staged.output_device, dims=kind.dims[form], weights=weights)
        for position, constant in kind.constants.get(form, {}).items():
            if not isinstance(values[position], refusals.UnjoinedOutput) and not is_equal(values[position], constant):
                what = f"output {position} of the model, {values[position]}"
                why = f"in an earlier batch, micro-batches and the full batch had {constant}; it may be a count"
                values[position] = refusals.UnjoinedOutput(what, why)
        mark_joined(values)
        return rebuild(outputs[0], values)

    def _threads_for(self, kind: BatchKind) -> StageThreads | None:
        """Return the threads in which micro-batches run; None: they run in this one."""
        if self._threads is None or kind.draws or kind.buffers or is_bound_to_thread():
            return None
        # A backward in threads computes no gradients of what torch.func.functional_call has put in place of parameters.
        used = (parameter for each in self._moded for parameter in each._parameters.values())
        return self._threads if all(each is None or each.is_leaf for each in used) else None

    def _validate(self, batch: Batch, pipelines: int) -> BatchKind | None:
        """Compare micro-batches with the full batch; return None if, without gradients, the batch is better not split.

        Raises:
            CannotSplitError: micro-batches do not compute what the full batch does.
        """
        for name, each in opaque_inputs(batch.inputs).items():
            raise refusals.CannotSplitError(
                f"argument {name} of the model is a {type(each).__name__}",
                why="it cannot be split, and micro-batches would see what others have left in it",
                fix="pass tensors, alone or in containers",
            )
        try:
            kind: BatchKind | None = self._validation(batch, pipelines).run()
        except torch.OutOfMemoryError:  # the full batch may need more memory than micro-batches: compare a part
            if batch.size < 4:
                raise
            kind = None  # the part is compared outside, where the error does not keep tensors of the full batch
        except RuntimeError as error:  # for example, a function of the user's saves a parameter for its backward
            if pipelines == 1:
                raise
            raise refusals.one_pipeline(f"backward of several pipelines fails ({type(error).__name__})") from error
        if kind is None:
            return self._validate(self._batch(batch.first(batch.size // 2)), pipelines)
        # Without a graph, the number of targets of a loss is not known.
        has_loss = any(isinstance(each, tuple) for form in kind.dims for each in form)
        return None if has_loss and not kind.has_graph else kind

    def _validation(self, batch: Batch, pipelines: int) -> BatchValidation:
        def split(kind: BatchKind) -> tuple[list[list[Any]], Sequence[int]]:
            if pipelines > 1 and (kind.buffers or kind.is_reentrant):
                changes = f"forward changes {kind.buffers[0]}" if kind.buffers else "a reentrant checkpoint"
                raise refusals.one_pipeline(changes)
            copied = self._batch(copy_inputs(batch.inputs)).split(self._microbatches(batch))
            with refusals.explained_split_failure(batch.split_dims):
                outputs, _ = self._executor.run(
                    copied, threads=self._threads_for(kind), buffers=kind.buffers, pipelines=pipelines
                )
            return [list(leaves(output)) for output in outputs], copied.sizes

        return BatchValidation(
            model=self.inner.model,
            inputs=batch.inputs,
            whole=self._executor.run_whole,
            split=split,
            devices=self._staged.devices,
            normalizes=self._staged.norms.is_training,
            adds_unknown=self.inner.average == "sum",
        )

    def _batch(self, inputs: Any) -> Batch:
        """Return the inputs as a batch, and remember the names of tensors that no later batch splits, either."""
        batch = Batch(inputs, dim=self._batch_dim, whole_inputs=self._plan.whole_inputs)
        if batch.not_per_sample != {*self._plan.whole_inputs}:
            self._plan = replace(self._plan, whole_inputs=tuple(sorted(batch.not_per_sample)))
            remember(self.inner.model, self._plan)
        return batch

    def _microbatches(self, batch: Batch) -> int:
        """Return the number of micro-batches: fewer if batch norm would train on one sample at a time."""
        count = self._plan.microbatches
        if self._staged.norms.is_training and batch.size < min(self._plan.samples, 2 * count):
            return max(1, batch.size // 2)
        return min(count, batch.size)
