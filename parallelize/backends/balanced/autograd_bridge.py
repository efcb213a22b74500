"""Autograd bridge: connects a pipeline's outputs to the caller's autograd graph; runs backward in stage threads.

    parameters of                 stage 0            stage 1            stage 2
                                     v                  v                  v
    inputs ──> InputGradients ─> StageGradients ─> StageGradients ─> StageGradients ─> OutputGradients ──> loss
                        <·········· backward ··········

A CPU tensor, the token, connects these autograd nodes, so the thread that calls backward runs one node after the other.
OutputGradients passes the outputs' gradients to the stages' threads. It returns without waiting, since it would block
the only autograd thread of the outputs' GPU. StageGradients waits for its stage and returns the gradients of that
stage's parameters, so hooks and DDP process the last stage's gradients while earlier stages still compute.

Order of the stages' tasks for micro-batches 0 and 1; a task waits for its micro-batch's task on the next stage:

    stage 2   1 0
    stage 1     1 0
    stage 0       1 0
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.microbatch_run import MicrobatchRun
from parallelize.backends.balanced.microbatch_split_join import JoinedOutput, SplitBatch
from parallelize.backends.balanced.segment import Segment
from parallelize.backends.balanced.stage_parameters import StageParameters
from parallelize.backends.balanced.stage_threads import StageThreads, ThreadLocalState

__all__ = ["PipelineBackward", "connect"]


@dataclass(kw_only=True, eq=False)
class PipelineBackward:
    """Backward pass of one forward through the pipeline.

    Args:
        thread_state: thread-local state of the thread that called forward.
        stages: number of stages.
        joined_outputs: the differentiable outputs.
        output_leaves: per joined output, one leaf per micro-batch, which receives the gradient of that part.
    """

    batch: SplitBatch
    runs: Sequence[MicrobatchRun]
    stage_parameters: StageParameters
    thread_state: ThreadLocalState
    threads: StageThreads
    stages: int
    joined_outputs: list[JoinedOutput] = field(default_factory=list)
    output_leaves: list[list[torch.Tensor | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tasks: list[list[Future[None]]] = [[] for _ in range(self.stages)]
        self._is_started = False

    def start(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Queue the backward of every segment, starting from the gradients of the joined outputs; return immediately.

        Raises:
            ConfigError: this is the forward's second backward, or create_graph=True.
        """
        if self._is_started:
            raise refusals.second_backward()
        if torch.is_grad_enabled():
            raise refusals.double_backward()
        self._is_started = True
        for joined, leaves, gradient in zip(self.joined_outputs, self.output_leaves, gradients, strict=True):
            if gradient is not None:
                _assign_gradients(joined.split_gradient(gradient, self.batch.sizes), leaves)
        for run in reversed(self.runs):
            later: Future[None] | None = None
            for segment in reversed(run.segments):
                later = self.threads.backward(segment.stage, _backward_segment, segment, later, self.thread_state)
                self._tasks[segment.stage].append(later)

    def stage_gradients(self, stage: int) -> list[torch.Tensor | None]:
        """Wait for a stage's backward; return the gradients of the parameters that the stage has used.

        Raises:
            Exception: the backward of a segment has failed; raised after the tasks of all stages have ended.
        """
        self._wait(self._tasks[stage])
        gradients = []
        for parameter, stage_parameter in self.stage_parameters.trainable(stage):
            gradient, stage_parameter.grad = stage_parameter.grad, None
            gradients.append(None if gradient is None else gradient.to(parameter.device))
        return gradients

    def input_gradients(self) -> list[torch.Tensor | None]:
        """Wait for the backward of all stages; return the gradients of the inputs that require grad."""
        self._wait([task for tasks in self._tasks for task in tasks])
        found = []
        for position, leaf in self.batch.grad_inputs:
            parts = [_input_gradient(run, self.batch.parts[i][position]) for i, run in enumerate(self.runs)]
            gradient = self.batch.gradient(position, parts)
            found.append(None if gradient is None else gradient.to(leaf.device))
        return found

    def _wait(self, tasks: Sequence[Future[None]]) -> None:
        try:
            for task in tasks:
                task.result()
        except BaseException:
            concurrent.futures.wait([task for tasks in self._tasks for task in tasks])
            raise


def connect(backward: PipelineBackward, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the joined outputs `values`, connected to the caller's autograd graph."""
    inputs = [leaf for _, leaf in backward.batch.grad_inputs]
    # The token requires grad: autograd records a node only if one of its inputs does.
    token: Any = torch.zeros((), device="cpu", requires_grad=True)
    if inputs:
        token = _InputGradients.apply(backward, *inputs)  # type: ignore[no-untyped-call]  # torch's
    for stage in range(backward.stages):
        parameters = [parameter for parameter, _ in backward.stage_parameters.trainable(stage)]
        token = _StageGradients.apply(backward, stage, token, *parameters)  # type: ignore[no-untyped-call]  # torch's
    outputs: Any = _OutputGradients.apply(backward, values, token)  # type: ignore[no-untyped-call]  # torch's
    return tuple(outputs)


def _backward_segment(segment: Segment, later: Future[None] | None, thread_state: ThreadLocalState) -> None:
    if later is not None:
        later.result()
    thread_state.use_streams()
    segment.backward()


def _assign_gradients(parts: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor | None]) -> None:
    for part, leaf in zip(parts, leaves, strict=True):
        if part is not None and leaf is not None:
            leaf.grad = part.to(leaf.device)


def _input_gradient(run: MicrobatchRun, input_slice: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of one micro-batch's slice of an input, summed over the segments that imported it."""
    exported = [leaf for tensor, leaf in run.user_segment.exports if tensor is input_slice]
    found = [leaf.grad.to(input_slice.device) for leaf in exported if leaf.grad is not None]
    return None if not found else found[0] if len(found) == 1 else torch.stack(found).sum(0)


class _InputGradients(torch.autograd.Function):
    """Autograd node whose backward returns the gradients of the inputs."""

    @staticmethod
    def forward(ctx: Any, backward: PipelineBackward, *inputs: torch.Tensor) -> torch.Tensor:
        del inputs
        ctx.pipeline_backward = backward
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _token: torch.Tensor) -> Any:
        return None, *ctx.pipeline_backward.input_gradients()


class _StageGradients(torch.autograd.Function):
    """Autograd node whose backward returns the gradients of a stage's parameters."""

    @staticmethod
    def forward(ctx: Any, backward: PipelineBackward, stage: int, token: torch.Tensor, *parameters: Any) -> Any:
        del parameters
        ctx.pipeline_backward, ctx.stage = backward, stage
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        return None, None, token, *ctx.pipeline_backward.stage_gradients(ctx.stage)


class _OutputGradients(torch.autograd.Function):
    """Autograd node whose backward receives the gradients of the outputs and starts the pipeline's backward."""

    @staticmethod
    def forward(ctx: Any, backward: PipelineBackward, values: list[torch.Tensor], token: torch.Tensor) -> Any:
        del token  # `values` is not stored in ctx, which would form a reference cycle
        ctx.pipeline_backward = backward
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.pipeline_backward.start(gradients)
        return None, None, torch.zeros((), device="cpu")
