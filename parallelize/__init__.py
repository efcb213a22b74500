"""Train a plain PyTorch function on every device, without changing its loop.

- Calls: `distributed`, which makes a `DistributedFunction`; `Job` of a submitted call; launchers
  with options: `SlurmLauncher`, `RayLauncher`, `SSHLauncher`, `LocalLauncher`
- Models: `parallel_model`, `no_sync`; backends with options: `DDPBackend`, `DDP2Backend`,
  `DPBackend`, `FSDPBackend`, `BalancedBackend`, `plan`, `Plan`, `AutoBackend`; mixed precision with
  options: `Amp`
- Data: `shard_loader`, which makes a `ShardedLoader`
- Checkpoints: `save`, `load`, `checkpoints`, `should_stop`
- This process: `rank`, `local_rank`, `world_size`, `is_main`, `device`
- Communication: `all_reduce`, `all_gather`, `broadcast`, `barrier`, `main_first`
- Errors: `ParallelizeError`, `ConfigError`, `LaunchError`, `MissingDependencyError`, `SyncError`,
  `WorkerError`

Authors of backends and launchers subclass the classes of `parallelize.plugins.base`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from parallelize.version import __version__

if TYPE_CHECKING:
    from parallelize.backends.auto.plugin import AutoBackend
    from parallelize.backends.balanced.plan import Plan, plan
    from parallelize.backends.balanced.plugin import BalancedBackend
    from parallelize.backends.ddp import DDP2Backend, DDPBackend
    from parallelize.backends.dp import DPBackend
    from parallelize.backends.fsdp.plugin import FSDPBackend
    from parallelize.checkpoint.checkpoints import checkpoints
    from parallelize.checkpoint.save_load import load, save
    from parallelize.collectives import all_gather, all_reduce, barrier, broadcast, main_first
    from parallelize.data.loader import ShardedLoader
    from parallelize.data.shard_loader import shard_loader
    from parallelize.decorator import DistributedFunction, distributed
    from parallelize.errors import (
        ConfigError,
        LaunchError,
        MissingDependencyError,
        ParallelizeError,
        SyncError,
        WorkerError,
    )
    from parallelize.launchers.local.launcher import LocalLauncher
    from parallelize.launchers.ray import RayLauncher
    from parallelize.launchers.slurm.job import Job
    from parallelize.launchers.slurm.launcher import SlurmLauncher
    from parallelize.launchers.ssh import SSHLauncher
    from parallelize.model import no_sync, parallel_model
    from parallelize.plugins.base import Amp
    from parallelize.run.context import device, is_main, local_rank, rank, world_size
    from parallelize.worker.preemption import should_stop

__all__ = [
    "Amp",
    "AutoBackend",
    "BalancedBackend",
    "ConfigError",
    "DDP2Backend",
    "DDPBackend",
    "DPBackend",
    "DistributedFunction",
    "FSDPBackend",
    "Job",
    "LaunchError",
    "LocalLauncher",
    "MissingDependencyError",
    "ParallelizeError",
    "Plan",
    "RayLauncher",
    "SSHLauncher",
    "ShardedLoader",
    "SlurmLauncher",
    "SyncError",
    "WorkerError",
    "__version__",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "checkpoints",
    "device",
    "distributed",
    "is_main",
    "load",
    "local_rank",
    "main_first",
    "no_sync",
    "parallel_model",
    "plan",
    "rank",
    "save",
    "shard_loader",
    "should_stop",
    "world_size",
]

_NAMES_BY_MODULE = {
    "backends.auto.plugin": "AutoBackend",
    "backends.balanced.plan": "Plan plan",
    "backends.balanced.plugin": "BalancedBackend",
    "backends.ddp": "DDP2Backend DDPBackend",
    "backends.dp": "DPBackend",
    "backends.fsdp.plugin": "FSDPBackend",
    "checkpoint.checkpoints": "checkpoints",
    "checkpoint.save_load": "load save",
    "collectives": "all_gather all_reduce barrier broadcast main_first",
    "data.loader": "ShardedLoader",
    "data.shard_loader": "shard_loader",
    "decorator": "DistributedFunction distributed",
    "errors": "ConfigError LaunchError MissingDependencyError ParallelizeError SyncError "
    "WorkerError",
    "launchers.local.launcher": "LocalLauncher",
    "launchers.ray": "RayLauncher",
    "launchers.slurm.job": "Job",
    "launchers.slurm.launcher": "SlurmLauncher",
    "launchers.ssh": "SSHLauncher",
    "model": "no_sync parallel_model",
    "plugins.base": "Amp",
    "run.context": "device is_main local_rank rank world_size",
    "worker.preemption": "should_stop",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    So the command line shows its help without importing torch.
    """
    for module, names in _NAMES_BY_MODULE.items():
        if name in names.split():
            globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
