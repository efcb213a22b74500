"""The sharded tensors that fsdp makes in a run: which are alive, and what becomes of them."""

from __future__ import annotations

import weakref
from typing import Any


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
        self._by_number: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, tensor: Any) -> None:
        """Note a tensor that was made, without keeping it alive."""
        self._by_number[self._added] = tensor
        self._added += 1

    def leave_sharded(self) -> None:
        """Let the tensors stay sharded for good; called when a block under `restore=False` ends.

        No later block makes a forgotten tensor plain. While another block of fsdp is open, nothing
        is forgotten: some of the tensors may be of that block, which may have to make them plain.
        """
        if not self.open_engines:
            self._by_number.clear()

    def alive(self) -> list[Any]:
        """Return the tensors that are alive, in the order in which they were made."""
        tensors = [self._by_number.get(number) for number in sorted(self._by_number.keys())]
        return [tensor for tensor in tensors if tensor is not None]
