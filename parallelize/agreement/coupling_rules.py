"""What operations make of values that depend on the samples of a batch: a rule for each operation.

    PER_SAMPLE ─── exp, + constant, matrix product along other dimensions ─── PER_SAMPLE
    PER_SAMPLE ─── sum or mean along the batch, x.T @ y ───────────────────── SUMMED
    PER_SAMPLE ─── x @ y.T, x[:, None] * y ────────────────────────────────── PAIRED
    SUMMED ─────── sum, * constant, any choice of elements ────────────────── SUMMED
    SUMMED ─────── exp, sqrt, square, * another value ─────────────────────── COUPLED
    PAIRED ─────── sum or softmax along the batch ─────────────────────────── COUPLED

A rule looks at an operation, at shapes and at dimensions, and never at the numbers in a tensor. It
returns UNKNOWN rather than guess: a loss that is wrongly called coupled gets a wrong warning.

`coupled_samples` calls the rules. At least one operand of the operation depends on samples, and
none is COUPLED or UNKNOWN: each is CONSTANT, PER_SAMPLE, SUMMED or PAIRED.

Glossary:
    operand      a value that an operation has taken, with its shape
    dependent    of an operand: it is not CONSTANT
    rows         the elements along the batch dimension; a sample has one or two
    crossing     of an operation: it joins elements along the batch dimension
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from parallelize.agreement.coupling_values import (
    CONSTANT,
    SUMMED,
    UNKNOWN,
    Dependence,
    Operand,
    Operation,
    Shape,
    Value,
    from_front,
)

_Rule = Callable[[Operation], Value]


# Element by element. Shapes are broadcast: dimensions are counted from the last one.


def _aligned(operation: Operation) -> list[Value]:
    """Return the values of the dependent operands, with batch dimensions as the result counts them.

    A result may have more dimensions than an operand. Broadcasting puts the new ones in front, so
    that every dimension of the operand has a higher number in the result.
    """
    values = []
    for operand in operation.dependent:
        dims_in_front = len(operation.shape) - len(operand.shape)
        dims = tuple(dim + dims_in_front for dim in operand.value.batch_dims)
        values.append(replace(operand.value, batch_dims=dims))
    return values


def _has(values: Sequence[Value], dependence: Dependence) -> bool:
    """Whether one of the values depends on samples in this way."""
    return dependence in [value.dependence for value in values]


def _joined(values: Sequence[Value]) -> Value:
    """Return what is known of a sum of values.

    Rules for other functions of these values call it first, and then judge a result that is SUMMED:
    a function that is not linear couples the terms of a sum.

    Args:
        values: one or more, with batch dimensions as the result counts them.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if _has(values, Dependence.SUMMED):
        return UNKNOWN if _has(values, Dependence.PAIRED) else SUMMED
    if _has(values, Dependence.PAIRED):
        return _joined_pairs(values)
    # All are PER_SAMPLE. After different selections, a row is of another sample in each value.
    for value in values:
        if value.selection != first.selection or not value.batch_dims:
            return UNKNOWN
    for value in values:
        if value.batch_dims != first.batch_dims:
            # As x[:, None] + y[None]: each element has a term of one sample and one of another.
            return SUMMED
    return first


def _joined_pairs(values: Sequence[Value]) -> Value:
    """Return what is known of a function of pairs and of a second value.

    It is PAIRED if the second value has the same pairs, or depends on one sample of each pair.

    Args:
        values: two, in any order, of which one or both are PAIRED. A concatenation may pass more,
            and does not use the result.
    """
    pairs = values[0]
    if pairs.dependence is not Dependence.PAIRED:
        pairs = values[1]
    is_masked = False
    for value in values:
        is_masked |= value.is_masked
        is_of_third_sample = not set(value.batch_dims) <= set(pairs.batch_dims)
        if not value.batch_dims or is_of_third_sample:
            return UNKNOWN
    return replace(pairs, is_masked=is_masked)


