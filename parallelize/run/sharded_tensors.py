"""The sharded tensors that fsdp makes in a run: which are alive, and what becomes of them.

At the end of a block, the ranks have to know which of their tensors belong together, although some
code may have run on one rank alone, such as `if is_main(): best = copy.deepcopy(model)`. So a
tensor has a place: the stretch of the program in which it was made, and its number there.

    the entry of a block    a stretch, of the parameters
    a forward               begins a stretch, because all ranks make each forward together
    the step of an          a stretch of its own, which is named by what it steps: in it, the state
    optimizer               of the optimizer is made
    attributes of a tensor  a stretch of their own, such as its gradients

Tensors of different ranks belong together if they have the same place in stretches in which all of
the ranks have made equally many.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass
class Stretch:
    """A stretch of the program.

    Attributes:
        name: the same on all ranks.
        tensors_made: number of sharded tensors that this rank has made in it.
    """

    name: str
    tensors_made: int = 0


class Place(NamedTuple):
    """Where a sharded tensor was made; as text, the same on all ranks that have made it."""

    stretch: Stretch
    number: int

    def __str__(self) -> str:
        return f"{self.stretch.name}, {self.number} of {self.stretch.tensors_made}"


class ShardedTensors:
    """The sharded tensors of a run in this process.

    All ranks make the tensors, and write to them, in one order. Each tensor refers to this object,
    because under `restore=False` the tensor is used after the end of the run.

    Attributes:
        open_engines: number of engines of fsdp whose block has not ended. Tensors of two blocks may
            be operands of one operation, so that all become plain when the last block ends.
        keeps_shards: whether a state dict that is made now gets the shards, in place of full
            tensors.
    """

    def __init__(self) -> None:
        self.open_engines = 0
        self.keeps_shards = False
        self._added = 0
        self._stretches_begun = 0
        self._stretch = self._outside_of_steps = Stretch("before the first block")
        self._named_stretches: dict[str, Stretch] = {}
        self._by_number: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def next_place(self, read_from: Any = None) -> Place:
        """Return the place of a tensor that is made now.

        Args:
            read_from: the tensor of which it is an attribute, such as its gradient. Programs read
                attributes on one rank alone, as in `if is_main(): assert p.grad is not None`, so
                that those of each tensor have a stretch of their own.
        """
        stretch = self._stretch
        if read_from is not None:
            stretch = self._stretch_named(f"{stretch.name}, read from ({read_from.place})")
        stretch.tensors_made += 1
        return Place(stretch, stretch.tensors_made)

    def add(self, tensor: Any, place: Place) -> None:
        """Note a tensor, and its place, without keeping it alive."""
        tensor.__dict__["place"] = place
        self._by_number[self._added] = tensor
        self._added += 1

    def begin_stretch(self) -> None:
        """Begin a stretch; called where all ranks are at the same point of the program."""
        self._stretches_begun += 1
        self._stretch = self._outside_of_steps = Stretch(f"stretch {self._stretches_begun}")
        self._named_stretches.clear()

    def begin_step(self, parameter: Any) -> None:
        """Begin, or go on with, the stretch of the steps on a parameter, until `end_step`."""
        name = f"{self._outside_of_steps.name}, step on ({parameter.place})"
        self._stretch = self._stretch_named(name)

    def _stretch_named(self, name: str) -> Stretch:
        return self._named_stretches.setdefault(name, Stretch(name))

    def end_step(self) -> None:
        """Go on with the stretch outside of steps."""
        self._stretch = self._outside_of_steps

    def leave_sharded(self) -> None:
        """Let the tensors stay sharded for good; called when a block under `restore=False` ends.

        No later block makes a forgotten tensor plain. While another block of fsdp is open, nothing
        is forgotten: some of the tensors may be of that block, which may have to make them plain.
        """
        if not self.open_engines:
            self._by_number.clear()

    def alive(self) -> list[Any]:
        """Return the tensors that are alive, in the order in which they were made."""
        return list(self._by_number.values())
