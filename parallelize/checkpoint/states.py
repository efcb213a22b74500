"""States of objects: as types that torch.load reads without running code, taken from objects, checked, and set.

A model's weights have the names that they have without torch.compile, DDP and DataParallel.
"""

from __future__ import annotations

import copy
import enum
import logging
import os
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn

from parallelize.errors import ConfigError, Fault
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.torch_patches.forward import route_of
from parallelize.torch_patches.step import parameters_of

__all__ = [
    "OBJECT",
    "VALUE",
    "Named",
    "StateHandler",
    "clone_tensor",
    "handler_for",
    "is_dtensor",
    "is_sharded",
    "states_of",
    "to_safe_types",
]

OBJECT = "state_dict"  # kind of an object that is neither a model nor an optimizer
VALUE = "value"  # kind of an entry that is a plain value: a number, string, tensor or container of these
Named = Mapping[str, Any]
"""Objects, or what belongs to them, by the user's names."""

_log = logging.getLogger("parallelize")
_NO_NAMES: Mapping[int, str] = {}
_WRAPPERS = re.compile(r"(?<![^.])_orig_mod\.")  # torch.compile(model), also of a submodule
_BUILT_IN: dict[Any, Callable[[Any], Any]] = {
    (type(None), torch.dtype): lambda value: value,
    torch.Size: torch.Size,
    torch.device: torch.device,
    bool: bool,
    int: int,
    float: float,
    complex: complex,
    # Equal strings become one object, which a pickle holds once: equal states give equal files.
    str: lambda value: sys.intern(str.__str__(value)),  # str() of an enum member is another string
    bytes: bytes,
    os.PathLike: os.fspath,
}


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing the class, which takes half a second."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def to_safe_types(value: Any, where: str, gather: Callable[[Any], Any] | None = None) -> Any:
    """Convert nested containers, numbers, strings, arrays, paths, enums and tensors to safe types.

    A tensor is copied only if it is a view of a larger storage, which torch.save would write as a
    whole. DTensors are kept, or replaced by what `gather` returns; `where` names the value in errors.
    """
    if type(value) in (torch.Tensor, nn.Parameter, nn.Buffer):
        return _dense(value, where)
    if is_dtensor(value):
        value = getattr(value, "shard", value)  # for which a tensor of an fsdp block stands
        return value if gather is None else gather(value)
    for kind, convert in _BUILT_IN.items():
        if isinstance(value, kind):
            return convert(value)
    if isinstance(value, dict):
        mapping: Any = next(each for each in (OrderedDict, Counter, dict) if isinstance(value, each))
        inner = mapping(
            {
                to_safe_types(key, f"a key of {where}"): to_safe_types(each, f"{where}[{key!r}]", gather)
                for key, each in value.items()
            }
        )
        if hasattr(value, "_metadata"):  # of a state dict: the version numbers of modules
            inner._metadata = to_safe_types(value._metadata, where)
        return inner
    if isinstance(value, (list, tuple, set, frozenset)):
        sequence = next((each for each in (list, tuple) if isinstance(value, each)), set)
        return sequence(to_safe_types(each, f"{where}[{number}]", gather) for number, each in enumerate(value))
    if type(value).__module__ == "numpy" and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy()) if value.ndim else value.item()
    if isinstance(value, enum.Enum):
        return to_safe_types(value.value, where)
    raise _refused(f"{where} is of type {type(value).__module__}.{type(value).__qualname__}")


def _dense(value: torch.Tensor, where: str) -> torch.Tensor:
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise _refused(f"{where} is not a dense tensor with values: {value.layout}, on {value.device}, {value.dtype}")
    value = value.detach()
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _refused(what: str) -> ConfigError:
    return ConfigError(
        what,
        why="a checkpoint holds dense tensors, numbers, strings and containers of these: loading a class would run "
        "code from the file",
        fix="save its content as numbers or dense tensors, or give its class state_dict() and load_state_dict()",
    )


