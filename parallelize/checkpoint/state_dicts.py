"""What the state of a model, an optimizer, or any other thing with a state is, and how it gets it back."""

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
from parallelize.checkpoint.safe_types import is_in_parts
from parallelize.errors import ConfigError, Fault
from parallelize.inplace.forward_routing import route_of
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.gradients import parameters_of

__all__ = ["VALUE", "State", "needs_all_ranks", "state_of"]

VALUE = "value"
"""The kind of what has no state of its own: a number, a text, a tensor, containers of them."""


class State(abc.ABC):
    """The state of one kind of thing."""

    kind: ClassVar[str]

    @abc.abstractmethod
    def take(self, thing: Any) -> Any:
        """The state of a thing; it shares tensors with it."""

    def faults(self, thing: Any, state: Any) -> Iterator[str]:
        """Why a thing cannot take a state, a phrase each; it is not changed."""
        del thing, state
        yield from ()

    def homes(self, thing: Any, state: Any) -> Iterator[tuple[Any, Any]]:
        """Of each value of a state that goes into a tensor in parts: the value, and that tensor."""
        del thing, state
        yield from ()

    def may_refuse(self, thing: Any) -> bool:
        """Whether a user's own code takes the state, which may raise though there is no fault in it."""
        del thing
        return True

    @abc.abstractmethod
    def put(self, thing: Any, state: Any) -> None:
        """Give a thing a state in which there is no fault; it keeps no tensor of it."""

    def refuse(self, name: str, thing: Any, entry: Entry) -> Iterator[Fault]:
        """Every fault of giving a thing what was saved under a name."""
        if entry.kind != self.kind:
            yield Fault(
                f"{name}={type(thing).__name__}(...), where the checkpoint holds a {entry.kind}",
                why="their states have nothing in common",
                fix="pass to load() what was passed to save(), under the same names",
            )
            return
        for each in self.faults(thing, entry.state):
            yield Fault(
                f"{name}: {each}",
                why=f"the checkpoint was saved of another {entry.name_of_class}, or of one made differently",
                fix=f"make the {type(thing).__name__} as it was when it was saved, or leave {name}= out",
            )


class _ModelState(State):
    kind = "model"

    def take(self, thing: Any) -> Any:
        state = thing.state_dict()
        route = route_of(thing)
        return {
            "tensors": dict(state),
            "versions": dict(getattr(state, "_metadata", {})),
            "precision": {} if route is None else route.inner.session.state_dict(),
        }

    def faults(self, thing: Any, state: Any) -> Iterator[str]:
        saved, own = state["tensors"], thing.state_dict()
        missing, unknown = [key for key in own if key not in saved], [key for key in saved if key not in own]
        if missing:
            yield f"no {_listed(missing)} in the checkpoint"
        if unknown:
            yield f"the checkpoint has {_listed(unknown)}, the model has not"
        differing = [
            f"{key} has shape {tuple(saved[key].shape)} in the checkpoint, {tuple(value.shape)} in the model"
            for key, value in own.items()
            if isinstance(value, torch.Tensor) and key in saved and not _fits(saved[key].shape, value)
        ]
        if differing:
            yield _listed(differing)

    def homes(self, thing: Any, state: Any) -> Iterator[tuple[Any, Any]]:
        for name, parameter in thing.named_parameters(remove_duplicate=False):
            if is_in_parts(parameter) and name in state["tensors"]:
                yield state["tensors"][name], parameter

    def may_refuse(self, thing: Any) -> bool:
        if any(map(is_lazy, (*thing.parameters(), *thing.buffers()))):
            return False  # it may, but could not be given back that it has no values yet
        return not all(_is_trusted(each) for module in thing.modules() for each in _loaders(module))

    def put(self, thing: Any, state: Any) -> None:
        tensors: OrderedDict[str, Any] = OrderedDict(state["tensors"])
        tensors._metadata = state["versions"]  # type: ignore[attr-defined]  # where load_state_dict looks for it
        thing.load_state_dict(tensors)
        route = route_of(thing)
        if route is not None:
            route.inner.session.load_state_dict(state["precision"])


