"""What torch's functions for process groups do when the user's code calls them in a run.

    init_process_group(...)        keeps the run's default group, and sets the timeout of that group
    destroy_process_group()        keeps the run's default group, which the run destroys at its end
    new_group(...)                 makes a group with the run's timeout, if the call has none

A script that was written for torchrun calls the first two. It needs no group of its own, because
the run's group serves tensors on the CPU and on the run's devices.
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

# torch's default of `rank` and `world_size`: the caller has passed none.
_NOT_GIVEN = -1

_init = dist.init_process_group
destroy_group = dist.destroy_process_group


@contextlib.contextmanager
def replace_group_functions() -> Iterator[None]:
    """In the context, replace init_process_group and destroy_process_group in all modules.

    A worker enters this before it imports the user's modules, and a run enters it, too. Inside
    another such context, this one does nothing.
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
    """In the context, make a timeout the default of new groups, in place of torch's defaults.

    Without this, a rank that waits in a group of the user's own ends after torch's ten minutes
    under NCCL, whatever timeout the user has set for the run.
    """
    torch_module = dist.distributed_c10d
    with contextlib.ExitStack() as replacements:
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            # A torch without NCCL has None as the timeout of NCCL's groups.
            if getattr(torch_module, name) is not None:
                replacements.enter_context(replace_attribute(torch_module, name, timeout))
        yield


def _exchange(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replace the two functions in all modules that have them, under the functions' own names.

    A replacement in torch.distributed alone would not reach a program that has written
    `from torch.distributed import init_process_group`.

    Args:
        functions: function -> its replacement.
    """
    modules: list[object] = list(sys.modules.values())
    for module in modules:
        # Some packages put other objects into sys.modules, and reading an attribute may run code.
        if not isinstance(module, types.ModuleType):
            continue
        attributes = module.__dict__
        for name in ("init_process_group", "destroy_process_group"):
            function = attributes.get(name)
            if isinstance(function, types.FunctionType) and function in functions:
                attributes[name] = functions[function]


@functools.wraps(_init)
def _init_once(*args: Any, **kwargs: Any) -> None:
    """Replace init_process_group: set the timeout of the run's group, and make no other group.

    If there is no group yet, initialize one as torch does.

    Raises:
        ConfigError: the call has another rank or world size than this process has in the run.
    """
    if not dist.is_initialized():
        _init(*args, **kwargs)
        return
    arguments = inspect.signature(_init).bind(*args, **kwargs).arguments
    # The user may pass rank and world size in a URL: "tcp://10.0.0.1:29500?rank=0&world_size=2".
    init_method = arguments.get("init_method") or ""
    options_in_url = dict(parse_qsl(urlsplit(init_method).query))
    values_of_run = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    for name, value_of_run in values_of_run.items():
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
    """Replace destroy_process_group: destroy a group, unless it is the run's default group.

    The run needs its group until its end. None stands for all groups, as in torch.
    """
    if group is not None and group != dist.group.WORLD:
        destroy_group(group)
