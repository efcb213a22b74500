"""The state of an optimizer: entries of its parameters, and the options of its groups.

file      entries by number, as `torch.optim.Optimizer.load_state_dict` takes them
folder    entries by the names of parameters, as torch's own tools for such folders expect
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from parallelize.checkpoint.matching import (
    fits_parameter,
    is_optimizer_state,
    kinds_of_entries,
    unlike_entries,
)
from parallelize.checkpoint.parameter_names import ParameterNames
from parallelize.checkpoint.safe_types import is_dtensor
from parallelize.checkpoint.state_handler import ObjectHandler, ObjectKind
from parallelize.run.containers import is_entangled, leaves, map_leaves
from parallelize.torch_patches.step import parameters_of

_CLASSES_WITH_OTHER_SHAPES = ("LBFGS", "Adafactor")
"""Optimizers whose entries hold all parameters at once, or sums of rows and of columns."""


_CLASSES_WITH_ONE_ENTRY = ("LBFGS",)
"""Optimizers with one vector of all parameters, in their order."""

_SHAPE = "shape of parameter"
_NAME = "name of parameter"
"""Keys of the record, with a number behind."""


@dataclass(frozen=True)
class _Replacement:
    """A tensor of the state, such as a moment, that takes the place of one of the optimizer.

    Args:
        key: number or name of the parameter in the state.
        parameter: the parameter.
        name: of the tensor in the entry of the parameter.
    """

    key: Any
    parameter: torch.Tensor
    name: str


class OptimizerHandler(ObjectHandler):
    """Handles an optimizer.

    Args:
        obj: the optimizer.
        name: as for `StateHandler`.
        parameter_names: of the models in the call.
    """

    kind = ObjectKind.OPTIMIZER

    def __init__(self, obj: Any, name: str, parameter_names: ParameterNames) -> None:
        super().__init__(obj, name)
        self._parameter_names = parameter_names
        self._replacements: list[_Replacement] = []

    def state_by_names(self) -> Any:
        """Return the current state with the names of parameters as the keys of entries."""
        state = self.current_state()
        parameter_by_index = self._parameter_by_key(state)
        keys = self._parameter_names.keys_for(parameter_by_index.values())
        key_by_index = dict(zip(parameter_by_index, keys, strict=True))
        entries = {key_by_index[index]: entry for index, entry in state["state"].items()}
        groups = []
        for group in state["param_groups"]:
            keys_of_group = [key_by_index[index] for index in group["params"]]
            groups.append({**group, "params": keys_of_group})
        return {"state": entries, "param_groups": groups}

    def _parameter_by_key(self, state: Any) -> dict[Any, Any]:
        """Return the parameter that belongs to each number, or name, in the groups of a state."""
        keys: list[Any] = []
        for group in state["param_groups"]:
            keys += group["params"]
        return dict(zip(keys, parameters_of(self.obj), strict=True))

    @override
    def describe(self) -> dict[str, Any]:
        details = self._facts()
        names = self._parameter_names.full_names(parameters_of(self.obj))
        for number, full_name in enumerate(names):
            details[f"{_NAME} {number}"] = full_name
        return details

    def _facts(self) -> dict[str, Any]:
        """Return what must be equal in the record, when the parameters are in one order."""
        facts = super().describe()
        for number, parameter in enumerate(parameters_of(self.obj)):
            facts[f"{_SHAPE} {number}"] = list(parameter.shape)
        return facts

    @override
    def differences(self) -> list[str]:
        if not is_optimizer_state(self.state):
            return ["it is not the state of an optimizer"]
        differences = self._put_in_order() or self._unlike_facts()
        if differences or not self._has_state_of_torch() or not self._loads_as_torch():
            return differences
        return self._unlike_groups() or self._unlike_tensors() or self._errors_of_trial()

    def _has_state_of_torch(self) -> bool:
        return bool(type(self.obj).__setstate__.__module__.startswith("torch.optim"))

    def _loads_as_torch(self) -> bool:
        return type(self.obj).load_state_dict is torch.optim.Optimizer.load_state_dict

    def _has_load_hooks(self) -> bool:
        """Whether hooks of the user's may turn the state into another one."""
        return any("load_state_dict" in name and hooks for name, hooks in vars(self.obj).items())

    def _put_in_order(self) -> list[str]:
        """Give the state the order of the optimizer, by names; return why it cannot have it.

        Without names on one side, the state keeps its order, as in torch.
        """
        saved_names = self._saved_names()
        own_names = _unique(self._parameter_names.full_names(parameters_of(self.obj)))
        if not saved_names or not own_names or saved_names == own_names:
            return []
        group_by_own_name = _group_by_name(own_names, self.obj.param_groups)
        group_by_saved_name = _group_by_name(saved_names, self.state["param_groups"])
        differences = _unlike_groups_of_names(group_by_own_name, group_by_saved_name)
        if differences:
            return differences
        own_class = type(self.obj).__name__
        if own_class in _CLASSES_WITH_ONE_ENTRY or not self._loads_as_torch():
            return [f"its parameters are in another order, which counts in a state of {own_class}"]
        number_by_name = {name: number for number, name in enumerate(saved_names)}
        self._reorder([number_by_name[own_name] for own_name in own_names])
        return []

    def _reorder(self, saved_numbers: list[int]) -> None:
        """Change the order of the parameters in the state and in the record.

        Args:
            saved_numbers: for each parameter of the optimizer, its number in the state.
        """
        keys = list(self._parameter_by_key(self.state))
        remaining_numbers = iter(saved_numbers)
        groups = []
        start = 0
        for group in self.state["param_groups"]:
            size = len(group["params"])
            numbers = list(itertools.islice(remaining_numbers, size))
            ordered = {**group, "params": [keys[number] for number in numbers]}
            # torch keeps names beside the parameters if the optimizer was made with names.
            names = group.get("param_names")
            if isinstance(names, list) and len(names) == size:
                ordered["param_names"] = [names[number - start] for number in numbers]
            groups.append(ordered)
            start += size
        self.state = {**self.state, "param_groups": groups}
        shapes = {}
        for own_number, number in enumerate(saved_numbers):
            shapes[f"{_SHAPE} {own_number}"] = self.details.get(f"{_SHAPE} {number}")
        self.details = {**self.details, **shapes}

    def _saved_names(self) -> list[str]:
        """Return the full names of the state's parameters, as they count here, in its order.

        Return [] if they are not known, or if one of their models is not in the call.
        """
        names = []
        for number in range(sum(_group_sizes(self.state["param_groups"]))):
            name = self.details.get(f"{_NAME} {number}")
            if not isinstance(name, str):
                return []
            names.append(name)
        if not self._parameter_names.are_of_these_models(names):
            return []
        # Two weights that were saved may be tied here.
        return _unique(list(map(self._parameter_names.own_name, names)))

    def _unlike_facts(self) -> list[str]:
        """Return where the class, the groups or the shapes of parameters differ."""
        own_facts: dict[str, Any] = {"group sizes": _group_sizes(self.obj.param_groups)}
        own_facts.update(self._facts())
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
        # Hooks must not be called twice.
        if self._has_load_hooks():
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
    def prepare(self, *, is_mapped: bool) -> None:
        if is_mapped:
            self._replacements = self._found_replacements()
        super().prepare(is_mapped=is_mapped)

    def _found_replacements(self) -> list[_Replacement]:
        """Return the tensors of the state that are as large as the optimizer's, and where they are.

        An optimizer that loads its state in another way than torch may need all of it at once.
        """
        if not self._loads_as_torch() or not self._has_state_of_torch() or self._has_load_hooks():
            return []
        ids_of_shards = self.shard_targets()
        replacements = []
        for key, parameter in self._parameter_by_key(self.state).items():
            own_entry = self.obj.state.get(parameter, {})
            for name, value in self.state["state"].get(key, {}).items():
                is_shard = id(value) in ids_of_shards
                if not is_shard and _are_alike(value, own_entry.get(name), parameter):
                    replacements.append(_Replacement(key, parameter, name))
        return replacements

    @override
    def _ids_copied_in_set(self) -> set[int]:
        entries = self.state["state"]
        return {id(entries[moment.key][moment.name]) for moment in self._replacements}

    @override
    def set(self) -> None:
        self._replace_one_by_one()
        super().set()
        if self.state["state"]:
            # The optimizer stepped before the save. Without this mark, which `step` sets,
            # schedulers warn that they step before the optimizer.
            self.obj._opt_called = True

    def _replace_one_by_one(self) -> None:
        """Copy tensors from the file, and drop each tensor of the optimizer for which one comes.

        `load_state_dict` of torch keeps the old tensors until it has all new ones. It takes those
        that the optimizer has by then as they are.
        """
        for parameter in {moment.parameter for moment in self._replacements}:
            # A state_dict() that the user keeps has the same entry, and is to stay as it is.
            self.obj.state[parameter] = dict(self.obj.state[parameter])
        for moment in self._replacements:
            entry = self.state["state"][moment.key]
            own_entry = self.obj.state[moment.parameter]
            entry[moment.name] = entry[moment.name].to(moment.parameter.device, copy=True)
            own_entry[moment.name] = entry[moment.name]