class StateHandler:
    """Gets, checks and sets the state of one object; this class stands for plain values, which are only read.

    Args:
        obj: the object.
        name: its name in errors.
        names: of parameters, by their ids; an optimizer has its state under these names, or else numbers.
    """

    kind: ClassVar[str] = VALUE
    state: Any
    details: Named
    strict: bool

    def __init__(self, obj: Any, name: str, names: Mapping[int, str]) -> None:
        self.obj, self.name, self.names = obj, name, names

    def get(self) -> Any:
        """Return the state, which shares tensors with the object."""
        return self.obj

    def describe(self) -> dict[str, Any]:
        """Return what is recorded beside the state, to check that it fits."""
        return {"kind": self.kind, "class": type(self.obj).__name__}

    def take(self, state: Any, details: Named, *, strict: bool = True) -> list[Fault]:
        """Keep a state to load, and return its faults: where it does not fit the object.

        Args:
            state: the state.
            details: what `describe` returned when it was saved; {} in a file of another program.
            strict: whether a model must have exactly the weights of the state.
        """
        self.state, self.details, self.strict = state, details, strict
        own, name = type(self.obj).__name__, self.name
        if self.kind == VALUE:
            fix = f"read it from the result of load(): load(path)[{name!r}]"
            return [Fault(f"{name}={self.obj!r:.80}", why="load() restores objects, not values", fix=fix)]
        kind = details.get("kind", self.kind if isinstance(state, Mapping) else VALUE)
        is_other = f"its kind is {self.kind!r}, where the checkpoint holds a {kind}"
        found = [is_other] if kind != self.kind else self.differences()
        why = f"the checkpoint was saved from something else than this {own}, or from one constructed differently"
        fix = (
            f"construct the {own} as it was when it was saved, under the same name, or omit {name}=; strict=False "
            "loads the parameters of a model that it has in common with the checkpoint"
        )
        return [Fault(f"{name}={own}(...): {each}", why=why, fix=fix) for each in found]

    def differences(self) -> list[str]:
        """Return what differs between the state and that of the object."""
        return []

    def shard_targets(self) -> dict[int, Any]:
        """Return the DTensors into which values of the state are loaded, by the ids of the values."""
        return {}

    def set(self) -> None:
        """Set the state of the object, copying all tensors."""
        dtensors = self.shard_targets()
        self.obj.load_state_dict(map_leaves(lambda each: _own(each, dtensors.get(id(each))), self.state))


class _ObjectHandler(StateHandler):
    kind = OBJECT

    def get(self) -> Any:
        return self.obj.state_dict()


class _ModelHandler(_ObjectHandler):
    kind = "model"

    def get(self) -> Any:
        found = _state_dict(self.obj)
        state: Any = OrderedDict((_plain(name), value) for name, value in found.items())
        state._metadata = {_plain(name): each for name, each in _versions(found).items()}
        return state

    def describe(self) -> dict[str, Any]:
        route = route_of(self.obj)
        precision = {} if route is None else route.owner.session.state_dict()
        return {**super().describe(), "precision": precision}

    def _adapted(self, own: Named) -> Any:
        """Return the state under the names of the object; either of them may be compiled, the state wrapped."""
        names = {_plain(each): each for each in (*_versions(own), *own)}
        theirs = [_plain(str(each)) for each in self.state]
        first = next(iter(theirs), "").partition(".")[0]
        is_outer = first not in names and all(each.startswith(f"{first}.") for each in theirs)
        prefix = f"{first}." if is_outer and not self.details else ""

        def renamed(state: Named) -> Any:
            plain = ((_plain(str(name)).removeprefix(prefix), each) for name, each in state.items())
            return OrderedDict((names.get(name, name), each) for name, each in plain)

        saved = renamed(self.state)
        saved._metadata = renamed(_versions(self.state))
        parameters = list(self.obj.named_parameters(remove_duplicate=False))
        held = {id(parameter): saved[name] for name, parameter in parameters if name in saved}
        for name, parameter in parameters:
            if name in own and id(parameter) in held:
                saved.setdefault(name, held[id(parameter)])  # tied weights, which some files hold once
        return saved

    def differences(self) -> list[str]:
        own = _state_dict(self.obj)
        self.state = self._adapted(own)
        if _shapes(own) != _shapes(self.state):
            # A hook, or a newer version of a module, may rename what it gets: torch decides, on a copy.
            try:
                copy.deepcopy(self.obj).load_state_dict(self.state, strict=self.strict, assign=True)
            except RuntimeError as exc:
                return [str(exc)]
        return []

    def shard_targets(self) -> dict[int, Any]:
        named = self.obj.named_parameters(remove_duplicate=False)
        return {id(self.state.get(name)): parameter for name, parameter in named if is_dtensor(parameter)}

    def set(self) -> None:
        found = self.obj.load_state_dict(self.state, strict=self.strict)
        if any(found):
            _log.warning("%s= does not have exactly the weights in the checkpoint: %s", self.name, found)
        route = route_of(self.obj)
        if route is not None and self.details.get("precision"):
            route.owner.session.load_state_dict(self.details["precision"])


