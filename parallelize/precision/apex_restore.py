"""Models and optimizers as they were before another library changed them in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Masters"]

_ABSENT = object()

# What an optimizer has learnt in the block stays learnt.
_KEPT = frozenset({"param_groups", "state", "defaults"})


class Masters:
    """Which parameter of an optimizer stands for which one of a model, by its place in the groups.

    Apex casts a model to half and puts fp32 copies, the masters, where the optimizer had the model's parameters.

    Args:
        models: before the library gets them.
        optimizers: before the library gets them.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._models = tuple(models)
        self._optimizers = tuple(optimizers)
        self._types = [{name: each.dtype for name, each in _tensors(model)} for model in models]
        self._attributes = [dict(each.__dict__) for each in optimizers]
        self._forwards = [model.__dict__.get("forward", _ABSENT) for model in models]
        self._places = {
            id(each): (number, group, index)
            for number, optimizer in enumerate(optimizers)
            for group, options in enumerate(optimizer.param_groups)
            for index, each in enumerate(options["params"])
        }
        self._originals = [[list(group["params"]) for group in each.param_groups] for each in optimizers]

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """What the optimizer has in the place of a model's parameter; itself, if no optimizer has it."""
        place = self._places.get(id(parameter))
        if place is None:
            return parameter
        number, group, index = place
        master: torch.Tensor = self._optimizers[number].param_groups[group]["params"][index]
        return master

    @torch.no_grad()
    def give_back(self) -> None:
        """Make models and optimizers what they were, with what they have learnt."""
        for model, types in zip(self._models, self._types, strict=True):
            for name, each in _tensors(model):
                each.grad = None if each.dtype is not types.get(name, each.dtype) else each.grad
                each.data = each.data.to(types.get(name, each.dtype))
        for number, optimizer in enumerate(self._optimizers):
            self._give_back_parameters(optimizer, self._originals[number])
            _restore(optimizer.__dict__, self._attributes[number])
        for model, forward in zip(self._models, self._forwards, strict=True):
            if forward is _ABSENT:
                model.__dict__.pop("forward", None)
            else:
                model.__dict__["forward"] = forward

    @staticmethod
    def _give_back_parameters(optimizer: torch.optim.Optimizer, originals: list[list[torch.Tensor]]) -> None:
        state: dict[Any, Any] = optimizer.state
        for group, parameters in zip(optimizer.param_groups, originals, strict=False):
            masters = group["params"][: len(parameters)]
            for master, parameter in zip(masters, parameters, strict=True):
                if master is not parameter:
                    parameter.data.copy_(master)
                    state.update({parameter: state.pop(master)} if master in state else {})
            group["params"][: len(parameters)] = parameters


def _restore(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    attributes.update({name: value for name, value in before.items() if name not in _KEPT})


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if each.is_floating_point():
            yield name, each
