"""States of objects: as types that torch.load reads without running code, taken from objects, checked, and set.

A model's weights have the names that they have without torch.compile, DDP and DataParallel.
"""

from __future__ import annotations

import copy
import enum
import logging
import os
import re
import reprlib
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn

from parallelize.errors import ConfigError, Fault
from parallelize.run.containers import is_entangled, leaves, map_leaves
from parallelize.torch_patches.forward import route_of
from parallelize.torch_patches.module_tensors import all_buffers, all_named_parameters, all_parameters
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
_OTHER_SHAPES = ("LBFGS", "Adafactor")  # of all parameters at once; sums of rows and of columns
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
    A container that is in several places is converted once, and stays one.
    """
    return _Conversion(gather).convert(value, where)


class _Conversion:
    """Converts one value to safe types.

    Args:
        gather: as for `to_safe_types`.
    """

    def __init__(self, gather: Callable[[Any], Any] | None) -> None:
        self._gather = gather
        # By the ids of containers, which are kept here, so that no other object gets such an id.
        self._converted: dict[int, tuple[Any, Any]] = {}

    def convert(self, value: Any, where: str) -> Any:
        """Return a value as safe types; `where` names it in errors."""
        if type(value) in (torch.Tensor, nn.Parameter, nn.Buffer):
            return _dense(value, where)
        if is_dtensor(value):
            value = getattr(value, "shard", value)  # for which a tensor of an fsdp block stands
            return value if self._gather is None else self._gather(value)
        for kind, convert in _BUILT_IN.items():
            if isinstance(value, kind):
                return convert(value)
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            if id(value) not in self._converted:
                self._converted[id(value)] = value, self._container(value, where)
            return self._converted[id(value)][1]
        if type(value).__module__ == "numpy" and value.dtype.kind in "biufc":
            return torch.from_numpy(value.copy()) if value.ndim else value.item()
        if isinstance(value, enum.Enum):
            return self.convert(value.value, where)
        raise _refused(f"{where} is of type {type(value).__module__}.{type(value).__qualname__}")

    def _container(self, value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            sequence = next((each for each in (list, tuple) if isinstance(value, each)), set)
            return sequence(self.convert(item, f"{where}[{number}]") for number, item in enumerate(value))
        mapping: Any = next(each for each in (OrderedDict, Counter, dict) if isinstance(value, each))
        inner = mapping(
            {
                self.convert(key, f"a key of {where}"): self.convert(item, f"{where}[{key!r}]")
                for key, item in value.items()
            }
        )
        if hasattr(value, "_metadata"):  # of a state dict: the version numbers of modules
            inner._metadata = self.convert(value._metadata, where)
        return inner


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
        if kind == self.kind != OBJECT and not isinstance(state, Mapping):
            kind = type(state).__name__
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

    def prepare(self) -> None:
        """Copy all tensors of the state; what cannot be copied raises before any object is changed."""
        dtensors = self.shard_targets()
        self.state = map_leaves(lambda leaf: _own(leaf, dtensors.get(id(leaf))), self.state, once=True)

    def set(self) -> None:
        """Set the state of the object; call `prepare` before."""
        self.obj.load_state_dict(self.state)


class _ObjectHandler(StateHandler):
    kind = OBJECT

    def get(self) -> Any:
        return self.obj.state_dict()

    def differences(self) -> list[str]:
        check = getattr(type(self.obj), "check_position", None)
        if check is not None and hasattr(type(self.obj), "load_rank_state"):  # a loader of this library
            check(self.obj, self.state)
        if type(self.obj).load_state_dict.__module__.startswith("torch."):
            return _unlike_state(self.obj.state_dict(), self.state)
        return []


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
        parameters = list(all_named_parameters(self.obj, remove_duplicate=False))
        held = {id(parameter): saved[name] for name, parameter in parameters if name in saved}
        for name, parameter in parameters:
            if name in own and id(parameter) in held:
                saved.setdefault(name, held[id(parameter)])  # tied weights, which some files hold once
        return saved

    def differences(self) -> list[str]:
        versions = _versions(self.state)
        if not _are_versions(versions):
            return ["the version numbers of its modules are damaged"]
        own = _state_dict(self.obj)
        self.state = self._adapted(own)
        if _shapes(own) != _shapes(self.state):
            # A hook, or a newer version of a module, may rename what it gets: torch decides, on a copy.
            trial = copy.deepcopy(self.obj)
            try:
                trial.load_state_dict(self.state, strict=self.strict, assign=True)
            except Exception as exc:  # noqa: BLE001 - a forged state makes torch raise all kinds
                return [str(exc)]
        # load_state_dict would copy such values wrongly, or raise after it has copied others.
        return [
            f"{name} is {_layout(self.state[name])}, where the model has {_layout(value)}"
            for name, value in own.items()
            if name in self.state and _layout(self.state[name]) != _layout(value)
        ] + self._unlike_precision()

    def _unlike_precision(self) -> list[str]:
        own = self.describe()["precision"]
        saved = self.details.get("precision")
        return _unlike_state(own, saved) if own and saved else []

    def shard_targets(self) -> dict[int, Any]:
        named = all_named_parameters(self.obj, remove_duplicate=False)
        return {id(self.state.get(name)): parameter for name, parameter in named if is_dtensor(parameter)}

    def prepare(self) -> None:
        """Nothing is copied: load_state_dict copies into the parameters."""

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
        if not _is_optimizer_state(self.state):
            return ["it is not the state of an optimizer"]
        own = {"group sizes": [len(each["params"]) for each in self.obj.param_groups], **self.describe()}
        sizes = [len(each["params"]) for each in self.state["param_groups"]]
        was = {**own, **self.details, "group sizes": sizes}
        found = [
            f"{what}: {was[what]} in the checkpoint, {fact} in the optimizer"
            for what, fact in own.items()
            if was[what] != fact
        ]
        is_torchs = type(self.obj).__setstate__.__module__.startswith("torch.optim")
        if found or not is_torchs or type(self.obj).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            return found
        return self._unlike_groups() or self._unlike_tensors() or self._trial()

    def _unlike_groups(self) -> list[str]:
        """Return the options of groups whose types are others than those of the optimizer."""
        found = []
        pairs = zip(self.obj.param_groups, self.state["param_groups"], strict=True)
        for number, (own, saved) in enumerate(pairs):
            options = {name: value for name, value in own.items() if name != "params" and name in saved}
            found += [f"group {number}: {each}" for each in _unlike_state(options, saved)]
            missing = own.keys() & {"lr"} - saved.keys()
            found += [f"group {number}: {name} is missing" for name in missing]
        return found

    def _unlike_tensors(self) -> list[str]:
        """Return the entries of the state that no step of the optimizer could have left."""
        entries = self.state["state"]
        if is_entangled(entries):
            return ["its lists are in each other, many times over"]
        if type(self.obj).__name__ in _OTHER_SHAPES:
            return []
        found = []
        for group in self.state["param_groups"]:
            written = [entries[name] for name in group["params"] if entries.get(name)]
            if len({_kinds(entry) for entry in written}) > 1:
                found.append("parameters of one group have entries of other names or types")
        for index, parameter in self._parameters(self.state).items():
            for name, value in entries.get(index, {}).items():
                if not isinstance(value, (torch.Tensor, int, float, type(None))):
                    found.append(f"{name} of parameter {index} is a {type(value).__name__}")
                elif not _fits_parameter(value, parameter):
                    found.append(f"{name} of parameter {index} has another shape or layout")
        if self.details and not set(entries) <= self._parameters(self.state).keys():
            found.append("there is an entry of a parameter that is in no group")
        return found

    def _trial(self) -> list[str]:
        """Load the state, without its values, into a stand-in without values; return what it raises."""
        hooks = [value for name, value in vars(self.obj).items() if "load_state_dict" in name]
        if any(hooks):  # which may turn the state into another one, and must not be called twice
            return []
        stand_in: Any = object.__new__(type(self.obj))
        vars(stand_in).update(vars(self.obj))
        stand_in.state = defaultdict(dict)
        stand_in.param_groups = map_leaves(_without_values, self.obj.param_groups)
        try:
            torch.optim.Optimizer.load_state_dict(stand_in, map_leaves(_without_values, dict(self.state), once=True))
        except Exception as exc:  # noqa: BLE001 - a forged state makes torch raise all kinds
            return [f"{type(exc).__name__}: {exc}"]
        return []

    def shard_targets(self) -> dict[int, Any]:
        return {
            id(value): parameter
            for index, parameter in self._parameters(self.state).items()
            for value in leaves(self.state["state"].get(index), once=True)
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
        found = [*all_parameters(obj), *all_buffers(obj)]
    else:
        found = parameters_of(obj) if isinstance(obj, torch.optim.Optimizer) else leaves(obj, once=True)
    return any(map(is_dtensor, found))


def states_of(objects: Named, gather: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Return the state of each object, or the value itself, as safe types.

    Args:
        objects: by their names.
        gather: returns the full tensor of a DTensor; None: DTensors are kept, and the states of optimizers are
            by the names of parameters, as torch's own tools expect in a folder.
    """
    models = [] if gather else [each for each in objects.values() if isinstance(each, nn.Module)]
    names = {id(parameter): name for model in reversed(models) for name, parameter in all_named_parameters(model)}
    return {name: to_safe_types(handler_for(obj, name, names).get(), name, gather) for name, obj in objects.items()}


