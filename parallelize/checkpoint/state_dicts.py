"""State handlers: get, check and set the state of models, optimizers and other objects with a state dict."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from parallelize.checkpoint.safe_types import is_dtensor, is_wrapper
from parallelize.errors import ConfigError, Fault
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.torch_patches.forward import route_of
from parallelize.torch_patches.step import parameters_of

__all__ = ["VALUE", "StateHandler", "clone_tensor", "handler_for", "needs_all_ranks"]

VALUE = "value"  # kind of the entries that are plain values: numbers, strings, tensors and containers of these
_log = logging.getLogger("parallelize")
_WRAPPERS = re.compile(r"(?<![^.])_orig_mod\.")  # torch.compile(model), also of a submodule


class StateHandler:
    """Gets, checks and sets the state of one object with `state_dict` and `load_state_dict`; `name` is for errors.

    `take` sets the state to load, the details recorded beside it ({} in a file of another program), and a phrase for
    each mismatch.
    """

    kind: ClassVar[str] = "state_dict"

    def __init__(self, obj: Any, name: str = "") -> None:
        self.obj, self.name = obj, name
        self.state: Any = None
        self.details: Mapping[str, Any] = {}
        self.mismatches: list[str] = []
        self._is_strict = True

    def get(self, names: Mapping[int, str] | None = None) -> Any:
        """Return the state, of an optimizer by `names` of its parameters' ids; its tensors are those of the object."""
        del names
        return self.obj.state_dict()

    def describe(self) -> dict[str, Any]:
        """Return what is recorded beside the state, to check that it fits, as safe types."""
        return {"kind": self.kind, "class": type(self.obj).__name__}

    def take(self, state: Any, details: Mapping[str, Any], *, strict: bool = True) -> bool:
        """Keep the state to load, and compare it with the object, which is not changed; return False: another kind."""
        self.state, self.details, self._is_strict = state, details, strict
        if details.get("kind", self.kind) != self.kind or not isinstance(state, Mapping):
            return False
        self.mismatches = list(self._compare())
        return True

    def _compare(self) -> Iterator[str]:
        yield from ()

    def shard_targets(self) -> Iterator[tuple[Any, Any]]:
        """Yield each value of the state that is loaded into a DTensor, with that DTensor."""
        yield from ()

    def may_raise(self) -> bool:
        """Return whether setting the state runs user code, which may raise even if the state fits."""
        return True

    def set(self) -> None:
        """Set the state of the object, copying all tensors."""
        dtensors = {id(value): dtensor for value, dtensor in self.shard_targets()}
        self.obj.load_state_dict(map_leaves(lambda each: _own(each, dtensors.get(id(each))), self.state))

    def faults(self) -> Iterator[Fault]:
        """Yield a fault for each mismatch."""
        kind = type(self.obj).__name__
        for each in self.mismatches:
            yield Fault(
                f"{self.name}: {each}",
                why=f"the checkpoint was saved from another {self.details.get('class', kind)}, or from one constructed "
                "differently",
                fix=f"construct the {kind} as it was when it was saved, or omit {self.name}=; strict=False "
                "loads the parameters of a model that it has in common with the checkpoint",
            )


