"""train.compare: the first steps of a call with one process and with its own layout.

    compare_runs                          in the caller's process
    ├── alone      one process, in fp32          which reads the batches of all ranks at once
    ├── together   the layout of the call, in fp32
    └── with amp   the layout of the call, with its `amp`; only if it has one
          └── _RecordedFunction           on each rank: runs the user's function
                ├── record_loss           before each backward
                └── record_step           after each step of an optimizer; the last one ends it

Glossary:

    alone, together     the runs that are compared
    step                one call of an optimizer's `step`
    part                a group of neighbours among the elements of a tensor, compared by their mean
    to part             of runs: to differ by more than rounding
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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

# The difference of a tensor is a fraction of its norm. A tensor that is a smaller part of all
# tensors counts as if it were this part: it may be rounding alone.
_LEAST_PART_OF_NORM = 0.01
# Number of parts into which a tensor is divided.
_PARTS = 4096
# Stands for inf and nan, so that two tensors that overflow at the same place are equal.
_NOT_FINITE = 1e4

_HEADER = "step         alone      together  largest differences"
_ROW = "{:>4}  {:>12.6g}  {:>12.6g}  gradients {:.1e} ({}), weights {:.1e} ({})"
_ADVICE = """\
Try in turn:
  take the batches from shard_loader, with one batch size for any world_size() (or batch='global') \
and a seed
  turn off what draws random numbers or mixes samples: dropout (p=0), augmentation, batch norm, \
contrastive losses
  average as the loss does: average='tokens' for means over unequal numbers of targets, \
average='sum' for sums"""

_Tensors = Mapping[str, torch.Tensor]
"""Name of a parameter -> the means of the parts of its gradient, or of its value."""


class _RecordedStep(NamedTuple):
    """One optimizer step on one rank.

    Args:
        loss: sum of the losses since the step before.
        gradients: of the parameters of the optimizer.
        weights: the parameters after the step.
    """

    loss: float
    gradients: _Tensors
    weights: _Tensors


class _Difference(NamedTuple):
    """The largest difference of a tensor between two runs.

    Args:
        fraction: the difference, as a fraction of the tensor's norm.
        name: of the parameter.
    """

    fraction: float
    name: str


class ComparedStep(NamedTuple):
    """One optimizer step in both runs.

    Attributes:
        loss_alone: loss with one process.
        loss_together: mean loss of the ranks of the other run.
        gradient_difference: largest difference of a parameter's gradient, as a fraction of its
            norm.
        gradient: name of that parameter.
        weight_difference: largest difference of a parameter after the step, as a fraction of its
            norm.
        weight: name of that parameter.
    """

    loss_alone: float
    loss_together: float
    gradient_difference: float
    gradient: str
    weight_difference: float
    weight: str


class Comparison(NamedTuple):
    """The first steps of a function with one process (alone) and with the call's own layout.

    `str()` is a table:

        step         alone      together  largest differences
           1       1.01345       1.04551  gradients 2.7e-01 (Net.0.weight), weights 1.4e-03 (...)
           2      0.912283      0.944208  gradients 2.9e-01 (Net.0.weight), weights 3.1e-03 (...)
        The runs part at step 1: fp32 explains differences of gradients up to 3.5e-04.
        Try in turn:
          ...

    Both runs are in fp32, without AMP and TF32. Gradients decide where the runs part, not weights:
    Adam turns the rounding of a gradient that should be zero into a step as large as its learning
    rate.

    Attributes:
        steps: the steps that both runs made.
        tolerance: relative difference of gradients that fp32 alone explains.
        first_difference: number of the first step, from 1, at which the runs differ; None: they do
            not.
        amp_difference: largest difference of a gradient with `amp` from the same run without; None:
            no amp.
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
        lines = [_HEADER]
        for number, step in enumerate(self.steps, start=1):
            lines.append(_ROW.format(number, *step))
        verdict = f"The runs part at step {self.first_difference}"
        if self.is_same:
            verdict = "The same training"
        explained = f"fp32 explains differences of gradients up to {self.tolerance:.1e}"
        lines.append(f"{verdict}: {explained}.")
        if self.amp_difference is not None:
            lines.append(
                "With amp, gradients of the same run differ from fp32 "
                f"by up to {self.amp_difference:.1e}."
            )
        if not self.is_same:
            lines.append(_ADVICE)
        return "\n".join(lines)


