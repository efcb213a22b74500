"""Optimizers of a sharded model: they hold its shards in the block, and its full parameters after it."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from parallelize.backends.sharded_tensors import convert_state_entry
from parallelize.runtime.containers import map_leaves
from parallelize.runtime.live_optimizers import live_optimizers
from parallelize.torch_patches import step
from parallelize.torch_patches.step import parameters_of

__all__ = ["ShardedOptimizers"]


class ShardedOptimizers:
    """The optimizers that hold parameters of a sharded model; found by themselves, whenever they were made.

    Args:
        originals: id of a parameter of the user -> the parameter.
        shards: id of a parameter of the user -> this rank's shard of it, a DTensor parameter.
        given: the optimizers that the user has passed.
    """

    def __init__(
        self, originals: Mapping[int, nn.Parameter], shards: Mapping[int, Any], *, given: Iterable[Any] = ()
    ) -> None:
        self._given = list(given)
        self._shards = dict(shards)
        self._originals = {id(shards[key]): original for key, original in originals.items()}
        self._kept = (list(originals.values()), list(shards.values()))  # ids stay valid
        # Optimizer -> when it first stepped in the block, and the `state` whose entries are sharded.
        self._ranks_of_first_step: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._sharded_states: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._count = itertools.count()
        for each in live_optimizers(originals.values(), also=self._given):
            self._shard(each)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the shards of the originals that it holds, and of state that it has loaded."""
        held = [id(each) for each in parameters_of(optimizer)]
        is_loaded = self._sharded_states.get(optimizer) is not optimizer.state
        if any(each in self._shards or (is_loaded and each in self._originals) for each in held):
            self._shard(optimizer)
        if optimizer in self._sharded_states:
            self._ranks_of_first_step.setdefault(optimizer, next(self._count))

    @contextlib.contextmanager
    def convert_new_groups(self) -> Iterator[None]:
        """Convert originals in param groups that are added inside the context, also by constructors of optimizers."""
        optimizer_class: Any = torch.optim.Optimizer
        add_param_group = optimizer_class.add_param_group

        @functools.wraps(add_param_group)
        def add_and_convert(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
            add_param_group(optimizer, param_group)
            _replace(optimizer, self._shards, to_shards=True)

        optimizer_class.add_param_group = add_and_convert
        try:
            yield
        finally:
            optimizer_class.add_param_group = add_param_group

    def close(self, *, restored: bool) -> None:
        """Give all optimizers the originals and full state, unless the model stays sharded."""
        if not restored:
            return
        gc.collect()  # else the ranks might find unequal numbers of unreachable optimizers, and gather their state
        latest = next(self._count)
        found = live_optimizers(self._kept[1], also=[*self._given, *self._ranks_of_first_step])
        for each in sorted(found, key=lambda each: self._ranks_of_first_step.get(each, latest)):
            _replace(each, self._originals, to_shards=False)
        _former_shards.update({shard: self._originals[id(shard)] for shard in self._kept[1]})
        _install_hook()

    def _shard(self, optimizer: Any) -> None:
        _replace(optimizer, self._shards, to_shards=True)
        self._sharded_states[optimizer] = optimizer.state


def _replace(optimizer: Any, replacements: Mapping[int, Any], *, to_shards: bool) -> None:
    """Replace an optimizer's parameters, in its own lists, and convert its state to shards or to full tensors."""
    for group in optimizer.param_groups:
        group["params"][:] = [replacements.get(id(each), each) for each in group["params"]]
    state = optimizer.state
    targets = {id(each): each for each in replacements.values()}
    position = {key: index for index, keys in enumerate(zip(replacements, targets, strict=True)) for key in keys}
    # In the same order on all ranks, for the collectives: groups made of a set have another order on each rank.
    for each in sorted((each for each in state if id(each) in position), key=lambda each: position[id(each)]):
        target = replacements.get(id(each), each)
        convert = functools.partial(convert_state_entry, parameter=target, like=target if to_shards else None)
        state[target] = map_leaves(convert, state.pop(each))


# Shards of blocks that have ended -> the user's parameters, for optimizers that were not found at the end.
_former_shards: WeakIdKeyDictionary = WeakIdKeyDictionary()


@functools.cache
def _install_hook() -> None:
    """Register `_restore_late` once: a hook that removed itself would change a dict that torch iterates."""
    step.before_step(_restore_late)


def _restore_late(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Give an optimizer that holds shards of an earlier block the parameters that they were made of."""
    held = [each for each in parameters_of(optimizer) if _former_shards and each in _former_shards]
    if held:
        _replace(optimizer, {id(each): _former_shards[each] for each in held}, to_shards=False)
