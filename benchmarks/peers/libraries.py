"""Adapters: how each library calls a function in several CPU processes, and wraps a model and a loader there.

Each is used as its documentation shows; `None` where it has no such feature.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

__all__ = ["LIBRARIES", "Library"]


@dataclass(frozen=True, kw_only=True)
class Library:
    """Adapter for one library.

    Args:
        package: its import name.
        call: `call(processes, function, *args)`; returns the library's result.
        model: a context manager: `with model(m, optimizer) as (m, optimizer)`.
        loader: returns the object to iterate instead of a DataLoader.
        gathered: `gathered(loader, values)`: gathers per-sample values of all ranks, each sample once.
        snippet: source that defines `call(function)`, for programs that are not in a file.
        on_hosts: `on_hosts(names, ssh_config, function)`: calls it once on each of the hosts, which `ssh` reaches by a
            configuration file; returns the values of all ranks.
    """

    package: str
    call: Callable[..., Any]
    snippet: str
    model: Callable[..., Any] | None = None
    loader: Callable[[DataLoader], Any] | None = None
    gathered: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    on_hosts: Callable[[Sequence[str], Path, Callable[[], Any]], list[Any]] | None = None


def _ours(processes: int, function: Callable[..., Any], *args: Any) -> Any:
    from parallelize import distributed

    return distributed(processes=processes)(function)(*args)


@contextlib.contextmanager
def _our_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Module, Any]]:
    from parallelize import parallel_model

    with parallel_model(model):
        yield model, optimizer


def _our_loader(loader: DataLoader) -> Any:
    from parallelize import shard_loader

    if isinstance(loader.sampler, DistributedSampler):  # a pre-sharded loader has its own tail
        return shard_loader(loader)
    return shard_loader(loader, tail="exact")


def _ours_on_hosts(names: Sequence[str], ssh_config: Path, function: Callable[[], Any]) -> list[Any]:
    from parallelize import SSHLauncher, distributed

    env = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    launcher = SSHLauncher(hosts=names, ssh=("ssh", "-F", str(ssh_config)), env=env)
    return distributed(launcher=launcher, processes=1)(function).all_ranks()


def _fabric(processes: int, function: Callable[..., Any], *args: Any) -> Any:
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu", devices=processes, strategy="ddp_spawn").launch(_with_fabric, function, args)


_launched: list[Any] = []  # the Fabric or Accelerator object of this process, for the adapters


def _with_fabric(fabric: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _launched.append(fabric)
    return function(*args)


@contextlib.contextmanager
def _fabric_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    yield _launched[-1].setup(model, optimizer)


def _fabric_loader(loader: DataLoader) -> Any:
    return _launched[-1].setup_dataloaders(loader)


def _fabric_gathered(_loader: Any, values: torch.Tensor) -> torch.Tensor:
    return _launched[-1].all_gather(values).flatten()


def _accelerate(processes: int, function: Callable[..., Any], *args: Any) -> Any:
    from accelerate import debug_launcher

    return debug_launcher(_with_accelerator, (function, args), num_processes=processes)


def _with_accelerator(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from accelerate import Accelerator

    _launched.append(Accelerator(cpu=True))
    return function(*args)


@contextlib.contextmanager
def _accelerate_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    yield _launched[-1].prepare(model, optimizer)


def _accelerate_loader(loader: DataLoader) -> Any:
    return _launched[-1].prepare(loader)


def _accelerate_gathered(_loader: Any, values: torch.Tensor) -> torch.Tensor:
    return _launched[-1].gather_for_metrics(values)


def _ignite(processes: int, function: Callable[..., Any], *args: Any) -> Any:
    from ignite import distributed as idist

    with idist.Parallel(backend="gloo", nproc_per_node=processes) as parallel:
        return parallel.run(_with_rank, function, args)


def _with_rank(_local_rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


@contextlib.contextmanager
def _ignite_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    from ignite import distributed as idist

    yield idist.auto_model(model), idist.auto_optim(optimizer)


def _ignite_loader(loader: DataLoader) -> Any:
    from ignite import distributed as idist

    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    return idist.auto_dataloader(loader.dataset, batch_size=loader.batch_size * idist.get_world_size(), sampler=sampler)


def _ignite_gathered(_loader: Any, values: torch.Tensor) -> torch.Tensor:
    from ignite import distributed as idist

    gathered = idist.all_gather(values)
    assert isinstance(gathered, torch.Tensor)
    return gathered


def _torchrunx(processes: int, function: Callable[..., Any], *args: Any) -> Any:
    from torchrunx import Launcher

    launcher = Launcher(hostnames=["localhost"], workers_per_host=processes, backend="gloo")
    return launcher.run(function, *args).rank(0)


def _torchrunx_on_hosts(names: Sequence[str], ssh_config: Path, function: Callable[[], Any]) -> list[Any]:
    from torchrunx import Launcher

    launcher = Launcher(hostnames=list(names), workers_per_host=1, ssh_config_file=ssh_config, backend="gloo")
    return launcher.run(function).index(0)


def _ray(processes: int, function: Callable[..., Any], *args: Any) -> Any:
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=processes, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        trainer = TorchTrainer(
            lambda config: function(*config["args"]),
            train_loop_config={"args": args},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=processes),
        )
        return trainer.fit().return_value
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _ray_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    from ray.train.torch import prepare_model

    yield prepare_model(model), optimizer


def _ray_loader(loader: DataLoader) -> Any:
    from ray.train.torch import prepare_data_loader

    return prepare_data_loader(loader)


def _monarch(processes: int, function: Callable[..., Any], *args: Any) -> Any:
    from monarch.actor import Actor, endpoint, this_host
    from monarch.spmd import setup_torch_elastic_env

    class Runner(Actor):
        @endpoint
        def run(self) -> Any:
            torch.distributed.init_process_group("gloo")
            return function(*args)

    meshes = this_host().spawn_procs(per_host={"gpus": processes})
    setup_torch_elastic_env(meshes)
    try:
        return next(iter(meshes.spawn("runner", Runner).run.call().get().values()))
    finally:
        meshes.stop().get()


LIBRARIES = {
    "parallelize": Library(
        package="parallelize",
        call=_ours,
        model=_our_model,
        loader=_our_loader,
        gathered=lambda loader, values: loader.gather(values),
        on_hosts=_ours_on_hosts,
        snippet="from parallelize import distributed\ncall = lambda f: distributed(processes=2)(f)()",
    ),
    "Fabric": Library(
        package="lightning_fabric",
        call=_fabric,
        model=_fabric_model,
        loader=_fabric_loader,
        gathered=_fabric_gathered,
        snippet="from lightning_fabric import Fabric\n"
        "call = Fabric(accelerator='cpu', devices=2, strategy='ddp_spawn').launch",
    ),
    "Accelerate": Library(
        package="accelerate",
        call=_accelerate,
        model=_accelerate_model,
        loader=_accelerate_loader,
        gathered=_accelerate_gathered,
        snippet="from accelerate import debug_launcher\ncall = lambda f: debug_launcher(f, num_processes=2)",
    ),
    "ignite": Library(
        package="ignite",
        call=_ignite,
        model=_ignite_model,
        loader=_ignite_loader,
        gathered=_ignite_gathered,
        snippet="from ignite import distributed as idist\n"
        "def call(f):\n    with idist.Parallel(backend='gloo', nproc_per_node=2) as p: return p.run(f)",
    ),
    "Ray Train": Library(
        package="ray",
        call=_ray,
        model=_ray_model,
        loader=_ray_loader,
        snippet="from ray.train import ScalingConfig\nfrom ray.train.torch import TorchConfig, TorchTrainer\n"
        "call = lambda f: TorchTrainer(lambda: f(), torch_config=TorchConfig(backend='gloo'), "
        "scaling_config=ScalingConfig(num_workers=2)).fit().return_value",
    ),
    "Monarch": Library(
        package="monarch",
        call=_monarch,
        snippet="from monarch.actor import Actor, endpoint, this_host\n"
        "class Runner(Actor):\n    @endpoint\n    def run(self, f): return f()\n"
        "def call(f):\n    procs = this_host().spawn_procs(per_host={'gpus': 2})\n"
        "    return next(iter(procs.spawn('runner', Runner).run.call(f).get().values()))",
    ),
    "torchrunx": Library(
        package="torchrunx",
        call=_torchrunx,
        on_hosts=_torchrunx_on_hosts,
        snippet="from torchrunx import Launcher\n"
        "call = lambda f: Launcher(hostnames=['localhost'], workers_per_host=2, backend='gloo').run(f).rank(0)",
    ),
}
