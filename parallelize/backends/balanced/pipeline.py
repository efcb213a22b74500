"""Pipeline: runs a model by its plan, as a module that DistributedDataParallel can wrap."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.batch_validation import BatchKind, BatchValidation, SplitRows
from parallelize.backends.balanced.batchnorm import BatchNorms
from parallelize.backends.balanced.executor import Executor
from parallelize.backends.balanced.graph_entries import GraphEntries, mark_joined
from parallelize.backends.balanced.microbatch_run import ModuleHooks, user_hooks
from parallelize.backends.balanced.microbatch_split_join import (
    SplitBatch,
    Weights,
    batch_size,
    first_samples,
    join_outputs,
    named_leaves,
    names_not_per_sample,
    output_form,
    rebuild,
    scalar_weights,
    split_dims,
)
from parallelize.backends.balanced.opaque_inputs import copy_inputs, opaque_inputs
from parallelize.backends.balanced.output_comparison import is_equal
from parallelize.backends.balanced.plan import Plan, remember
from parallelize.backends.balanced.side_effects import RNGState
from parallelize.backends.balanced.stage_threads import StageThreads, is_bound_to_thread, stages_on
from parallelize.backends.balanced.threaded_backward import connect
from parallelize.backends.balanced.units import border_units, unit_routes
from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.weighted_backward import weigh_losses

__all__ = ["Pipeline"]


def _code(hook: Any) -> Any:
    """Return what is equal for hooks that a loop registers anew for each step."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__code__", type(hook))


def _may_be_clamped(weights: Weights, sizes: Sequence[int]) -> bool:
    """Return whether a sum of several samples is divided by 1 or less: the divisor may be `count.clamp(min=1)`."""
    found = (
        part * count.count <= 1.0
        for parts, count in weights.values()
        if count.kind == "mean" and count.loss == "Sum" and isinstance(count.count, float)
        for part, size in zip(parts, sizes, strict=True)
        if isinstance(part, float) and size > 1
    )
    return any(found)


def _global_hooks() -> list[Any]:
    found = (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks)
    return [hook for hooks in found for hook in hooks.values()]


