"""Units of fully_shard: the submodules whose parameters are all-gathered together, and checks of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from parallelize.errors import ConfigError
from parallelize.runtime.autograd_graph import has_sparse_gradient

__all__ = ["find_units", "refuse_mixed_dtypes", "refuse_sparse_gradients", "refuse_tied_parameters"]


def find_units(model: nn.Module, blocks: Any) -> list[nn.Module]:
    """Return the submodules that `FSDPOptions.blocks` selects for fully_shard, inner ones first."""
    candidates = [each for each in model.modules() if each is not model and any(True for _ in each.parameters())]
    if blocks is None:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        members = {child for each in lists for child in each}
        # The members of a nested list (the experts of a layer) belong to the unit of the outer list's member.
        nested = {descendant for each in members for descendant in each.modules() if descendant is not each}
        chosen = [module for module in candidates if module in members - nested]
    elif isinstance(blocks, int):
        containers = (nn.ModuleList, nn.ModuleDict)
        sizes = {module: sum(each.numel() for each in module.parameters()) for module in candidates}
        chosen = [module for module in candidates if sizes[module] >= blocks and not isinstance(module, containers)]
    else:
        chosen = [module for module in candidates if isinstance(module, tuple(blocks))]
        if not chosen:
            raise ConfigError(
                f"FSDPBackend(blocks={[each.__name__ for each in blocks]!r})",
                why=f"no submodule of {type(model).__name__} with parameters has one of these classes",
                fix="pass the classes of its repeated blocks, or leave blocks=None",
            )
    return chosen[::-1]


def refuse_tied_parameters(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse a parameter of two units: fully_shard would shard it in one and leave it full in the other."""
    first_seen: dict[int, tuple[nn.Module, str]] = {}
    for unit, name, parameter in _parameters_by_unit(model, units):
        first_unit, first = first_seen.setdefault(id(parameter), (unit, name))
        if first_unit is not unit:
            raise ConfigError(
                f"{first} and {name} of {type(model).__name__} are one parameter in two blocks",
                why="a parameter is gathered with one block only",
                fix="choose FSDPBackend(blocks=...) so that both are in the same block, or in none",
            )


def refuse_mixed_dtypes(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse a unit with several dtypes: its gradients are reduced as one tensor."""
    first_of_unit: dict[nn.Module, tuple[str, nn.Parameter]] = {}
    for unit, name, parameter in _parameters_by_unit(model, units):
        if parameter.requires_grad:
            first, other = first_of_unit.setdefault(unit, (name, parameter))
            if other.dtype is not parameter.dtype:
                raise ConfigError(
                    f"{first} of {type(model).__name__} is {other.dtype} and {name} is {parameter.dtype}",
                    why="fully_shard gathers the parameters of a block together, and reduces their gradients as one",
                    fix="use the same dtype (complex as torch.view_as_real), choose FSDPBackend(blocks=[...]) "
                    "so that they are in different blocks, or use backend='ddp'",
                )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Refuse trained embeddings with sparse=True, whose gradients fully_shard cannot reduce."""
    for name, module in model.named_modules():
        if has_sparse_gradient(module) and module.weight.requires_grad:
            raise ConfigError(
                f"{name or type(model).__name__} has sparse=True under fsdp",
                why="fully_shard reduces dense gradients only",
                fix="use sparse=False, freeze it, or use backend='ddp'",
            )


def _parameters_by_unit(model: nn.Module, units: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield (innermost unit, full name, parameter) per registered parameter; outside of all units, the model."""
    innermost_unit: dict[nn.Module, nn.Module] = {}
    for unit in units:
        for module in unit.modules():
            innermost_unit.setdefault(module, unit)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield innermost_unit.get(module, model), f"{path}.{name}".lstrip("."), parameter