def compare_runs(
    call: Call, *, steps: int, launch: Callable[[Task], Sequence[Outcome]]
) -> Comparison:
    """Run the first steps of a call with one process and with its layout, and compare them.

    Both runs have new processes.

    Args:
        call: the call.
        steps: number of optimizer steps.
        launch: runs a task in new processes and returns the outcomes of all ranks.

    Raises:
        ConfigError: the call has one device or several nodes, runs inside another run, or `steps`
            is not positive.
        WorkerError: a run made no optimizer step.
    """
    layout = call.layout
    _check(f"{call.name}.compare({steps!r}, ...)", layout, steps)
    function = _RecordedFunction(call.function, steps, layout.world_size)

    def steps_of_ranks(run_layout: Layout) -> list[list[_RecordedStep]]:
        recorded = Call(function, call.args, call.kwargs, run_layout, all_ranks=True)
        return [outcome.value for outcome in launch(Task.of(recorded))]

    # All runs need the same initial weights.
    config = layout.config.changed(seed=layout.config.seed or 0)
    fp32 = config.changed(amp=None)
    together_with_amp = None
    with handle_stop_signals():
        (alone,) = steps_of_ranks(_layout_of_one_process(dataclasses.replace(layout, config=fp32)))
        together = steps_of_ranks(dataclasses.replace(layout, config=fp32))
        if config.amp is not None:
            together_with_amp = steps_of_ranks(dataclasses.replace(layout, config=config))
    # With `logical=`, one process adds in the same order as several: the bits are equal.
    tolerance = 0.0
    if config.logical is None:
        tolerance = _tolerance_of(alone[0].gradients.values())
    compared = list(map(_compared_step, alone, *together))
    return Comparison(
        compared,
        tolerance,
        _first_difference(compared, tolerance, has_same_length=len(alone) == len(together[0])),
        _amp_difference(together, together_with_amp),
    )


def _layout_of_one_process(layout: Layout) -> Layout:
    """Return the layout of the same call with the first device alone."""
    count = {"gpus": 1}
    if layout.device_type == "cpu":
        count = {"processes": 1}
    config = layout.config.changed(backend="ddp", **count)
    first_device = layout.devices[0][:1]
    return dataclasses.replace(layout, config=config, devices=(first_device,), warnings=())


def _check(call_text: str, layout: Layout, steps: object) -> None:
    """Refuse a call that cannot be compared.

    Args:
        call_text: how the user has called `compare`.
        layout: of the call.
        steps: the first argument.
    """
    if type(steps) is not int or steps < 1:
        raise ConfigError(
            call_text,
            why="the first argument is the number of optimizer steps, at least 1",
            fix="use train.compare(5, ...), followed by the arguments of the call",
        )
    if active() is not None or layout.world is not None:
        raise ConfigError(
            call_text,
            why="it starts processes of its own, and this is a process of a run",
            fix="call it in a plain script, without torchrun or srun and outside of decorated "
            "functions",
        )
    if layout.num_nodes > 1:
        raise ConfigError(
            call_text,
            why=f"both runs are on this machine, and the call has num_nodes={layout.num_nodes}",
            fix="use train.options(num_nodes=1).compare(...)",
        )
    if sum(map(len, layout.devices)) == 1:
        raise ConfigError(
            call_text,
            why="the call itself would run on one device, so there is nothing to compare",
            fix="use train.options(processes=2).compare(...) for two processes on the CPU",
        )


def _compared_step(alone: _RecordedStep, *ranks: _RecordedStep) -> ComparedStep:
    """Compare one step of the process alone with the same step of all ranks together.

    The gradients and weights of the ranks are equal: those of rank 0 are compared.
    """
    gradient = _largest_difference(alone.gradients, ranks[0].gradients)
    weight = _largest_difference(alone.weights, ranks[0].weights)
    loss_together = fmean(step.loss for step in ranks)
    return ComparedStep(alone.loss, loss_together, *gradient, *weight)


def _largest_difference(tensors: _Tensors, compared: _Tensors) -> _Difference:
    """Return the largest norm of a difference, as a fraction of the norm of the tensor.

    Args:
        tensors: of the first run.
        compared: the same tensors of the second run.
    """
    norm_of_all = math.hypot(*map(_norm, tensors.values()))
    largest = _Difference(0.0, "")
    for name, tensor in tensors.items():
        # If all tensors are 0, the difference itself counts.
        scale = max(_norm(tensor), _LEAST_PART_OF_NORM * norm_of_all) or 1.0
        fraction = _norm(tensor - compared[name]) / scale
        if math.isnan(fraction):
            fraction = math.inf
        largest = max(largest, _Difference(fraction, name))
    return largest


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.norm())


