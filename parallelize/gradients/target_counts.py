"""Number of targets that a loss averages over, read from its autograd graph before backward.

    reduction   an operation that makes a scalar of the values of the targets: a mean, a sum, a
                loss of torch such as NllLoss
    term        a reduction to which the loss is linear: the loss is a sum of multiples of its terms
    count       the number of targets that a term averages over, or the sum of their class weights

The search goes from the loss down, through operations that are linear in one value, to the terms.
It reads the graph and patches no function. So it finds losses in a forward, of modules, under
autocast and imported by name alike, and costs nothing while they are computed. In these losses, x
and y of shape (6, 5) and the scalar z are computed by models; t are six targets, two of them
ignored:

    loss                              graph, from the loss on             counts of the terms
    F.cross_entropy(x, t)             NllLoss                             4, its total weight
    x.mean()                          Mean                                30
    x.mean(1).mean()                  Mean, Mean of no scalar             6
    1 - 0.5 * x.mean()                Rsub, Mul, Mean                     30
    x.sum() / 4                       Div by 4, Sum                       4
    x.sum() / 4 / 2                   Div by 2, Div by 4, Sum             8
    (x.sum() + y.sum()) / 4           Div by 4, Add, two Sums             4 and 4
    (x.sum() / 4 + y.mean()) / 2      Div by 2, Add, Div by 4 and Mean    4 and 30, as below
    torch.stack([x.mean(), z]).sum()  Sum, Stack, Mean and that of z      30 and that of z
    x.mean() + penalty(weights)       Add, Mean and that of the penalty   30: no model is behind the
                                                                          penalty
    x.sum()                           Sum                                 none: a sum
    x.mean() ** 2                     Pow                                 none: unknown

A number that divides a sum of terms may be a count, as in (x.sum() + y.sum()) / 4, or the number of
terms or accumulated passes, as the 2 in (x.sum() / 4 + y.mean()) / 2. It is taken for a count only
where no number divides the term alone, and where the term is a sum.
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
"""A number of the host, or a 0-dim tensor of an accelerator, which the host must wait to read."""

# Key in the metadata of a node: number of an output -> its LossCount. See `attach_count`.
_ATTACHED_COUNTS: Any = "parallelize: counts, by the numbers of outputs"
# Relative difference of two sums of the same class weights that are added up in different orders.
_ROUNDING = 1e-5

# Names of operations: the name of the node AddBackward0 up to "Backward".
_LINEAR = frozenset(("Add", "Alias", "Clone", "Div", "Mul", "Neg", "Reshape", "ReshapeAlias"))
_LINEAR |= {"Rsub", "Select", "Squeeze", "Sub", "ToCopy", "UnsafeView", "Unsqueeze", "View"}
_SUMS = frozenset({"Mean", "Sum"})
_FOLLOWED = _LINEAR | _SUMS
_LISTS = frozenset({"Cat", "Stack"})
# What makes a learned weight of a loss from a parameter. A replica of DataParallel has its
# parameters by Broadcast.
_OF_WEIGHTS = frozenset({"Alias", "Broadcast", "Clone", "Exp", "Neg", "Reshape", "Sigmoid"})
_OF_WEIGHTS |= {"Softplus", "Squeeze", "ToCopy", "View", "torch::autograd::AccumulateGrad"}
# Values of torch's enum Reduction, which nodes of losses save.
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class LossCount:
    """The count of one term of a loss.

        reduction       the term                                count
        "mean"          a mean                                  number or total weight of targets
        "divided sum"   a sum that is divided by a number       the number
        "sum"           a sum                                   None
        "unknown"       no mean or sum that the search knows    None

    Args:
        operation: name of the operation that has computed the term, such as "NllLoss".
        reduction: as in the table.
        count: as in the table.
        scales: numbers that multiply or divide the term in the loss; only `join_weights` needs
            them.
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
        is_in_model: whether a forward of a model has computed the value. The value then depends on
            data, although the search finds no output of a model behind it.
        scales: numbers that multiply or divide the value on the way to the loss.
        divisor: product of the numbers that divide the value alone. If there are none: product of
            the numbers that divide a sum with the value as a term. None: no number divides it.
        divides_sum: whether the divisor divides a sum. A number that divides the value alone then
            replaces the divisor, which may be a number of terms or passes.
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
        return _operation_of(self.node)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value.

        It is read from the node. To read a saved tensor would run the user's hooks on saved
        tensors, which may load the tensor from a disk or from the host.
        """
        return tuple(self.node._input_metadata[self.output].shape)

    @property
    def elements(self) -> int:
        """Number of elements of the value."""
        return math.prod(self.shape)

    def sources(self) -> list[_Value]:
        """Return the values from which this value was computed, except those without a gradient.

        The scales and the divisor of this value apply to its sources, too.
        """
        sources = []
        for node, output in self.node.next_functions:
            if node is not None:
                sources.append(self.moved_to(node, output))
        return sources

    def moved_to(self, node: Any, output: int) -> _Value:
        """Return the value of another output, with the scales and the divisor of this value."""
        return _Value(node, output, self.is_in_model, self.scales, self.divisor, self.divides_sum)

    def is_from_data(self) -> bool:
        """Whether the value depends on an output of a model; a penalty on weights does not.

        In a forward, only a learned weight is known to depend on no data: a parameter, or what
        simple operations make of it. Other operations may have operands without a gradient.
        """
        nodes = nodes_behind([self.node])
        if not self.is_in_model:
            return any(map(is_output, nodes))
        # The first other operation ends the search, which would else reach the whole graph.
        return any(_operation_of(node) not in _OF_WEIGHTS for node in nodes)


def _operation_of(node: Any) -> str:
    """Return the name of a node's operation, such as "NllLoss" of NllLossBackward0."""
    name: str = node.name()
    return name.rpartition("Backward")[0] or name


