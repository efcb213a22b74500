"""The units of a model: the submodules whose parameters fully_shard gathers together.

Transformer                    blocks=None selects the members of containers:
├── embed       Linear
├── layers      ModuleList     a container
│   ├── 0       Block          a unit
│   └── 1       Block          a unit
└── head        Linear
                               the parameters of `embed` and `head` are of the root
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from parallelize.errors import ConfigError
from parallelize.gradients.autograd_graph import has_sparse_gradient
from parallelize.torch_patches.module_tensors import all_named_parameters, all_parameters

Blocks = Sequence[type[nn.Module] | str] | int | None
"""The option `blocks` of FSDPBackend: classes and names, a least number of parameters, or None."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether fully_shard divides a parameter of a unit. Every rank holds the others whole.

    fully_shard has no rows to divide in a parameter without dimensions, and fails at parameters
    without elements. Of integers and booleans it would make a parameter that requires gradients
    (`_init_sharded_param` in torch's _fsdp_param.py), which torch refuses.
    """
    is_differentiable = parameter.is_floating_point() or parameter.is_complex()
    return parameter.ndim > 0 and parameter.numel() > 0 and is_differentiable


def units_of(model: nn.Module, blocks: Blocks) -> list[nn.Module]:
    """Return the submodules that `blocks` selects, inner ones first: fully_shard needs this order.

    Raises:
        ConfigError: no submodule has a name, or no submodule has one of the classes; or a list of
            modules is selected, which is not called itself.
    """
    if blocks is None:
        return list(dict.fromkeys(_members(model)))
    # torch lists modules before their submodules, and the model itself first.
    submodules = list(model.modules())[1:]
    submodules.reverse()
    if isinstance(blocks, int):
        return [module for module in submodules if _is_large(module, blocks)]
    classes = tuple(selector for selector in blocks if isinstance(selector, type))
    named: set[nn.Module] = set()
    for selector in blocks:
        if isinstance(selector, str):
            named.add(_submodule(model, selector))
    units = [module for module in submodules if isinstance(module, classes) or module in named]
    if not units:
        raise ConfigError(
            _shown(blocks),
            why=f"no submodule of {type(model).__name__} has one of these classes",
            fix="pass the classes of its repeated blocks, or leave blocks=None",
        )
    _refuse_containers(units, blocks)
    return units


def _submodule(model: nn.Module, name: str) -> nn.Module:
    """Return the submodule of a name.

    Raises:
        ConfigError: there is none.
    """
    submodules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name in submodules:
        return submodules[name]
    similar = difflib.get_close_matches(name, submodules) or dict(model.named_children())
    fix = f"use names of named_modules(), such as {', '.join(similar)}"
    if any(type(module).__name__ == name for module in submodules.values()):
        fix = "pass the class itself, without quotes"
    raise ConfigError(
        _shown([name]), why=f"{type(model).__name__} has no submodule of this name", fix=fix
    )


def _refuse_containers(units: Sequence[nn.Module], blocks: Sequence[type[nn.Module] | str]) -> None:
    """Refuse lists and dictionaries without a forward: fully_shard hooks the forward of a unit."""
    for unit in units:
        has_forward = type(unit).forward is not nn.Module.forward
        if isinstance(unit, _CONTAINERS) and not has_forward:
            raise ConfigError(
                _shown(blocks),
                why=f"a {type(unit).__name__} is not called itself, only its members are",
                fix="pass the classes or names of its members",
            )


def _shown(blocks: Sequence[type[nn.Module] | str]) -> str:
    """Return the option as errors show it."""
    names = [getattr(selector, "__name__", selector) for selector in blocks]
    return f"FSDPBackend(blocks={names!r})"


def _is_large(module: nn.Module, least: int) -> bool:
    """Whether a module has at least so many parameters, and is called itself.

    A container is not called, only its members are: hooks of fully_shard on it would never run.
    """
    size = sum(parameter.numel() for parameter in all_parameters(module))
    return size >= least and not isinstance(module, _CONTAINERS)


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost members of containers.

    All members of a ModuleList count. Members of other containers count if they have submodules: a
    Sequential is more often a list of small layers than one of blocks.
    """
    for child in module.children():
        is_member = isinstance(module, nn.ModuleList)
        if _is_container(module) and _has_submodules(child):
            is_member = True
        if is_member and not _is_container(child):
            yield child
        else:
            yield from _members(child)


def _is_container(module: nn.Module) -> bool:
    """Whether a module is a list or dictionary of modules, or a Sequential of blocks."""
    if isinstance(module, _CONTAINERS):
        return True
    return type(module) is nn.Sequential and any(map(_has_submodules, module))


def _has_submodules(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def refuse_gradients(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse gradients that fully_shard cannot reduce.

    Raises:
        ConfigError: a gradient is sparse, or the gradients of a unit are of several dtypes.
    """
    for name, module in model.named_modules():
        if has_sparse_gradient(module) and module.weight.requires_grad:
            raise ConfigError(
                f"{name or type(model).__name__} has sparse=True under fsdp",
                why="fully_shard reduces dense gradients only",
                fix="use sparse=False, freeze it, or use backend='ddp'",
            )
    of_inner_units: set[torch.Tensor] = set()
    for unit in (*units, model):
        dtypes = set()
        for parameter in all_parameters(unit):
            # Every rank holds the other parameters whole: they are of no unit.
            is_trained = parameter.requires_grad and is_sharded(parameter)
            if is_trained and parameter not in of_inner_units:
                dtypes.add(str(parameter.dtype))
        of_inner_units.update(all_parameters(unit))
        if len(dtypes) > 1:
            names = " and ".join(sorted(dtypes))
            raise ConfigError(
                f"trained parameters of {type(unit).__name__} are of {names}",
                why="fully_shard reduces the gradients of a block as one tensor",
                fix="use the same dtype (complex as torch.view_as_real), choose "
                "FSDPBackend(blocks=[...]) so that they are in different blocks, or use "
                "backend='ddp'",
            )


def refuse_one_byte_floats(model: nn.Module, device: torch.device) -> None:
    """Refuse parameters in float8 types where gloo would gather them, which does not know them."""
    for name, parameter in all_named_parameters(model):
        if device.type == "cpu" and parameter.is_floating_point() and parameter.itemsize == 1:
            raise ConfigError(
                f"{name} of {type(model).__name__} is {parameter.dtype} under fsdp on CPUs",
                why="gloo does not gather float types of one byte",
                fix="register it as a buffer, keep it as .view(torch.uint8), or use backend='ddp'",
            )
