"""The names of parameters, by which the state of an optimizer finds its parameters.

    "0.weight"          the name in a model, as torch's own tools for folders expect it
    "model.0.weight"    the full name: the model was passed as model=

torch knows the parameters of an optimizer by their positions. These change when layers are declared
in another order, and then each parameter would silently get the moments of another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from parallelize.checkpoint.model_state import plain_name
from parallelize.checkpoint.state_handler import Named
from parallelize.torch_patches.module_tensors import all_named_parameters


class ParameterNames:
    """The names of all parameters of the models in a call.

    A parameter has several names if it is tied, or in several models. The first one counts when it
    is saved, and each of them finds it when it is loaded.

    Args:
        objects: by the names in the call.
    """

    def __init__(self, objects: Named) -> None:
        self._prefixes: list[str] = []
        # Id of a parameter -> its name in the first model that has it.
        self._name_by_id: dict[int, str] = {}
        self._full_name_by_id: dict[int, str] = {}
        self._id_by_full_name: dict[str, int] = {}
        for model_name, model in objects.items():
            if isinstance(model, nn.Module):
                self._add(model_name, model)

    def _add(self, model_name: str, model: nn.Module) -> None:
        prefix = f"{model_name}."
        self._prefixes.append(prefix)
        for own_name, parameter in all_named_parameters(model, remove_duplicate=False):
            name = plain_name(own_name)
            self._name_by_id.setdefault(id(parameter), name)
            self._full_name_by_id.setdefault(id(parameter), prefix + name)
            self._id_by_full_name[prefix + name] = id(parameter)

    def keys_for(self, parameters: Iterable[Any]) -> list[Any]:
        """Return different names for the parameters of an optimizer, in order.

        They are the names in the models, or the full names where two models have the same name. A
        parameter of no model has its position.
        """
        keys: list[Any] = []
        full_keys: list[Any] = []
        for position, parameter in enumerate(parameters):
            keys.append(self._name_by_id.get(id(parameter), position))
            full_keys.append(self._full_name_by_id.get(id(parameter), position))
        if len(set(keys)) < len(keys):
            return full_keys
        return keys

    def full_names(self, parameters: Iterable[Any]) -> list[str]:
        """Return the full names of parameters, in order; [] if one of them is in no model."""
        names = []
        for parameter in parameters:
            if id(parameter) not in self._full_name_by_id:
                return []
            names.append(self._full_name_by_id[id(parameter)])
        return names

    def are_of_these_models(self, full_names: Iterable[str]) -> bool:
        """Return whether models of the call have the names by which all full names begin."""
        return all(name.startswith(tuple(self._prefixes)) for name in full_names)

    def own_name(self, full_name: str) -> str:
        """Return the full name that counts here for a parameter that was saved under a full name.

        A parameter that does not exist keeps the name.
        """
        parameter_id = self._id_by_full_name.get(full_name)
        if parameter_id is None:
            return full_name
        return self._full_name_by_id[parameter_id]
