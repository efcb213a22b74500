"""Number of targets that a loss averages over, read from its autograd graph before backward.

    loss ── / k ── + ──┬── 0.9 * ── NllLoss (mean)          count: its total weight, without ignored targets
                       └── 0.1 * ── Sum / n                 count: n

The search follows operations that are linear in one loss down to each reduction. Functions are not patched: losses in a
forward, of modules, under autocast and imported by name are found alike, and nothing is done while they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from parallelize.errors import ConfigError
from parallelize.runtime.autograd_graph import node_of, nodes_behind
from parallelize.runtime.containers import leaves
from parallelize.torch_patches.backward import Root
from parallelize.torch_patches.private import self_test

__all__ = [
    "MODELS_KEY",
    "LossCount",
    "attach_count",
    "join_weights",
    "loss_counts",
    "models_reached",
    "require_readable_losses",
    "required_count",
]

MODELS_KEY = "parallelize: models"  # key of `mark_outputs`
_COUNTS_KEY = "parallelize: counts"
_MAX_NODES = 1000
_ROUNDING = 1e-5  # relative, of weights of targets that are added up in another order

# Operations by their nodes' names up to "Backward".
_LINEAR = frozenset(("Add", "Alias", "Clone", "Div", "Mul", "Neg", "Reshape", "ReshapeAlias", "Rsub", "Select"))
_LINEAR |= {"Squeeze", "Sub", "ToCopy", "UnsafeView", "Unsqueeze", "View"}
_LISTS = frozenset({"Cat", "Stack"})


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
    """A node that the search has reached."""

    node: Any
    output: int
    divisor: float | torch.Tensor | None = None  # product of the constants that divide the node's value
    is_in_model: bool = False  # whether it is part of a model's forward
    outer: float | torch.Tensor | None = None  # product of the constants that divide a sum of several such values
    scales: tuple[float | torch.Tensor, ...] = ()  # constants that multiply or divide the node's value


def loss_counts(roots: Iterable[Root], *, is_in_model: bool = False) -> list[LossCount]:
    """Return the reductions of which the roots are linear combinations, without terms that depend on no model's output.

    Args:
        roots: the scalar losses from which a backward starts.
        is_in_model: whether the roots were computed in the forward of a model.
    """
    nodes = [(node_of(root), root.output_nr) for root in roots]
    with torch.no_grad():
        found = list(_reductions([_Term(*each, None, is_in_model) for each in nodes if each[0] is not None]))
    if len(found) > 1:  # e.g. a penalty on weights: data has no part in it
        found = [(term, count) for term, count in found if _is_from_data(term)] or found
    return [count for _, count in found]


@self_test("average='sum' or 'tokens', and losses computed in forward", instead="use average='ranks'")
def require_readable_losses() -> bool:
    """The graph of a loss tells the loss's reduction, and what it is divided by."""
    logits, targets = torch.zeros(3, 2, requires_grad=True), torch.tensor([0, 1, -100])
    summed = F.cross_entropy(logits, targets, reduction="sum")
    losses = (F.cross_entropy(logits, targets), summed, summed / 4, F.mse_loss(logits, logits.detach()), logits.sum())
    found = [(each.kind, float(each.count or 0)) for loss in losses for each in loss_counts([loss], is_in_model=True)]
    return found == [("mean", 2.0), ("sum", 0.0), ("divided sum", 4.0), ("mean", 6.0), ("sum", 0.0)]


def required_count(roots: Sequence[Root]) -> LossCount:
    """Return the one count of a loss, for average="tokens".

    Raises:
        ConfigError: it is not known, or there are several.
    """
    require_readable_losses()
    counts = loss_counts(roots)
    unknown = next((each for each in counts if each.kind == "sum" or each.count is None), None)
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
    first, root = counts[0], roots[0]
    return _unclamped(first, root) if first.kind == "divided sum" and isinstance(root, torch.Tensor) else first