def _tolerance_of(gradients: Iterable[torch.Tensor]) -> float:
    """Return the relative difference that rounding explains: half of the digits of the dtype."""
    steps_of_dtypes = [torch.finfo(gradient.dtype).eps for gradient in gradients]
    return math.sqrt(max(steps_of_dtypes, default=0.0))


def _first_difference(
    compared: Sequence[ComparedStep], tolerance: float, *, has_same_length: bool
) -> int | None:
    """Return the number of the first step at which the runs part; None: they do not.

    Args:
        compared: the steps that both runs made.
        tolerance: difference of gradients that is not counted.
        has_same_length: whether both runs made the same number of steps.
    """
    for number, step in enumerate(compared, start=1):
        if step.gradient_difference > tolerance:
            return number
    return None if has_same_length else len(compared) + 1


def _amp_difference(
    without_amp: list[list[_RecordedStep]], with_amp: list[list[_RecordedStep]] | None
) -> float | None:
    """Return the largest difference of a gradient on rank 0; None: the call has no amp."""
    if with_amp is None:
        return None
    steps = map(_compared_step, without_amp[0], with_amp[0])
    return max(step.gradient_difference for step in steps)


# Recording of the steps in a process


def signed_means(value: Any) -> torch.Tensor:
    """Return the means of a tensor's parts on the CPU, in its dtype, or that of its real numbers.

    Each element has a sign, drawn for its index: without signs, errors of opposite signs in one
    part would cancel. If the tensor is sharded, this is a collective.
    """
    numbers = value.detach().to_dense().cpu()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    flat = numbers.double().reshape(1, -1)
    signs = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).sign()
    means = torch.adaptive_avg_pool1d(flat * signs, min(flat.numel(), _PARTS))
    finite = means.nan_to_num(nan=_NOT_FINITE, posinf=_NOT_FINITE, neginf=-_NOT_FINITE)
    return finite.to(numbers.dtype)


class _EndOfRecording(BaseException):
    """Ends the user's function after the last recorded step.

    It is not an Exception, so that code of the user does not catch it.
    """


@dataclass
class _RecordedFunction:
    """Replacement for the user's function: runs it for some optimizer steps, in full fp32.

    Args:
        function: the user's function.
        max_steps: number of optimizer steps.
        merged_ranks: number of ranks whose batches one process reads.
    """

    function: Callable[..., Any]
    max_steps: int
    merged_ranks: int

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.function)
        # A worker copies them to its `__main__`.
        self.__globals__ = getattr(self.function, "__globals__", {})

    def __reduce__(self) -> Any:
        return _RecordedFunction, (self.function, self.max_steps, self.merged_ranks)

    def __call__(self, *args: Any, **kwargs: Any) -> list[_RecordedStep]:
        """Run the user's function until it has made the steps, or returns; return the steps."""
        use_full_fp32()
        # With `logical=`, a process alone reads all parts of a batch anyway.
        if world_size() == 1 and current().config.logical is None:
            current().loaders.merged_ranks = self.merged_ranks
        steps: list[_RecordedStep] = []
        losses: list[float] = []

        def record_loss(backward_pass: Pass, run: Run) -> None:
            tensors = [root for root in backward_pass.roots if isinstance(root, torch.Tensor)]
            losses.extend(tensor.item() for tensor in tensors if tensor.numel() == 1)
            run(backward_pass)

        def record_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps.append(_recorded_step(optimizer, sum(losses)))
            losses.clear()
            if len(steps) == self.max_steps:
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
                fix="compare a call that trains with an optimizer of torch.optim, or a subclass "
                "of it",
            )
        return steps


def _recorded_step(optimizer: torch.optim.Optimizer, loss: float) -> _RecordedStep:
    """Return the gradients and the values of an optimizer's parameters, after its step.

    Args:
        optimizer: the optimizer.
        loss: sum of the losses since the step before.
    """
    name_by_id: dict[int, str] = {}
    for model in routed_models():
        for name, parameter in all_named_parameters(model):
            name_by_id[id(parameter)] = f"{type(model).__name__}.{name}"
    gradients = {}
    weights = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        name = name_by_id.get(id(parameter), f"parameter {number}")
        weights[name] = signed_means(parameter)
        gradients[name] = torch.zeros_like(weights[name])
        if parameter.grad is not None:
            gradients[name] = signed_means(parameter.grad)
    return _RecordedStep(loss, gradients, weights)
