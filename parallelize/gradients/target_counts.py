"""Number of targets that a loss averages over, read from its autograd graph before backward.

    loss ── / k ── + ──┬── 0.9 * ── NllLoss (mean)          count: its total weight, without ignored targets
                       └── 0.1 * ── Sum / n                 count: n

The search follows operations that are linear in one loss down to each reduction. Functions are not patched: losses in a
forward, of modules, under autocast and imported by name are found alike, and nothing is done while they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.autograd.graph import get_gradient_edge

from parallelize.errors import ConfigError
from parallelize.gradients.autograd_graph import MODELS_KEY, node_of, nodes_behind
from parallelize.run.containers import leaves
from parallelize.torch_patches.backward import Root

__all__ = [
    "LossCount",
    "attach_count",
    "join_weights",
    "loss_counts",
    "number_on",
    "required_count",
]

_COUNTS_KEY: Any = "parallelize: counts"
_ROUNDING = 1e-5  # relative, of weights of targets that are added up in another order

# Operations by their nodes' names up to "Backward".
_LINEAR = frozenset(("Add", "Alias", "Clone", "Div", "Mul", "Neg", "Reshape", "ReshapeAlias", "Rsub", "Select"))
_LINEAR |= {"Squeeze", "Sub", "ToCopy", "UnsafeView", "Unsqueeze", "View"}
_LISTS = frozenset({"Cat", "Stack"})
_SUMS = frozenset({"Mean", "Sum"})


@dataclass(frozen=True)
class LossCount:
    """One reduction in a loss.

    Args:
        loss: name of the reduction, such as "NllLoss".
        kind: a mean; a sum that is divided by a number, such as its count; a sum; or an operation that is not known.
        count: number (or total weight) of the targets; a tensor on an accelerator, where reading it synchronizes; None
            for the last two kinds.
        scales: numbers by which it is multiplied or divided.
    """

    loss: str
    kind: Literal["mean", "divided sum", "sum", "unknown"]
    count: float | torch.Tensor | None = None
    scales: tuple[float | torch.Tensor, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class _Term:
    """A node that the search has reached.

    Args:
        node: the node.
        output: number of its output.
        is_in_model: whether it is part of a model's forward.
        scales: constants that multiply or divide the node's value.
        divisor: product of the constants that divide it, or else a sum of which it is a term.
        divides_sum: whether they divide a sum.
    """

    node: Any
    output: int
    is_in_model: bool = False
    scales: tuple[float | torch.Tensor, ...] = ()
    divisor: float | torch.Tensor | None = None
    divides_sum: bool = False

    @property
    def operation(self) -> str:
        """Name of the operation that has computed the value."""
        name: str = self.node.name()
        return name.rpartition("Backward")[0] or name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        # Not of the saved tensor: hooks on saved tensors would load it from where they have moved it.
        return tuple(self.node._input_metadata[self.output].shape)

    @property
    def is_from_data(self) -> bool:
        """Whether the value depends on an output of a model, unlike e.g. a penalty on weights."""
        return self.is_in_model or any(MODELS_KEY in node.metadata for node in nodes_behind([self.node]))


def loss_counts(roots: Iterable[Root], *, is_in_model: bool = False) -> list[LossCount]:
    """Return the reductions of which the roots are linear combinations, without terms that depend on no model's output.

    Args:
        roots: the scalar losses from which a backward starts.
        is_in_model: whether the roots were computed in the forward of a model.
    """
    nodes = [(node_of(root), root.output_nr) for root in roots]
    pending = [_Term(*each, is_in_model) for each in nodes if each[0] is not None]
    seen, found = set[Any](), []
    with torch.no_grad():
        while pending:
            term = pending.pop()
            if (term.node, term.output) in seen:  # a sum may lead to it in exponentially many ways
                continue
            seen.add((term.node, term.output))
            term = replace(term, is_in_model=term.is_in_model or MODELS_KEY in term.node.metadata)
            given = term.node.metadata.get(_COUNTS_KEY, {}).get(term.output)
            operands = None if given is not None else _operands(term)
            if operands is None:
                found.append((term, replace(given or _reduction(term), scales=term.scales)))
            else:
                pending += operands
    if len(found) > 1:
        found = [(term, count) for term, count in found if term.is_from_data] or found
    return [count for _, count in found]


def required_count(roots: Sequence[Root]) -> LossCount:
    """Return the one count of a loss, for average="tokens".

    Raises:
        ConfigError: it is not known, or there are several.
    """
    counts = loss_counts(roots)
    unknown = next((each for each in counts if each.count is None), None)
    if unknown is not None:
        raise ConfigError(
            f"average='tokens' with a loss that is a sum ({unknown.loss})"
            if unknown.kind == "sum"
            else f"average='tokens' with a loss that {unknown.loss} computes",
            why="the number of targets that it averages over cannot be read from its graph",
            fix="let the loss end in a mean of torch (F.cross_entropy, Tensor.mean()) or in a sum that is divided by a "
            "count, outside of compiled functions; or use average='sum' if one process would add the sums of all "
            "ranks, average='ranks' if all ranks have equally many targets",
        )
    several: Any = counts if len(counts) > 1 else []
    numbers = {float(each.count): each for each in several}  # on an accelerator, this synchronizes
    if numbers and max(numbers) > min(numbers) * (1 + _ROUNDING):
        terms = " and ".join(f"{number:g} ({each.loss})" for number, each in numbers.items())
        raise ConfigError(
            f"average='tokens' with a loss of terms that average over {terms} targets",
            why="a backward has one weight",
            fix="divide all terms by the same count, or use average='ranks'",
        )
    return _unclamped(counts[0], roots[0])


def _unclamped(count: LossCount, loss: Root) -> LossCount:
    """Return the count of a sum that is divided: 0 if all targets are masked, where the user has clamped the divisor.

    As in loss.sum() / mask.sum().clamp(min=1).
    """
    if count.kind != "divided sum" or not isinstance(loss, torch.Tensor):
        return count
    assert count.count is not None  # The count of a divided sum is its divisor.
    number = number_on(loss.device, count.count)
    return replace(count, count=_number(torch.where(loss.detach() == 0, 0.0, number)))


def attach_count(tensor: torch.Tensor, count: LossCount) -> None:
    """Store the count of a loss that custom operations have joined from several ones, in its graph."""
    edge = get_gradient_edge(tensor)
    metadata: Any = edge.node.metadata  # torch declares a method
    metadata.setdefault(_COUNTS_KEY, {})[edge.output_nr] = count


def join_weights(
    losses: Sequence[torch.Tensor], *, samples: Sequence[int], inputs: Any
) -> tuple[list[float | torch.Tensor], LossCount]:
    """Return the weights by which losses of the parts of a batch add up to the loss of the batch, and its count.

    Means are weighted by their counts, and sums are added. All other scalars are weighted by samples, such as means of
    other terms in each part, or multiplied by other numbers.

    Args:
        losses: one scalar per part, computed in the model's forward.
        samples: number of samples of each part.
        inputs: the inputs of the model; a sum divided by one of these numbers, such as the number of targets of several
            batches, stays a sum.
    """
    numbers = [each for each in leaves(inputs) if isinstance(each, (int, float, torch.Tensor))]
    numbers = [each for each in numbers if getattr(each, "shape", ()) == ()]
    counts = [_only_count(loss, numbers) for loss in losses]
    (kind, *others), first = {each.kind for each in counts}, counts[0]
    # Each is multiplied by the same numbers. (On an accelerator, this synchronizes.)
    is_alike = len({tuple(map(float, each.scales)) for each in counts}) == 1
    if kind == "mean" and not others and is_alike:
        device = losses[0].device
        numbers = [one.count.to(device) if isinstance(one.count, torch.Tensor) else one.count or 0.0 for one in counts]
        total = sum(numbers)
        return [each / (total or 1.0) for each in numbers], LossCount(first.loss, "mean", total)
    # A sum that is equal in all parts, such as a penalty on weights, does not depend on the batch.
    if kind in {"sum", "divided sum"} and not others and len({each.item() for each in losses}) > 1:
        return [1.0] * len(losses), first
    return [each / sum(samples) for each in samples], LossCount(first.loss, "unknown")


def _only_count(loss: torch.Tensor, numbers: Sequence[float | torch.Tensor]) -> LossCount:
    """Return the count of a loss of one term; a sum divided by one of `numbers` stays a sum, others are means."""
    counts = loss_counts([loss], is_in_model=True)
    if len(counts) != 1:
        return LossCount("several", "unknown")
    (only,) = counts
    is_mean = only.kind == "divided sum" and float(only.count or 0.0) not in map(float, numbers)
    return replace(_unclamped(only, loss), kind="mean", scales=()) if is_mean else only


def _operands(term: _Term) -> list[_Term] | None:
    """Return the losses of which a node's value is a linear combination; None if it is a reduction or not known."""
    node, name = term.node, term.operation
    if math.prod(term.shape) != 1:
        return None
    operands = [replace(term, node=each, output=output) for each, output in node.next_functions if each is not None]
    if name in _SUMS:
        return _scalars(operands)
    if name in {"Add", "Sub"} and len(operands) > 1:
        return [replace(each, divides_sum=True) for each in operands]
    if name == "Mul" and len(operands) > 1:
        operands = [each for each in operands if each.is_from_data]  # e.g. without a learned weight of the loss
    if name not in _LINEAR or len(operands) != 1 or math.prod(operands[0].shape) != 1:
        return None
    if name not in {"Mul", "Div"}:
        return operands
    is_first = node.next_functions[0][0] is not None
    if name == "Div" and not is_first:
        return None  # a constant divided by a loss
    if len([each for each, _ in node.next_functions if each is not None]) > 1:
        return operands  # the other one is learned
    other = _number(node._saved_other if is_first else node._saved_self)
    scaled = replace(operands[0], scales=(*term.scales, other))
    if name == "Mul":
        return [scaled]
    # That of a sum of means is the number of passes and not that of targets; sums may have this one only.
    divisor = other if term.divisor is None or term.divides_sum else term.divisor * other
    return [replace(scaled, divisor=divisor, divides_sum=False)]