def _unclamped(count: LossCount, loss: torch.Tensor) -> LossCount:
    """Return the count of a sum that is divided: 0 if all targets are masked, where the user has clamped the divisor.

    As in loss.sum() / mask.sum().clamp(min=1).
    """
    number = torch.where(loss.detach() == 0, 0.0, torch.as_tensor(count.count, device=loss.device))
    return replace(count, count=number if loss.device.type != "cpu" else float(number.sum()))


def attach_count(tensor: torch.Tensor, count: LossCount) -> None:
    """Store the count of a loss that custom operations have joined from several ones, in its graph."""
    edge = get_gradient_edge(tensor)
    _metadata(edge.node).setdefault(_COUNTS_KEY, {})[edge.output_nr] = count


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
    require_readable_losses()
    numbers = [each for each in leaves(inputs) if not isinstance(each, torch.Tensor) or each.dim() == 0]
    with torch.no_grad():
        counts = [_only_count(loss_counts([each], is_in_model=True), numbers) for each in losses]
    (kind, *others), first = {each.kind for each in counts}, counts[0]
    # Each is multiplied by the same numbers. (On an accelerator, this synchronizes.)
    is_alike = len({tuple(map(float, each.scales)) for each in counts}) == 1
    if kind == "mean" and not others and is_alike:
        device = losses[0].device
        if first.loss == "Sum":
            counts = [_unclamped(each, loss) for each, loss in zip(counts, losses, strict=True)]
        found = [each.to(device) if isinstance(each, torch.Tensor) else each for each in (one.count for one in counts)]
        total: Any = sum(each for each in found if each is not None)
        return [each / (total or 1.0) for each in found if each is not None], LossCount(first.loss, "mean", total)
    # A sum that is equal in all parts, such as a penalty on weights, does not depend on the batch.
    if kind in {"sum", "divided sum"} and not others and len({each.item() for each in losses}) > 1:
        return [1.0] * len(losses), first
    return [each / sum(samples) for each in samples], LossCount(first.loss, "unknown")


def _only_count(counts: Sequence[LossCount], numbers: Sequence[Any]) -> LossCount:
    """Return the count of a loss of one term; a sum divided by one of `numbers` stays a sum, others are means."""
    if len(counts) != 1:
        return LossCount("several", "unknown")
    (only,) = counts
    given = (each for each in numbers if isinstance(each, (int, float, torch.Tensor)))
    is_mean = only.kind == "divided sum" and all(float(only.count or 0.0) != float(each) for each in given)
    return replace(only, kind="mean", scales=()) if is_mean else only


def _reductions(terms: list[_Term]) -> Iterator[tuple[_Term, LossCount]]:
    seen: set[Any] = set()  # a sum may lead to the same loss in exponentially many ways
    while terms:
        term = terms.pop()
        node = term.node
        key = (node, term.output, *map(_identity, (term.divisor, term.outer)))
        if key in seen:
            continue
        seen.add(key)
        if len(seen) > _MAX_NODES:
            yield term, LossCount("more operations than are searched", "unknown")
            return
        if not term.is_in_model and MODELS_KEY in node.metadata:
            term = replace(term, is_in_model=True)
        given = node.metadata.get(_COUNTS_KEY, {}).get(term.output)
        inner = None if given is not None else _operands(term)
        if inner is None:
            yield term, replace(given or _reduction(term), scales=term.scales)
        else:
            terms += inner


def _identity(number: Any) -> object:
    return id(number) if isinstance(number, torch.Tensor) else number


def _operands(term: _Term) -> list[_Term] | None:
    """Return the losses of which a node's value is a linear combination; None if it is a reduction or not known."""
    node, name = term.node, _operation(term.node)
    divisor = term.divisor
    edges = [replace(term, node=each, output=output) for each, output in node.next_functions if each is not None]
    if name in {"Mean", "Sum"}:
        return _scalars(edges)
    if name == "_DDPSink":
        return [edges[term.output]]
    if name in {"Add", "Sub"} and len(edges) > 1:
        # Of means, it is the number of passes and not that of targets; sums may have this one only.
        outer = term.outer if divisor is None else divisor
        return [replace(each, divisor=None, outer=outer) for each in edges]
    if name == "Mul" and len(edges) > 1:
        edges = [each for each in edges if _is_from_data(each)]  # e.g. without a learned weight of the loss
    is_known = name in _LINEAR and len(edges) == 1 and _numel(edges[0]) == 1
    if name == "Mul" and is_known:
        scales = (*term.scales, *_multipliers(node))
        return [replace(each, scales=scales) for each in edges]
    if name != "Div" or not is_known:
        return edges if is_known else None
    if len(node.next_functions) > 1 and node.next_functions[0][0] is None:
        return None  # a constant divided by a loss
    number = _number(node._saved_other)
    total = number if divisor is None else divisor * number
    return [replace(edges[0], divisor=total, scales=(*term.scales, number))]