class _OptimizerHandler(_ObjectHandler):
    kind = "optimizer"

    def get(self) -> Any:
        state = self.obj.state_dict()
        name_of = {index: self.names.get(id(each), index) for index, each in self._parameters(state).items()}
        groups = [{**each, "params": [name_of[index] for index in each["params"]]} for each in state["param_groups"]]
        return {"state": {name_of[index]: each for index, each in state["state"].items()}, "param_groups": groups}

    def _parameters(self, state: Any) -> dict[Any, Any]:
        """Return the parameter for each index in a state."""
        indices = chain(*(group["params"] for group in state["param_groups"]))
        return dict(zip(indices, parameters_of(self.obj), strict=True))

    def describe(self) -> dict[str, Any]:
        shapes = [list(each.shape) for each in parameters_of(self.obj)]
        return {**super().describe(), **{f"shape of parameter {number}": each for number, each in enumerate(shapes)}}

    def differences(self) -> list[str]:
        if not {"state", "param_groups"} <= self.state.keys():
            return ["it is not the state of an optimizer"]
        own = {"group sizes": [len(each["params"]) for each in self.obj.param_groups], **self.describe()}
        sizes = [len(each["params"]) for each in self.state["param_groups"]]
        was = {**own, **self.details, "group sizes": sizes}
        return [
            f"{what}: {was[what]} in the checkpoint, {fact} in the optimizer"
            for what, fact in own.items()
            if was[what] != fact
        ]

    def shard_targets(self) -> dict[int, Any]:
        return {
            id(value): parameter
            for index, parameter in self._parameters(self.state).items()
            for value in leaves(self.state["state"].get(index))
            if is_dtensor(parameter) and parameter.shape and getattr(value, "shape", None) == parameter.shape
        }

    def set(self) -> None:
        super().set()
        if self.state["state"]:
            self.obj._opt_called = True  # it stepped before the save; without this, schedulers warn


def handler_for(obj: Any, name: str = "", names: Mapping[int, str] = _NO_NAMES) -> StateHandler:
    """Return the handler for an object or a plain value; the arguments are as for `StateHandler`."""
    while isinstance(obj, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        obj = obj.module
    # Look at the class: the loaders of shard_loader forward attributes that they lack to the user's loader.
    has_state = all(hasattr(type(obj), each) for each in ("state_dict", "load_state_dict"))
    kinds = {nn.Module: _ModelHandler, torch.optim.Optimizer: _OptimizerHandler, object: _ObjectHandler}
    kind = next(handler for each, handler in kinds.items() if isinstance(obj, each))
    return (kind if has_state else StateHandler)(obj, name, names)


def is_sharded(obj: Any) -> bool:
    """Return whether an object has shards, so that all ranks must take part in saving it."""
    if isinstance(obj, nn.Module):
        found = [*obj.parameters(), *obj.buffers()]
    else:
        found = parameters_of(obj) if isinstance(obj, torch.optim.Optimizer) else leaves(obj)
    return any(map(is_dtensor, found))


def states_of(objects: Named, gather: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Return the state of each object, or the value itself, as safe types.

    Args:
        objects: by their names.
        gather: returns the full tensor of a DTensor; None: DTensors are kept, and the states of optimizers are
            by the names of parameters, as torch's own tools expect in a folder.
    """
    models = [] if gather else [each for each in objects.values() if isinstance(each, nn.Module)]
    names = {id(parameter): name for model in reversed(models) for name, parameter in model.named_parameters()}
    return {name: to_safe_types(handler_for(obj, name, names).get(), name, gather) for name, obj in objects.items()}


def _state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a state dict, with shards where fsdp would gather them."""
    if not is_sharded(model):
        return model.state_dict()
    from parallelize.backends.fsdp.full_tensors import state

    state.keeps_shards = True
    try:
        return model.state_dict()
    finally:
        state.keeps_shards = False


def _versions(state: Any) -> dict[str, Any]:
    """Return the version numbers of modules in a state dict."""
    return getattr(state, "_metadata", {})


def _plain(name: str) -> str:
    """Return the name of a weight or module without those that torch.compile adds."""
    return _WRAPPERS.sub("", f"{name}.")[:-1]


def clone_tensor(value: Any) -> Any:
    """Copy a tensor out of a memory-mapped file, which would otherwise stay open, and be read in training."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _own(value: Any, dtensor: Any) -> Any:
    """Return a copy of a value; where a DTensor is loaded, this rank's shard, which may have been read as such."""
    if dtensor is None:
        return clone_tensor(value)
    from parallelize.backends.fsdp.full_tensors import shard_like, stand_for  # takes half a second: only if sharded

    return stand_for(value if is_dtensor(value) else shard_like(value, dtensor))


def _shapes(state: Named) -> dict[str, Any]:
    return {name: getattr(each, "shape", None) for name, each in state.items()}