def _linear(operation: Operation) -> Value:
    """Return what is known of a sum or difference, or of an operation that changes no numbers."""
    return _joined(_aligned(operation))


def _masking(operation: Operation) -> Value:
    """Return what is known of values after a mask has replaced some elements.

    The mask is noted for pairs alone. It may have replaced all pairs of different samples, and a
    sum of the other pairs couples nothing.
    """
    value = _linear(operation)
    return replace(value, is_masked=value.dependence is Dependence.PAIRED)


def _nonlinear(operation: Operation) -> Value:
    """Return what is known of e.g. an exponential: exp(f(a) + f(b)) is no sum of terms."""
    # x ** 1 is linear.
    if operation.name == "Pow" and getattr(operation.node, "_saved_exponent", None) == 1:
        return _linear(operation)
    value = _linear(operation)
    if value.dependence is Dependence.SUMMED:
        return operation.coupled()
    return value


def _piecewise_linear(operation: Operation) -> Value:
    """Return what is known of e.g. a clamped value.

    A sum stays as it is within the bounds, and is no sum of terms beyond them. Only the numbers
    show which, so that it is UNKNOWN.
    """
    value = _linear(operation)
    return UNKNOWN if value.dependence is Dependence.SUMMED else value


def _multiplied(operation: Operation, values: Sequence[Value]) -> Value:
    """Return what is known of a product, from its dependent factors: one or two."""
    if len(values) == 1:
        return values[0]
    if _has(values, Dependence.SUMMED):
        return operation.coupled()
    joined = _joined(values)
    if joined.dependence is Dependence.SUMMED:
        # The batch dimensions differ, as in x[:, None] * y[None]. An element of x + y would have a
        # term of each of two samples. An element of x * y is a function of the pair.
        first, second = values
        dims = (*first.batch_dims, *second.batch_dims)
        return Value(Dependence.PAIRED, dims, rows=first.rows)
    return joined


def _product(operation: Operation) -> Value:
    """Return what is known of a product of two values, one of which may be a constant."""
    value = _multiplied(operation, _aligned(operation))
    has_constant = len(operation.dependent) == 1
    if value.dependence is Dependence.PAIRED and has_constant:
        # A matrix of zeros and ones may leave out pairs. A number, such as a temperature, does not.
        return replace(value, is_masked=value.is_masked or not _is_times_number(operation))
    return value


def _is_times_number(operation: Operation) -> bool:
    """Whether the constant factor of a product is a single number.

    A constant in the graph, such as a parameter, has a shape there. Any other constant has none,
    and is what the node has saved for the gradient of the other factor.
    """
    names = ("_saved_self", "_saved_other")
    edges = operation.node.next_functions
    for name, (node, _output), operand in zip(names, edges, operation.operands, strict=False):
        if operand.value == CONSTANT and node is not None:
            return math.prod(operand.shape) == 1
        if operand.value == CONSTANT:
            constant = getattr(operation.node, name, None)
            return not isinstance(constant, torch.Tensor) or constant.numel() == 1
    return True


def _quotient(operation: Operation) -> Value:
    """Return what is known of a quotient: its divisor is inverted, which is not linear."""
    values = _aligned(operation)
    is_divisor_dependent = len(operation.operands) > 1 and operation.operands[1].value != CONSTANT
    if not is_divisor_dependent:
        return values[0]
    # The divisor is the last dependent operand, and the only one if the dividend is constant.
    if values[-1].dependence is Dependence.SUMMED:
        return operation.coupled()
    return _multiplied(operation, values)


# Reductions, and what normalizes along a dimension. Along another dimension than that of the batch,
# each row stays a function of its sample, and only the position of the batch dimension may change.


