"""Weights of losses: gradients of ranks and accumulated passes are averaged by what their losses average over.

Backward pass i of a step, on rank r, has a loss that is a mean over c[r, i] targets, with gradient g[r, i]. After every
backward pass, `.grad` is, with n passes so far and W ranks:

    average="ranks"     sum_i  1/W sum_r  g[r, i]                           as DistributedDataParallel averages
    average="sum"       sum_i      sum_r  g[r, i]
    average="tokens"    sum_i  1/W sum_r  g[r, i] * c[r, i] / C             C: the mean of c over W ranks and n passes

If the user divides each of n losses by n, this is the gradient of the mean over all targets of all ranks and passes.
Backward starts from c / C. As C changes with each pass, gradients of earlier passes are multiplied by old C / new C.
Passes under `no_sync` use the last C instead, and the pass that averages sums the counts of all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from parallelize.errors import ConfigError, SyncError, did_you_mean
from parallelize.inplace.gradient_origins import GradientTracker
from parallelize.inplace.uneven_counts import CountRange, UnevenCounts
from parallelize.precision.loss_scale import scale_
from parallelize.runtime.autograd_graph import mark_outputs
from parallelize.runtime.context import Runtime
from parallelize.runtime.loss_counts import (
    MODELS_KEY,
    LossCount,
    loss_counts,
    models_reached,
    require_readable_losses,
)
from parallelize.runtime.replace_attribute import replace_attribute
from parallelize.runtime.weighted_backward import Roots, Weight, weigh_losses

__all__ = ["Average", "GradientAverage", "Window", "require_average"]

_tracker, _has_forward, _is_local = attrgetter("tracker"), attrgetter("has_forward"), attrgetter("is_local")

Average = Literal["ranks", "sum", "tokens"]
_AVERAGES = ("ranks", "sum", "tokens")


def require_average(average: str) -> None:
    """Check the value of the option.

    Raises:
        ConfigError: no average has that name.
    """
    if average not in _AVERAGES:
        fix = did_you_mean(str(average), _AVERAGES)
        raise ConfigError(f"average={average!r}", why="the value is unknown", fix=fix)


@dataclass(frozen=True, eq=False)
class _Passes:
    """The backward passes of one step so far.

    Args:
        loss: name of the reduction of their losses.
        total: sum of the counts of all ranks, of passes whose gradients are averaged.
        number: number of these passes, times the number of ranks.
        local_total: sum of this rank's counts, of passes under no_sync since.
        local_number: number of these.
        mean: the C by which the gradients are divided; equal on all ranks.
    """

    loss: str
    total: Weight
    number: int
    local_total: Weight
    local_number: int
    mean: Weight


class Window:
    """Backward passes through one model since its last optimizer step.

    Attributes:
        parameters: the parameters whose gradients backward accumulates.
        has_forward: whether there was a forward since the last optimizer step.
        is_averaging: whether backward passes of this rank run collectives with the other ranks.
        tracker: records the origins of the model's gradients; None: the engine does not average them.
        passes: the passes of this step; None: there were none.
        is_no_sync: whether the model is in a `no_sync` context.
        counts: under "ranks": the range of the counts of these passes.
    """

    def __init__(self) -> None:
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.has_forward = False
        self.is_averaging = False
        self.tracker: GradientTracker | None = None
        self.passes: _Passes | None = None
        self.counts: CountRange | None = None
        self.is_no_sync = False
        self._ids: frozenset[int] = frozenset()

    def bind(self, model: nn.Module, *, is_averaging: bool, tracker: GradientTracker | None) -> None:
        """Use the model's current parameters; called when its engine is built."""
        self.parameters, self.is_averaging, self.tracker = tuple(model.parameters()), is_averaging, tracker
        self._ids = frozenset(map(id, self.parameters))

    def mark(self, output: Any, inputs: Any) -> list[Any]:
        """Store this window in the graph of a forward's output; return the nodes of the output."""
        self.has_forward = True
        return mark_outputs(output, inputs=inputs, key=MODELS_KEY, owner=self)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Count the backward passes in the context locally."""
        return replace_attribute(self, "is_no_sync", value=True)

    @property
    def is_local(self) -> bool:
        """Whether a backward now accumulates gradients without averaging them."""
        return self.is_no_sync or not self.is_averaging

    def end_if_stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        """End the step if `optimizer` has parameters of the model."""
        for group in optimizer.param_groups if self.has_forward else ():
            if not self._ids.isdisjoint(map(id, group["params"])):
                self.has_forward, self.passes, self.counts = False, None, None

    def end_if_cleared(self) -> None:
        """End the step if its gradients were set to None; fully_shard holds those of no_sync passes elsewhere."""
        has_local = self.passes is not None and self.passes.local_number and self.is_averaging
        if not has_local and all(each.grad is None for each in self.parameters):
            self.passes = self.counts = None

    def scale_gradients(self, factor: Weight) -> None:
        """Multiply the gradients of the model."""

        def on(gradient: torch.Tensor) -> torch.Tensor:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            return torch.as_tensor(factor, dtype=dtype).to(gradient.device)

        if isinstance(factor, torch.Tensor) or factor != 1.0:
            scale_(self.parameters, on)


_Start = tuple[Weight | None, list[tuple[Window, Weight]]]
"""The weight of a pass, and by what to multiply the gradients of windows after it."""


class GradientAverage:
    """Weights the backward passes of one parallel_model block.

    Args:
        average: the option of the block.
        run: the run in this process.
    """

    def __init__(self, average: Average, *, run: Runtime) -> None:
        self._average = average
        self._world_size = run.world.world_size
        self.is_uniform = average == "ranks" or (average == "sum" and run.world.world_size == 1)
        self._device = run.device
        self.windows: list[Window] = []
        self._last_mean: Weight = 1.0
        self._uneven_counts = UnevenCounts(run)

    def window(self) -> Window:
        """Return the window of a further model of the block."""
        self.windows.append(Window())
        return self.windows[-1]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Weight backward passes in the context."""

        def after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            for window in self.windows:
                window.end_if_stepped_by(optimizer)

        with register_optimizer_step_post_hook(after_step), weigh_losses(self):
            yield
        self._uneven_counts.warn()

    def weigh(self, roots: Roots, batch_weight: float, backward: Callable[[Weight | None], None]) -> None:
        """Weight a backward pass, and let the trackers record its gradients; implements `LossWeight`."""
        trackers, raised = list(filter(None, map(_tracker, self.windows))), ""
        for tracker in trackers:
            tracker.before_backward()
        try:
            weight, rescaled = self._begin(roots, batch_weight)
            backward(weight)
            for window, factor in rescaled:
                window.scale_gradients(factor)
            if self._uneven_counts.compared is not None:
                self._uneven_counts.start_reduction()
        except BaseException as error:
            raised, self._uneven_counts.compared = type(error).__name__, None
            if "mark a variable ready only once" in str(error):
                raise _second_gradient_error() from error
            raise
        finally:
            for tracker in trackers:
                tracker.after_backward(raised=raised)

    def _begin(self, roots: Roots, batch_weight: float) -> _Start:
        forwarded = list(filter(_has_forward, self.windows))
        # Without a forward, a search through the whole graph of another model would find nothing.
        windows = models_reached(roots, among=forwarded) if forwarded else []
        if not windows:
            return None, []
        is_local = all(map(_is_local, windows))
        for window in windows:
            if window.passes is not None or window.counts is not None:
                window.end_if_cleared()
        if self._average == "ranks":
            window = windows[0]
            window.counts = self._uneven_counts.compare(window.counts, roots, batch_weight, is_local=is_local)
            return None, []
        if self._average == "sum":
            return float(self._world_size) if batch_weight else 0.0, []
        with torch.no_grad():
            found = _required_count(roots)
            count: Any = found.count if batch_weight else 0.0
            return self._add_pass(windows, found.loss, count, is_local=is_local and self._world_size > 1)

    def _add_pass(self, windows: list[Window], loss: str, count: Any, *, is_local: bool) -> _Start:
        added: dict[_Passes | None, _Passes] = {}
        for window in windows:
            if window.passes not in added:
                added[window.passes] = self._add(window.passes, loss, count, is_local=is_local)
        former = windows[0].passes
        # Gradients of no_sync passes may be out of reach until this pass has averaged them (fully_shard).
        start = former.mean if former is not None and former.local_number else added[former].mean
        end: list[tuple[Window, Weight]] = []
        for window in windows:
            now = added[window.passes]
            if window.passes is not None and window.passes.mean is not start:
                window.scale_gradients(window.passes.mean / start)
            if now.mean is not start:
                end.append((window, start / now.mean))
            window.passes = now
        return count / start, end

    def _add(self, passes: _Passes | None, loss: str, count: Weight, *, is_local: bool) -> _Passes:
        passes = passes or _Passes(loss, 0.0, 0, 0.0, 0, self._last_mean)
        if passes.loss != loss:
            raise ConfigError(
                f"average='tokens' with backward passes of {passes.loss} and {loss} in one step",
                why="their targets are not of one kind, so that they have no common mean",
                fix="step after each, or use average='ranks'",
            )
        total, number = passes.local_total + count, passes.local_number + 1
        if is_local:
            return _Passes(loss, passes.total, passes.number, total, number, passes.mean)
        if self._world_size > 1:
            # The only communication: one number per averaging backward.
            total = torch.as_tensor(total, dtype=torch.float64).to(self._device, copy=True)
            dist.all_reduce(total)
        total, number = passes.total + total, passes.number + self._world_size * number
        mean, last = total / number, self._last_mean
        # The mean is 0 if all targets are ignored.
        self._last_mean = torch.where(mean > 0, mean, last) if isinstance(mean, torch.Tensor) else mean or last
        return _Passes(loss, total, number, 0.0, 0, self._last_mean)


