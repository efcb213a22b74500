"""Comparison: how the steps of one process and of several differ, and the likely reasons, told from recordings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from parallelize.comparison.recording import RecordedStep, Recording

__all__ = ["ComparedStep", "Comparison", "Reason", "compare_recordings"]


@dataclass(frozen=True)
class Reason:
    """A likely reason for a difference.

    Args:
        name: short name, such as "batch norm".
        why: what makes the runs differ.
        fix: what to do.
    """

    name: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"  {self.name}: {self.why}\n    fix: {self.fix}"


@dataclass(frozen=True)
class ComparedStep:
    """One optimizer step in both runs.

    Args:
        losses: with one process, and the mean over the ranks of the other run; nan: unknown.
        gradient_difference: norm of the difference of all gradients, as a fraction of their norm with one process.
        weight_difference: largest absolute difference of a weight after the step.
        parameter: name of the parameter that holds that weight.
    """

    losses: tuple[float, float]
    gradient_difference: float
    weight_difference: float
    parameter: str


@dataclass(frozen=True)
class Comparison:
    """The first steps of a function with one process and with the call's own processes; `str()` is a table.

        step  loss, 1 process  loss, 2 processes  gradients differ by  weights differ at most by
           1          1.01345            1.04551              2.7e-01         2.4e-02 (0.weight)
           2         0.912283           0.944208              2.9e-01         4.1e-02 (0.weight)
        The runs part at step 1. Likely reasons:
          batch norm: 1 (BatchNorm1d) normalizes by the statistics of each process's own batch
            fix: ...

    Gradients decide where the runs part, not weights: Adam turns the rounding of a gradient that should be zero into a
    step as large as its learning rate.

    Attributes:
        is_same: whether both runs make the same steps, up to rounding.
        reasons: likely reasons for a difference, the most basic one first.
        steps: the steps that both runs made.
        labels: names of both runs, such as "1 process" and "2 processes".
        first_difference: number of the first step, from 1, at which the runs differ; None: they do not.
    """

    is_same: bool
    reasons: tuple[Reason, ...]
    steps: tuple[ComparedStep, ...]
    labels: tuple[str, str]
    first_difference: int | None = None

    def __str__(self) -> str:
        header = (
            "step",
            *(f"loss, {each}" for each in self.labels),
            "gradients differ by",
            "weights differ at most by",
        )
        rows = [header]
        for number, step in enumerate(self.steps, start=1):
            losses = (f"{loss:.6g}" for loss in step.losses)
            weight = f"{step.weight_difference:.1e} ({step.parameter})"
            rows.append((str(number), *losses, f"{step.gradient_difference:.1e}", weight))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, self._verdict(), *map(str, self.reasons)])

    def _verdict(self) -> str:
        if self.is_same:
            return f"The same training, up to rounding{', but:' if self.reasons else '.'}"
        where = "before the first step" if self.first_difference == 0 else f"at step {self.first_difference}"
        return f"The runs part {where}. Likely reasons:"


def compare_recordings(
    single: Recording, ranks: Sequence[Recording], *, labels: tuple[str, str], tolerance: float
) -> Comparison:
    """Compare the recording of one process with those of the ranks of another run.

    Args:
        single: recording of one process that read the batches of all ranks.
        ranks: recordings of the other run, in rank order; at least one step in each.
        labels: names of both runs.
        tolerance: relative difference of gradients that is rounding.
    """
    pairs = list(zip(single.steps, ranks[0].steps, strict=False))
    losses = [_mean([rank.steps[number].loss for rank in ranks]) for number in range(len(pairs))]
    steps = tuple(_compared(a, b, loss) for (a, b), loss in zip(pairs, losses, strict=True))
    differing = [number for number, step in enumerate(steps, start=1) if not step.gradient_difference <= tolerance]
    differing += [number for number, (a, b) in enumerate(pairs, start=1) if a.learning_rates != b.learning_rates]
    if _difference(single.initial, ranks[0].initial) > tolerance:
        differing.append(0)
    if not differing and len(single.steps) != len(ranks[0].steps):
        differing.append(len(pairs) + 1)
    first = min(differing, default=None)
    reasons = _Reasons(single, ranks, labels, tolerance, first).found()
    return Comparison(first is None, tuple(reasons), steps, labels, first)


def _compared(single: RecordedStep, main: RecordedStep, loss: float) -> ComparedStep:
    largest, parameter = 0.0, main.names[0] if main.names else ""
    for name, a, b in zip(main.names, single.weights, main.weights, strict=False):
        difference = (
            math.inf if a.shape != b.shape else float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        )
        if not difference <= largest:  # also for nan
            largest, parameter = difference, name
    gradients = _difference(single.gradients, main.gradients)
    return ComparedStep((math.nan if single.loss is None else single.loss, loss), gradients, largest, parameter)


def _mean(losses: Sequence[float | None]) -> float:
    return sum(math.nan if loss is None else loss for loss in losses) / len(losses)


def _flat(tensors: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Concatenate tensors; for a missing one, zeros like the other run's."""
    given = [torch.zeros_like(b) if a is None and b is not None else a for a, b in zip(tensors, other, strict=False)]
    return torch.cat([torch.empty(0, dtype=torch.float64), *(each.double() for each in given if each is not None)])