def _dims_of(operation: Operation) -> set[int]:
    """Return the dimensions along which an operation goes: all if its node has saved none."""
    ndim = len(operation.first.shape)
    saved = getattr(operation.node, "_saved_dim", None)
    if isinstance(saved, int):
        saved = (saved,)
    if not saved:
        return set(range(ndim))
    return {from_front(dim, ndim) for dim in saved}


def _crosses(value: Value, dims: set[int], ndim: int) -> bool | None:
    """Whether an operation along `dims` joins rows; None: the batch dimension is not known.

    Args:
        value: the operand of the operation.
        dims: the dimensions of the operand along which the operation goes.
        ndim: the number of dimensions of the operand.
    """
    # All dimensions include the batch dimension, even if nobody knows which one it is.
    if len(dims) == ndim:
        return True
    if not value.batch_dims:
        return None
    return not dims.isdisjoint(value.batch_dims)


def _without_dims(value: Value, dims: set[int], *, keepdim: bool) -> Value:
    """Return a value after an operation has removed `dims`, none of which is a batch dimension.

    With `keepdim`, they stay with size 1.
    """
    if keepdim:
        return value
    batch_dims = []
    for batch_dim in value.batch_dims:
        dims_in_front = [dim for dim in dims if dim < batch_dim]
        batch_dims.append(batch_dim - len(dims_in_front))
    return replace(value, batch_dims=tuple(batch_dims))


def _summed(operation: Operation) -> Value:
    """Return what is known of a sum or mean along some dimensions, or all."""
    value, ndim = operation.first.value, len(operation.first.shape)
    if value.dependence is Dependence.SUMMED:
        return value
    dims = _dims_of(operation)
    crosses = _crosses(value, dims, ndim)
    if crosses is None:
        return UNKNOWN
    if not crosses:
        keepdim = getattr(operation.node, "_saved_keepdim", False)
        return _without_dims(value, dims, keepdim=keepdim)
    if value.dependence is Dependence.PER_SAMPLE:
        return SUMMED
    # A sum over pairs of a sample with itself would be SUMMED.
    return UNKNOWN if value.is_masked else operation.coupled()


def _nonlinear_reduction(operation: Operation) -> Value:
    """Return what is known of e.g. a norm, a standard deviation, or a logarithm of a sum."""
    # Norms have an order, and the norm of order 1 is a sum. The other operations have none.
    order = getattr(operation.node, "_saved_ord", getattr(operation.node, "_saved_p", 2))
    if order != 2:
        return UNKNOWN
    value, ndim = operation.first.value, len(operation.first.shape)
    if value.dependence is Dependence.SUMMED:
        return operation.coupled()
    dims = _dims_of(operation)
    crosses = _crosses(value, dims, ndim)
    if crosses is None:
        return UNKNOWN
    if crosses:
        return operation.coupled()
    keepdim = getattr(operation.node, "_saved_keepdim", False)
    return _without_dims(value, dims, keepdim=keepdim)


def _softmax(operation: Operation) -> Value:
    """Return what is known of values that are normalized: each depends on all in a dimension."""
    value, ndim = operation.first.value, len(operation.first.shape)
    if value.dependence is Dependence.SUMMED:
        return operation.coupled()
    crosses = _crosses(value, _dims_of(operation), ndim)
    if crosses is None:
        return UNKNOWN
    return operation.coupled() if crosses else value


def _elementwise_loss(operation: Operation) -> Value:
    """Return what is known of a loss that is computed by elements, such as the squared error."""
    value = _nonlinear(operation)
    return _after_reduction(operation, value)


def _picking_loss(operation: Operation) -> Value:
    """Return what is known of a loss that picks from each row the element of the row's target.

    Rows are along the first dimension. The targets may pick the pairs of a sample with itself, so
    that nothing is said of PAIRED.
    """
    value = operation.first.value
    if value.dependence is Dependence.PAIRED or value.batch_dims not in {(), (0,)}:
        return UNKNOWN
    return _after_reduction(operation, value)


