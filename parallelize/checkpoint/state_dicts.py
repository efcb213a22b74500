"""State handlers: get and set the state of models, optimizers and other objects with a state dict."""

from __future__ import annotations

import abc
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from parallelize.checkpoint.safe_types import is_dtensor
from parallelize.errors import ConfigError, Fault
from parallelize.inplace.forward_routing import route_of
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.gradients import parameters_of
from parallelize.torch_private import self_test

__all__ = ["VALUE", "StateHandler", "clone_tensor", "handler_for", "named_optimizer_state", "needs_all_ranks"]

VALUE = "value"
"""Kind of the entries that are plain values: numbers, strings, tensors and containers of these."""

_log = logging.getLogger("parallelize")
_WRAPPERS = re.compile(r"(?<![^.])_orig_mod\.")  # torch.compile(model), also of a submodule


class StateHandler(abc.ABC):
    """Gets and sets the state of one kind of object."""

    kind: ClassVar[str]

    @abc.abstractmethod
    def get_state(self, obj: Any) -> Any:
        """Return the state of an object; its tensors share memory with the object."""

    def details(self, obj: Any) -> dict[str, Any]:
        """Return what is recorded beside the state, to check that it fits, as safe types."""
        return {"kind": self.kind, "class": type(obj).__name__}

    def adapt(self, obj: Any, state: Any) -> Any:
        """Return the state under the names of the object."""
        del obj
        return state

    def mismatches(self, obj: Any, state: Any, details: Mapping[str, Any], *, strict: bool) -> Iterator[str]:
        """Yield a phrase for each reason why a state does not fit an object; the object is not changed."""
        del obj, state, details, strict
        yield from ()

    def shard_targets(self, obj: Any, state: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each value of a state that is loaded into a DTensor, with that DTensor."""
        del obj, state
        yield from ()

    def may_raise(self, obj: Any) -> bool:
        """Return whether setting the state runs user code, which may raise even if the state fits."""
        del obj
        return True

    @abc.abstractmethod
    def set_state(self, obj: Any, state: Any, details: Mapping[str, Any], *, strict: bool = True) -> None:
        """Set the state of an object, copying all tensors; the state must fit."""

    def faults(self, name: str, obj: Any, state: Any, details: Mapping[str, Any], *, strict: bool) -> Iterator[Fault]:
        """Yield a fault for each reason why a state cannot be loaded into the object that was passed as `name`."""
        kind = details.get("kind", self.kind)
        if kind != self.kind or not isinstance(state, Mapping):
            yield Fault(
                f"{name}={type(obj).__name__}(...), where the checkpoint holds a {kind if details else 'value'}",
                why="their states are incompatible",
                fix="pass the same objects to load() as to save(), under the same names",
            )
            return
        for each in self.mismatches(obj, state, details, strict=strict):
            saved_from = details.get("class", type(obj).__name__)
            yield Fault(
                f"{name}: {each}",
                why=f"the checkpoint was saved from another {saved_from}, or from one constructed differently",
                fix=f"construct the {type(obj).__name__} as it was when it was saved, or omit {name}=; strict=False "
                "loads the parameters of a model that it has in common with the checkpoint",
            )


@self_test("load()", instead="save and load with torch.save and torch.load")
def _require_versions() -> bool:
    """A module gets its version number from a state dict's `_metadata`."""
    found: list[Any] = []

    class Versioned(nn.Module):
        def _load_from_state_dict(self, *args: Any) -> None:
            found.append(args[2].get("version"))

    state: Any = OrderedDict()
    state._metadata = {"": {"version": 7}}
    Versioned().load_state_dict(state)
    return found == [7]


class _ModelHandler(StateHandler):
    kind = "model"

    def get_state(self, obj: Any) -> Any:
        """Return the state dict under the names that the weights have without torch.compile, DDP and DataParallel."""
        while isinstance(obj, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            obj = obj.module
        found = obj.state_dict()
        state: Any = OrderedDict((_WRAPPERS.sub("", name), value) for name, value in found.items())
        state._metadata = {
            _WRAPPERS.sub("", f"{name}.")[:-1]: each for name, each in getattr(found, "_metadata", {}).items()
        }
        return state

    def details(self, obj: Any) -> dict[str, Any]:
        route = route_of(obj)
        return {**super().details(obj), "precision": {} if route is None else route.inner.session.state_dict()}

    def adapt(self, obj: Any, state: Any) -> Any:
        """Return the state dict under the names of the object; either of them may be compiled or wrapped."""
        found = obj.state_dict()
        own = {_plain(name): name for name in found}
        saved: Any = OrderedDict((n if n in found else own.get(_plain(n), n), value) for n, value in state.items())
        parameters = list(obj.named_parameters(remove_duplicate=False))
        held = {id(parameter): name for name, parameter in parameters if name in saved}
        for name, parameter in parameters:
            if name in found and name not in saved and id(parameter) in held:
                saved[name] = saved[held[id(parameter)]]  # tied weights, which files of safetensors hold once
        versions = {_plain(f"{name}."): each for name, each in getattr(state, "_metadata", {}).items()}
        modules = getattr(found, "_metadata", {})
        saved._metadata = {name: versions[_plain(f"{name}.")] for name in modules if _plain(f"{name}.") in versions}
        return saved

    def mismatches(self, obj: Any, state: Any, details: Mapping[str, Any], *, strict: bool) -> Iterator[str]:
        del details
        own = obj.state_dict()
        missing, unknown = [key for key in own if key not in state], [key for key in state if key not in own]
        if missing and strict:
            yield f"no {_join_names(missing)} in the checkpoint"
        if unknown and strict:
            yield f"the checkpoint has {_join_names(unknown)}, the model does not"
        differing = [
            f"{key} has shape {tuple(state[key].shape)} in the checkpoint, {tuple(value.shape)} in the model"
            for key, value in own.items()
            if isinstance(value, torch.Tensor) and key in state and not _shapes_match(state[key].shape, value)
        ]
        if differing:
            yield _join_names(differing)

    def shard_targets(self, obj: Any, state: Any) -> Iterator[tuple[Any, Any]]:
        for name, parameter in obj.named_parameters(remove_duplicate=False):
            if is_dtensor(parameter) and name in state:
                yield state[name], parameter

    def may_raise(self, obj: Any) -> bool:
        if any(map(is_lazy, (*obj.parameters(), *obj.buffers()))):
            return False  # user code may raise, but an uninitialized parameter cannot be restored
        return not all(_is_library_code(each) for module in obj.modules() for each in _load_functions(module))

    def set_state(self, obj: Any, state: Any, details: Mapping[str, Any], *, strict: bool = True) -> None:
        _require_versions()
        found = obj.load_state_dict(state, strict=strict)
        for what, names in (("missing in", found.missing_keys), ("unexpected in", found.unexpected_keys)):
            if names:
                _log.warning("%s the checkpoint, and ignored: %s", what, ", ".join(names))
        route = route_of(obj)
        if route is not None and details.get("precision"):
            route.inner.session.load_state_dict(details["precision"])


class _OptimizerHandler(StateHandler):
    kind = "optimizer"

    def get_state(self, obj: Any) -> Any:
        return obj.state_dict()

    def details(self, obj: Any) -> dict[str, Any]:
        shapes = [[list(each.shape) for each in group["params"]] for group in obj.param_groups]
        return {**super().details(obj), "shapes": shapes}

    def mismatches(self, obj: Any, state: Any, details: Mapping[str, Any], *, strict: bool) -> Iterator[str]:
        del strict
        if not {"state", "param_groups"} <= state.keys():
            yield "it is not the state of an optimizer"
            return
        if type(obj).__name__ != details.get("class", type(obj).__name__):
            yield f"saved from {details['class']}, loaded into {type(obj).__name__}"
        own = [group["params"] for group in obj.param_groups]
        saved = [group["params"] for group in state["param_groups"]]
        if [len(group) for group in saved] != [len(group) for group in own]:
            yield f"saved with groups of {_group_sizes(saved)} parameters, has groups of {_group_sizes(own)}"
            return
        for number, (before, parameter) in enumerate(zip(chain(*details.get("shapes", ())), chain(*own), strict=False)):
            if not _shapes_match(before, parameter):
                now = tuple(parameter.shape)
                yield f"parameter {number} has shape {tuple(before)} in the checkpoint, {now} in the optimizer"

    def shard_targets(self, obj: Any, state: Any) -> Iterator[tuple[Any, Any]]:
        by_index = _parameters_by_index(obj, state)
        for index, entries in state["state"].items():
            parameter = by_index.get(index)
            if parameter is not None and is_dtensor(parameter):
                values = entries.values() if isinstance(entries, dict) else ()
                yield from ((each, parameter) for each in values if getattr(each, "shape", None) == parameter.shape)

    def may_raise(self, obj: Any) -> bool:
        return not _is_library_code(obj.load_state_dict)

    def set_state(self, obj: Any, state: Any, details: Mapping[str, Any], *, strict: bool = True) -> None:
        del details, strict
        by_index = _parameters_by_index(obj, state)
        each_state = {
            index: _parameter_state(entries, like=by_index.get(index)) for index, entries in state["state"].items()
        }
        obj.load_state_dict({**map_leaves(clone_tensor, {**state, "state": {}}), "state": each_state})
        if each_state:
            obj._opt_called = True  # it stepped before the save; without this, schedulers warn


class _GenericHandler(StateHandler):
    kind = "state_dict"

    def get_state(self, obj: Any) -> Any:
        return obj.state_dict()

    def set_state(self, obj: Any, state: Any, details: Mapping[str, Any], *, strict: bool = True) -> None:
        del details, strict
        obj.load_state_dict(map_leaves(clone_tensor, state))


def handler_for(obj: Any) -> StateHandler | None:
    """Return the handler for an object, or None for a plain value."""
    if isinstance(obj, nn.Module):
        return _ModelHandler()
    if isinstance(obj, torch.optim.Optimizer):
        return _OptimizerHandler()
    # Look at the class: the loaders of shard_loader forward attributes that they lack to the user's loader.
    if callable(getattr(type(obj), "state_dict", None)) and callable(getattr(type(obj), "load_state_dict", None)):
        return _GenericHandler()
    if isinstance(obj, torch.utils.data.DataLoader):
        raise ConfigError(
            f"cannot save the position of a {type(obj).__name__}",
            why="it does not record how many batches it has returned",
            fix="pass the loader that shard_loader returns: loader = shard_loader(loader); save(path, loader=loader)",
        )
    return None


def needs_all_ranks(obj: Any) -> bool:
    """Return whether an object is sharded, so that all ranks must take part in saving it."""
    if isinstance(obj, nn.Module):
        return any(map(is_dtensor, (*obj.parameters(), *obj.buffers())))
    if isinstance(obj, torch.optim.Optimizer):
        return any(map(is_dtensor, parameters_of(obj)))
    return any(map(is_dtensor, leaves(obj)))


def _plain(name: str) -> str:
    """Return the name of a weight without the prefixes of torch.compile, DDP and DataParallel."""
    return _WRAPPERS.sub("", name).removeprefix("module.")


def _load_functions(module: nn.Module) -> Iterator[Any]:
    """Yield all functions that run when a module loads its state."""
    yield from (module.load_state_dict, module._load_from_state_dict, module.set_extra_state)
    yield from module._load_state_dict_pre_hooks.values()
    yield from module._load_state_dict_post_hooks.values()


def _is_library_code(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(("torch.", "parallelize."))


def named_optimizer_state(optimizer: Any, state: Any, names: Mapping[int, str]) -> Any:
    """Return an optimizer's state dict by the names of its parameters, which torch's load_state_dict takes too."""
    name_of = {index: names.get(id(each), index) for index, each in _parameters_by_index(optimizer, state).items()}
    groups = [{**each, "params": [name_of[index] for index in each["params"]]} for each in state["param_groups"]]
    return {**state, "state": {name_of[index]: each for index, each in state["state"].items()}, "param_groups": groups}


def _parameters_by_index(optimizer: Any, saved: Any) -> dict[int, Any]:
    """Return the parameter for each index in a saved optimizer state."""
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    return dict(zip(indices, parameters_of(optimizer), strict=True))


def _parameter_state(entries: Any, *, like: Any) -> Any:
    """Return a copy of one parameter's optimizer state; for a DTensor parameter, of this rank's shard."""
    if like is None or not is_dtensor(like):
        return map_leaves(clone_tensor, entries)
    # Takes half a second to import: only if sharded.
    from parallelize.backends.sharded_tensors import convert_state_entry

    return {
        name: value if is_dtensor(value) else convert_state_entry(value, parameter=like, like=like)
        for name, value in entries.items()
    }


def clone_tensor(value: Any) -> Any:
    """Copy a tensor out of a memory-mapped file, which would otherwise stay open and be read during training."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _shapes_match(shape: Sequence[int], own: torch.Tensor) -> bool:
    """Return whether values of `shape` fit the tensor `own`; a lazy module's uninitialized tensor fits any shape."""
    return is_lazy(own) or list(own.shape) == list(shape)


def _group_sizes(groups: Sequence[Sequence[Any]]) -> str:
    return " and ".join(str(len(group)) for group in groups) or "no"


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