def _difference(expected: Sequence[torch.Tensor | None], actual: Sequence[torch.Tensor | None]) -> float:
    """Return the norm of the difference as a fraction of the expected norm."""
    a, b = _flat(expected, actual), _flat(actual, expected)
    if a.shape != b.shape:
        return math.inf
    difference, norm = float((a - b).norm()), float(a.norm())
    return difference / norm if norm else 0.0 if difference == 0.0 else math.inf


@dataclass(frozen=True)
class _Reasons:
    """Finds the likely reasons for a difference that is first seen at step `first` (None: no difference)."""

    single: Recording
    ranks: Sequence[Recording]
    labels: tuple[str, str]
    tolerance: float
    first: int | None

    def found(self) -> list[Reason]:
        reasons = [*self._setup(), *self._data()]
        if self.first is None:
            return reasons
        number = min(max(self.first, 1), len(self.single.steps), len(self.ranks[0].steps)) - 1
        a, others = self.single.steps[number], [rank.steps[number] for rank in self.ranks]
        reasons += [*self._optimizer(a, others[0]), *self._model(a, others)]
        return reasons or [self._loss(a, others)]

    def _setup(self) -> Iterator[Reason]:
        if len(self.ranks) > 1 and not any(step.is_in_block for step in self.ranks[0].steps):
            yield Reason(
                "no parallel_model block",
                "no model was in a block at an optimizer step, so each process trained alone",
                "train inside `with parallel_model(model):`",
            )
        if self.first == 0:
            yield Reason(
                "initial weights",
                "they differ before the first step, although both runs start from the same seed",
                "create the model from torch's global generator, without rank(), world_size() or the time",
            )
        if self.first is not None and len(self.single.steps) != len(self.ranks[0].steps):
            yield Reason(
                "number of steps",
                f"{self.labels[0]} made {len(self.single.steps)} steps, {self.labels[1]} {len(self.ranks[0].steps)}",
                "make the loop depend on the batches of shard_loader only",
            )

    def _data(self) -> Iterator[Reason]:
        if len(self.ranks) > 1 and not self.ranks[0].fingerprints:
            yield Reason(
                "data not from shard_loader",
                "each process reads all of it unless the code shards it, and one process cannot read the batches of "
                "all ranks",
                "iterate shard_loader(loader) instead of loader",
            )
            return
        by_step = zip(*(rank.fingerprints for rank in self.ranks), strict=False)
        for number, (expected, each) in enumerate(zip(self.single.fingerprints, by_step, strict=False), start=1):
            actual = tuple(fingerprint for (fingerprint,) in each) if len(self.ranks) > 1 else each[0]
            if self.first is not None and expected != actual:
                rank = next((rank for rank, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), 0)
                yield Reason(
                    "order or content of the data",
                    f"batch {number} of rank {rank} has other samples than the same part of the batch of one process",
                    "use the same batch size for any world_size() (or batch='global'), seed the sampler; if the "
                    "dataset draws random numbers (augmentation), the difference is expected",
                )
                return

    def _optimizer(self, a: RecordedStep, b: RecordedStep) -> Iterator[Reason]:
        if a.learning_rates != b.learning_rates:
            yield Reason(
                "learning rate",
                f"{_numbers(a.learning_rates)} with {self.labels[0]}, {_numbers(b.learning_rates)} with "
                f"{self.labels[1]}",
                "the code scales it with world_size(); to compare, use the same learning rate in both runs",
            )

    def _model(self, a: RecordedStep, others: Sequence[RecordedStep]) -> Iterator[Reason]:
        if a.draws_random_numbers or any(each.draws_random_numbers for each in others):
            yield Reason(
                "random numbers",
                "dropout, noise or another random operation ran between the batch and the step; each process draws "
                "its own numbers",
                "nothing, the difference is expected; to compare the rest, turn it off (p=0)",
            )
        if a.batch_norm:
            yield Reason(
                "batch norm",
                f"{a.batch_norm} normalizes by the statistics of each process's own batch",
                "on GPUs, model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before the block; or use "
                "group norm, or accept it if the batch per process is large",
            )

    def _loss(self, a: RecordedStep, others: Sequence[RecordedStep]) -> Reason:
        losses = [math.nan if each.loss is None else each.loss for each in others]
        expected, mean, main = math.nan if a.loss is None else a.loss, sum(losses) / len(losses), others[0]
        scale = _scale(a, main)
        if scale and not math.isclose(scale, 1.0, rel_tol=10 * self.tolerance):
            return Reason(
                "sum instead of mean",
                f"the gradients of {self.labels[1]} are {scale:.4g} times those of {self.labels[0]}: gradients are "
                "averaged over the processes, and the loss is a sum over samples or is divided by their number",
                "parallel_model(model, average='sum'), or the mean over samples, reduction='mean'",
            )
        rounding = 32 * self.tolerance**2 * abs(expected)
        if not abs(mean - expected) > rounding:  # also for nan
            return self._unknown()
        if min(losses) - rounding <= expected <= max(losses) + rounding:
            return Reason(
                "token mean",
                "each process's loss is a mean over another number of terms (ignore_index, masks, padding, sequence "
                "lengths), and the mean of these means is not the mean over all terms",
                "parallel_model(model, average='tokens') weights each loss by its number of terms",
            )
        return Reason(
            "loss over the batch",
            "the loss of the global batch is not a mean of the losses of its parts (contrastive loss, in-batch "
            "negatives, statistics of the batch)",
            "compute it on all_gather(outputs), which is differentiable",
        )

    def _unknown(self) -> Reason:
        if self.first == 1:
            return Reason(
                "gradients",
                "the losses agree and the gradients do not: something between the loss and the step acts on one "
                "process's part, such as a mean over another number of terms with nearly the same value, or a hook",
                "use the mean over the terms of all processes; change gradients only after backward has averaged them",
            )
        return Reason(
            "rounding that grows",
            "earlier steps agree up to rounding, and nothing else differs: training amplifies it (a large learning "
            "rate, an unstable loss)",
            "compare with a smaller learning rate, or in float64: the difference then starts later",
        )


def _scale(a: RecordedStep, b: RecordedStep) -> float | None:
    """Return the factor between the gradients of two runs; None: they are not multiples of each other."""
    expected, actual = _flat(a.gradients, b.gradients), _flat(b.gradients, a.gradients)
    if expected.shape != actual.shape or not float(expected.norm()):
        return None
    scale = float(expected @ actual / (expected @ expected))
    is_multiple = float((actual - scale * expected).norm()) <= 1e-3 * float(actual.norm())
    return scale if is_multiple else None


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in dict.fromkeys(values))
