"""The end of a block of fsdp: sharded tensors become plain ones with full values, if these fit.

The words of this file:

    full values     the elements of a sharded tensor, or of its gradient, of all ranks together
    home            the device where full values go: where the model came from; the CPU for "meta"
    label           names full values on all ranks

    the entry of a block    announce              warns if the full parameters will not fit
    its end                 restore_parameters    the parameters of its model, with gradients
    the last end            restore_others        what else is alive: the state of optimizers, EMA
                                                  and other copies, gradients that the user holds

Full values are restored in three steps, so that no rank waits for one that cannot go on:

    1   the ranks compare their labels      full values that only some ranks have stay sharded
    2   each rank takes the memory for      if one of them cannot, all keep their shards: the
        all full values at its home         result of the training is not lost
    3   they are gathered, one tensor       a rank never holds two full copies of the model
        after the other

The state of optimizers is restored by the same rule as parameters, and not when it is first read:
programs read it on one rank alone, as in `if is_main(): torch.save(optimizer.state_dict(), ...)`,
where no other rank would gather. What stays sharded works as under `restore=False`.
"""

from __future__ import annotations

import dataclasses
import gc
import socket
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelize.agreement.fingerprint import comparison_group, differences, digest
from parallelize.agreement.gather import gather_objects
from parallelize.backends.fsdp.shards import full_tensor
from parallelize.backends.measuring import free_bytes
from parallelize.run.sharded_tensors import ShardedTensors
from parallelize.run.startup_summary import size_text
from parallelize.run.user_line import user_stacklevel

_USED_FRACTION = 0.9
"""Full values may take this much of the free memory: the program goes on after the block."""

_COPIES_OF_EVEN_ROWS = 1
"""To gather a tensor whose rows are equally many on all ranks takes the memory of the result."""

_COPIES_OF_UNEVEN_ROWS = 3
"""Otherwise it takes as much as this many copies: the result, the same with rows that pad those of
the last rank, and this rank's padded rows."""

_COPIES_OF_GLOO = 1
"""On the CPU, gloo takes a buffer of the size of the result."""

_LOOKS = 3
"""The ranks look at most this often for tensors that are alive, if these differ."""

_HOW_TO_SAVE = (
    "parallelize.save() saves shards; parallel_model(model, restore=False) keeps them without this "
    "warning"
)


@dataclass(frozen=True)
class _Room:
    """The memory of one rank for full values.

    Args:
        rank: the rank, and its host, as text.
        needed_bytes: what the full values take.
        free_bytes: what this rank can still take: its share of memory that a node's ranks share.
        is_enough: whether the full values fit.
    """

    rank: str
    needed_bytes: int
    free_bytes: float
    is_enough: bool


@dataclass(frozen=True)
class _Agreement:
    """The labels of full values that all ranks have, in one order, and those that some have."""

    common: Sequence[str]
    lone: Sequence[str]


