"""Number of targets that a loss averages over, read from its autograd graph before backward.

The search follows operations that are linear in one value from the loss down to each reduction, a
term of the loss. Functions are not patched: losses in a forward, of modules, under autocast and
imported by name are found in the same way, and nothing is done while they are computed. x and y are
outputs of models, of shape (6, 5), and t are six targets, of which two are ignored:

    loss                              graph, from the loss on             counts of the terms
    F.cross_entropy(x, t)             NllLoss                             4, its total weight
    x.mean()                          Mean                                30
    x.mean(1).mean()                  Mean, Mean of no scalar             6
    1 - 0.5 * x.mean()                Rsub, Mul, Mean                     30
    x.sum() / 4                       Div by 4, Sum                       4
    x.sum() / 4 / 2                   Div by 2, Div by 4, Sum             8
    (x.sum() + y.sum()) / 4           Div by 4, Add, two Sums             4 and 4
    (x.sum() / 4 + y.mean()) / 2      Div by 2, Add, Div by 4 and Mean    4 and 30: the 2 divides a
                                                                          sum of terms, as of passes
    torch.stack([x.mean(), z]).sum()  Sum, Stack, Mean and z's            30 and z's
    x.mean() + penalty(weights)       Add, Mean and others                30; others are of no model
    x.sum()                           Sum                                 none: a sum
    x.mean() ** 2                     Pow                                 none: unknown
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.autograd.graph import get_gradient_edge

from parallelize.errors import ConfigError
from parallelize.gradients.autograd_graph import is_output, node_of, nodes_behind
from parallelize.run.containers import leaves
from parallelize.torch_patches.backward import Root

Number = float | torch.Tensor
"""A number of the host, or one in a 0-dim tensor of an accelerator, where reading it waits."""

_ATTACHED_COUNTS: Any = "parallelize: counts, by the numbers of outputs"
# Relative, of weights of targets that are added up in another order.
_ROUNDING = 1e-5

# Operations by their nodes' names up to "Backward".
_LINEAR = frozenset(("Add", "Alias", "Clone", "Div", "Mul", "Neg", "Reshape", "ReshapeAlias"))
_LINEAR |= {"Rsub", "Select", "Squeeze", "Sub", "ToCopy", "UnsafeView", "Unsqueeze", "View"}
_SUMS = frozenset({"Mean", "Sum"})
_FOLLOWED = _LINEAR | _SUMS
_LISTS = frozenset({"Cat", "Stack"})
# Values of torch's enum Reduction, which nodes of losses save.
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class LossCount:
    """One reduction in a loss.

    Args:
        operation: name of the reduction, such as "NllLoss".
        reduction: a mean; a sum that is divided by a number, such as its count; a sum; or an
            operation that is not known.
        count: number (or total weight) of the targets; None for the last two reductions.
        scales: numbers by which it is multiplied or divided.
    """

    operation: str
    reduction: Literal["mean", "divided sum", "sum", "unknown"]
    count: Number | None = None
    scales: tuple[Number, ...] = field(default=(), compare=False)


@dataclass(slots=True)
class _Value:
    """A value that the search has reached: an output of a node.

    Args:
        node: the node.
        output: number of the output.
        is_in_model: whether a forward of a model has computed it. Such a value depends on data,
            even if no output of a model is behind it.
        scales: numbers that multiply or divide it on the way to the loss.
        divisor: product of the numbers that divide it, or else a sum of which it is a term.
        divides_sum: whether the divisor divides a sum of which the value is a term. A number that
            divides the term alone replaces it: that of a sum of means is the number of passes.
    """

    node: Any
    output: int
    is_in_model: bool = False
    scales: tuple[Number, ...] = ()
    divisor: Number | None = None
    divides_sum: bool = False

    @property
    def operation(self) -> str:
        """Name of the operation that has computed the value."""
        name: str = self.node.name()
        return name.rpartition("Backward")[0] or name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value.

        It is not that of a saved tensor: hooks on saved tensors would load the tensor from where
        they have moved it.
        """
        return tuple(self.node._input_metadata[self.output].shape)

    @property
    def elements(self) -> int:
        """Number of elements of the value."""
        return math.prod(self.shape)

    def sources(self) -> list[_Value]:
        """Return the values from which this one was computed, with what the search knows of it."""
        sources = []
        for node, output in self.node.next_functions:
            if node is not None:
                sources.append(self.moved_to(node, output))
        return sources

    def moved_to(self, node: Any, output: int) -> _Value:
        """Return another value, with what the search knows of this one."""
        return _Value(node, output, self.is_in_model, self.scales, self.divisor, self.divides_sum)

    def is_from_data(self) -> bool:
        """Whether the value depends on an output of a model, unlike a penalty on weights."""
        return self.is_in_model or any(map(is_output, nodes_behind([self.node])))