def loss_counts(roots: Iterable[Root], *, is_in_model: bool = False) -> list[LossCount]:
    """Return the counts of the terms of a loss.

    Terms that depend on no output of a model, such as penalties on weights, are left out if other
    terms do.

    Args:
        roots: the scalars from which a backward pass starts. They add up to the loss.
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
        # In a recurrence such as loss = loss + 0.1 * loss, the number of ways to a value doubles
        # with each step. One way is enough to find the terms.
        position = value.node, value.output
        if position in visited:
            continue
        visited.add(position)
        value.is_in_model = value.is_in_model or is_output(value.node)
        # The search ends at an attached count, or where `_summands` goes no further.
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
        terms_from_data = [term for term in terms if term[0].is_from_data()]
        terms = terms_from_data or terms
    return [count for _, count in terms]


def required_count(roots: Sequence[Root]) -> LossCount:
    """Return the count that all terms of a loss have, for average="tokens".

    Raises:
        ConfigError: the count of a term is not known, or the terms have different counts.
    """
    counts = loss_counts(roots)
    for count in counts:
        if count.count is None:
            raise _unknown_count_error(count)
    if len(counts) > 1:
        # On an accelerator, the host waits to read the numbers. A single term needs no comparison.
        count_by_number = {float(count.count or 0.0): count for count in counts}
        if not are_equal(count_by_number):
            raise _several_counts_error(count_by_number)
    return _unclamped(counts[0], roots[0])


_LARGEST_CLAMPED_DIVISOR = 1.0
"""To what a user clamps a number of targets that may be 0, or to less."""


def are_equal(numbers: Iterable[float]) -> bool:
    """Whether numbers of targets are equal up to rounding; at least one number is needed.

    Terms that add up the same class weights in different orders differ by rounding.
    """
    ordered = sorted(numbers)
    return ordered[-1] <= ordered[0] * (1 + _ROUNDING)


def _unknown_count_error(count: LossCount) -> ConfigError:
    """Return the error for a term whose count is None: a sum, or an unknown operation."""
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


def _several_counts_error(count_by_number: dict[float, LossCount]) -> ConfigError:
    """Return the error for terms that average over different numbers of targets."""
    counted_terms = [f"{number:g} ({count.operation})" for number, count in count_by_number.items()]
    terms = " and ".join(counted_terms)
    return ConfigError(
        f"average='tokens' with a loss of terms that average over {terms} targets",
        why="a backward has one weight, and each term would need its own",
        fix="use average='ranks', and divide the sum of each term by its number of targets on all "
        "ranks, per rank: term.sum() / parallelize.all_reduce(float(count), 'mean'); or divide all "
        "terms by the same count",
    )


def _unclamped(count: LossCount, loss: Root) -> LossCount:
    """Return a count, with 0 for a divided sum whose targets are all masked.

    In losses.sum() / mask.sum().clamp(min=1), the divisor is 1 if all targets are masked. The loss
    is 0 then, and the clamped divisor must not count as a target. The loss of real targets may be
    0, too, as that of a hinge whose margins are met: a larger divisor counts them. Other counts are
    returned as they are.

    Args:
        count: the count of a term of the loss.
        loss: the root from which the pass starts.
    """
    if count.reduction != "divided sum" or not isinstance(loss, torch.Tensor):
        return count
    # The count of a divided sum is its divisor.
    assert count.count is not None
    if loss.device.type == "cpu":
        is_clamped = loss.item() == 0 and float(count.count) <= _LARGEST_CLAMPED_DIVISOR
        return replace(count, count=0.0) if is_clamped else count
    # To read the loss, the host would wait for the device. So the device chooses between the two.
    number = number_on(loss.device, count.count)
    is_clamped_on_device = (loss.detach() == 0) & (number <= _LARGEST_CLAMPED_DIVISOR)
    return replace(count, count=torch.where(is_clamped_on_device, 0.0, number))


def attach_count(tensor: torch.Tensor, count: LossCount) -> None:
    """Store the count of a loss in its graph, where the search finds it and ends.

    An engine has joined the loss from the losses of a batch's parts, by operations that hide the
    count.

    Args:
        tensor: the loss; it must require a gradient.
        count: as `join_weights` returns it.
    """
    edge = get_gradient_edge(tensor)
    # Torch declares `metadata` as a method, and it is a dictionary.
    metadata: Any = edge.node.metadata
    metadata.setdefault(_ATTACHED_COUNTS, {})[edge.output_nr] = count


def _attached_count(value: _Value) -> LossCount | None:
    """Return the count that `attach_count` has stored for a value; None: there is none."""
    counts: dict[int, LossCount] = value.node.metadata.get(_ATTACHED_COUNTS, {})
    return counts.get(value.output)


def join_weights(
    losses: Sequence[torch.Tensor], *, samples: Sequence[int], inputs: Any
) -> tuple[list[Number], LossCount]:
    """Return weights for the losses of a batch's parts, and the count of the weighted sum.

    An engine that runs a model on parts of a batch multiplies the loss of each part by its weight,
    and adds up. The weights depend on `_count_of_part` of the parts:

        all "mean", with equal scales         count of the part / sum of the counts
        all "sum", or all "divided sum"       1, unless the losses of all parts are equal
        everything else                       samples of the part / sum of the samples

    The host reads losses, scales and counts, and waits for an accelerator that has them.

    Args:
        losses: one scalar per part, computed in the model's forward.
        samples: number of samples of each part.
        inputs: the inputs of the model, for `_count_of_part`.
    """
    input_numbers = _numbers_in(inputs)
    counts = [_count_of_part(loss, input_numbers) for loss in losses]
    count_of_first_part = counts[0]
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
        return weights, LossCount(count_of_first_part.operation, "mean", total)
    if reductions in ({"sum"}, {"divided sum"}):
        # A sum that is equal in all parts is not over samples: it is a penalty on weights, say.
        is_of_batch = len({loss.item() for loss in losses}) > 1
        if is_of_batch:
            return [1.0] * len(losses), count_of_first_part
    total_samples = sum(samples)
    shares: list[Number] = [size / total_samples for size in samples]
    return shares, LossCount(count_of_first_part.operation, "unknown")


def _numbers_in(inputs: Any) -> list[Number]:
    """Return the numbers among the inputs of a model: Python numbers and 0-dim tensors."""
    numbers = []
    for value in leaves(inputs):
        is_scalar = isinstance(value, torch.Tensor) and value.shape == ()
        if is_scalar or isinstance(value, (int, float)):
            numbers.append(value)
    return numbers


def _have_equal_scales(counts: Sequence[LossCount]) -> bool:
    """Whether the losses of all parts are multiplied and divided by the same numbers.

    Numbers of an accelerator are read, and the host waits for them.
    """
    scales = {tuple(map(float, count.scales)) for count in counts}
    return len(scales) == 1


def _count_of_part(loss: torch.Tensor, input_numbers: Sequence[Number]) -> LossCount:
    """Return the count of the loss of one part of a batch, with a reduction for `join_weights`.

        loss                                    reduction
        several terms                           "unknown"
        a sum divided by an input of the model  "divided sum": all parts have this divisor, such as
                                                the targets of several batches, and add up
        another divided sum                     "mean": each part is divided by its own number
        another term                            as `loss_counts` returns it

    Args:
        loss: the loss of the part.
        input_numbers: the numbers among the inputs of the model.
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

    None: the value is a term of the loss, and the search ends there. The value is a reduction of
    targets, or the result of an operation that is not linear in one scalar.
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
        # targets. If two factors depend on data, the value is linear in neither: it is a term.
        sources = [source for source in sources if source.is_from_data()]
    if len(sources) != 1 or sources[0].elements != 1:
        return None
    # The other operand has no gradient here: it is a number, which the node has saved.
    if operation in {"Mul", "Div"} and not is_product_of_two:
        return _scaled(value, sources[0])
    return sources


