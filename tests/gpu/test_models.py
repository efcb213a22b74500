"""Backends on a GPU: two ranks share one device over gloo, and DataParallel over devices [0, 0]."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from zoo import ZOO, Mlp

from parallelize import (
    DDP2Backend,
    DDPBackend,
    DPBackend,
    FSDPBackend,
    device,
    distributed,
    parallel_model,
    rank,
    shard_loader,
)
from parallelize.cli import doctor
from parallelize.cluster.devices import probe
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.plugins.base import Backend
from parallelize.run import context
from parallelize.run.context import Runtime

pytestmark = pytest.mark.gpu

TWICE = (torch.device("cuda", 0), torch.device("cuda", 0))


def on_one_gpu(backend: Backend, **options: Any) -> Any:
    """Decorate a function to run on two ranks, both on the first GPU."""
    return distributed(backend=backend, gpus=[0, 0], process_group_backend="gloo", **options)


def twice_in_one_process(backend: Backend, *, world: World) -> Any:
    """Activate a run in which this process drives the first GPU as if it were two."""
    config = Config.parse(backend=backend, gpus=[0, 0], process_group_backend="gloo", num_nodes=world.num_nodes)
    return context.activate(Runtime(world, Layout(config, world.num_nodes, (TWICE,))))


def seeded(make: Any) -> Any:
    torch.manual_seed(7)
    return make()


def batch_chunk(animal: str, *, step: int, chunks: int, index: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(100 + step)
    return tuple(column.chunk(chunks)[index] for column in ZOO[animal].batch(8))


def train(model: nn.Module, animal: str, *, chunks: int, index: int, on: str = "cuda") -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        batch = (column.to(on) for column in batch_chunk(animal, step=step, chunks=chunks, index=index))
        ZOO[animal].loss(model(*batch)).backward()
        optimizer.step()
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def train_alone(animal: str) -> dict[str, torch.Tensor]:
    return train(seeded(ZOO[animal].make).cuda(), animal, chunks=1, index=0)


def assert_close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("animal", [name for name in ZOO if ZOO[name].is_exact])
@pytest.mark.parametrize("backend", [DDPBackend(), FSDPBackend()], ids=["ddp", "fsdp"])
def test_two_ranks_train_what_one_trains(backend: Backend, animal: str) -> None:
    """Two ranks, each with half of every batch, train the weights of one process with the full batches."""

    @on_one_gpu(backend)
    def run() -> dict[str, torch.Tensor]:
        model = seeded(ZOO[animal].make)
        with parallel_model(model):
            assert next(model.parameters()).is_cuda
            train(model, animal, chunks=2, index=rank(), on="cpu")  # the block moves the inputs to the device
        return {name: value.cpu() for name, value in model.state_dict().items()}

    for weights in run.all_ranks():
        assert_close(weights, train_alone(animal))


@pytest.mark.parametrize("animal", [name for name in ZOO if ZOO[name].is_exact])
def test_dp_trains_what_one_device_trains(animal: str) -> None:
    """DataParallel over [0, 0] trains the weights of one device, with outputs in any container."""
    model = seeded(ZOO[animal].make)
    with twice_in_one_process(DPBackend(), world=World()), parallel_model(model):
        weights = train(model, animal, chunks=1, index=0)
    assert_close(weights, train_alone(animal))


def test_dp_splits_a_batch_evenly() -> None:
    """A batch of 32 is 16 on each device; one smaller than the number of devices runs on as many as it has samples."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.sizes: list[int] = []

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.sizes.append(len(x))  # one list, shared by the replicas
            return self.layer(x), x.mean()

    model = Counting()
    with twice_in_one_process(DPBackend(), world=World()), parallel_model(model):
        output, mean = model(torch.arange(32.0)[:, None])
        assert model.sizes == [16, 16]
        assert output.shape == (32, 1)
        assert mean.item() == pytest.approx(15.5)
        output, mean = model(torch.ones(1, 1))
        assert model.sizes == [16, 16, 1]
        assert copy.deepcopy(model)(torch.ones(3, 1, device="cuda"))[0].shape == (3, 1)
        with torch.no_grad():
            model(torch.arange(4.0)[:, None])
        assert model.sizes[-2:] == [2, 2]


