"""The state of an optimizer: entries of its parameters, and the options of its groups.

file      entries by number, as `torch.optim.Optimizer.load_state_dict` takes them
folder    entries by the names of parameters, as torch's own tools for such folders expect
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from parallelize.checkpoint.matching import (
    fits_parameter,
    is_optimizer_state,
    kinds_of_entries,
    unlike_entries,
)
from parallelize.checkpoint.safe_types import is_dtensor
from parallelize.checkpoint.state_handler import ObjectHandler, ObjectKind
from parallelize.run.containers import is_entangled, leaves, map_leaves
from parallelize.torch_patches.step import parameters_of

_CLASSES_WITH_OTHER_SHAPES = ("LBFGS", "Adafactor")
"""Optimizers whose entries hold all parameters at once, or sums of rows and of columns."""


class OptimizerHandler(ObjectHandler):
    """Handles an optimizer.

    Args:
        obj: the optimizer.
        name: as for `StateHandler`.
        name_by_parameter: id of a parameter -> the name under which the current state has its
            entry; a parameter without a name has its number.
    """

    kind = ObjectKind.OPTIMIZER

    def __init__(self, obj: Any, name: str, name_by_parameter: Mapping[int, str]) -> None:
        super().__init__(obj, name)
        self._name_by_parameter = name_by_parameter

    @override
    def current_state(self) -> Any:
        state = self.obj.state_dict()
        key_by_index = {}
        for index, parameter in self._parameter_by_key(state).items():
            key_by_index[index] = self._name_by_parameter.get(id(parameter), index)
        entries = {}
        for index, entry in state["state"].items():
            entries[key_by_index[index]] = entry
        groups = []
        for group in state["param_groups"]:
            keys = [key_by_index[index] for index in group["params"]]
            groups.append({**group, "params": keys})
        return {"state": entries, "param_groups": groups}

    def _parameter_by_key(self, state: Any) -> dict[Any, Any]:
        """Return the parameter that belongs to each number, or name, in the groups of a state."""
        keys: list[Any] = []
        for group in state["param_groups"]:
            keys += group["params"]
        return dict(zip(keys, parameters_of(self.obj), strict=True))

    @override
    def describe(self) -> dict[str, Any]:
        details = super().describe()
        for number, parameter in enumerate(parameters_of(self.obj)):
            details[f"shape of parameter {number}"] = list(parameter.shape)
        return details

    @override
    def differences(self) -> list[str]:
        if not is_optimizer_state(self.state):
            return ["it is not the state of an optimizer"]
        differences = self._unlike_facts()
        own_class = type(self.obj)
        has_state_of_torch = own_class.__setstate__.__module__.startswith("torch.optim")
        loads_as_torch = own_class.load_state_dict is torch.optim.Optimizer.load_state_dict
        if differences or not has_state_of_torch or not loads_as_torch:
            return differences
        return self._unlike_groups() or self._unlike_tensors() or self._errors_of_trial()

    def _unlike_facts(self) -> list[str]:
        """Return where the class, the groups or the shapes of parameters differ."""
        own_facts: dict[str, Any] = {"group sizes": _group_sizes(self.obj.param_groups)}
        own_facts.update(self.describe())
        # A file of another program says nothing but the sizes of the groups.
        saved_facts = {**own_facts, **self.details}
        saved_facts["group sizes"] = _group_sizes(self.state["param_groups"])
        differences = []
        for subject, own_fact in own_facts.items():
            saved_fact = saved_facts[subject]
            if saved_fact != own_fact:
                differences.append(
                    f"{subject}: {saved_fact} in the checkpoint, {own_fact} in the optimizer"
                )
        return differences

    def _unlike_groups(self) -> list[str]:
        """Return the options of groups whose types differ from those of the optimizer."""
        differences = []
        groups = zip(self.obj.param_groups, self.state["param_groups"], strict=True)
        for number, (own_group, saved_group) in enumerate(groups):
            # What the file lacks, the optimizer keeps; the parameters are compared by their shapes.
            common_names = own_group.keys() & saved_group.keys() - {"params"}
            own_options = {name: own_group[name] for name in own_group if name in common_names}
            unlike = unlike_entries(own_options, saved_group)
            differences += [f"group {number}: {difference}" for difference in unlike]
            if "lr" in own_group and "lr" not in saved_group:
                differences.append(f"group {number}: lr is missing")
        return differences

    def _unlike_tensors(self) -> list[str]:
        """Return the entries of the state that no step of the optimizer could have left."""
        entries = self.state["state"]
        if is_entangled(entries):
            return ["its lists are in each other, many times over"]
        if type(self.obj).__name__ in _CLASSES_WITH_OTHER_SHAPES:
            return []
        differences = []
        for group in self.state["param_groups"]:
            kinds = {kinds_of_entries(entries[key]) for key in group["params"] if entries.get(key)}
            if len(kinds) > 1:
                differences.append("parameters of one group have entries of other names or types")
        parameter_by_key = self._parameter_by_key(self.state)
        for key, parameter in parameter_by_key.items():
            for name, value in entries.get(key, {}).items():
                if not isinstance(value, (torch.Tensor, int, float, type(None))):
                    differences.append(f"{name} of parameter {key} is a {type(value).__name__}")
                elif not fits_parameter(value, parameter):
                    differences.append(f"{name} of parameter {key} has another shape or layout")
        is_of_this_library = bool(self.details)
        if is_of_this_library and not set(entries) <= parameter_by_key.keys():
            differences.append("there is an entry of a parameter that is in no group")
        return differences

    def _errors_of_trial(self) -> list[str]:
        """Load the state without its values into a copy without values; return what it raises."""
        # Hooks of the user's may turn the state into another one, and must not be called twice.
        for name, value in vars(self.obj).items():
            if "load_state_dict" in name and value:
                return []
        trial: Any = object.__new__(type(self.obj))
        vars(trial).update(vars(self.obj))
        trial.state = defaultdict(dict)
        trial.param_groups = map_leaves(_without_values, self.obj.param_groups)
        state = map_leaves(_without_values, dict(self.state), once=True)
        try:
            torch.optim.Optimizer.load_state_dict(trial, state)
        except Exception as exc:  # noqa: BLE001 - a forged state makes torch raise all kinds
            return [f"{type(exc).__name__}: {exc}"]
        return []

    @override
    def shard_targets(self) -> dict[int, Any]:
        target_by_id = {}
        for key, parameter in self._parameter_by_key(self.state).items():
            # A parameter without dimensions is not divided.
            if not is_dtensor(parameter) or not parameter.shape:
                continue
            for value in leaves(self.state["state"].get(key), once=True):
                if getattr(value, "shape", None) == parameter.shape:
                    target_by_id[id(value)] = parameter
        return target_by_id

    @override
    def set(self) -> None:
        super().set()
        if self.state["state"]:
            # The optimizer stepped before the save. Without this mark, which `step` sets,
            # schedulers warn that they step before the optimizer.
            self.obj._opt_called = True


def _group_sizes(groups: list[Any]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _without_values(value: Any) -> Any:
    """Return a tensor of this shape and type that has no values; other leaves as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