def loss_counts(roots: Iterable[Root], *, is_in_model: bool = False) -> list[LossCount]:
    """Return the reductions of which the roots are linear combinations.

    Terms that depend on no model's output are left out, if there are others.

    Args:
        roots: the scalar losses from which a backward starts.
        is_in_model: whether the roots were computed in the forward of a model.
    """
    pending = []
    for root in roots:
        node = node_of(root)
        if node is not None:
            pending.append(_Value(node, root.output_nr, is_in_model))
    visited = set()
    terms: list[tuple[_Value, LossCount]] = []
    while pending:
        value = pending.pop()
        # A sum may lead to a value in exponentially many ways, as in a recurrence.
        position = value.node, value.output
        if position in visited:
            continue
        visited.add(position)
        value.is_in_model = value.is_in_model or is_output(value.node)
        count = _attached_count(value)
        summands = None
        if count is None:
            summands = _summands(value)
        if summands is not None:
            pending += summands
            continue
        if count is None:
            count = _count_of_reduction(value)
        if value.scales:
            count = replace(count, scales=value.scales)
        terms.append((value, count))
    if len(terms) > 1:
        terms = [term for term in terms if term[0].is_from_data()] or terms
    return [count for _, count in terms]


def required_count(roots: Sequence[Root]) -> LossCount:
    """Return the one count of a loss, for average="tokens".

    Raises:
        ConfigError: it is not known, or there are several.
    """
    counts = loss_counts(roots)
    for count in counts:
        if count.count is None:
            raise _unknown_count_error(count)
    if len(counts) > 1:
        # On an accelerator, this waits for the device.
        numbers = {float(count.count or 0.0): count for count in counts}
        if not are_equal(numbers):
            raise _several_counts_error(numbers)
    return _unclamped(counts[0], roots[0])


def are_equal(numbers: Iterable[float]) -> bool:
    """Whether numbers of targets are equal, but for the rounding of their weights."""
    ordered = sorted(numbers)
    return ordered[-1] <= ordered[0] * (1 + _ROUNDING)


def _unknown_count_error(count: LossCount) -> ConfigError:
    loss = f"that {count.operation} computes"
    if count.reduction == "sum":
        loss = f"that is a sum ({count.operation})"
    return ConfigError(
        f"average='tokens' with a loss {loss}",
        why="the number of targets that it averages over cannot be read from its graph",
        fix="let the loss end in a mean of torch (F.cross_entropy, Tensor.mean()) or in a sum that "
        "is divided by a count, outside of compiled functions; or use average='sum' if one process "
        "would add the sums of all ranks, average='ranks' if all ranks have equally many targets",
    )


def _several_counts_error(counts: dict[float, LossCount]) -> ConfigError:
    terms = " and ".join(f"{number:g} ({count.operation})" for number, count in counts.items())
    return ConfigError(
        f"average='tokens' with a loss of terms that average over {terms} targets",
        why="a backward has one weight, and each term would need its own",
        fix="use average='ranks', and divide the sum of each term by its number of targets on all "
        "ranks, per rank: term.sum() / parallelize.all_reduce(float(count), 'mean'); or divide all "
        "terms by the same count",
    )