def _after_reduction(operation: Operation, value: Value) -> Value:
    """Return what is known of a loss, from the losses of its elements, after its `reduction=`."""
    # torch's number of reduction="none" is 0.
    is_reduced = operation.node._saved_reduction != 0
    if not is_reduced or value.dependence in {Dependence.COUPLED, Dependence.UNKNOWN}:
        return value
    if value.dependence is Dependence.PAIRED:
        return UNKNOWN if value.is_masked else operation.coupled()
    return SUMMED


# Products of matrices. The place of a factor's dimension is the dimension of the result that it
# becomes; None: the product sums over it. For x and y of (samples, features), w of (features, n):
#
#     x @ w        places of x: (0, None)                        PER_SAMPLE
#     x.T @ y      both batch dimensions at None                 SUMMED
#     x @ y.T      batch dimensions at 0 and at 1                PAIRED

_Places = tuple[int | None, ...]


def _contraction(first_places: _Places, second_places: _Places) -> _Rule:
    """Return the rule of a product of two matrices, or of batches of them.

    Args:
        first_places: the place of each dimension of the first factor.
        second_places: the place of each dimension of the second factor.
    """

    def rule(operation: Operation) -> Value:
        # The operands of addmm and baddbmm begin with a summand, such as a bias. A summand that
        # depends on samples is rare, and its sum with the product is not followed.
        *summands, first, second = operation.operands
        for summand in summands:
            if summand.value != CONSTANT:
                return UNKNOWN
        return _contracted(operation, (first, first_places), (second, second_places))

    return rule


def _contracted(operation: Operation, *factors: tuple[Operand, _Places]) -> Value:
    """Return what is known of a product, from its two factors with their places."""
    # Of each dependent factor: its value, and the places of its batch dimensions.
    values, places = [], []
    for operand, places_of_operand in factors:
        value = operand.value
        if value == CONSTANT:
            continue
        if value.dependence is Dependence.PER_SAMPLE and not value.batch_dims:
            return UNKNOWN
        values.append(value)
        places.append([places_of_operand[dim] for dim in value.batch_dims])
    if not values:
        return CONSTANT
    if len(values) == 1:
        return _times_constant(values[0], places[0])
    if _has(values, Dependence.SUMMED):
        return operation.coupled()
    if _has(values, Dependence.PAIRED):
        return UNKNOWN
    return _times_samples(operation, values, places[0] + places[1])


def _times_constant(value: Value, places: Sequence[int | None]) -> Value:
    """Return what is known of a product with a constant matrix, from the places of `batch_dims`."""
    if value.dependence is Dependence.SUMMED:
        return value
    batch_dims = []
    for place in places:
        if place is not None:
            batch_dims.append(place)
        elif value.dependence is Dependence.PER_SAMPLE:
            return SUMMED
        else:
            # The constant may be zero for all pairs of different samples.
            return UNKNOWN
    return replace(value, batch_dims=tuple(batch_dims))


def _times_samples(
    operation: Operation, values: Sequence[Value], places: Sequence[int | None]
) -> Value:
    """Return what is known of a product of two factors that are PER_SAMPLE.

    `places` has the place of the batch dimension of each factor.
    """
    first_place, second_place = places
    if first_place is None and second_place is None:
        # As x.T @ y: a sum over the samples.
        return SUMMED
    if first_place is None or second_place is None:
        # For each sample of one factor, a sum over the samples of the other.
        return operation.coupled()
    if first_place != second_place:
        return Value(Dependence.PAIRED, (first_place, second_place), rows=values[0].rows)
    # As a product of batches of matrices, sample by sample.
    return _joined([replace(value, batch_dims=(first_place,)) for value in values])


# Movements of elements. A part of the rows may be of one sample alone, and then a function of it
# couples nothing: such a part is UNKNOWN.


