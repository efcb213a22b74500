"""One batch through the pipeline: cut, run by threads, joined."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced.autograd_bridge import Record, connect
from parallelize.backends.balanced.batchnorm import deferred
from parallelize.backends.balanced.microbatch_rng import drawn_seed
from parallelize.backends.balanced.microbatch_run import Tape
from parallelize.backends.balanced.microbatch_split_join import Batch, columns, rebuild
from parallelize.backends.balanced.recompute import recomputing
from parallelize.backends.balanced.segment import Stage
from parallelize.backends.balanced.stage_lock import Aborted, Turnstile
from parallelize.backends.balanced.stage_parameters import Shadows
from parallelize.backends.balanced.stage_threads import Workers
from parallelize.backends.balanced.stage_transfer import Crossing
from parallelize.backends.balanced.thread_local_state import Ambient
from parallelize.backends.balanced.user_forward import Forward
from parallelize.runtime.containers import leaves

__all__ = ["Executor", "Wiring"]


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How a model lies over its stages.

    Args:
        stages: in order.
        routes: id of a module -> the stage of each of its calls.
        microbatches: how many, at most.
        recomputed: modules whose activations are computed again in backward.
        draws: whether the model draws random numbers.
        batch_dim: of the inputs.
        whole_inputs: names of tensors among the inputs that are not cut.
        output_dims: position of an output -> its batch dimension as far as it is known; None: it has none.
        output_form: of the outputs for which that is known; None: any.
        home: where joined outputs are.
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
    home: torch.device = torch.device("cpu")  # noqa: RUF009  # a device cannot change


class Executor:
    """Runs a module's forward over stages; `crossing.watching` must be on.

    Args:
        module: what each micro-batch calls.
        model: whose batch norms it holds.
        wiring: the stages.
        workers: threads for these stages.
    """

    def __init__(self, module: Forward, *, model: nn.Module, wiring: Wiring, workers: Workers) -> None:
        self._module = module
        self._model = model
        self._wiring = wiring
        self._workers = workers

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for a batch, differentiable as ever.

        Raises:
            ConfigError: inputs that cannot be cut, outputs that cannot be joined.
            Exception: what the forward of a micro-batch has raised; of several, that of the first micro-batch.
        """
        wiring = self._wiring
        batch = Batch((args, kwargs), microbatches=wiring.microbatches, dim=wiring.batch_dim, whole=wiring.whole_inputs)
        devices = [stage.device for stage in wiring.stages]
        ambient, shadows = Ambient(frozenset(devices)), Shadows(devices, half=self._module.half)
        tapes = self._tapes(len(batch.sizes), shadows)
        with deferred(self._model, [tape.moments for tape in tapes]), recomputing(wiring.recomputed):
            outputs = self._forward(batch, tapes, ambient)
        record = Record(
            batch=batch,
            tapes=tapes,
            shadows=shadows,
            ambient=ambient,
            workers=self._workers,
            stages=len(devices),
        )
        return self._joined(outputs, record)

    def _tapes(self, count: int, shadows: Shadows) -> list[Tape]:
        wiring = self._wiring
        turnstiles = [Turnstile() for _ in wiring.stages]
        seed = drawn_seed() if wiring.draws else None
        return [
            Tape(i, stages=wiring.stages, routes=wiring.routes, shadows=shadows, turnstiles=turnstiles, seed=seed)
            for i in range(count)
        ]

    def _forward(self, batch: Batch, tapes: Sequence[Tape], ambient: Ambient) -> list[Any]:
        running = [
            self._workers.forward(ambient.run, functools.partial(self._microbatch, tape, batch)) for tape in tapes
        ]
        try:
            concurrent.futures.wait(running)
        except BaseException:  # Ctrl-C: nobody may be left who uses the model
            tapes[0].abort()
            concurrent.futures.wait(running)
            raise
        errors = [error for error in (each.exception() for each in running) if error is not None]
        for error in errors:
            if not isinstance(error, Aborted):
                raise error
        return [each.result() for each in running]

    def _microbatch(self, tape: Tape, batch: Batch) -> Any:
        try:
            for piece in batch.parts[tape.index]:
                if isinstance(piece, torch.Tensor):
                    tape.bring(piece)
            args, kwargs = batch.inputs(tape.index)
            return tape.run(lambda: self._module(*args, **kwargs), crossing=Crossing(tape))
        except BaseException:
            tape.abort()
            raise

    def _joined(self, outputs: Sequence[Any], record: Record) -> Any:
        wiring, sizes = self._wiring, record.batch.sizes
        handed = [
            [tape.hand_out(leaf) if isinstance(leaf, torch.Tensor) else (leaf, None) for leaf in leaves(output)]
            for tape, output in zip(record.tapes, outputs, strict=True)
        ]
        rows = [[value for value, _ in row] for row in handed]
        dims, known = wiring.output_dims, wiring.output_form
        found = columns(rows, sizes, device=wiring.home, dims=dims, known=known)
        values = [column.value for column in found]
        waiting = [[row[position][1] for row in handed] for position in range(len(found))]
        wanted = [i for i, leaves_ in enumerate(waiting) if any(leaf is not None for leaf in leaves_)]
        if wanted and torch.is_grad_enabled():
            record.columns = [found[i].without_value() for i in wanted]
            record.waiting = [waiting[i] for i in wanted]
            for i, value in zip(wanted, connect(record, [values[i] for i in wanted]), strict=True):
                values[i] = value
        return rebuild(outputs[0], values)