def _unclamped(count: LossCount, loss: Root) -> LossCount:
    """Return the count of a divided sum: 0 if all targets are masked, where the divisor is clamped.

    As in loss.sum() / mask.sum().clamp(min=1). Other reductions are returned as they are.
    """
    if count.reduction != "divided sum" or not isinstance(loss, torch.Tensor):
        return count
    assert count.count is not None  # The count of a divided sum is its divisor.
    if loss.device.type == "cpu":
        return count if loss.item() else replace(count, count=0.0)
    # The host does not read a loss on a device, because it would wait.
    number = number_on(loss.device, count.count)
    return replace(count, count=torch.where(loss.detach() == 0, 0.0, number))


def attach_count(tensor: torch.Tensor, count: LossCount) -> None:
    """Store the count of a loss that custom operations have joined from several, in its graph."""
    edge = get_gradient_edge(tensor)
    metadata: Any = edge.node.metadata  # torch declares a method
    metadata.setdefault(_ATTACHED_COUNTS, {})[edge.output_nr] = count


def _attached_count(value: _Value) -> LossCount | None:
    counts: dict[int, LossCount] = value.node.metadata.get(_ATTACHED_COUNTS, {})
    return counts.get(value.output)


def join_weights(
    losses: Sequence[torch.Tensor], *, samples: Sequence[int], inputs: Any
) -> tuple[list[Number], LossCount]:
    """Return the weights by which losses of a batch's parts add up to its loss, and its count.

    Means are weighted by their counts, and sums are added. All other scalars are weighted by
    samples, such as means of other terms in each part, or multiplied by other numbers.

    Args:
        losses: one scalar per part, computed in the model's forward.
        samples: number of samples of each part.
        inputs: the inputs of the model; a sum divided by one of these numbers, such as the number
            of targets of several batches, stays a sum.
    """
    input_numbers = _numbers_in(inputs)
    counts = [_count_of_part(loss, input_numbers) for loss in losses]
    first = counts[0]
    reductions = {count.reduction for count in counts}
    if reductions == {"mean"} and _have_equal_scales(counts):
        numbers: list[Number] = []
        for count in counts:
            if isinstance(count.count, torch.Tensor):
                numbers.append(count.count.to(losses[0].device))
            else:
                numbers.append(count.count or 0.0)
        total = sum(numbers)
        weights = [number / (total or 1.0) for number in numbers]
        return weights, LossCount(first.operation, "mean", total)
    if reductions in ({"sum"}, {"divided sum"}):
        # A sum that is equal in all parts, such as a penalty on weights, is not of the batch.
        is_of_batch = len({loss.item() for loss in losses}) > 1
        if is_of_batch:
            return [1.0] * len(losses), first
    total_samples = sum(samples)
    shares: list[Number] = [size / total_samples for size in samples]
    return shares, LossCount(first.operation, "unknown")


def _numbers_in(inputs: Any) -> list[Number]:
    """Return the numbers among the inputs of a model, alone or in 0-dim tensors."""
    numbers = []
    for value in leaves(inputs):
        is_scalar = isinstance(value, torch.Tensor) and value.shape == ()
        if is_scalar or isinstance(value, (int, float)):
            numbers.append(value)
    return numbers


def _have_equal_scales(counts: Sequence[LossCount]) -> bool:
    """Whether the losses of all parts are multiplied by the same numbers.

    On an accelerator, this waits for the device.
    """
    scales = {tuple(map(float, count.scales)) for count in counts}
    return len(scales) == 1


def _count_of_part(loss: torch.Tensor, input_numbers: Sequence[Number]) -> LossCount:
    """Return the count of a loss of one term; a loss of several is unknown.

    A sum divided by an input of the model stays a sum; other divided sums are means.
    """
    counts = loss_counts([loss], is_in_model=True)
    if len(counts) != 1:
        return LossCount("several", "unknown")
    count = counts[0]
    if count.reduction != "divided sum":
        return count
    if float(count.count or 0.0) in map(float, input_numbers):
        return count
    return replace(_unclamped(count, loss), reduction="mean", scales=())