def _are_alike(value: Any, own_value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value may be copied to take the place of an optimizer's, before the load.

    Args:
        value: in the state.
        own_value: in the optimizer, under the same name.
        parameter: whose entries they are in. Numbers, which may stay on the CPU, are not like it.
    """
    if type(value) is not torch.Tensor or type(own_value) is not torch.Tensor:
        return False
    if value.shape != own_value.shape or value.shape != parameter.shape or not value.shape:
        return False
    return value.dtype == own_value.dtype and own_value.device == parameter.device


def _unique(names: list[str]) -> list[str]:
    """Return names if they are different, else []."""
    if len(set(names)) < len(names):
        return []
    return names


def _unlike_groups_of_names(
    group_by_own_name: dict[str, int], group_by_saved_name: dict[str, int]
) -> list[str]:
    """Return the first parameter that is not on both sides, or not in the same group."""
    for name in group_by_saved_name:
        if name not in group_by_own_name:
            return [f"{name} is not in the optimizer"]
    for name, own_group in group_by_own_name.items():
        saved_group = group_by_saved_name.get(name)
        if saved_group is None:
            return [f"{name} is not in the checkpoint"]
        if own_group != saved_group:
            return [f"{name} is in group {own_group}, and in group {saved_group} of the checkpoint"]
    return []


def _group_by_name(names: list[str], groups: list[Any]) -> dict[str, int]:
    """Return the number of the group of each parameter, by its name.

    Args:
        names: names of the parameters of all groups, in order.
        groups: as in `param_groups`.
    """
    group_by_name = {}
    remaining_names = iter(names)
    for number, group in enumerate(groups):
        for name in itertools.islice(remaining_names, len(group["params"])):
            group_by_name[name] = number
    return group_by_name


def _group_sizes(groups: list[Any]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _without_values(value: Any) -> Any:
    """Return a tensor of this shape and type that has no values; other leaves as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
