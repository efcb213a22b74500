"""The units of a model: the submodules whose parameters fully_shard gathers together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.errors import ConfigError
from parallelize.gradients.autograd_graph import has_sparse_gradient
from parallelize.torch_patches.module_tensors import all_parameters

__all__ = ["refuse_gradients", "units_of"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def units_of(model: nn.Module, blocks: Any) -> list[nn.Module]:
    """Return the submodules that `FSDPBackend.blocks` selects for fully_shard, inner ones first."""
    submodules = list(model.modules())[:0:-1]
    if blocks is None:
        chosen = list(dict.fromkeys(_members(model)))
    elif isinstance(blocks, int):
        sizes = {
            module: sum(each.numel() for each in all_parameters(module)) for module in submodules
        }
        chosen = [
            each
            for each in submodules
            if sizes[each] >= blocks and not isinstance(each, _CONTAINERS)
        ]
    else:
        chosen = [each for each in submodules if isinstance(each, tuple(blocks))]
        if not chosen:
            raise ConfigError(
                f"FSDPBackend(blocks={[each.__name__ for each in blocks]!r})",
                why=f"no submodule of {type(model).__name__} has one of these classes",
                fix="pass the classes of its repeated blocks, or leave blocks=None",
            )
    return chosen


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of lists of modules, and those with parts of other containers, that are in no other member."""
    for child in module.children():
        is_whole = isinstance(module, nn.ModuleList) or (
            _is_container(module) and any(child.children())
        )
        yield from [child] if is_whole and not _is_container(child) else _members(child)


def _is_container(module: nn.Module) -> bool:
    has_blocks = type(module) is nn.Sequential and any(any(each.children()) for each in module)
    return has_blocks or isinstance(module, _CONTAINERS)


def refuse_gradients(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse gradients that fully_shard cannot reduce: sparse ones, and several dtypes in a unit."""
    for name, module in model.named_modules():
        if has_sparse_gradient(module) and module.weight.requires_grad:
            raise ConfigError(
                f"{name or type(model).__name__} has sparse=True under fsdp",
                why="fully_shard reduces dense gradients only",
                fix="use sparse=False, freeze it, or use backend='ddp'",
            )
    known = set[torch.Tensor]()
    for unit in (*units, model):
        dtypes = {
            each.dtype for each in all_parameters(unit) if each.requires_grad and each not in known
        }
        known.update(all_parameters(unit))
        if len(dtypes) > 1:
            raise ConfigError(
                f"trained parameters of {type(unit).__name__} are of {' and '.join(sorted(map(str, dtypes)))}",
                why="fully_shard reduces the gradients of a block as one tensor",
                fix="use the same dtype (complex as torch.view_as_real), choose FSDPBackend(blocks=[...]) "
                "so that they are in different blocks, or use backend='ddp'",
            )