def _summands(value: _Value) -> list[_Value] | None:
    """Return the scalars of which a value is a linear combination.

    None: the search ends at the value, which is a term of the loss. It is a reduction of a tensor
    that is no list of scalars, or the result of an operation that is not linear in one value.
    """
    operation = value.operation
    if operation not in _FOLLOWED or value.elements != 1:
        return None
    sources = value.sources()
    if operation in _SUMS:
        return _summed_scalars(sources)
    if operation in {"Add", "Sub"} and len(sources) > 1:
        for source in sources:
            source.divides_sum = True
        return sources
    is_product_of_two = operation == "Mul" and len(sources) > 1
    if is_product_of_two:
        # A factor that does not depend on data, such as a learned weight of the loss, has no
        # targets. A product of two factors that depend on data is not linear.
        sources = [source for source in sources if source.is_from_data()]
    if len(sources) != 1 or sources[0].elements != 1:
        return None
    # A factor or divisor without a gradient is a number that the node has saved.
    if operation in {"Mul", "Div"} and not is_product_of_two:
        return _scaled(value, sources[0])
    return sources


def _scaled(value: _Value, source: _Value) -> list[_Value] | None:
    """Return the source of a product or quotient with a number, and note the number in the source.

    None: the value is a number divided by the source, which is not linear in the source.
    """
    is_source_first = value.node.next_functions[0][0] is not None
    if value.operation == "Mul":
        saved = value.node._saved_other if is_source_first else value.node._saved_self
        source.scales += (_number(saved),)
        return [source]
    if not is_source_first:
        return None
    number = _number(value.node._saved_other)
    source.scales += (number,)
    if value.divisor is None or value.divides_sum:
        source.divisor = number
    else:
        source.divisor = value.divisor * number
    source.divides_sum = False
    return [source]


def _summed_scalars(sources: list[_Value]) -> list[_Value] | None:
    """Return the scalars that a mean or sum reduces, if they are losses.

        torch.stack([x.mean(), y.mean()]).sum()   the scalars of the list
        x.mean().sum()                            the scalar loss x.mean()
        x[0, 0].exp().mean()                      None: the scalar is one target, of a batch of one
        x.sum()                                   None: the elements of x are targets

    Args:
        sources: those of the mean or sum, which has one.
    """
    source = sources[0]
    shape = source.shape
    operation = source.operation
    if operation in _LISTS:
        scalars = source.sources()
        # There are as many elements as tensors in the list, so that each tensor is a scalar.
        if math.prod(shape) == len(source.node.next_functions):
            return scalars
    if shape == ():
        is_loss = operation in _FOLLOWED or hasattr(source.node, "_saved_reduction")
        if is_loss or _attached_count(source) is not None:
            return [source]
    return None


def _count_of_reduction(value: _Value) -> LossCount:
    operation = value.operation
    if value.elements != 1:
        return LossCount(operation, "unknown")
    reduction = None
    if operation == "Sum":
        reduction = _SUM
    elif operation == "Mean":
        reduction = _MEAN
    else:
        reduction = getattr(value.node, "_saved_reduction", None)
    if reduction == _SUM and value.divisor is None:
        return LossCount(operation, "sum")
    if reduction == _SUM:
        return LossCount(operation, "divided sum", value.divisor)
    if reduction != _MEAN:
        return LossCount(operation, "unknown")
    if operation in {"NllLoss", "NllLoss2D"}:
        return LossCount(operation, "mean", _number(value.node._saved_total_weight))
    return LossCount(operation, "mean", value.sources()[0].elements)


def number_on(
    device: torch.device, number: Number, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return a new 0-dim tensor with a number, for which the host does not wait.

    A kernel fills it. torch.tensor(number, device=device) copies it from memory that is not pinned:
    the host then waits for all that the device has to do before (cudaMemcpyAsync and a
    synchronization of the stream, in Copy.cu).

    Args:
        device: where the tensor is.
        number: a number of the host, or one in a 0-dim tensor of a device.
        dtype: of the tensor.
    """
    if isinstance(number, torch.Tensor):
        return number.to(device, dtype, copy=True)
    return torch.full((), number, dtype=dtype, device=device)


def _number(value: Any) -> Number:
    """Return a number that an operation has saved; one on an accelerator stays there."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value.detach()
    return float(value)
