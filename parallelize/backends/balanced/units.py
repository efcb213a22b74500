"""Which submodules are placed as a whole, and the stage of each of their calls."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from torch import nn

__all__ = ["finest", "homes", "names_of", "parameter_bytes", "routes", "separate"]


def names_of(model: nn.Module) -> dict[int, str]:
    """id of each submodule -> the first of its names."""
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), name)
    return names


def finest(model: nn.Module) -> list[nn.Module]:
    """The submodules that have no submodules, in the order in which they were added."""
    return [module for module in model.modules() if module is not model and not any(True for _ in module.children())]


def separate(model: nn.Module, costs: Mapping[int, float], *, at_most: float) -> list[nn.Module]:
    """Submodules that together do all that submodules do, each a small part of it where it could be divided.

    Args:
        model: whose.
        costs: id of a module -> what its calls cost, seconds or bytes; of those that were called.
        at_most: a module that costs more is divided into the submodules it calls.
    """
    found: list[nn.Module] = []
    seen: set[int] = set()

    def divide(module: nn.Module) -> None:
        for child in module.children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            calls_others = any(id(each) in costs for each in child.modules() if each is not child)
            is_called = id(child) in costs
            if calls_others and not (is_called and costs[id(child)] <= at_most):
                divide(child)
            else:
                found.append(child)

    divide(model)
    return found


def routes(model: nn.Module, events: Sequence[str], bounds: Sequence[int]) -> dict[int, list[int]]:
    """id of an atom -> the stage of each of its calls.

    Args:
        model: whose submodules.
        events: names of the atoms, in the order of their calls.
        bounds: the events of stage j are `bounds[j]` to `bounds[j + 1]`.
    """
    modules = dict(model.named_modules())
    found: dict[int, list[int]] = {}
    for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for name in events[begin:end]:
            found.setdefault(id(modules[name]), []).append(stage)
    # What was not called while the events were recorded (an expert without tokens, layers after an early exit) belongs
    # to what was added before it.
    inside = {id(part) for name in dict.fromkeys(events) for part in modules[name].modules()}
    last = 0
    for module in model.modules():
        if id(module) in found:
            last = found[id(module)][-1]
        elif id(module) not in inside and module is not model and not any(True for _ in module.children()):
            found[id(module)] = [last]
    return found


def homes(model: nn.Module, table: Mapping[int, Sequence[int]]) -> list[tuple[nn.Module, int]]:
    """Every submodule with the stage on which its parameters and buffers live: where it is first called.

    What containers hold themselves goes to the stage of the first atom inside them.
    """
    found: list[tuple[nn.Module, int]] = []
    seen: set[int] = set()

    def settle(module: nn.Module, around: int | None) -> int:
        own = table[id(module)][0] if around is None and id(module) in table else around
        children = [settle(child, own) for child in module.children()]
        stage = own if own is not None else min(children, default=0)
        if id(module) not in seen:
            seen.add(id(module))
            found.append((module, stage))
        return stage

    settle(model, None)
    return found


def parameter_bytes(module: nn.Module, seen: Collection[int] = ()) -> dict[int, int]:
    """id of each parameter and buffer of a module that is not in `seen` -> its bytes."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return {id(each): each.numel() * each.element_size() for each in tensors if id(each) not in seen}