def _multipliers(node: Any) -> list[float | torch.Tensor]:
    """Return the number by which a multiplication multiplies a loss, unless it is learned."""
    operands = [each for each, _ in node.next_functions]
    if None not in operands and len(operands) > 1:
        return []
    number = node._saved_other if operands[0] is not None else node._saved_self
    return [] if isinstance(number, torch.Tensor) and number.numel() != 1 else [_number(number)]


def _scalars(operands: list[_Term]) -> list[_Term] | None:
    """Return the scalars that a mean or sum reduces: a scalar itself, or those of torch.stack; None: other tensors."""
    for each in operands:
        inner = each.node.next_functions
        if _operation(each.node) in _LISTS and _numel(each) == len(inner):
            return [replace(each, node=node, output=output) for node, output in inner if node is not None]
        if _shape(each) == () and _is_followed(each.node):
            return [each]
    return None


def _is_followed(node: Any) -> bool:
    """Whether a node is a linear operation or a reduction; another 0-dim value is one target, as of a batch of one."""
    name = _operation(node)
    return name in _LINEAR | {"Mean", "Sum"} or hasattr(node, "_saved_reduction") or _COUNTS_KEY in node.metadata


def _reduction(term: _Term) -> LossCount:
    name = _operation(term.node)
    if _numel(term) != 1:
        return LossCount(name, "unknown")
    reduction = getattr(term.node, "_saved_reduction", None)  # torch's enum: 1 mean, 2 sum
    if name == "Sum" or reduction == 2:
        divisor = term.outer if term.divisor is None else term.divisor
        return LossCount(name, "sum") if divisor is None else LossCount(name, "divided sum", divisor)
    if name in {"NllLoss", "NllLoss2D"} and reduction == 1:
        return LossCount(name, "mean", _number(term.node._saved_total_weight))
    if name == "Mean" or reduction == 1:
        operand = next(_Term(*edge) for edge in term.node.next_functions if edge[0] is not None)
        return LossCount(name, "mean", _numel(operand))
    return LossCount(name, "unknown")


def _metadata(node: Any) -> dict[Any, Any]:
    metadata: dict[Any, Any] = node.metadata  # torch declares a method
    return metadata


def _operation(node: Any) -> str:
    name: str = node.name()
    return name.rpartition("Backward")[0] or name


def _shape(term: _Term) -> tuple[int, ...]:
    # Not the saved tensor: hooks on saved tensors would load it from where they have moved it.
    return tuple(term.node._input_metadata[term.output].shape)


def _numel(term: _Term) -> int:
    return math.prod(_shape(term))


def _number(value: Any) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return float(value)
    return float(value) if value.device.type == "cpu" else value.detach()


def _is_from_data(term: _Term) -> bool:
    return term.is_in_model or any(MODELS_KEY in node.metadata for node in nodes_behind([term.node]))


def models_reached(roots: Iterable[Root], *, among: Collection[object]) -> list[Any]:
    """Return the models among `among` whose outputs lead to the roots."""
    pending: list[Any] = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen, found = {None}, dict[Any, None]()
    while pending and len(found) < len(among):  # not nodes_behind, whose generator costs more than this search
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        marks = node.metadata.get(MODELS_KEY)
        if marks is None:
            for each, _ in node.next_functions:
                pending.append(each)
            continue
        for model, inputs in marks.items():
            if model in among:
                found[model] = None
            pending += inputs
    return list(found)
