"""train.compare: the first steps of a function with one process and with its own layout, on the same global batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch

from parallelize.call.outcome import Outcome
from parallelize.call.task import Call, Task
from parallelize.config.layout import Layout
from parallelize.errors import ConfigError, WorkerError
from parallelize.run.context import active, current, world_size
from parallelize.torch_patches.arithmetic import use_full_fp32
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed
from parallelize.torch_patches.forward import routed_models
from parallelize.torch_patches.module_tensors import all_named_parameters
from parallelize.torch_patches.step import AfterStep, after_step, parameters_of
from parallelize.worker.preemption import handle_stop_signals

__all__ = ["ComparedStep", "Comparison", "compare_runs", "signed_means"]

_SMALL = 0.01  # a tensor whose norm is a smaller part of all is compared with this part: it may be rounding alone
_HEADER = "step         alone      together  largest differences"
_PARTS = 4096  # numbers in which a tensor is compared
_NOT_FINITE = 1e4  # so that two tensors that overflow alike differ by nothing
_TRY = """Try in turn:
  take the batches from shard_loader, with one batch size for any world_size() (or batch='global') and a seed
  turn off what draws random numbers or mixes samples: dropout (p=0), augmentation, batch norm, contrastive losses
  average as the loss does: average='tokens' for means over unequal numbers of targets, average='sum' for sums"""


_Step = tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Sum of the losses of an optimizer step, and by the names of parameters their gradients and their new values."""


class ComparedStep(NamedTuple):
    """One optimizer step in both runs.

    Attributes:
        loss_alone: loss with one process.
        loss_together: mean loss of the ranks of the other run.
        gradient_difference: largest difference of a parameter's gradient, as a fraction of its norm.
        gradient: name of that parameter.
        weight_difference: largest difference of a parameter after the step, as a fraction of its norm.
        weight: name of that parameter.
    """

    loss_alone: float
    loss_together: float
    gradient_difference: float
    gradient: str
    weight_difference: float
    weight: str


class Comparison(NamedTuple):
    """The first steps of a function with one process (alone) and with the call's own; `str()` is a table.

        step         alone      together  largest differences
           1       1.01345       1.04551  gradients 2.7e-01 (Net.0.weight), weights 1.4e-03 (Net.0.weight)
           2      0.912283      0.944208  gradients 2.9e-01 (Net.0.weight), weights 3.1e-03 (Net.2.bias)
        The runs part at step 1: fp32 explains differences of gradients up to 3.5e-04. Try in turn:
          ...

    Both runs are in fp32, without AMP and TF32. Gradients decide where the runs part, not weights: Adam turns the
    rounding of a gradient that should be zero into a step as large as its learning rate.

    Attributes:
        steps: the steps that both runs made.
        tolerance: relative difference of gradients that fp32 alone explains.
        first_difference: number of the first step, from 1, at which the runs differ; None: they do not.
        amp_difference: largest difference of a gradient with `amp` from the same run without; None: no amp.
    """

    steps: Sequence[ComparedStep]
    tolerance: float
    first_difference: int | None
    amp_difference: float | None

    @property
    def is_same(self) -> bool:
        """Whether both runs make the same steps, up to rounding."""
        return self.first_difference is None

    def __str__(self) -> str:
        row = "{:>4}  {:>12.6g}  {:>12.6g}  gradients {:.1e} ({}), weights {:.1e} ({})"
        lines = [_HEADER, *(row.format(number, *step) for number, step in enumerate(self.steps, start=1))]
        verdict = "The same training" if self.is_same else f"The runs part at step {self.first_difference}"
        lines.append(f"{verdict}: fp32 explains differences of gradients up to {self.tolerance:.1e}.")
        if self.amp_difference is not None:
            lines.append(f"With amp, gradients of the same run differ from fp32 by up to {self.amp_difference:.1e}.")
        return "\n".join(lines if self.is_same else [*lines, _TRY])


def compare_runs(call: Call, *, steps: int, launch: Callable[[Task], Sequence[Outcome]]) -> Comparison:
    """Run the first steps of a task with one process and with its layout, both in new processes, and compare them.

    Args:
        call: the call.
        steps: number of optimizer steps.
        launch: runs a task in new processes and returns the outcomes of all ranks.

    Raises:
        ConfigError: the call has one device or several nodes, runs inside another run, or `steps` is not positive.
        WorkerError: a run made no optimizer step.
    """
    layout = call.layout
    _check(f"{call.name}.compare({steps!r}, ...)", layout, steps)
    own = layout.config.changed(seed=layout.config.seed or 0)  # all runs need the same initial weights
    fp32 = own.changed(amp=None)
    one = fp32.changed(backend="ddp", **({"processes": 1} if layout.device_type == "cpu" else {"gpus": 1}))
    alone = dataclasses.replace(layout, config=one, devices=(layout.devices[0][:1],), warnings=())
    together = (fp32,) if own.amp is None else (fp32, own)
    function = _RecordedFunction(call.function, steps, layout.world_size)
    with handle_stop_signals():
        (single,), ranks, *amp = [
            [outcome.value for outcome in launch(Task.of(Call(function, call.args, call.kwargs, each, all_ranks=True)))]
            for each in (alone, *(dataclasses.replace(layout, config=each) for each in together))
        ]
    tolerance = max(torch.finfo(each.dtype).eps for each in single[0][1].values()) ** 0.5
    tolerance *= own.logical is None
    compared = list(map(_compared, single, *ranks))
    parts = [number for number, each in enumerate(compared, start=1) if each.gradient_difference > tolerance]
    parts += [len(compared) + 1] * (len(single) != len(ranks[0]))
    amps = [each.gradient_difference for run in amp for each in map(_compared, ranks[0], run[0])]
    return Comparison(compared, tolerance, min(parts, default=None), max(amps, default=None))