def _scaled(value: _Value, source: _Value) -> list[_Value] | None:
    """Note the number of a product or quotient in its source, and return the source in a list.

    None: the value is a number divided by the source, so it is not linear in the source.

    Args:
        value: computed by Mul or Div of the source and a number.
        source: the operand that has a gradient.
    """
    # The node of an operand without a gradient is None.
    is_source_first = value.node.next_functions[0][0] is not None
    if value.operation == "Mul":
        saved = value.node._saved_other if is_source_first else value.node._saved_self
        source.scales += (_number(saved),)
        return [source]
    if not is_source_first:
        return None
    number = _number(value.node._saved_other)
    source.scales += (number,)
    # The source has the divisor of the value so far: see `_Value.divides_sum`.
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
        sources: the sources of the mean or sum: one value.
    """
    source = sources[0]
    shape = source.shape
    operation = source.operation
    if operation in _LISTS:
        scalars = source.sources()
        # If there are as many elements as tensors in the list, each tensor is a scalar.
        if math.prod(shape) == len(source.node.next_functions):
            return scalars
    if shape == ():
        is_loss = operation in _FOLLOWED or hasattr(source.node, "_saved_reduction")
        if is_loss or _attached_count(source) is not None:
            return [source]
    return None


def _count_of_reduction(value: _Value) -> LossCount:
    """Return the count of a term, which is no linear combination of scalars."""
    operation = value.operation
    if value.elements != 1:
        return LossCount(operation, "unknown")
    reduction = None
    if operation == "Sum":
        reduction = _SUM
    elif operation == "Mean":
        reduction = _MEAN
    else:
        # A loss of torch, such as NllLoss, saves its reduction. Other nodes have none.
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
    """Return a new 0-dim tensor with a number, without waiting for the device.

    A kernel fills the tensor. torch.tensor(number, device=device) would copy the number from memory
    that is not pinned: the host would wait until the device has done all its earlier work
    (cudaMemcpyAsync and a synchronization of the stream, in Copy.cu).

    Args:
        device: the device of the new tensor.
        number: a number of the host, or a 0-dim tensor of a device.
        dtype: dtype of the new tensor.
    """
    if isinstance(number, torch.Tensor):
        return number.to(device, dtype, copy=True)
    return torch.full((), number, dtype=dtype, device=device)


def _number(value: Any) -> Number:
    """Return a number that a node has saved; a number on an accelerator stays there."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value.detach()
    return float(value)