def _state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a state dict, with shards where fsdp would gather them."""
    if not is_sharded(model):
        return model.state_dict()
    from parallelize.backends.fsdp.full_tensors import keeping_shards  # takes half a second: only if sharded

    with keeping_shards(model):
        return model.state_dict()


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
    # The import takes half a second: only if sharded.
    from parallelize.backends.fsdp.full_tensors import registry_of, shard_like, stand_for

    return stand_for(value if is_dtensor(value) else shard_like(value, dtensor), registry_of(dtensor))


def _without_values(value: Any) -> Any:
    """Return a tensor of this shape and type that has no values; other leaves as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _kinds(entry: Named) -> tuple[tuple[str, bool], ...]:
    """Return the names in an optimizer's entry of a parameter, and whether they are tensors."""
    kinds = {str(name): isinstance(value, torch.Tensor) for name, value in entry.items()}
    return tuple(sorted(kinds.items()))


def _fits_parameter(value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value is a number, or a tensor with a number for each of a parameter's."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.layout is torch.strided and (value.numel() == 1 or value.shape == parameter.shape)


def _layout(value: Any) -> str:
    """Return how a tensor holds its values, as text; equal for all that can be copied into another."""
    if not isinstance(value, torch.Tensor):
        return ""
    kinds = {"complex": value.is_complex(), "quantized": value.is_quantized}
    return " ".join([str(value.layout), *(name for name, holds in kinds.items() if holds)])


def _are_versions(versions: Any) -> bool:
    """Return whether these are the version numbers of modules, which torch compares with others."""
    return isinstance(versions, Mapping) and all(
        isinstance(entry, Mapping) and isinstance(entry.get("version"), (int, type(None)))
        for entry in versions.values()
    )


def _is_optimizer_state(state: Any) -> bool:
    """Return whether a state has the form of one of an optimizer: entries by the names in groups."""
    groups, entries = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(entries, Mapping):
        return False
    names: list[Any] = []
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            return False
        names += group["params"]
    if not all(isinstance(name, (int, str)) for name in names) or len(set(names)) < len(names):
        return False
    return all(isinstance(entries.get(name, {}), Mapping) for name in names)


def _unlike_state(own: Any, saved: Any) -> list[str]:
    """Return the entries of a saved state that have other types than those of an object's own state.

    Lists must be there: an object of torch takes them out, where a number that is missing, as in a
    state of another version of torch, leaves that of the object.
    """
    if not isinstance(own, Mapping) or not isinstance(saved, Mapping):
        return [] if isinstance(saved, Mapping) else [f"its state is a {type(saved).__name__}"]
    found = [f"{name} is missing" for name, value in own.items() if name not in saved and _is_row(value)]
    return found + [
        f"{name} is {reprlib.repr(saved[name])}, where the object has {reprlib.repr(value)}"
        for name, value in own.items()
        if name in saved and not _is_like(value, saved[name])
    ]


def _is_like(own: Any, saved: Any) -> bool:
    """Return whether a value may take the place of another one, by their types."""
    if own is None or (saved is None and isinstance(own, bool)):
        return True
    if isinstance(own, (bool, str)):
        return isinstance(saved, type(own))
    if _is_number(own):
        return _is_number(saved)
    if isinstance(own, Mapping):
        return isinstance(saved, Mapping)
    if not _is_row(own):
        return True
    is_tuple = isinstance(own, tuple)
    if not _is_row(saved) or (is_tuple and len(own) != len(saved)):
        return False
    return not own or all(_is_like(own[0], item) for item in saved)


def _is_row(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shapes(state: Named) -> dict[str, Any]:
    return {name: getattr(each, "shape", None) for name, each in state.items()}
