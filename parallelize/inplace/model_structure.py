"""Which modules and parameters a model consists of, compared with a glance at every forward."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import nn

__all__ = ["Structure"]


class Structure:
    """A model's modules, parameters and which of them are trained, as they were when this was made.

    Args:
        model: the model.
        has_own_parameters: whether its parameters are the objects that the user has put there; else an engine puts
            others in their places as it goes, and only the modules and the number of parameters are looked at.
    """

    def __init__(self, model: nn.Module, *, has_own_parameters: bool = True) -> None:
        self.model = model
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.trained: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad
        }
        self._modules = dict(model.named_modules())
        self._has_own_parameters = has_own_parameters
        # The dictionaries themselves and what they hold: compared by identity, without calling any named_* generator.
        parameters: list[dict[str, Any]] = [module._parameters for module in model.modules()]
        children: list[dict[str, Any]] = [module._modules for module in model.modules()]
        self._held = [
            (holder, tuple(holder.values()))
            for holder in (*children, *(parameters if has_own_parameters else ()))
            if holder
        ]
        self._sizes = [(holder, len(holder)) for holder in (*parameters, *children)]
        self._each = tuple(self.parameters.values()) if has_own_parameters else ()
        self._flags = [parameter.requires_grad for parameter in self._each]

    def is_current(self) -> bool:
        """Whether the model still consists of the same modules and parameters, the same of them trained."""
        for holder, size in self._sizes:
            if len(holder) != size:
                return False
        for holder, values in self._held:
            if not all(map(is_, holder.values(), values)):
                return False
        return [parameter.requires_grad for parameter in self._each] == self._flags

    def changes(self) -> list[str]:
        """What is different now, a phrase each, by name."""
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