def _reshaped(operation: Operation) -> Value:
    """Return what is known of elements that keep their order, and get another shape.

    If the batch dimension is not found in the new shape, PER_SAMPLE stays without it.
    """
    value, old_shape = operation.first.value, operation.first.shape
    batch_dims = []
    for old_dim in value.batch_dims:
        sizes_in_front = old_shape[:old_dim]
        batch_dim = _batch_dim_after_reshape(value.rows, sizes_in_front, operation.shape)
        if batch_dim is not None:
            batch_dims.append(batch_dim)
    if value.dependence is Dependence.PAIRED and len(batch_dims) < 2:
        return UNKNOWN
    return replace(value, batch_dims=tuple(batch_dims))


def _batch_dim_after_reshape(rows: int, sizes_in_front: Shape, shape: Shape) -> int | None:
    """Return the dimension of a new shape that the batch dimension has become; None: it is none.

    It may have joined the dimensions behind it: 6 rows of 4 elements become 24 elements, each of
    one row. So its size is a multiple of the number of rows. It must not have joined dimensions in
    front of it: then each position in it would be of several rows.

    Args:
        rows: number of rows.
        sizes_in_front: sizes of the old shape in front of the batch dimension.
        shape: the new shape.
    """
    elements_in_front = math.prod(sizes_in_front)
    for dim, size in enumerate(shape):
        # Dimensions of size 1 may stand in front of it.
        if math.prod(shape[:dim]) == elements_in_front and size > 1:
            return dim if size % rows == 0 else None
    return None


def _expanded(operation: Operation) -> Value:
    """Return what is known of a value that is repeated along dimensions of size 1."""
    (value,) = _aligned(operation)
    return value


def _permuted(operation: Operation) -> Value:
    """Return what is known of a value whose dimensions have another order."""
    value, ndim = operation.first.value, len(operation.shape)
    # For each dimension of the result, the dimension of the operand that it was.
    order = list(range(ndim))
    if operation.name == "Permute":
        order = [from_front(dim, ndim) for dim in operation.node._saved_dims]
    elif operation.name == "Transpose":
        first = operation.saved_dim("_saved_dim0", ndim)
        second = operation.saved_dim("_saved_dim1", ndim)
        order[first], order[second] = second, first
    else:
        order.reverse()
    dims = tuple(order.index(dim) for dim in value.batch_dims)
    return replace(value, batch_dims=dims)


def _sliced(operation: Operation) -> Value:
    """Return what is known of a slice: some of the elements along a dimension, in their order."""
    value = operation.first.value
    if value.dependence is Dependence.SUMMED:
        return value
    dim = operation.saved_dim("_saved_dim", len(operation.first.shape))
    if not value.batch_dims:
        return UNKNOWN
    if dim not in value.batch_dims:
        return value
    # A sample has one row or two, so that three rows are of two samples at least. One position may
    # be a part of a row, if a reshape has joined the batch dimension with others.
    rows = operation.shape[dim]
    is_by_row = operation.first.shape[dim] == value.rows
    if value.dependence is Dependence.PAIRED or not is_by_row or rows < 3:
        return UNKNOWN
    return replace(value, rows=rows, selection=operation.edge)


def _gathered(operation: Operation) -> Value:
    """Return what is known of elements that gather or index_select takes along a dimension."""
    value = operation.first.value
    if value.dependence is Dependence.SUMMED:
        return value
    dim = operation.saved_dim("_saved_dim", len(operation.first.shape))
    if not value.batch_dims or dim in value.batch_dims:
        return UNKNOWN
    return value


def _selected(operation: Operation) -> Value:
    """Return what is known of the elements at one position of a dimension, which is removed."""
    value = _gathered(operation)
    # Without batch dimensions, it is SUMMED or UNKNOWN.
    if not value.batch_dims:
        return value
    dim = operation.saved_dim("_saved_dim", len(operation.first.shape))
    return _without_dims(value, {dim}, keepdim=False)


def _picked(operation: Operation) -> Value:
    """Return what is known of e.g. x[index]: no shape tells which rows it has picked."""
    value = operation.first.value
    return value if value.dependence is Dependence.SUMMED else UNKNOWN