def _check(what: str, layout: Layout, steps: object) -> None:
    for is_fault, why, fix in (
        (
            type(steps) is not int or steps < 1,
            "the first argument is the number of optimizer steps, at least 1",
            "use train.compare(5, ...), followed by the arguments of the call",
        ),
        (
            active() is not None or layout.world is not None,
            "it starts processes of its own, and this is a process of a run",
            "call it in a plain script, without torchrun or srun and outside of decorated functions",
        ),
        (
            layout.num_nodes > 1,
            f"both runs are on this machine, and the call has num_nodes={layout.num_nodes}",
            "use train.options(num_nodes=1).compare(...)",
        ),
        (
            sum(map(len, layout.devices)) == 1,
            "the call itself would run on one device, so there is nothing to compare",
            "use train.options(processes=2).compare(...) for two processes on the CPU",
        ),
    ):
        if is_fault:
            raise ConfigError(what, why=why, fix=fix)


def _compared(alone: _Step, *ranks: _Step) -> ComparedStep:
    gradients, weights = map(_difference, alone[1:], ranks[0][1:])
    return ComparedStep(alone[0], fmean(loss for loss, *_ in ranks), *gradients, *weights)


def _difference(tensors: Any, others: Any) -> tuple[float, str]:
    """Return the largest norm of a difference, as a fraction of the tensor's own norm, and the tensor's name."""
    least = _SMALL * math.hypot(*(each.norm() for each in tensors.values()))
    parts = {name: (each - others[name]).norm() / (max(each.norm(), least) or 1) for name, each in tensors.items()}
    return max((float(part.nan_to_num(math.inf)), name) for name, part in parts.items())


# Recording of the steps in a process


def signed_means(value: Any) -> torch.Tensor:
    """Return the means of a tensor's parts on the CPU, in its dtype; a collective if the tensor is sharded.

    Each element has a sign, drawn for its index: else, errors of opposite signs in one part would cancel.
    """
    flat = value.detach().to_dense().cpu().double().reshape(1, -1)
    signs = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).sign()
    means = torch.adaptive_avg_pool1d(flat * signs, min(flat.numel(), _PARTS))
    return means.nan_to_num(_NOT_FINITE, _NOT_FINITE, -_NOT_FINITE).to(value.dtype)


class _EndOfRecording(BaseException):
    """Ends the user's function after the last recorded step; not an Exception, so that user code does not catch it."""


@dataclass
class _RecordedFunction:
    """Replacement for the user's function: runs it for some optimizer steps, in full fp32, and returns the steps.

    Args:
        function: the user's function.
        steps: number of optimizer steps.
        merged_ranks: number of ranks whose batches one process reads.
    """

    function: Callable[..., Any]
    steps: int
    merged_ranks: int

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.function)
        self.__globals__ = getattr(self.function, "__globals__", {})  # a worker copies them to its `__main__`

    def __reduce__(self) -> Any:
        return _RecordedFunction, (self.function, self.steps, self.merged_ranks)

    def __call__(self, *args: Any, **kwargs: Any) -> list[_Step]:
        """Run the user's function until it has made the steps, or returns."""
        use_full_fp32()
        steps, losses = list[_Step](), list[float]()
        is_alone = world_size() == 1 and current().config.logical is None  # this process is its own
        current().loaders.merged_ranks = self.merged_ranks if is_alone else 1

        def record_loss(each: Pass, run: Run) -> None:
            losses.extend(root.item() for root in each.roots if isinstance(root, torch.Tensor) and root.numel() == 1)
            run(each)

        def record_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            names = {
                id(p): f"{type(each).__name__}.{name}"
                for each in routed_models()
                for name, p in all_named_parameters(each)
            }
            owned = {names.get(id(p), f"parameter {n}"): p for n, p in enumerate(parameters_of(optimizer))}
            weights = {name: signed_means(p) for name, p in owned.items()}
            gradients = {
                name: weights[name] * 0 if p.grad is None else signed_means(p.grad) for name, p in owned.items()
            }
            steps.append((sum(losses), gradients, weights))
            losses.clear()
            if len(steps) == self.steps:
                raise _EndOfRecording

        with (
            contextlib.suppress(_EndOfRecording),
            after_step(AfterStep.RECORD, record_step),
            subscribed(Order.RECORD, record_loss),
        ):
            self.function(*args, **kwargs)
        if not steps:
            raise WorkerError(
                f"the function returned without an optimizer step, on {world_size()} process(es)",
                why="compare records the steps of torch optimizers",
                fix="compare a call that trains with an optimizer of torch.optim, or a subclass of it",
            )
        return steps
