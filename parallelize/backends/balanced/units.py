"""Units: the submodules that are not split further, and the stage of each of their calls."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from torch import nn

__all__ = [
    "border_units",
    "choose_units",
    "module_stages",
    "parameter_bytes",
    "unit_routes",
]

_FIRST_UNITS = 4


def choose_units(model: nn.Module, costs: Mapping[int, float], *, at_most: float) -> list[nn.Module]:
    """Return units: submodules that together cover the model, each of which costs little or cannot be split.

    Args:
        model: the user's model.
        costs: id of each called module -> cost of its calls, in seconds or bytes.
        at_most: a module that costs more than this is replaced by its submodules, if any of them is called.
    """
    found: list[nn.Module] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            calls_others = any(id(each) in costs for each in child.modules() if each is not child)
            is_called = id(child) in costs
            if calls_others and not (is_called and costs[id(child)] <= at_most):
                visit(child)
            else:
                found.append(child)

    visit(model)
    return found


def unit_routes(model: nn.Module, calls: Sequence[str], bounds: Sequence[int]) -> dict[int, list[int]]:
    """Return the stages of the calls of each unit, by the id of the unit.

    Args:
        model: the model that contains the units.
        calls: name of the unit of each call, in call order.
        bounds: stage j runs `calls[bounds[j]:bounds[j + 1]]`.
    """
    modules = dict(model.named_modules())
    found: dict[int, list[int]] = {}
    for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for name in calls[begin:end]:
            found.setdefault(id(modules[name]), []).append(stage)
    # Modules that were not called (an expert without tokens, layers after an early exit) are assigned to the stage of
    # the module that was added before them.
    inside = {id(part) for name in dict.fromkeys(calls) for part in modules[name].modules()}
    last = 0
    for module in model.modules():
        if id(module) in found:
            last = found[id(module)][-1]
        elif id(module) not in inside and module is not model and not any(True for _ in module.children()):
            found[id(module)] = [last]
    return found


def border_units(model: nn.Module, calls: Sequence[str], bounds: Sequence[int]) -> set[int]:
    """Return the ids of the first units, and of those before which the stage may change; arguments: `unit_routes`."""
    stages = [stage for stage, pair in enumerate(itertools.pairwise(bounds)) for _ in range(*pair)]
    modules = dict(model.named_modules())
    borders = {id(modules[name]) for name, one, other in zip(calls, [0, *stages], stages, strict=False) if one != other}
    called = {id(modules[name]) for name in calls}
    borders |= {id(modules[name]) for name in calls[:_FIRST_UNITS]}  # where the graphs of micro-batches are marked
    return borders | {unit for unit in unit_routes(model, calls, bounds) if unit not in called}


def module_stages(model: nn.Module, routes: Mapping[int, Sequence[int]]) -> list[tuple[nn.Module, int]]:
    """Return every submodule with the stage of its parameters and buffers: the stage of its first call.

    Parameters that a container owns itself are on the first stage of the units inside it.
    """
    found: list[tuple[nn.Module, int]] = []
    seen: set[int] = set()

    def assign_stage(module: nn.Module, parent_stage: int | None) -> int:
        own_stage = routes[id(module)][0] if parent_stage is None and id(module) in routes else parent_stage
        children = [assign_stage(child, own_stage) for child in module.children()]
        stage = own_stage if own_stage is not None else min(children, default=0)
        if id(module) not in seen:
            seen.add(id(module))
            found.append((module, stage))
        return stage

    assign_stage(model, None)
    return found


def parameter_bytes(module: nn.Module, seen: Collection[int] = ()) -> dict[int, int]:
    """Return the bytes of each parameter and buffer of a module, by its id; leave out ids in `seen`."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return {id(each): each.numel() * each.element_size() for each in tensors if id(each) not in seen}
