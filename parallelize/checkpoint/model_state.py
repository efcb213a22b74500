"""The state of a model: its weights under the names that they have without torch.compile and DDP.

plain name    "0.weight", in a checkpoint
own name      "_orig_mod.0.weight", in the state dict of a compiled model
"""

from __future__ import annotations

import copy
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from typing_extensions import override

from parallelize.checkpoint.matching import are_versions, layout_of, shapes_of, unlike_entries
from parallelize.checkpoint.safe_types import is_dtensor
from parallelize.checkpoint.state_handler import ObjectHandler, ObjectKind, shard_for
from parallelize.torch_patches.forward import route_of
from parallelize.torch_patches.module_tensors import (
    all_buffers,
    all_named_parameters,
    all_parameters,
)
from parallelize.torch_patches.module_tensors import is_dtensor as is_users_dtensor

_log = logging.getLogger("parallelize")

_PART_OF_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")
"""What torch.compile adds to a name: at its beginning, or after a dot for a compiled submodule."""


class ModelHandler(ObjectHandler):
    """Handles a model."""

    kind = ObjectKind.MODEL

    @override
    def current_state(self) -> Any:
        return _renamed_state(_state_dict(self.obj), plain_name)

    @override
    def describe(self) -> dict[str, Any]:
        route = route_of(self.obj)
        precision = {}
        if route is not None:
            precision = route.owner.session.state_dict()
        return {**super().describe(), "precision": precision}

    @override
    def differences(self) -> list[str]:
        if not are_versions(_versions(self.state)):
            return ["the version numbers of its modules are damaged"]
        own_state = _state_dict(self.obj)
        self.state = self._with_own_names(own_state)
        if shapes_of(own_state) != shapes_of(self.state):
            # A hook, or a newer version of a module, may rename what it gets: torch decides, on a
            # copy of the model.
            trial = copy.deepcopy(self.obj)
            try:
                trial.load_state_dict(self.state, strict=self.is_strict, assign=True)
            except Exception as exc:  # noqa: BLE001 - a forged state makes torch raise all kinds
                return [str(exc)]
        return self._unlike_layouts(own_state) + self._unlike_precision()

    def _with_own_names(self, own_state: Any) -> Any:
        """Return the state under the model's own names; the state may come from a wrapped model."""
        own_name_by_plain_name: dict[str, str] = {}
        for own_name in (*_versions(own_state), *own_state):
            own_name_by_plain_name[plain_name(own_name)] = own_name
        prefix = ""
        # Under the names of this library, a prefix means another model.
        is_of_another_program = not self.details
        if is_of_another_program:
            prefix = _common_prefix(self.state, own_name_by_plain_name)

        def own_name_of(name: Any) -> str:
            plain = plain_name(str(name)).removeprefix(prefix)
            return own_name_by_plain_name.get(plain, plain)

        renamed = _renamed_state(self.state, own_name_of)
        self._fill_tied(renamed, own_state)
        return renamed

    def _fill_tied(self, state: Any, own_state: Any) -> None:
        """Add weights that the model has under several names, and some files under one of them."""
        parameters = list(all_named_parameters(self.obj, remove_duplicate=False))
        value_by_id = {}
        for name, parameter in parameters:
            if name in state:
                value_by_id[id(parameter)] = state[name]
        for name, parameter in parameters:
            if name in own_state and id(parameter) in value_by_id:
                state.setdefault(name, value_by_id[id(parameter)])

    def _unlike_layouts(self, own_state: Any) -> list[str]:
        """Return the tensors whose layouts differ.

        `load_state_dict` would copy their values wrongly, or raise after it has copied others.
        """
        unlike = []
        for name, own_value in own_state.items():
            if name not in self.state:
                continue
            saved_layout, own_layout = layout_of(self.state[name]), layout_of(own_value)
            if saved_layout != own_layout:
                unlike.append(f"{name} is {saved_layout}, where the model has {own_layout}")
        return unlike

    def _unlike_precision(self) -> list[str]:
        own_precision = self.describe()["precision"]
        saved_precision = self.details.get("precision")
        if not own_precision or not saved_precision:
            return []
        return unlike_entries(own_precision, saved_precision)

    @override
    def shard_targets(self) -> dict[int, Any]:
        target_by_id = {}
        for name, parameter in all_named_parameters(self.obj, remove_duplicate=False):
            if is_dtensor(parameter):
                target_by_id[id(self.state.get(name))] = parameter
        return target_by_id

    @override
    def prepare(self, *, is_mapped: bool) -> None:
        """Take this rank's parts for a model that is tensor parallel already.

        Nothing else is copied: `load_state_dict` copies the values into the parameters.
        """
        for name, parameter in all_named_parameters(self.obj, remove_duplicate=False):
            if is_users_dtensor(parameter) and name in self.state:
                self.state[name] = shard_for(parameter, self.state[name])

    @override
    def set(self) -> None:
        incompatible_keys = self.obj.load_state_dict(self.state, strict=self.is_strict)
        if any(incompatible_keys):
            _log.warning(
                "%s= does not have exactly the weights in the checkpoint: %s",
                self.name,
                incompatible_keys,
            )
        route = route_of(self.obj)
        precision = self.details.get("precision")
        if route is not None and precision:
            route.owner.session.load_state_dict(precision)


def has_shards(model: nn.Module) -> bool:
    """Return whether a model has DTensors."""
    return any(map(is_dtensor, (*all_parameters(model), *all_buffers(model))))


def plain_name(name: str) -> str:
    """Return the name of a weight or module without what torch.compile adds to it."""
    # The name of a compiled module itself ends without a dot.
    return _PART_OF_COMPILED.sub("", f"{name}.")[:-1]


def _state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a state dict, with shards where fsdp would gather full tensors."""
    if not has_shards(model):
        return model.state_dict()
    # The import takes half a second, and is needed only with shards.
    from parallelize.backends.fsdp.full_tensors import keeping_shards

    with keeping_shards(model):
        return model.state_dict()


def _versions(state: Any) -> dict[str, Any]:
    """Return the version numbers of modules, which torch keeps as an attribute of a state dict."""
    return getattr(state, "_metadata", {})


def _renamed_state(state: Any, rename: Callable[[Any], str]) -> Any:
    """Return a state dict, and the version numbers in it, under other names."""
    renamed: Any = OrderedDict()
    for name, value in state.items():
        renamed[rename(name)] = value
    versions = OrderedDict()
    for name, version in _versions(state).items():
        versions[rename(name)] = version
    renamed._metadata = versions
    return renamed


def _common_prefix(state: Any, plain_names: Mapping[str, str]) -> str:
    """Return what all names of a state begin with if it is not of the model; "": there is none.

    Lightning saves the weights of `self.net` as "net.0.weight".
    """
    names = [plain_name(str(name)) for name in state]
    if not names:
        return ""
    first_part = names[0].partition(".")[0]
    prefix = f"{first_part}."
    if first_part in plain_names or not all(name.startswith(prefix) for name in names):
        return ""
    return prefix