class _ModelHandler(StateHandler):
    kind = "model"

    def get(self, names: Mapping[int, str] | None = None) -> Any:
        """Return the state dict under the names that the weights have without torch.compile, DDP and DataParallel."""
        del names
        model = self.obj
        while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        found = _state_dict(model)
        state: Any = OrderedDict((_WRAPPERS.sub("", name), value) for name, value in found.items())
        state._metadata = {
            _WRAPPERS.sub("", f"{name}.")[:-1]: each for name, each in getattr(found, "_metadata", {}).items()
        }
        return state

    def describe(self) -> dict[str, Any]:
        route = route_of(self.obj)
        return {**super().describe(), "precision": {} if route is None else route.owner.session.state_dict()}

    def _adapted(self, state: Any) -> Any:
        """Return the state dict under the names of the object; either of them may be compiled or wrapped."""
        found = _state_dict(self.obj)
        own = {_plain(name): name for name in found}
        prefix = "" if self.details else _common_prefix(state, own)
        versions = {
            _plain(f"{name}.").removeprefix(prefix): each for name, each in getattr(state, "_metadata", {}).items()
        }
        saved: Any = OrderedDict()
        for name, value in state.items():
            saved[name if name in found else own.get(_plain(name.removeprefix(prefix)), name)] = value
        parameters = list(self.obj.named_parameters(remove_duplicate=False))
        held = {id(parameter): name for name, parameter in parameters if name in saved}
        for name, parameter in parameters:
            if name in found and name not in saved and id(parameter) in held:
                saved[name] = saved[held[id(parameter)]]  # tied weights, which files of safetensors hold once
        modules = {name: _plain(f"{name}.") for name in getattr(found, "_metadata", {})}
        saved._metadata = {name: versions[plain] for name, plain in modules.items() if plain in versions}
        return saved

    def _compare(self) -> Iterator[str]:
        state = self.state = self._adapted(self.state)
        own = _state_dict(self.obj)
        missing, unknown = [key for key in own if key not in state], [key for key in state if key not in own]
        if missing and self._is_strict:
            yield f"no {_join_names(missing)} in the checkpoint"
        if unknown and self._is_strict:
            yield f"the checkpoint has {_join_names(unknown)}, the model does not"
        differing = [
            f"{key} has shape {tuple(state[key].shape)} in the checkpoint, {tuple(value.shape)} in the model"
            for key, value in own.items()
            if isinstance(value, torch.Tensor) and key in state and not _shapes_match(state[key].shape, value)
        ]
        if differing:
            yield _join_names(differing)

    def shard_targets(self) -> Iterator[tuple[Any, Any]]:
        for name, parameter in self.obj.named_parameters(remove_duplicate=False):
            if is_dtensor(parameter) and name in self.state:
                yield self.state[name], parameter

    def may_raise(self) -> bool:
        if any(map(is_lazy, (*self.obj.parameters(), *self.obj.buffers()))):
            return False  # user code may raise, but an uninitialized parameter cannot be restored
        return not all(_is_library_code(each) for module in self.obj.modules() for each in _load_functions(module))

    def set(self) -> None:
        try:
            found = self.obj.load_state_dict(self.state, strict=self._is_strict)
        except RuntimeError as exc:
            if not self.mismatches:
                raise
            raise ConfigError.of(list(self.faults())) from exc
        for what, names in (("missing in", found.missing_keys), ("unexpected in", found.unexpected_keys)):
            if names:
                _log.warning("%s the checkpoint, and ignored: %s", what, ", ".join(names))
        route = route_of(self.obj)
        if route is not None and self.details.get("precision"):
            route.owner.session.load_state_dict(self.details["precision"])


class _OptimizerHandler(StateHandler):
    kind = "optimizer"

    def get(self, names: Mapping[int, str] | None = None) -> Any:
        state = self.obj.state_dict()
        if names is None:
            return state
        name_of = {index: names.get(id(each), index) for index, each in self._parameters(state).items()}
        groups = [{**each, "params": [name_of[index] for index in each["params"]]} for each in state["param_groups"]]
        named = {name_of[index]: each for index, each in state["state"].items()}
        return {**state, "state": named, "param_groups": groups}

    def describe(self) -> dict[str, Any]:
        shapes = [[list(each.shape) for each in group["params"]] for group in self.obj.param_groups]
        return {**super().describe(), "shapes": shapes}

    def _compare(self) -> Iterator[str]:
        if not {"state", "param_groups"} <= self.state.keys():
            yield "it is not the state of an optimizer"
            return
        kind = type(self.obj).__name__
        if kind != self.details.get("class", kind):
            yield f"saved from {self.details['class']}, loaded into {kind}"
        own = [group["params"] for group in self.obj.param_groups]
        saved = [group["params"] for group in self.state["param_groups"]]
        if list(map(len, saved)) != list(map(len, own)):
            before, now = (" and ".join(str(len(group)) for group in groups) or "no" for groups in (saved, own))
            yield f"saved with groups of {before} parameters, has groups of {now}"
            return
        shapes = chain(*self.details.get("shapes", ()))
        for number, (shape, parameter) in enumerate(zip(shapes, chain(*own), strict=False)):
            if not _shapes_match(shape, parameter):
                is_now = tuple(parameter.shape)
                yield f"parameter {number} has shape {tuple(shape)} in the checkpoint, {is_now} in the optimizer"

    def shard_targets(self) -> Iterator[tuple[Any, Any]]:
        parameters = self._parameters(self.state)
        for index, entries in self.state["state"].items():
            parameter = parameters.get(index)
            if parameter is not None and is_dtensor(parameter):
                values = entries.values() if isinstance(entries, dict) else ()
                shape = parameter.shape
                yield from ((each, parameter) for each in values if shape and getattr(each, "shape", None) == shape)

    def may_raise(self) -> bool:
        return not _is_library_code(self.obj.load_state_dict)

    def set(self) -> None:
        super().set()
        if self.state["state"]:
            self.obj._opt_called = True  # it stepped before the save; without this, schedulers warn

    def _parameters(self, state: Any) -> dict[Any, Any]:
        """Return the parameter for each index in a state."""
        indices = chain(*(group["params"] for group in state["param_groups"]))
        return dict(zip(indices, parameters_of(self.obj), strict=True))


