"""init_process_group and destroy_process_group as called by the user's code inside a run.

A script for torchrun initializes the default process group. In a run this group exists already, for tensors on the
CPU and on the run's devices: the script's call sets its timeout, and the run destroys it at its end.
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

__all__ = ["destroy_group", "replace_group_functions", "timeout_of_new_groups"]

_init = dist.init_process_group
destroy_group = dist.destroy_process_group


@contextlib.contextmanager
def replace_group_functions() -> Iterator[None]:
    """Replace both functions in all modules that have imported them; a run in a run changes nothing."""
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

    Without this, a rank that waits in a group of the user's own ends after torch's ten minutes under
    NCCL, whatever timeout the user has set for the run.
    """
    torch_module = dist.distributed_c10d
    with contextlib.ExitStack() as replacements:
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            if getattr(torch_module, name) is not None:  # None: a torch without NCCL
                replacements.enter_context(replace_attribute(torch_module, name, timeout))
        yield


def _exchange(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    modules: list[object] = list(sys.modules.values())
    for names in [module.__dict__ for module in modules if isinstance(module, types.ModuleType)]:
        for name in ("init_process_group", "destroy_process_group"):
            if isinstance(names.get(name), types.FunctionType):
                names[name] = functions.get(names[name], names[name])


@functools.wraps(_init)
def _init_once(*args: Any, **kwargs: Any) -> None:
    if not dist.is_initialized():
        _init(*args, **kwargs)
        return
    arguments = inspect.signature(_init).bind(*args, **kwargs).arguments
    given = dict(parse_qsl(urlsplit(arguments.get("init_method") or "").query))
    for name, own in (("rank", dist.get_rank()), ("world_size", dist.get_world_size())):
        value = int(given.get(name, arguments.get(name, -1)))
        if value not in (-1, own):
            raise ConfigError(
                f"init_process_group({name}={value}) on rank {dist.get_rank()} of a run of {dist.get_world_size()} "
                "processes",
                why="the run has started its processes, and given each of them a rank",
                fix="pass neither rank nor world size, or those of the variables RANK and WORLD_SIZE",
            )
    if arguments.get("timeout") is not None:
        dist.distributed_c10d._set_pg_timeout(arguments["timeout"])


@functools.wraps(destroy_group)
def _keep_default_group(group: Any = None) -> None:
    if group is not None and group != dist.group.WORLD:
        destroy_group(group)