def _concatenated(operation: Operation) -> Value:
    """Return what is known of values that cat or stack puts beside each other."""
    values = [operand.value for operand in operation.dependent]
    dependences = {value.dependence for value in values}
    if dependences == {Dependence.SUMMED}:
        return SUMMED
    value = _joined(values)
    if dependences != {Dependence.PER_SAMPLE} or len(value.batch_dims) != 1:
        return UNKNOWN
    (batch_dim,) = value.batch_dims
    dim = operation.saved_dim("_saved_dim", len(operation.shape))
    if operation.name == "Stack":
        # The new dimension moves those behind it by one.
        is_moved = dim <= batch_dim
        return replace(value, batch_dims=(batch_dim + int(is_moved),))
    if dim != batch_dim:
        return value
    # The user may have gathered the rows of all ranks, of which only this rank's rows depend on
    # samples. Then the loss compares all samples, as it should.
    if len(values) < len(operation.operands):
        return UNKNOWN
    return replace(value, rows=operation.shape[dim], selection=operation.edge)


def _samplewise(operation: Operation) -> Value:
    """Return what is known of the output of a layer that keeps the samples in the first dimension.

    Batch norm counts as such a layer, although it joins samples: it has a warning of its own, about
    buffers that differ between the ranks.
    """
    value = operation.first.value
    is_kept = value.batch_dims == (0,) and operation.first.shape[0] == operation.shape[0]
    if len(operation.dependent) > 1 or len(operation.shape) < 2 or not is_kept:
        return UNKNOWN
    return value


RULES: dict[str, _Rule] = {}
"""Name of an operation -> its rule. Operations that are not here make a value UNKNOWN."""
for _rule, _names in (
    (_linear, "Add Sub Rsub Neg ToCopy Clone Alias"),
    (_masking, "Where MaskedFill Triu Tril"),
    (_nonlinear, "Exp Expm1 Exp2 Log Log1P Log2 Log10 Sqrt Rsqrt Pow Reciprocal Sin Cos Erf"),
    (_nonlinear, "Sigmoid LogSigmoid Tanh Softplus Gelu Silu Elu Mish"),
    (_piecewise_linear, "Relu LeakyRelu Abs Clamp ClampMin ClampMax Hardtanh Threshold"),
    (_piecewise_linear, "Minimum Maximum"),
    (_product, "Mul"),
    (_quotient, "Div"),
    (_summed, "Sum Mean"),
    (_nonlinear_reduction, "Var Std Norm LinalgVectorNorm Logsumexp Prod"),
    (_softmax, "Softmax LogSoftmax"),
    (_elementwise_loss, "MseLoss SmoothL1Loss HuberLoss SoftMarginLoss BinaryCrossEntropy"),
    (_elementwise_loss, "BinaryCrossEntropyWithLogits"),
    (_picking_loss, "NllLoss NllLoss2D"),
    (_contraction((0, None), (None, 1)), "Mm Addmm"),
    (_contraction((0, 1, None), (0, None, 2)), "Bmm Baddbmm"),
    (_contraction((0, None), (None,)), "Mv"),
    (_contraction((None,), (None,)), "Dot"),
    (_reshaped, "View UnsafeView Reshape ReshapeAlias Unsqueeze Squeeze"),
    (_expanded, "Expand"),
    (_permuted, "Permute Transpose T"),
    (_sliced, "Slice Split SplitWithSizes"),
    (_selected, "Select Unbind"),
    (_gathered, "Gather IndexSelect"),
    (_picked, "Index Diagonal Trace Take MaskedSelect Cumsum"),
    (_concatenated, "Cat Stack"),
    (_samplewise, "NativeLayerNorm NativeBatchNorm NativeGroupNorm Convolution NativeDropout"),
):
    for _name in _names.split():
        RULES[_name] = _rule
