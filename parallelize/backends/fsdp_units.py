"""Which submodules of a model are gathered each on their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from parallelize.errors import ConfigError
from parallelize.runtime.gradients import has_sparse_gradient

__all__ = ["refuse_mixtures", "refuse_sparse_gradients", "refuse_ties", "units_of"]


def units_of(model: nn.Module, blocks: Any) -> list[nn.Module]:
    """The submodules that are gathered on their own, inner ones first."""
    below = [module for module in model.modules() if module is not model and any(True for _ in module.parameters())]
    if blocks is None:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        members = {child for each in lists for child in each}
        # A list in a member of a list (the experts of a layer) goes with its member.
        inside = {deep for each in members for deep in each.modules() if deep is not each}
        chosen = [module for module in below if module in members - inside]
    elif isinstance(blocks, int):
        containers = (nn.ModuleList, nn.ModuleDict)
        sizes = {module: sum(each.numel() for each in module.parameters()) for module in below}
        chosen = [module for module in below if sizes[module] >= blocks and not isinstance(module, containers)]
    else:
        chosen = [module for module in below if isinstance(module, tuple(blocks))]
        if not chosen:
            raise ConfigError(
                f"FSDPBackend(blocks={[kind.__name__ for kind in blocks]!r})",
                why=f"no submodule of {type(model).__name__} with parameters is of these classes",
                fix="name the classes of its repeated blocks, or leave blocks=None",
            )
    return chosen[::-1]


def refuse_ties(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """A parameter of two units would be sharded with one and left whole in the other."""
    home: dict[int, tuple[nn.Module, str]] = {}
    for unit, name, parameter in _homes(model, units):
        first_unit, first = home.setdefault(id(parameter), (unit, name))
        if first_unit is not unit:
            raise ConfigError(
                f"{first} and {name} of {type(model).__name__} are one parameter in two blocks",
                why="a parameter is gathered with one block only",
                fix="choose FSDPBackend(blocks=...) so that both are in the same block, or in none",
            )


def refuse_mixtures(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """The gradients of a unit travel as one tensor, and so in one type."""
    firsts: dict[nn.Module, tuple[str, nn.Parameter]] = {}
    for unit, name, parameter in _homes(model, units):
        if parameter.requires_grad:
            first, other = firsts.setdefault(unit, (name, parameter))
            if other.dtype is not parameter.dtype:
                raise ConfigError(
                    f"{first} of {type(model).__name__} is {other.dtype} and {name} is {parameter.dtype}",
                    why="fully_shard gathers the parameters of a block together, and reduces their gradients as one",
                    fix="keep both in one type (a complex one as torch.view_as_real), choose FSDPBackend(blocks=[...]) "
                    "so that they are in different blocks, or use backend='ddp'",
                )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Parts are cut from dense gradients."""
    for name, module in model.named_modules():
        if has_sparse_gradient(module) and module.weight.requires_grad:
            raise ConfigError(
                f"{name or type(model).__name__} has sparse=True under fsdp",
                why="fully_shard reduces dense gradients only",
                fix="use sparse=False, freeze it, or use backend='ddp'",
            )


def _homes(model: nn.Module, units: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Of each place of a parameter the innermost unit around it, or the model; its name; the parameter."""
    innermost: dict[nn.Module, nn.Module] = {}
    for unit in units:
        for module in unit.modules():
            innermost.setdefault(module, unit)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield innermost.get(module, model), f"{path}.{name}".lstrip("."), parameter