def test_ddp2_sees_the_batch_of_its_node() -> None:
    """A contrastive loss compares all 4 samples of a node, on two devices; gradients are averaged over two nodes.

    Under ddp, noise-contrastive estimation would compare each sample with the 2 of its device only.
    """

    def nce(encoded: torch.Tensor) -> torch.Tensor:
        similarity = encoded @ encoded.roll(1, dims=1).T
        return nn.functional.cross_entropy(similarity, torch.arange(len(encoded), device=encoded.device))

    @on_one_gpu(DDPBackend())
    def run() -> tuple[list[float], dict[str, torch.Tensor]]:
        world = World(rank=rank(), node_rank=rank(), world_size=2)
        model = seeded(lambda: nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        with twice_in_one_process(DDP2Backend(), world=world), parallel_model(model):
            for step in range(3):
                optimizer.zero_grad()
                encoded = model(batch_chunk("mlp", step=step, chunks=2, index=rank())[0])
                assert len(encoded) == 4
                loss = nce(encoded)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        dist.barrier()
        return losses, {name: value.cpu() for name, value in model.state_dict().items()}

    ranks = run.all_ranks()
    model = seeded(lambda: nn.Linear(6, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses = [nce(model(batch_chunk("mlp", step=step, chunks=2, index=node)[0].cuda())) for node in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
        assert [each[0][step] for each in ranks] == pytest.approx([loss.item() for loss in losses], rel=1e-4)
    for _, weights in ranks:
        assert_close(weights, {name: value.cpu() for name, value in model.state_dict().items()})


def test_sync_batchnorm_sees_all_ranks() -> None:
    """Two ranks with half a batch each normalise over the full batch."""

    @on_one_gpu(DDPBackend())
    def run() -> dict[str, torch.Tensor]:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(seeded(ZOO["convnet"].make))
        with parallel_model(model):
            return train(model, "convnet", chunks=2, index=rank())

    for weights in run.all_ranks():
        assert_close(weights, train_alone("convnet"))


def test_a_legacy_script_uses_the_gpu_it_sees() -> None:
    """On one GPU without a launcher, model and inputs are moved; the current device is restored after the block."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = torch.cuda.current_device()
    with parallel_model(model, gpus=1):
        assert probe().count >= 1
        output = model(torch.ones(2, 6))
        assert output.is_cuda
        output.mean().backward()
        optimizer.step()
    assert torch.cuda.current_device() == before
    assert next(model.parameters()).is_cuda


def test_arguments_arrive_on_the_device_of_their_rank() -> None:
    """Each rank gets tensors on its own device, also where ranks share one, and the worker waits for all devices."""
    gpus = [0, 0, 1] if torch.cuda.device_count() > 1 else [0, 0]

    @distributed(gpus=gpus, process_group_backend="gloo")
    def where(x: torch.Tensor) -> tuple[str, str, float]:
        return str(x.device), str(device()), x.sum().item()

    assert where.all_ranks(torch.ones(2, device="cuda")) == [(f"cuda:{each}", f"cuda:{each}", 2.0) for each in gpus]


def test_doctor_names_gpus_that_slurm_hides() -> None:
    """In a task of its own GPU, which another task cannot open, though torch sees no pair without access."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    found = list(doctor.gpus({**slurm, "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"}))
    (hidden,) = (each for each in found if "Slurm hides" in each.what)
    assert "no peer access" in hidden.why
    assert "--gpus-per-node=2" in hidden.fix


def test_doctor_exchanges_tensors_over_each_library() -> None:
    """Two ranks on the CPU over gloo, and two on two GPUs."""
    found = list(doctor.all_reduce(os.environ))
    assert [each.status for each in found] == ["ok"] * (2 if torch.cuda.device_count() > 1 else 1)


def train_batches(samples: torch.Tensor) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model):
        for x in shard_loader(DataLoader(samples, batch_size=6)):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()


@pytest.mark.parametrize("backend", ["dp", "ddp"])
def test_a_call_is_compared_with_one_process(backend: str) -> None:
    """Two devices of one process, and two processes, make the steps of one process on one device."""
    train = distributed(backend=backend, gpus=[0, 0], process_group_backend="gloo")(train_batches)
    comparison = train.compare(2, torch.randn(48, 4))
    assert comparison.is_same, str(comparison)


class Mixed(nn.Module):
    """Has a sharded weight, parameters that are whole on every rank, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(()))
        self.order = nn.Parameter(torch.tensor([3, 2, 1, 0]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))[:, self.order] * self.scale


def test_a_model_comes_home_from_fsdp_whole() -> None:
    """A model of the CPU is one of the CPU after the block: parameters, gradients and buffers."""

    @on_one_gpu(FSDPBackend())
    def train() -> list[list[str]]:
        model = Mixed()
        parameters, buffers = list(model.parameters()), list(model.buffers())
        for _ in range(2):
            with parallel_model(model, buffers="rank0"):
                model(torch.randn(8, 4)).square().mean().backward()
            model(torch.randn(8, 4))
        assert [*map(id, parameters)] == [*map(id, model.parameters())]
        assert [*map(id, buffers)] == [*map(id, model.buffers())]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [[str(tensor.device) for tensor in tensors] for tensors in (parameters, buffers, gradients)]

    assert train() == [["cpu"] * 6, ["cpu"] * 3, ["cpu"] * 5]
