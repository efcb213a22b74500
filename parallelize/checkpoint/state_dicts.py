"""State handlers: get and set the state of models, optimizers and other objects with a state dict."""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from parallelize.checkpoint.file_format import Entry
from parallelize.checkpoint.safe_types import is_dtensor
from parallelize.errors import ConfigError, Fault
from parallelize.inplace.forward_routing import route_of
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.gradients import parameters_of
from parallelize.torch_private import self_test

__all__ = ["VALUE", "StateHandler", "clone_tensor", "handler_for", "needs_all_ranks"]

VALUE = "value"
"""Kind of the entries that are plain values: numbers, strings, tensors and containers of these."""


class StateHandler(abc.ABC):
    """Gets and sets the state of one kind of object."""

    kind: ClassVar[str]

    @abc.abstractmethod
    def get_state(self, obj: Any) -> Any:
        """Return the state of an object; its tensors share memory with the object."""

    def mismatches(self, obj: Any, state: Any) -> Iterator[str]:
        """Yield a phrase for each reason why a state does not fit an object; the object is not changed."""
        del obj, state
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
    def set_state(self, obj: Any, state: Any) -> None:
        """Set the state of an object, copying all tensors; the state must fit."""

    def faults(self, name: str, obj: Any, entry: Entry) -> Iterator[Fault]:
        """Yield a fault for each reason why an entry cannot be loaded into the object that was passed as `name`."""
        if entry.kind != self.kind:
            yield Fault(
                f"{name}={type(obj).__name__}(...), where the checkpoint holds a {entry.kind}",
                why="their states are incompatible",
                fix="pass the same objects to load() as to save(), under the same names",
            )
            return
        for each in self.mismatches(obj, entry.state):
            yield Fault(
                f"{name}: {each}",
                why=f"the checkpoint was saved from another {entry.class_name}, or from one constructed differently",
                fix=f"construct the {type(obj).__name__} as it was when it was saved, or omit {name}=",
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
        state = obj.state_dict()
        route = route_of(obj)
        return {
            "tensors": dict(state),
            "versions": dict(getattr(state, "_metadata", {})),
            "precision": {} if route is None else route.inner.session.state_dict(),
        }

    def mismatches(self, obj: Any, state: Any) -> Iterator[str]:
        saved, own = state["tensors"], obj.state_dict()
        missing, unknown = [key for key in own if key not in saved], [key for key in saved if key not in own]
        if missing:
            yield f"no {_join_names(missing)} in the checkpoint"
        if unknown:
            yield f"the checkpoint has {_join_names(unknown)}, the model does not"
        differing = [
            f"{key} has shape {tuple(saved[key].shape)} in the checkpoint, {tuple(value.shape)} in the model"
            for key, value in own.items()
            if isinstance(value, torch.Tensor) and key in saved and not _shapes_match(saved[key].shape, value)
        ]
        if differing:
            yield _join_names(differing)

    def shard_targets(self, obj: Any, state: Any) -> Iterator[tuple[Any, Any]]:
        for name, parameter in obj.named_parameters(remove_duplicate=False):
            if is_dtensor(parameter) and name in state["tensors"]:
                yield state["tensors"][name], parameter

    def may_raise(self, obj: Any) -> bool:
        if any(map(is_lazy, (*obj.parameters(), *obj.buffers()))):
            return False  # user code may raise, but an uninitialized parameter cannot be restored
        return not all(_is_library_code(each) for module in obj.modules() for each in _load_functions(module))

    def set_state(self, obj: Any, state: Any) -> None:
        _require_versions()
        tensors: OrderedDict[str, Any] = OrderedDict(state["tensors"])
        tensors._metadata = state["versions"]  # type: ignore[attr-defined]  # load_state_dict reads it there
        obj.load_state_dict(tensors)
        route = route_of(obj)
        if route is not None:
            route.inner.session.load_state_dict(state["precision"])


class _OptimizerHandler(StateHandler):
    kind = "optimizer"

    def get_state(self, obj: Any) -> Any:
        return {"state": obj.state_dict(), "class": type(obj).__name__, "shapes": _shapes(obj)}

    def mismatches(self, obj: Any, state: Any) -> Iterator[str]:
        if type(obj).__name__ != state["class"]:
            yield f"saved from {state['class']}, loaded into {type(obj).__name__}"
        saved, own = state["shapes"], [group["params"] for group in obj.param_groups]
        if [len(group) for group in saved] != [len(group) for group in own]:
            yield f"saved with groups of {_group_sizes(saved)} parameters, has groups of {_group_sizes(own)}"
            return
        for number, (before, parameter) in enumerate(zip(chain(*saved), chain(*own), strict=True)):
            if not _shapes_match(before, parameter):
                now = tuple(parameter.shape)
                yield f"parameter {number} has shape {tuple(before)} in the checkpoint, {now} in the optimizer"

    def shard_targets(self, obj: Any, state: Any) -> Iterator[tuple[Any, Any]]:
        by_index = _parameters_by_index(obj, state["state"])
        for index, entries in state["state"]["state"].items():
            parameter = by_index.get(index)
            if parameter is not None and is_dtensor(parameter):
                values = entries.values() if isinstance(entries, dict) else ()
                yield from ((each, parameter) for each in values if getattr(each, "shape", None) == parameter.shape)

    def may_raise(self, obj: Any) -> bool:
        return not _is_library_code(obj.load_state_dict)

    def set_state(self, obj: Any, state: Any) -> None:
        saved = state["state"]
        by_index = _parameters_by_index(obj, saved)
        each_state = {
            index: _parameter_state(entries, like=by_index.get(index)) for index, entries in saved["state"].items()
        }
        obj.load_state_dict({**map_leaves(clone_tensor, {**saved, "state": {}}), "state": each_state})
        if each_state:
            obj._opt_called = True  # it stepped before the save; without this, schedulers warn


class _GenericHandler(StateHandler):
    kind = "state_dict"

    def get_state(self, obj: Any) -> Any:
        return obj.state_dict()

    def set_state(self, obj: Any, state: Any) -> None:
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


def _load_functions(module: nn.Module) -> Iterator[Any]:
    """Yield all functions that run when a module loads its state."""
    yield from (module.load_state_dict, module._load_from_state_dict, module.set_extra_state)
    yield from module._load_state_dict_pre_hooks.values()
    yield from module._load_state_dict_post_hooks.values()


def _is_library_code(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(("torch.", "parallelize."))


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


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    return [[list(each.shape) for each in group["params"]] for group in optimizer.param_groups]


def _shapes_match(shape: Sequence[int], own: torch.Tensor) -> bool:
    """Return whether values of `shape` fit the tensor `own`; a lazy module's uninitialized tensor fits any shape."""
    return is_lazy(own) or list(own.shape) == list(shape)


def _group_sizes(groups: Sequence[Sequence[Any]]) -> str:
    return " and ".join(str(len(group)) for group in groups) or "no"


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