class Restoration:
    """Restores the sharded tensors of one block, whose engine calls it on all ranks together.

    Args:
        registry: the sharded tensors of the run.
        home: where full values go.
        rank: rank of this process.
        ranks_of_node: number of ranks that share the memory of this node.
    """

    def __init__(
        self, registry: ShardedTensors, home: torch.device, *, rank: int, ranks_of_node: int
    ) -> None:
        self._registry = registry
        self._home = home
        self._rank = f"rank {rank} on {socket.gethostname()}"
        self._ranks_of_node = ranks_of_node

    def announce(self, parameters: Iterable[Any]) -> None:
        """Warn, at the entry of the block, if full parameters do not fit; a collective.

        Whether they fit is decided at the end. The warning comes when the program can be changed.
        """
        room = self._room_for([parameter.shard for parameter in parameters])
        lacking = _first_lacking_room(room)
        if lacking is not None:
            _warn(
                "the model will stay sharded after the block, whose end would give every rank full "
                f"parameters: {self._reason(lacking)}. {_HOW_TO_SAVE}"
            )

    def restore_parameters(self, parameters: Sequence[Any]) -> bool:
        """Make the parameters of the block's model plain, if all ranks have room; a collective.

        Returns:
            Whether they are plain now. Else all of them are sharded, as before.
        """
        labelled = {str(number): parameter for number, parameter in enumerate(parameters)}
        # A rank may have dropped a gradient. Nobody could gather it, so that all ranks drop it.
        agreement = _agree_on(list(_shards_by_label(labelled)))
        lacking_with_gradients = self._restore(labelled, agreement.common)
        if lacking_with_gradients is None:
            return True
        # The result of the training is worth more than the gradients of its last pass.
        lacking = self._restore(labelled, list(labelled))
        if lacking is None:
            reason = self._reason(lacking_with_gradients)
            _warn(f"gradients of parameters are dropped at the end of the block: {reason}")
            return True
        _warn(f"the model stays sharded after the block: {self._reason(lacking)}. {_HOW_TO_SAVE}")
        return False

    def restore_others(self) -> None:
        """Make all other sharded tensors plain that all ranks have, if no block is open.

        Tensors of two blocks may be operands of one operation, so that all of them become plain
        when the last block ends.
        """
        if self._registry.open_engines:
            return
        labelled, agreement = self._others()
        lacking = self._restore(labelled, agreement.common)
        if lacking is not None:
            _warn(
                "states of optimizers and copies of parameters stay sharded after the block: "
                f"{self._reason(lacking)}. {_HOW_TO_SAVE}"
            )
        elif agreement.lone:
            # No later block could restore them, either.
            self._registry.leave_sharded()
            _warn(
                f"{len(agreement.lone)} sharded tensors stay sharded after the block, because only "
                "some ranks have them, such as a copy of the model that was made on one rank. "
                "Make copies on all ranks, outside of `if is_main():`, or keep the state that "
                "model.state_dict() returns on all ranks"
            )

    def _others(self) -> tuple[dict[str, Any], _Agreement]:
        """Return the tensors that are alive, by label, and what the ranks agree on; a collective.

        A tensor may be alive on some ranks only because nobody has looked for garbage there, or
        because the thread of hang detection holds the frames that it looks at. So the ranks look
        again if their tensors differ.
        """
        looks = 0
        while True:
            labelled = self._alive_by_label()
            agreement = _agree_on(list(_shards_by_label(labelled)))
            looks += 1
            if not agreement.lone or looks == _LOOKS:
                return labelled, agreement
            # What this dictionary holds would stay alive.
            labelled.clear()
            time.sleep(0.1)

    def _alive_by_label(self) -> dict[str, Any]:
        """Return the tensors that are alive and sharded, by a label that tells them apart."""
        gc.collect()
        labelled = {}
        for tensor in self._registry.alive():
            # The registry knows a tensor as long as it is alive, also when it has become plain.
            if "shard" in tensor.__dict__:
                labelled[f"{tensor.place}: {tuple(tensor.shape)}, {tensor.dtype}"] = tensor
        return labelled

    def _restore(self, labelled: dict[str, Any], common: Sequence[str]) -> _Room | None:
        """Make tensors plain, with the full values of the common labels, if all ranks have room.

        Args:
            labelled: sharded tensors by their labels.
            common: labels of full values that all ranks have, in one order.

        Returns:
            What a rank lacks, and then no tensor was changed; None: they are plain now.
        """
        shard_by_label = _shards_by_label(labelled)
        shards = [shard_by_label[label] for label in common]
        room = self._room_for(shards)
        homes = self._memory_for(shards) if room.is_enough else None
        # They would keep the rows of all tensors until the last one is restored.
        del shards, shard_by_label
        room = dataclasses.replace(room, is_enough=homes is not None)
        lacking = _first_lacking_room(room)
        if homes is None or lacking is not None:
            return lacking
        full_values: dict[str, torch.Tensor] = dict(zip(common, homes, strict=True))
        for label in common:
            if label in labelled:
                gradient = full_values.get(_label_of_gradient(label))
                _make_plain(labelled[label], full_values[label], gradient)
        return None

    def _room_for(self, shards: Sequence[Any]) -> _Room:
        """Return this rank's room for the full values of shards."""
        needed_bytes = sum([shard.nbytes for shard in shards])
        most_bytes = needed_bytes
        if shards and shards[0].device_mesh.device_type == self._home.type:
            most_bytes += _bytes_to_gather(shards)
        free = free_bytes(self._home, self._ranks_of_node)
        is_enough = most_bytes <= free * _USED_FRACTION
        return _Room(self._rank, needed_bytes, free, is_enough)

    def _reason(self, lacking: _Room) -> str:
        needed, free = size_text(lacking.needed_bytes), size_text(lacking.free_bytes)
        return f"{lacking.rank} needs {needed} of {self._home.type} memory, and has {free} free"

    def _memory_for(self, shards: Sequence[Any]) -> list[torch.Tensor] | None:
        """Take the memory at home for the full values of shards; None: there is too little.

        The free bytes may be unknown, or taken by others in the meantime. The memory to gather one
        tensor on its device is taken, too, and given back at once: when a collective has begun, it
        would be too late for a rank to say that it has none.
        """
        homes = []
        try:
            for shard in shards:
                full = torch.empty(shard.shape, dtype=shard.dtype, device=self._home)
                homes.append(full)
            if shards:
                device_type = shards[0].device_mesh.device_type
                torch.empty(_bytes_to_gather(shards), dtype=torch.uint8, device=device_type)
        except (MemoryError, RuntimeError):
            # torch raises a RuntimeError without a class of its own when the CPU has no memory.
            return None
        return homes


