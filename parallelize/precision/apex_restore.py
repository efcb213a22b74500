"""Snapshot of models and optimizers before Apex changes them in place, to restore them afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.precision.weight_casting import floating_point_tensors

__all__ = ["ApexSnapshot"]

_ABSENT = object()

# Attributes of an optimizer that keep what training has changed, or are restored separately.
_NOT_RESTORED = frozenset({"param_groups", "state", "defaults"})


class ApexSnapshot:
    """Original dtypes, forwards and optimizer parameters, and the master parameter of each model parameter.

    Apex casts a model to half and replaces the parameters in the optimizer by fp32 copies, the masters. A master is at
    the same position in the parameter groups as its parameter was.

    Args:
        models: the models; not yet passed to `amp.initialize`.
        optimizers: the optimizers; not yet passed to `amp.initialize`.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._models = tuple(models)
        self._optimizers = tuple(optimizers)
        self._dtypes = [{name: each.dtype for name, each in floating_point_tensors(model)} for model in models]
        self._attributes = [dict(each.__dict__) for each in optimizers]
        self._forwards = [model.__dict__.get("forward", _ABSENT) for model in models]
        self._originals = [[list(group["params"]) for group in each.param_groups] for each in optimizers]
        self._hooks = [
            (part._state_dict_hooks, set(part._state_dict_hooks)) for one in models for part in one.modules()
        ]

    def masters_of(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the masters of model parameters, and those parameters themselves that no optimizer holds."""
        masters = {id(parameter): master for master, parameter in self._pairs()}
        return [masters.get(id(each), each) for each in parameters]

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for optimizer, groups in zip(self._optimizers, self._originals, strict=True):
            for group, parameters in zip(optimizer.param_groups, groups, strict=False):
                yield from zip(group["params"], parameters, strict=False)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo Apex's changes of models and optimizers, but keep the trained values."""
        for model, dtypes in zip(self._models, self._dtypes, strict=True):
            for name, each in floating_point_tensors(model):
                each.grad = None if each.dtype is not dtypes.get(name, each.dtype) else each.grad
                each.data = each.data.to(dtypes.get(name, each.dtype))
        for optimizer_index, optimizer in enumerate(self._optimizers):
            self._restore_parameters(optimizer, self._originals[optimizer_index])
            _restore_attributes(optimizer.__dict__, self._attributes[optimizer_index])
        for model, forward in zip(self._models, self._forwards, strict=True):
            if forward is _ABSENT:
                model.__dict__.pop("forward", None)
            else:
                model.__dict__["forward"] = forward
        for hooks, known in self._hooks:
            for key in hooks.keys() - known:
                del hooks[key]

    @staticmethod
    def _restore_parameters(optimizer: torch.optim.Optimizer, originals: list[list[torch.Tensor]]) -> None:
        state: dict[Any, Any] = optimizer.state
        for group, parameters in zip(optimizer.param_groups, originals, strict=False):
            masters = group["params"][: len(parameters)]
            for master, parameter in zip(masters, parameters, strict=True):
                if master is not parameter:
                    parameter.data.copy_(master)
                    state.update({parameter: state.pop(master)} if master in state else {})
            group["params"][: len(parameters)] = parameters


def _restore_attributes(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    attributes.update({name: value for name, value in before.items() if name not in _NOT_RESTORED})
