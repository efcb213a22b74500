"""Snapshot of a model's modules and parameters, compared quickly at every forward to detect changes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn

__all__ = ["Structure"]

_requires_grad = attrgetter("requires_grad")


class Structure:
    """Snapshot of a model's modules and parameters, and of which parameters are trained.

    Args:
        model: the model.
        keeps_parameters: whether the engine leaves the user's Parameter objects in place; if it replaces them, only
            the modules and the number of parameters are compared.
        shared: parameters that another model of the block has, too; they are not in `trained`.
    """

    def __init__(
        self, model: nn.Module, *, keeps_parameters: bool = True, shared: Collection[nn.Parameter] = ()
    ) -> None:
        self.model = model
        self.shared_ids = {id(each) for each in shared}
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.trained: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and id(parameter) not in self.shared_ids
        }
        self._modules = dict(model.named_modules())
        self._keeps_parameters = keeps_parameters
        # The `_parameters` and `_modules` dictionaries, compared by identity without a Python loop.
        parameters: list[dict[str, Any]] = [module._parameters for module in model.modules()]
        children: list[dict[str, Any]] = [module._modules for module in model.modules()]
        self._dictionaries = parameters + children
        self._sizes = list(map(len, self._dictionaries))
        self._compared = children + parameters if keeps_parameters else children
        self._members = list(chain.from_iterable(map(dict.values, self._compared)))
        self._trainable = tuple(self.parameters.values()) if keeps_parameters else ()
        self._requires_grad = list(map(_requires_grad, self._trainable))

    def is_current(self) -> bool:
        """Return whether the model has the same modules and parameters, with the same `requires_grad`."""
        return self.has_same_parts() and list(map(_requires_grad, self._trainable)) == self._requires_grad

    def has_same_parts(self) -> bool:
        """Return whether the model has the same modules and parameters."""
        is_same_size = list(map(len, self._dictionaries)) == self._sizes
        return is_same_size and all(map(is_, chain.from_iterable(map(dict.values, self._compared)), self._members))

    @contextlib.contextmanager
    def original_parameters(self) -> Iterator[None]:
        """Undo the replacements of torch.func.functional_call in the context, so that the engine can be switched."""
        replaced, original = [dict(each) for each in self._compared], iter(self._members)
        for dictionary in self._compared:
            dictionary.update({name: next(original) for name in dictionary})
        try:
            yield
        finally:
            for dictionary, members in zip(self._compared, replaced, strict=True):
                dictionary.update(members)

    def changes(self) -> list[str]:
        """Describe each module or parameter that was added, removed or replaced."""
        modules, parameters = dict(self.model.named_modules()), dict(self.model.named_parameters())
        found = [
            f"{name} is another module"
            for name, module in self._modules.items()
            if modules.get(name, module) is not module
        ]
        for now, before in ((modules, self._modules), (parameters, self.parameters)):
            found += [f"{name} is new" for name in now if name not in before]
            found += [f"{name} is gone" for name in before if name not in now]
        return found