def _second_gradient_error() -> SyncError:
    return SyncError(
        "backward computes the gradient of a parameter a second time, while the ranks average the first one",
        why="after a forward, each gradient is averaged once: the second came from another backward through layers "
        "that both losses share, or from a reentrant checkpoint",
        fix="call backward once, on the sum of the losses; use torch.utils.checkpoint with use_reentrant=False; "
        "for gradient surgery assign the all_reduce of what torch.autograd.grad returns to p.grad",
    )


def _required_count(roots: Roots) -> LossCount:
    """Return the count of a loss under average="tokens".

    Raises:
        ConfigError: it is not known, or there are several.
    """
    require_readable_losses()
    counts = loss_counts(roots)
    for each in counts:
        if each.kind == "sum":
            raise ConfigError(
                f"average='tokens' with a loss that is a sum ({each.loss})",
                why="only a mean has a number of targets to be weighted by",
                fix="divide each sum by the number of its targets; use average='sum' if one process would add the sums "
                "of all ranks, or average='ranks' if all ranks have equally many targets",
            )
        if each.count is None:
            raise ConfigError(
                f"average='tokens' with a loss that {each.loss} computes",
                why="the number of targets that it averages over cannot be read from its graph",
                fix="let the loss end in a mean of torch (F.cross_entropy, Tensor.mean()) or in a sum that is divided "
                "by a count, outside of compiled functions; or use average='ranks'",
            )
    several: Any = counts if len(counts) > 1 else []
    numbers = {float(each.count): each for each in several}  # on an accelerator, this synchronizes
    if len(numbers) > 1:
        terms = " and ".join(f"{number:g} ({each.loss})" for number, each in numbers.items())
        raise ConfigError(
            f"average='tokens' with a loss of terms that average over {terms} targets",
            why="a backward has one weight",
            fix="divide all terms by the same count, or use average='ranks'",
        )
    first, root = counts[0], roots[0]
    if first.kind == "divided sum" and isinstance(root, torch.Tensor):
        # All targets are masked, and the user has clamped the divisor, as in loss.sum() / mask.sum().clamp(min=1).
        count = torch.where(root.detach() == 0, 0.0, torch.as_tensor(first.count, device=root.device))
        return dataclasses.replace(first, count=count if root.device.type != "cpu" else float(count.sum()))
    return first