class Pipeline(nn.Module):
    """Runs each batch of a model through the stages of a plan; its hooks and threads end with `close`.

    Args:
        inner: holds the model, which is on the devices of its stages.
        plan: the plan.
        batch_dim: batch dimension of the inputs.
        output_device: device of the inputs and of the outputs.

    Attributes:
        refusal: why the latest kind of batch that is not split is not; None: all are.
    """

    refusal: ConfigError | None = None

    def __init__(self, inner: Inner, plan: Plan, *, batch_dim: int, output_device: torch.device) -> None:
        super().__init__()
        self.inner = inner
        self._plan = plan
        self._batch_dim = batch_dim
        self._kinds: dict[Any, BatchKind | None] = {}
        self._moded = list(inner.model.modules())
        stages = stages_on([torch.device(device) for device in plan.devices])
        modules = dict(inner.model.named_modules())
        units = [modules[name] for name in dict.fromkeys(plan.events)]
        self._norms = BatchNorms(inner.model)
        self._cleanup = contextlib.ExitStack()
        is_on_cpu = {stage.device.type for stage in stages} == {"cpu"} and plan.microbatches > 1
        self._executor = Executor(
            stages=stages,
            routes=unit_routes(inner.model, plan.events, plan.bounds),
            norms=self._norms,
            recomputed=tuple(each for each in units if each not in self._norms) if plan.recompute else (),
            output_device=output_device,
            model=inner.model,
            threads=StageThreads(stages, microbatches=plan.microbatches) if is_on_cpu else None,
        )
        if self._executor.threads is not None:
            self._cleanup.callback(self._executor.threads.close)
        hooks = ModuleHooks(
            inner.model,
            stages,
            self._executor.routes,
            self._norms,
            output_device=output_device,
            borders=border_units(inner.model, plan.events, plan.bounds),
        )
        self._cleanup.callback(hooks.close)
        self._cleanup.enter_context(weigh_losses(GraphEntries(plan.explaining_out_of_memory)))

    def close(self) -> None:
        """Remove the hooks, and end the threads."""
        self._cleanup.close()

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a batch."""
        # Mixed precision casts the weights once for all micro-batches: to the session, they are one forward.
        whole = types.MethodType(lambda _model, *args, **kwargs: self._run(args, kwargs), self.inner.model)
        return self.inner.session.forward(whole, *args, **kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = args, kwargs
        return self._run_whole(inputs) if self._plan.microbatches == 1 else self._run_split(inputs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.bind_method(self.inner.method, self.inner.model)(*args, **kwargs)

    def _run_whole(self, inputs: Any) -> Any:
        output = self._executor.run_whole(self._call, *inputs)
        mark_joined(output)
        device = self._executor.output_device
        if all(each.device == device for each in leaves(output) if isinstance(each, torch.Tensor)):
            return output
        return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, output)

    def _run_split(self, inputs: Any) -> Any:
        key = self._key(inputs)
        if self._kinds.get(key, self) is None:
            return self._run_whole(inputs)
        try:
            count = self._microbatches(inputs)
            if count > 1 and key not in self._kinds:
                self._kinds[key] = self._validate(inputs, count)
            kind = self._kinds.get(key)
            if kind is not None and count > 1:
                self._check_parameter_hooks(kind)
                return self._run_microbatches(inputs, kind, count)
        except refusals.CannotSplitError as error:
            self._kinds[key], self.refusal = None, error
            if torch.is_grad_enabled():
                warnings.warn(f"batches like this one are not split into micro-batches: {error}", stacklevel=2)
        return self._run_whole(inputs)

    def _key(self, inputs: Any) -> Any:
        """Return what distinguishes kinds of batches, see `batch_validation`."""
        flags = [value for each in self._moded for value in vars(each).values() if type(value) in {bool, str}]
        # Not the hooks' ids: a loop may register the same function anew for each step.
        hooks = tuple(
            _code(each) for each in (*(hook for m in self._moded for hook in user_hooks(m)), *_global_hooks())
        )
        names = tuple((name, leaf if isinstance(leaf, bool) else None) for name, leaf in named_leaves(inputs))
        modes = tuple(each for each in (*inputs[0], *inputs[1].values()) if isinstance(each, str))
        return tuple(flags), hooks, names, modes, torch.is_grad_enabled(), self.inner.method

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

    def _run_microbatches(self, inputs: Any, kind: BatchKind, count: int) -> Any:
        is_threaded = self._is_threaded(kind)
        is_bounded = is_threaded and torch.is_grad_enabled()
        before = RNGState([stage.device for stage in self._executor.stages])
        buffers = [(each, each.clone()) for each in map(self.inner.model.get_buffer, kind.buffers)]
        batch = self._split(inputs, count, is_bounded=is_bounded)
        outputs, moments = self._executor.run(self._call, batch, is_threaded=is_threaded, buffers=kind.buffers)
        kind.draws = kind.draws or (is_threaded and before.has_changed())
        rows = [list(leaves(output)) for output in outputs]
        if len({len(row) for row in rows}) > 1:
            self._norms.update(moments)
            counts = " and ".join(map(str, sorted({len(row) for row in rows})))
            return refusals.UnjoinedOutput(refusals.unjoinable(f"micro-batches return {counts} values", "they differ"))
        adds_unknown = self.inner.average == "sum"
        weights = scalar_weights(rows, batch.sizes, inputs=inputs, adds_unknown=adds_unknown)
        form = output_form(rows[0], weights)
        if form not in kind.dims or _may_be_clamped(weights, batch.sizes):
            try:
                found = self._validate(inputs, count)
            except refusals.CannotSplitError:  # the batch runs again, whole
                before.restore()
                for buffer, value in buffers:
                    buffer.copy_(value)
                raise
            kind.dims[form] = {} if found is None else found.dims.get(form, {})
            kind.constants[form] = {} if found is None else found.constants.get(form, {})
        self._norms.update(moments)
        if is_bounded and self._executor.threads is not None:
            connect(rows, bounds=batch.bounds, submit=self._executor.threads.backward)
        values = join_outputs(rows, device=self._executor.output_device, dims=kind.dims[form], weights=weights)
        for position, constant in kind.constants.get(form, {}).items():
            if not isinstance(values[position], refusals.UnjoinedOutput) and not is_equal(values[position], constant):
                what = f"output {position} of the model, {values[position]}"
                why = f"in an earlier batch, micro-batches and the full batch had {constant}; it may be a count"
                values[position] = refusals.UnjoinedOutput(refusals.unjoinable(what, why))
        mark_joined(values)
        return rebuild(outputs[0], values)

    def _is_threaded(self, kind: BatchKind) -> bool:
        is_free = not kind.draws and not kind.buffers and not self._has_replaced_parameters()
        return self._executor.threads is not None and is_free and not is_bound_to_thread()

    def _has_replaced_parameters(self) -> bool:
        """Return whether torch.func.functional_call has replaced parameters by results of operations.

        A backward in threads does not compute gradients of such tensors, which the user may ask for.
        """
        used = (parameter for each in self._moded for parameter in each._parameters.values())
        return any(parameter is not None and not parameter.is_leaf for parameter in used)

    def _split(self, inputs: Any, count: int, *, is_bounded: bool = False) -> SplitBatch:
        whole = self._plan.whole_inputs
        return SplitBatch(inputs, microbatches=count, dim=self._batch_dim, whole_inputs=whole, is_bounded=is_bounded)

    def _validate(self, inputs: Any, count: int) -> BatchKind | None:
        """Compare micro-batches with the full batch; return None if, without gradients, the batch is better not split.

        Raises:
            CannotSplitError: micro-batches do not compute what the full batch does.
        """
        for name, each in opaque_inputs(inputs).items():
            raise refusals.CannotSplitError(
                f"argument {name} of the model is a {type(each).__name__}",
                why="it cannot be split, and micro-batches would see what others have left in it",
                fix="pass tensors, alone or in containers",
            )

        def split(inputs: Any, kind: BatchKind) -> SplitRows:
            batch = self._split(copy_inputs(inputs), count)
            try:
                is_threaded = self._is_threaded(kind)
                outputs, _ = self._executor.run(self._call, batch, is_threaded=is_threaded, buffers=kind.buffers)
            except (ConfigError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise refusals.split_failure(split_dims(inputs, dim=self._batch_dim), error) from error
            return SplitRows([list(leaves(output)) for output in outputs], batch.sizes)

        devices = dict.fromkeys([self._executor.output_device, *(stage.device for stage in self._executor.stages)])
        validation = BatchValidation(
            model=self.inner.model,
            whole=self._run_whole,
            split=split,
            devices=list(devices),
            normalizes=self._norms.is_training,
            adds_unknown=self.inner.average == "sum",
        )
        samples, kind = batch_size(inputs, dim=self._batch_dim), None
        while kind is None:
            try:
                kind = validation.run(inputs)
            except torch.OutOfMemoryError:  # the full batch may need more memory than micro-batches: compare a part
                samples //= 2
                if samples < 2:
                    raise
            inputs = first_samples(inputs, samples, dim=self._batch_dim, whole_inputs=self._plan.whole_inputs)
            count = self._microbatches(inputs)
        # Without a graph, the number of targets of a loss is not known.
        has_loss = any(isinstance(each, tuple) for form in kind.dims for each in form)
        return None if has_loss and not torch.is_grad_enabled() else kind

    def _learn_whole_inputs(self, inputs: Any) -> None:
        """Remember the names of inputs with another length than the batch; later batches do not split them either."""
        known = self._plan.whole_inputs
        new = names_not_per_sample(inputs, dim=self._batch_dim).difference(known)
        if new:
            self._plan = replace(self._plan, whole_inputs=tuple(sorted(new.union(known))))
            remember(self.inner.model, self._plan)

    def _microbatches(self, inputs: Any) -> int:
        """Return the number of micro-batches: fewer if batch norm would train on one sample at a time."""
        self._learn_whole_inputs(inputs)
        samples, count = batch_size(inputs, dim=self._batch_dim), self._plan.microbatches
        if self._norms.is_training and samples < min(self._plan.samples, 2 * count):
            return max(1, samples // 2)
        return min(count, samples)
