"""What the user's code inside a run does with process groups.

    init_process_group(...)        in a run: sets the timeout of the run's group, which exists
    destroy_process_group()        in a run: keeps that group, which the run destroys at its end
    new_group(...)                 gets the run's timeout, if the call has none

A script for torchrun calls the first two. The run's group serves tensors on the CPU and on the
run's devices, so that the script needs no other one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from parallelize.errors import ConfigError
from parallelize.torch_patches.private import replace_attribute

# torch's value of `rank` and `world_size` that stands for none.
_NOT_GIVEN = -1

_init = dist.init_process_group
destroy_group = dist.destroy_process_group


@contextlib.contextmanager
def replace_group_functions() -> Iterator[None]:
    """Replace the first two functions in all modules that have imported them.

    A run in a run changes nothing.
    """
    if dist.init_process_group is _init_once:
        yield
        return
    _exchange({_init: _init_once, destroy_group: _keep_default_group})
    try:
        yield
    finally:
        _exchange({_init_once: _init, _keep_default_group: destroy_group})


@contextlib.contextmanager
def timeout_of_new_groups(timeout: timedelta) -> Iterator[None]:
    """Give groups that the user makes in the block this timeout, in place of torch's defaults.

    Without this, a rank that waits in a group of the user's own ends after torch's ten minutes
    under NCCL, whatever timeout the user has set for the run.
    """
    torch_module = dist.distributed_c10d
    with contextlib.ExitStack() as replacements:
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            if getattr(torch_module, name) is not None:  # None: a torch without NCCL
                replacements.enter_context(replace_attribute(torch_module, name, timeout))
        yield


def _exchange(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replace functions by others, under their own names in all modules.

    Programs write `from torch.distributed import init_process_group` in any of their modules.
    """
    modules: list[object] = list(sys.modules.values())
    for module in modules:
        # Some packages put other objects there, whose attributes run code.
        if not isinstance(module, types.ModuleType):
            continue
        attributes = module.__dict__
        for name in ("init_process_group", "destroy_process_group"):
            function = attributes.get(name)
            if isinstance(function, types.FunctionType) and function in functions:
                attributes[name] = functions[function]


@functools.wraps(_init)
def _init_once(*args: Any, **kwargs: Any) -> None:
    """Set the timeout of the run's group, if there is one; else initialize one as torch does."""
    if not dist.is_initialized():
        _init(*args, **kwargs)
        return
    arguments = inspect.signature(_init).bind(*args, **kwargs).arguments
    # Such as "tcp://10.0.0.1:29500?rank=0&world_size=2".
    init_method = arguments.get("init_method") or ""
    options_in_url = dict(parse_qsl(urlsplit(init_method).query))
    of_run = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    for name, value_of_run in of_run.items():
        value = int(options_in_url.get(name, arguments.get(name, _NOT_GIVEN)))
        if value not in {_NOT_GIVEN, value_of_run}:
            raise ConfigError(
                f"init_process_group({name}={value}) on rank {dist.get_rank()} of a run of "
                f"{dist.get_world_size()} processes",
                why="the run has started its processes, and given each of them a rank",
                fix="pass neither rank nor world size, or those of the variables RANK and "
                "WORLD_SIZE",
            )
    if arguments.get("timeout") is not None:
        dist.distributed_c10d._set_pg_timeout(arguments["timeout"])


@functools.wraps(destroy_group)
def _keep_default_group(group: Any = None) -> None:
    """Destroy a group, unless it is the run's: collectives of the run are still to come."""
    if group is not None and group != dist.group.WORLD:
        destroy_group(group)
