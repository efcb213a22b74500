"""One forward, as the user's backward finds it.

    parameters of       stage 0        stage 1        stage 2
                           v              v              v
    inputs ──> Source ─> StageNode ─> StageNode ─> StageNode ─> Sink ──> outputs, loss
                        <·········· backward ··········

The nodes are joined by a token on the CPU, so that backward passes them one after the other in the thread that called
it. Sink hands the gradients of the outputs to the stages' threads and returns at once; StageNode waits for its stage
and returns the gradients of its parameters, so that hooks and DDP work on the last stage's while earlier stages still
compute. Sink must not wait: its gradients may be on a GPU, whose only autograd thread it would occupy.

The stages' threads, 3 stages, 2 micro-batches; a task waits for the later segments of its own micro-batch:

    stage 2   1 0
    stage 1     1 0
    stage 0       1 0
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.microbatch_run import Tape
from parallelize.backends.balanced.microbatch_split_join import Batch, Column
from parallelize.backends.balanced.segment import Segment
from parallelize.backends.balanced.stage_parameters import Shadows
from parallelize.backends.balanced.stage_threads import Workers
from parallelize.backends.balanced.thread_local_state import Ambient

__all__ = ["Record", "connect"]


class Record:
    """What backward needs of a forward.

    Args:
        batch: the inputs, cut.
        tapes: of each micro-batch.
        shadows: of this forward.
        ambient: of the thread that called forward.
        workers: the threads.
        stages: how many.
    """

    def __init__(
        self,
        *,
        batch: Batch,
        tapes: Sequence[Tape],
        shadows: Shadows,
        ambient: Ambient,
        workers: Workers,
        stages: int,
    ) -> None:
        self.batch = batch
        self.tapes = list(tapes)
        self.shadows = shadows
        self.stages = stages
        self.columns: list[Column] = []
        # Of each differentiable output, the leaves that wait for its gradient, by micro-batch.
        self.waiting: list[list[torch.Tensor | None]] = []
        self._ambient = ambient
        self._workers = workers
        self._tasks: list[list[Future[None]]] = [[] for _ in range(stages)]
        self._is_started = False

    def start(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Hand the gradients of the outputs to the stages; returns at once.

        Raises:
            ConfigError: backward has been here before, or wants a graph of itself.
        """
        if self._is_started:
            raise refusals.second_backward()
        if torch.is_grad_enabled():
            raise refusals.double_backward()
        self._is_started = True
        for column, leaves, gradient in zip(self.columns, self.waiting, gradients, strict=True):
            if gradient is not None:
                _deal(column.gradients(gradient, self.batch.sizes), leaves)
        for tape in reversed(self.tapes):
            later: Future[None] | None = None
            for segment in reversed(tape.segments):
                later = self._workers.backward(segment.stage, _backward, segment, later, self._ambient)
                self._tasks[segment.stage].append(later)

    def finish(self, stage: int) -> list[torch.Tensor | None]:
        """Wait for a stage; the gradients of the parameters it has used.

        Raises:
            Exception: what the backward of a segment has raised; no thread works on this step any more.
        """
        self._wait(self._tasks[stage])
        gradients = []
        for parameter, shadow in self.shadows.trained(stage):
            gradient, shadow.grad = shadow.grad, None
            gradients.append(None if gradient is None else gradient.to(parameter.device))
        return gradients

    def input_gradients(self) -> list[torch.Tensor | None]:
        """Wait for all stages; the gradients of the inputs that want one."""
        self._wait([task for tasks in self._tasks for task in tasks])
        found = []
        for position, leaf in self.batch.wanting:
            parts = [_total(tape, self.batch.parts[i][position]) for i, tape in enumerate(self.tapes)]
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


def connect(record: Record, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The differentiable outputs of a forward, in the user's graph.

    Args:
        record: the forward.
        values: joined over the micro-batches.
    """
    inputs = [leaf for _, leaf in record.batch.wanting]
    # A token that wants a gradient, for otherwise no node would be in the graph.
    token: Any = _Source.apply(record, *inputs) if inputs else torch.zeros((), device="cpu", requires_grad=True)  # type: ignore[no-untyped-call]  # torch's
    for stage in range(record.stages):
        parameters = [parameter for parameter, _ in record.shadows.trained(stage)]
        token = _StageNode.apply(record, stage, token, *parameters)  # type: ignore[no-untyped-call]  # torch's
    outputs: Any = _Sink.apply(record, values, token)  # type: ignore[no-untyped-call]  # torch's
    return tuple(outputs)


def _backward(segment: Segment, later: Future[None] | None, ambient: Ambient) -> None:
    if later is not None:
        later.result()
    ambient.use_streams()
    segment.backward()


def _deal(parts: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor | None]) -> None:
    for part, leaf in zip(parts, leaves, strict=True):
        if part is not None and leaf is not None:
            leaf.grad = part.to(leaf.device)


def _total(tape: Tape, piece: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a piece of an input, from all who imported it."""
    found = [leaf.grad.to(piece.device) for t, leaf in tape.outside.exports if t is piece and leaf.grad is not None]
    return None if not found else found[0] if len(found) == 1 else torch.stack(found).sum(0)


class _Source(torch.autograd.Function):
    """Where the inputs' gradients come out."""

    @staticmethod
    def forward(ctx: Any, record: Record, *inputs: torch.Tensor) -> torch.Tensor:
        """A token for the inputs."""
        del inputs
        ctx.record = record
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _token: torch.Tensor) -> Any:
        """Wait for all stages."""
        return None, *ctx.record.input_gradients()


class _StageNode(torch.autograd.Function):
    """Where the gradients of a stage's parameters come out."""

    @staticmethod
    def forward(ctx: Any, record: Record, stage: int, token: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """The token."""
        del parameters
        ctx.record, ctx.stage = record, stage
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        """Wait for the stage."""
        return None, None, token, *ctx.record.finish(ctx.stage)


class _Sink(torch.autograd.Function):
    """Where the gradients of the outputs come in."""

    @staticmethod
    def forward(ctx: Any, record: Record, values: list[torch.Tensor], token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs, which are not kept: what holds them would hold this node."""
        del token
        ctx.record = record
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Begin the pipelined backward; never wait."""
        ctx.record.start(gradients)
        return None, None, torch.zeros((), device="cpu")