def _make_plain(tensor: Any, full: torch.Tensor, full_gradient: torch.Tensor | None) -> None:
    """Gather a sharded tensor, and turn it into a plain one; a collective.

    Args:
        tensor: the sharded tensor.
        full: memory for its full values.
        full_gradient: memory for those of its gradient; None: it is to have no gradient.
    """
    shard = tensor.shard
    full.copy_(full_tensor(shard))
    if full_gradient is not None:
        full_gradient.copy_(full_tensor(shard.grad))
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    for name in ("shard", "registry", "place"):
        tensor.__dict__.pop(name, None)
    tensor.data = full
    tensor.requires_grad_(shard.requires_grad and shard.is_leaf)
    if shard.is_leaf:
        tensor.grad = full_gradient


def _shards_by_label(labelled: dict[str, Any]) -> dict[str, Any]:
    """Return the DTensors of sharded tensors and of their gradients, by label."""
    shard_by_label = {}
    for label, tensor in labelled.items():
        shard_by_label[label] = tensor.shard
        if tensor.shard.is_leaf and tensor.shard.grad is not None:
            shard_by_label[_label_of_gradient(label)] = tensor.shard.grad
    return shard_by_label


def _label_of_gradient(label: str) -> str:
    return f"gradient of {label}"


def _bytes_to_gather(shards: Sequence[Any]) -> int:
    """Return the bytes that it takes to gather one of these tensors."""
    most_bytes = 0
    for shard in shards:
        mesh = shard.device_mesh
        is_even = shard.shape[0] % mesh.size(mesh.ndim - 1) == 0
        copies = _COPIES_OF_EVEN_ROWS if is_even else _COPIES_OF_UNEVEN_ROWS
        if mesh.device_type == "cpu":
            copies += _COPIES_OF_GLOO
        most_bytes = max(most_bytes, copies * shard.nbytes)
    return most_bytes


def _agree_on(labels: list[str]) -> _Agreement:
    """Compare the labels of the ranks; a collective.

    Mostly they are equal, so that the ranks exchange one digest, and the labels only if it differs.
    """
    if not differences([digest(repr(labels))]):
        return _Agreement(common=labels, lone=[])
    labels_of_ranks = gather_objects(labels, group=comparison_group())
    of_all_ranks = set(labels).intersection(*labels_of_ranks)
    of_any_rank = set(labels).union(*labels_of_ranks)
    # All ranks gather in the order of rank 0.
    common = [label for label in labels_of_ranks[0] if label in of_all_ranks]
    return _Agreement(common, sorted(of_any_rank - of_all_ranks))


def _first_lacking_room(room: _Room) -> _Room | None:
    """Return the room of the first rank that lacks some; None: all have enough; a collective."""
    sent = [room.rank, room.needed_bytes, room.free_bytes, room.is_enough]
    for reply in gather_objects(sent, group=comparison_group()):
        room_of_rank = _Room(*reply)
        if not room_of_rank.is_enough:
            return room_of_rank
    return None


def _warn(message: str) -> None:
    """Show a warning at the user's line: that of the `with` statement."""
    warnings.warn(message, stacklevel=user_stacklevel())