def _scalars(operands: list[_Term]) -> list[_Term] | None:
    """Return the scalars that a mean or sum reduces: a scalar itself, or those of torch.stack; None: other tensors."""
    for each in operands:
        inner = each.node.next_functions
        if each.operation in _LISTS and math.prod(each.shape) == len(inner):
            return [replace(each, node=node, output=output) for node, output in inner if node is not None]
        # Another 0-dim value is one target, as of a batch of one.
        is_followed = each.operation in _LINEAR | _SUMS or hasattr(each.node, "_saved_reduction")
        if each.shape == () and (is_followed or _COUNTS_KEY in each.node.metadata):
            return [each]
    return None


def _reduction(term: _Term) -> LossCount:
    name = term.operation
    reduction = getattr(term.node, "_saved_reduction", None)  # torch's enum: 1 mean, 2 sum
    if math.prod(term.shape) != 1:
        return LossCount(name, "unknown")
    if name == "Sum" or reduction == 2:
        return LossCount(name, "sum" if term.divisor is None else "divided sum", term.divisor)
    if name in {"NllLoss", "NllLoss2D"} and reduction == 1:
        return LossCount(name, "mean", _number(term.node._saved_total_weight))
    if name == "Mean" or reduction == 1:
        operand = next(_Term(*edge) for edge in term.node.next_functions if edge[0] is not None)
        return LossCount(name, "mean", math.prod(operand.shape))
    return LossCount(name, "unknown")


def number_on(device: torch.device, number: float | torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a new 0-dim tensor with a number, for which the host does not wait.

    A kernel fills it. torch.tensor(number, device=device) copies it from memory that is not pinned: the host then waits
    for all that the device has to do before (cudaMemcpyAsync and a synchronization of the stream, in Copy.cu).

    Args:
        device: where the tensor is.
        number: a number of the host, or one in a 0-dim tensor of a device.
        dtype: of the tensor.
    """
    if isinstance(number, torch.Tensor):
        return number.to(device, dtype, copy=True)
    return torch.full((), number, dtype=dtype, device=device)


def _number(value: Any) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return float(value)
    return float(value) if value.device.type == "cpu" else value.detach()