class _OptimizerState(State):
    kind = "optimizer"

    def take(self, thing: Any) -> Any:
        return {"state": thing.state_dict(), "class": type(thing).__name__, "shapes": _shapes(thing)}

    def faults(self, thing: Any, state: Any) -> Iterator[str]:
        if type(thing).__name__ != state["class"]:
            yield f"it was {state['class']} and is {type(thing).__name__}"
        saved, own = state["shapes"], [group["params"] for group in thing.param_groups]
        if [len(group) for group in saved] != [len(group) for group in own]:
            yield f"it had groups of {_sizes(saved)} parameters and has groups of {_sizes(own)}"
            return
        for number, (before, now) in enumerate(zip(chain(*saved), chain(*own), strict=True)):
            if not _fits(before, now):
                yield f"its parameter {number} had shape {tuple(before)} and has {tuple(now.shape)}"

    def homes(self, thing: Any, state: Any) -> Iterator[tuple[Any, Any]]:
        of_index = _of_index(thing, state["state"])
        for index, entries in state["state"]["state"].items():
            parameter = of_index.get(index)
            if parameter is not None and is_in_parts(parameter):
                values = entries.values() if isinstance(entries, dict) else ()
                yield from ((each, parameter) for each in values if getattr(each, "shape", None) == parameter.shape)

    def may_refuse(self, thing: Any) -> bool:
        return not _is_trusted(thing.load_state_dict)

    def put(self, thing: Any, state: Any) -> None:
        saved = state["state"]
        of_index = _of_index(thing, saved)
        each_state = {index: _placed(entries, like=of_index.get(index)) for index, entries in saved["state"].items()}
        thing.load_state_dict({**map_leaves(_copied, {**saved, "state": {}}), "state": each_state})
        if each_state:
            thing._opt_called = True  # it has stepped, in another process: schedulers ask this before they warn


class _ThingState(State):
    kind = "state_dict"

    def take(self, thing: Any) -> Any:
        return thing.state_dict()

    def put(self, thing: Any, state: Any) -> None:
        thing.load_state_dict(map_leaves(_copied, state))


def state_of(thing: Any) -> State | None:
    """What takes and puts the state of a thing; None: it is a plain value."""
    if isinstance(thing, nn.Module):
        return _ModelState()
    if isinstance(thing, torch.optim.Optimizer):
        return _OptimizerState()
    # Asked of the class: a loader of shard_loader answers for the user's loader where it has no answer of its own.
    if callable(getattr(type(thing), "state_dict", None)) and callable(getattr(type(thing), "load_state_dict", None)):
        return _ThingState()
    if isinstance(thing, torch.utils.data.DataLoader):
        raise ConfigError(
            f"the position of a {type(thing).__name__}",
            why="it does not know how far it was read",
            fix="pass what shard_loader returns, as in loader = shard_loader(loader); save(path, loader=loader)",
        )
    return None


def needs_all_ranks(thing: Any) -> bool:
    """Whether each rank holds only a part of a thing."""
    if isinstance(thing, nn.Module):
        return any(map(is_in_parts, (*thing.parameters(), *thing.buffers())))
    if isinstance(thing, torch.optim.Optimizer):
        return any(map(is_in_parts, parameters_of(thing)))
    return any(map(is_in_parts, leaves(thing)))


def _loaders(module: nn.Module) -> Iterator[Any]:
    """All that runs when a module gets its state."""
    yield from (module.load_state_dict, module._load_from_state_dict, module.set_extra_state)
    yield from module._load_state_dict_pre_hooks.values()
    yield from module._load_state_dict_post_hooks.values()


def _is_trusted(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(("torch.", "parallelize."))


def _of_index(optimizer: Any, saved: Any) -> dict[int, Any]:
    """The parameter that each index of a saved state stands for."""
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    return dict(zip(indices, parameters_of(optimizer), strict=True))


def _placed(entries: Any, *, like: Any) -> Any:
    """One parameter's state: a copy, or this rank's part of what goes with a parameter in parts."""
    if like is None or not is_in_parts(like):
        return map_leaves(_copied, entries)
    from parallelize.backends.sharded_tensors import converted  # half a second to import: only where there are parts

    return {
        name: value if is_in_parts(value) else converted(value, of=like, like=like) for name, value in entries.items()
    }


def _copied(value: Any) -> Any:
    # What is read from a file is pages of the file: kept, they would hold it open and be read from the disk in a step.
    return value.clone() if isinstance(value, torch.Tensor) else value


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    return [[list(each.shape) for each in group["params"]] for group in optimizer.param_groups]


def _fits(shape: Sequence[int], own: torch.Tensor) -> bool:
    """Whether values of a shape go into a tensor; into one that a lazy module has not made yet, any do."""
    return is_lazy(own) or list(own.shape) == list(shape)


def _sizes(groups: Sequence[Sequence[Any]]) -> str:
    return " and ".join(str(len(group)) for group in groups) or "no"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
