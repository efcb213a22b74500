"""Snapshot of a model's modules and parameters, compared quickly at every forward to detect changes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from operator import is_
from typing import Any

from torch import nn

__all__ = ["Structure"]


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
        # The `_parameters` and `_modules` dictionaries, compared by identity: faster than the named_* generators.
        parameters: list[dict[str, Any]] = [module._parameters for module in model.modules()]
        children: list[dict[str, Any]] = [module._modules for module in model.modules()]
        self._members = [
            (dictionary, tuple(dictionary.values()))
            for dictionary in (*children, *(parameters if keeps_parameters else ()))
            if dictionary
        ]
        self._sizes = [(dictionary, len(dictionary)) for dictionary in (*parameters, *children)]
        self._compared = tuple(self.parameters.values()) if keeps_parameters else ()
        self._requires_grad = [parameter.requires_grad for parameter in self._compared]

    def is_current(self) -> bool:
        """Return whether the model has the same modules and parameters, with the same `requires_grad`."""
        return (
            self.has_same_parts() and [parameter.requires_grad for parameter in self._compared] == self._requires_grad
        )

    def has_same_parts(self) -> bool:
        """Return whether the model has the same modules and parameters."""
        if not all(len(dictionary) == size for dictionary, size in self._sizes):
            return False
        return all(all(map(is_, dictionary.values(), values)) for dictionary, values in self._members)

    @contextlib.contextmanager
    def original_parameters(self) -> Iterator[None]:
        """Undo the replacements of torch.func.functional_call in the context, so that the engine can be switched."""
        members = [(dictionary, values, dict(dictionary)) for dictionary, values in self._members]
        for dictionary, values, replaced in members:
            dictionary.update(zip(replaced, values, strict=True))
        try:
            yield
        finally:
            for dictionary, _, replaced in members:
                dictionary.update(replaced)

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