def handler_for(obj: Any, name: str = "") -> StateHandler | None:
    """Return a handler for an object, or None for a plain value."""
    if isinstance(obj, nn.Module):
        return _ModelHandler(obj, name)
    if isinstance(obj, torch.optim.Optimizer):
        return _OptimizerHandler(obj, name)
    # Look at the class: the loaders of shard_loader forward attributes that they lack to the user's loader.
    if callable(getattr(type(obj), "state_dict", None)) and callable(getattr(type(obj), "load_state_dict", None)):
        return StateHandler(obj, name)
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
    return any(map(is_dtensor, parameters_of(obj) if isinstance(obj, torch.optim.Optimizer) else leaves(obj)))


def _state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a state dict, with shards where fsdp would gather them."""
    if not needs_all_ranks(model):
        return model.state_dict()
    from parallelize.backends.fsdp.full_tensors import state

    state.keeps_shards = True
    try:
        return model.state_dict()
    finally:
        state.keeps_shards = False


def _plain(name: str) -> str:
    """Return the name of a weight without the prefixes of torch.compile, DDP and DataParallel."""
    return _WRAPPERS.sub("", name).removeprefix("module.")


def _common_prefix(state: Mapping[Any, Any], own: Mapping[str, Any]) -> str:
    """Return the prefix of all names in a file of another program, such as "net." of Lightning, if the rest fits."""
    prefix = str(next(iter(state), "")).partition(".")[0] + "."
    stripped = {str(name).removeprefix(prefix) for name in state if str(name).startswith(prefix)}
    return prefix if len(stripped) == len(state) and set(map(_plain, stripped)) == own.keys() else ""


def _load_functions(module: nn.Module) -> Iterator[Any]:
    """Yield all functions that run when a module loads its state."""
    yield from (module.load_state_dict, module._load_from_state_dict, module.set_extra_state)
    yield from module._load_state_dict_pre_hooks.values()
    yield from module._load_state_dict_post_hooks.values()


def _is_library_code(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(("torch.", "parallelize."))


def clone_tensor(value: Any) -> Any:
    """Copy a tensor out of a memory-mapped file, which would otherwise stay open and be read during training."""
    if is_wrapper(value):
        names, context = value.__tensor_flatten__()
        inner = {name: getattr(value, name).clone() for name in names}
        return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())
    return value.clone() if isinstance(value, torch.Tensor) else value


def _own(value: Any, dtensor: Any) -> Any:
    """Return a copy of a value; where a DTensor is loaded, this rank's shard, which may have been read as such."""
    if dtensor is None:
        return clone_tensor(value)
    from parallelize.backends.fsdp.full_tensors import shard_like, stand_for  # takes half a second: only if sharded

    return stand_for(value if is_dtensor(value) else shard_like(value, dtensor))


def _shapes_match(shape: Sequence[int], own: torch.Tensor) -> bool:
    """Return whether values of `shape` fit the tensor `own`; a lazy module's uninitialized tensor fits any shape."""
    return is_lazy(own) or list(own.shape) == list(shape)


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
