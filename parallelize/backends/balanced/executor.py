"""Executor: splits a batch into micro-batches, runs them through the pipeline in threads, and joins their outputs."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced.activation_checkpoint import recompute_modules
from parallelize.backends.balanced.autograd_bridge import PipelineBackward, connect
from parallelize.backends.balanced.batchnorm import deferred_running_stats
from parallelize.backends.balanced.microbatch_run import MicrobatchRun, active_run
from parallelize.backends.balanced.microbatch_split_join import SplitBatch, join_outputs, rebuild
from parallelize.backends.balanced.segment import Stage
from parallelize.backends.balanced.stage_parameters import HalfParameters, StageParameters
from parallelize.backends.balanced.stage_threads import Aborted, StageLock, StageThreads, ThreadLocalState
from parallelize.backends.balanced.stage_transfer import StageTransfer
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import leaves
from parallelize.runtime.loss_counts import attach_count

__all__ = ["Executor", "ModelForward", "PipelineConfig"]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Which stage runs which modules, and how batches are split and joined.

    Args:
        stages: the stages, in pipeline order.
        routes: id of a module -> the stages of its first, second, ... call; further calls use the last entry.
        microbatches: maximum number of micro-batches per batch.
        recomputed: modules whose activations are recomputed in backward.
        draws: whether forward draws random numbers.
        batch_dim: batch dimension of the inputs.
        whole_inputs: names of input tensors that are not split.
        output_dims: position of an output -> its batch dimension, None if it has none; absent if not known.
        output_form: number of dimensions of each output; `output_dims` applies to this form only. None: to any form.
        output_device: device of the joined outputs.
    """

    stages: tuple[Stage, ...]
    routes: Mapping[int, Sequence[int]]
    microbatches: int
    recomputed: tuple[nn.Module, ...] = ()
    draws: bool = True
    batch_dim: int = 0
    whole_inputs: Collection[str] = ()
    output_dims: Mapping[int, int | None] = field(default_factory=dict)
    output_form: tuple[int | None, ...] | None = None
    output_device: torch.device = torch.device("cpu")  # noqa: RUF009  # torch.device is immutable


class ModelForward:
    """Calls the user's forward under the block's mixed precision.

    At levels with half-precision weights (O2), a full batch casts the model's weights for the call. Micro-batches run
    at the same time, so each casts only the stage parameters that it uses.
    """

    def __init__(self, inner: Inner) -> None:
        self._inner = inner
        dtype, excluded = inner.session.weights_dtype, inner.session.fp32_modules
        self.half_parameters = None if dtype is None else HalfParameters.from_model(inner.model, dtype, excluded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a full batch or, in a micro-batch's thread, for the micro-batch."""
        if active_run() is None:
            return self._inner(*args, **kwargs)
        return self._inner.call_with_cast_weights(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Runs batches of `model` over the stages by calling `module`, inside `stage_transfer.intercept_operations`."""

    module: ModelForward
    model: nn.Module
    config: PipelineConfig
    threads: StageThreads

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's output for a batch, connected to the caller's autograd graph.

        Raises:
            ConfigError: inputs cannot be split, or outputs cannot be joined.
            Exception: the forward of a micro-batch has failed; if several have, the exception of the first micro-batch.
        """
        config = self.config
        dim, whole = config.batch_dim, config.whole_inputs
        batch = SplitBatch((args, kwargs), microbatches=config.microbatches, dim=dim, whole_inputs=whole)
        devices = [stage.device for stage in config.stages]
        thread_state = ThreadLocalState(frozenset(devices))
        stage_parameters = StageParameters(devices, half_parameters=self.module.half_parameters)
        runs = self._make_runs(len(batch.sizes), stage_parameters)
        with deferred_running_stats(self.model, [run.moments for run in runs]), recompute_modules(config.recomputed):
            outputs = self._forward(batch, runs, thread_state)
        backward = PipelineBackward(
            batch=batch,
            runs=runs,
            stage_parameters=stage_parameters,
            thread_state=thread_state,
            threads=self.threads,
            stages=len(devices),
        )
        return self._join(outputs, backward)

    def _make_runs(self, count: int, stage_parameters: StageParameters) -> list[MicrobatchRun]:
        config = self.config
        stage_locks = [StageLock() for _ in config.stages]
        # One draw per step from the global generator, so that the user's seed determines all random numbers.
        seed = int(torch.randint(2**62, (), device="cpu").item()) if config.draws else None
        return [
            MicrobatchRun(
                i,
                stages=config.stages,
                routes=config.routes,
                stage_parameters=stage_parameters,
                stage_locks=stage_locks,
                seed=seed,
            )
            for i in range(count)
        ]

    def _forward(self, batch: SplitBatch, runs: Sequence[MicrobatchRun], thread_state: ThreadLocalState) -> list[Any]:
        futures = [
            self.threads.forward(thread_state.run, functools.partial(self._run_microbatch, run, batch)) for run in runs
        ]
        try:
            concurrent.futures.wait(futures)
        except BaseException:  # for example Ctrl-C: end the threads before the caller uses the model again
            runs[0].abort()
            concurrent.futures.wait(futures)
            raise
        errors = [error for error in (each.exception() for each in futures) if error is not None]
        for error in errors:
            if not isinstance(error, Aborted):
                raise error
        return [each.result() for each in futures]

    def _run_microbatch(self, run: MicrobatchRun, batch: SplitBatch) -> Any:
        try:
            run.mark_inputs(batch.parts[run.index])
            args, kwargs = batch.inputs(run.index)
            return run.call_forward(lambda: self.module(*args, **kwargs), transfer=StageTransfer(run))
        except BaseException:
            run.abort()
            raise

    def _join(self, outputs: Sequence[Any], backward: PipelineBackward) -> Any:
        config, sizes = self.config, backward.batch.sizes
        exported = [
            [run.export_output(leaf) if isinstance(leaf, torch.Tensor) else (leaf, None) for leaf in leaves(output)]
            for run, output in zip(backward.runs, outputs, strict=True)
        ]
        rows = [[value for value, _ in row] for row in exported]
        dims, known_form = config.output_dims, config.output_form
        joined_outputs = join_outputs(
            rows, sizes, device=config.output_device, dims=dims, known_form=known_form, inputs=backward.batch.inputs(0)
        )
        values = [joined.value for joined in joined_outputs]
        output_leaves = [[row[position][1] for row in exported] for position in range(len(joined_outputs))]
        differentiable = [i for i, leaves_ in enumerate(output_leaves) if any(leaf is not None for leaf in leaves_)]
        if differentiable and torch.is_grad_enabled():
            # value=None avoids a reference cycle: value -> autograd graph -> `backward` -> value.
            backward.joined_outputs = [replace(joined_outputs[i], value=None) for i in differentiable]
            backward.output_leaves = [output_leaves[i] for i in differentiable]
            connected = connect(backward, [values[i] for i in differentiable])
            for i, value in zip(differentiable, connected, strict=True):
                values[i] = value
                if (count := joined_outputs[i].count) is not None:
                    attach_count(value, count)
        return rebuild(outputs[0], values)
