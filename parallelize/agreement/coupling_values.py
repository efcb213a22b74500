"""What is known of a value in the graph of a loss: how its elements depend on samples.

    PER_SAMPLE      the rows of a batch           [f(a), f(b), f(c)]
    SUMMED          a mean, x.T @ y               f(a) + f(b) + f(c)
    PAIRED          x @ y.T                       [[f(a, a), f(a, b), ...], ...]
    COUPLED         an entropy over pairs         all else

Here a, b and c are samples of a batch, and f is any function of one or two of them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


class Dependence(enum.Enum):
    """How the elements of a value depend on the samples of a batch."""

    CONSTANT = enum.auto()
    """On no sample."""
    PER_SAMPLE = enum.auto()
    """Each element on one sample, and the elements together on several."""
    SUMMED = enum.auto()
    """Each element is a sum of several terms, each of which depends on one sample."""
    PAIRED = enum.auto()
    """Element [i, j] is a function of sample i and sample j, as those of x @ y.T."""
    COUPLED = enum.auto()
    """Some element on several samples, and not as a sum of functions of one sample."""
    UNKNOWN = enum.auto()
    """No rule tells how."""


@dataclass(frozen=True)
class Value:
    """What is known of a value.

    Args:
        dependence: how its elements depend on samples.
        batch_dims: the batch dimension of PER_SAMPLE, or the two of PAIRED; empty: not known, or
            any other dependence.
        rows: size of a batch dimension; a sample has one row or two. It tells where the batch
            dimension is after a reshape.
        selection: node and output number of the operation that has selected or joined rows; None:
            all rows of the batch, in their order. In two values with different selections, the same
            row may be of different samples.
        is_masked: whether elements of PAIRED may have been left out. If all pairs of different
            samples are, a sum of the rest couples nothing.
        operation: name of the operation that has coupled samples; "" unless COUPLED.
    """

    dependence: Dependence
    batch_dims: tuple[int, ...] = ()
    rows: int = 0
    selection: tuple[Any, int] | None = None
    is_masked: bool = False
    operation: str = ""


@dataclass(frozen=True)
class Operand:
    """A value that an operation has taken, with its shape."""

    value: Value
    shape: Shape


CONSTANT = Value(Dependence.CONSTANT)
SUMMED = Value(Dependence.SUMMED)
UNKNOWN = Value(Dependence.UNKNOWN)


class Operation:
    """An operation in the autograd graph, and one of its outputs.

    Args:
        node: the operation's node. Its private attributes `_saved_...` are arguments of the
            operation.
        output: number of the output.
        operands: the values that it has taken. Those that need no gradient are not in the graph:
            they are CONSTANT, with shape ().

    Attributes:
        edge: node and number of the output, as the graph and `Value.selection` name a value.
        name: see `operation_name`.
        shape: of the output.
    """

    def __init__(self, node: Any, output: int, operands: Sequence[Operand]) -> None:
        self.node, self.edge, self.operands = node, (node, output), operands
        self.name = operation_name(node)
        self.shape = shape_of(node, output)

    @property
    def first(self) -> Operand:
        """The first operand, which is the only one of a reduction or of a movement of elements."""
        return self.operands[0]

    @property
    def dependent(self) -> list[Operand]:
        """The operands that are not CONSTANT."""
        return [operand for operand in self.operands if operand.value != CONSTANT]

    def saved_dim(self, name: str, ndim: int) -> int:
        """Return a dimension that the operation has saved, counted from 0.

        Args:
            name: attribute of the node, such as "_saved_dim".
            ndim: number of dimensions of the tensor that has the dimension.
        """
        return from_front(getattr(self.node, name), ndim)

    def coupled(self) -> Value:
        """Return the value of an output in which this operation has coupled samples."""
        return Value(Dependence.COUPLED, operation=self.name)


def operation_name(node: Any) -> str:
    """Return the name of an operation of torch, such as "Mul" of a node MulBackward0.

    It is "" for other nodes, such as that of a user's Function.
    """
    match = re.fullmatch(r"(\w+)Backward\d", node.name())
    return match[1] if match else ""


def shape_of(node: Any, output: int) -> Shape:
    """Return the shape of an output of a node's operation."""
    # The node's inputs are gradients of these outputs. A saved tensor has a shape, too, but reading
    # it would run hooks on saved tensors, such as those that load it from the host.
    return tuple(node._input_metadata[output].shape)


def from_front(dim: int, ndim: int) -> int:
    """Return a dimension that a node has saved, counted from 0; `ndim` is their number."""
    # A node shows a negative dimension as an unsigned number of 64 bits.
    signed = dim - 2**64 if dim >= 2**63 else dim
    return signed % max(ndim, 1)
