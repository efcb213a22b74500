"""Does a loss compare the samples of a batch with each other? Its autograd graph tells.

    output of a model ── square ────── PER_SAMPLE ── mean ── SUMMED            an ordinary loss
    output of a model ── sum ───────── SUMMED ────── sqrt ── COUPLED           RMSE, dice, VICReg
    output of a model ─┬─ x @ y.T ──── PAIRED ── softmax ─── COUPLED           CLIP, InfoNCE
    output of a model ─┘

The search starts at the marked outputs of models, whose rows are the samples of a batch, and
follows each value up to the loss. A value behind an operation without a rule is UNKNOWN, and
nothing is said of it. A loss that is called coupled has a coupled term; it is wrong only of a loss
that multiplies this term by zero, or selects another one. A loss that is not called coupled may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parallelize.agreement.coupling_rules import RULES
from parallelize.agreement.coupling_values import (
    CONSTANT,
    UNKNOWN,
    Dependence,
    Operand,
    Operation,
    Value,
    operation_name,
    shape_of,
)

BATCH_KEY: Any = "parallelize: batch"
"""Key of the metadata of a node that has computed an output of a model; its value is a `Batch`.

`batch_losses.BatchLosses.mark` writes it."""


@dataclass(frozen=True)
class Batch:
    """The batch from which a model has computed an output.

    Args:
        samples: number of samples; 0: not known, so that the output is UNKNOWN.
        is_batch_first: whether an input shows that the first dimension is the batch dimension: no
            other dimension of it has this size.
    """

    samples: int
    is_batch_first: bool = False


def coupling_operation(roots: Iterable[tuple[Any, int]]) -> str | None:
    """Return the name of the operation by which a loss couples samples; None: none is known.

    It is called before backward, which frees the graph.

    Args:
        roots: node and output number of each tensor from which a backward pass starts. The node is
            None for a tensor that needs no gradient.
    """
    values: dict[tuple[Any, int], Value] = {}
    for root in roots:
        node, _output = root
        if node is None:
            continue
        value = _value_of(root, values)
        if value.dependence is Dependence.COUPLED:
            return value.operation
    return None


def _value_of(root: tuple[Any, int], values: dict[tuple[Any, int], Value]) -> Value:
    """Return what is known of a value, after all values that it was computed from.

    A graph may be deeper than Python's stack, so that this is a loop with a stack of its own.

    Args:
        root: node and output number of the value.
        values: what is known of the values so far, by node and output number. This function adds to
            it.
    """
    pending = [root]
    while pending:
        # The edge stays on the stack until its operands are done.
        edge = pending[-1]
        node, output = edge
        if edge in values:
            pending.pop()
            continue
        batch = node.metadata.get(BATCH_KEY)
        if batch is not None:
            values[edge] = _output_of_model(node, output, batch)
            continue
        operand_edges = [operand for operand in node.next_functions if operand[0] is not None]
        missing = [operand for operand in operand_edges if operand not in values]
        if missing:
            pending += missing
            continue
        values[edge] = _computed(node, output, values)
    return values[root]


def _computed(node: Any, output: int, values: dict[tuple[Any, int], Value]) -> Value:
    """Return what is known of an output of an operation, from the values of its operands.

    Args:
        node: the node of the operation in the graph.
        output: the number of the output.
        values: what is known of the values so far. It has all operands of the operation.
    """
    operands = []
    for operand_node, operand_output in node.next_functions:
        if operand_node is None:
            operands.append(Operand(CONSTANT, ()))
        else:
            shape = shape_of(operand_node, operand_output)
            operands.append(Operand(values[operand_node, operand_output], shape))
    operation = Operation(node, output, operands)
    if not operation.dependent:
        return CONSTANT
    rule = RULES.get(operation.name)
    if rule is None:
        return UNKNOWN
    # Rules do not get these two: an operand that is COUPLED comes before one that is UNKNOWN.
    for operand in operation.dependent:
        if operand.value.dependence is Dependence.COUPLED:
            return operand.value
    for operand in operation.dependent:
        if operand.value.dependence is Dependence.UNKNOWN:
            return UNKNOWN
    return rule(operation)


def _output_of_model(node: Any, output: int, batch: Batch) -> Value:
    """Return what is known of an output of a model.

    It is PER_SAMPLE if its first dimension has all samples, or twice as many: a model may compute
    two views of each sample in one forward. It is UNKNOWN if another dimension has the same size,
    and no input shows which is which.
    """
    shape = shape_of(node, output)
    # An output of one element may be a loss that the model has computed, or a parameter.
    if math.prod(shape) == 1:
        return CONSTANT if _is_of_one_parameter(node) else UNKNOWN
    if batch.samples < 2 or shape[0] not in {batch.samples, 2 * batch.samples}:
        return UNKNOWN
    if batch.samples in shape[1:] and not batch.is_batch_first:
        return UNKNOWN
    return Value(Dependence.PER_SAMPLE, (0,), rows=shape[0])


def _is_of_one_parameter(node: Any) -> bool:
    """Whether a value is a function of one parameter alone, such as the temperature of CLIP."""
    # The node of a parameter, AccumulateGrad, ends the loop: no other node has a `variable`.
    while len(node.next_functions) == 1 and operation_name(node):
        ((node, _output),) = node.next_functions
        if node is None:
            return False
    return hasattr(node, "variable")
