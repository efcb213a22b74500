"""Training on two GPUs, under every backend and precision: the weights are those of the CPU."""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import pytest
import torch
from cublas import take_workspaces
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import (
    BalancedBackend,
    ConfigError,
    DDP2Backend,
    DDPBackend,
    FSDPBackend,
    device,
    distributed,
    parallel_model,
    shard_loader,
)

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.timeout(300),  # the first test with some GPUs trains all cases on them
]

GPUS = [(0, 1), (1, 0), (1,)]
PER_DEVICE = {"ddp": DDPBackend(), "fsdp": FSDPBackend(), "fsdp, offloaded": FSDPBackend(cpu_offload=True)}
PER_NODE = {"ddp2": DDP2Backend()}
BACKENDS = {**PER_DEVICE, **PER_NODE}
# How far the weights may be from those of the CPU in fp32. Training changes them by more than 0.1.
TOLERANCES = {None: 1e-4, "fp16": 3e-3, "bf16": 3e-2, "O2": 3e-2}
STAGES = [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cpu", "cuda:1"), ("cuda:1", "cpu")]
PIPELINES = list(itertools.product(STAGES, TOLERANCES))

Weights = dict[str, torch.Tensor]


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16)


def fit(model: nn.Module, batches: Any, *, at: torch.device | str | None = None) -> Weights:
    """Train an epoch, and check that every batch is on the given device (None: anywhere)."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    for x, y in batches:
        assert at is None or x.device == y.device == torch.device(at)
        output = model(x).float()
        loss = F.cross_entropy(output, y.to(output.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights_of(model)


def weights_of(model: nn.Module) -> Weights:
    full = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.state_dict().items()}
    return {name: each.detach().to("cpu", torch.float32, copy=True) for name, each in full.items()}


@functools.cache
def cpu_weights() -> Weights:
    model = make()
    before = weights_of(model)
    after = fit(model, loader())
    assert (before["0.weight"] - after["0.weight"]).abs().max() > 0.1
    return after


def assert_trained(weights: Weights, *, amp: str | None) -> None:
    tolerance = TOLERANCES[amp]
    torch.testing.assert_close(weights, cpu_weights(), rtol=tolerance, atol=tolerance)


@functools.cache
def trained_by_ranks(gpus: tuple[int, ...], *, per_node: bool) -> list[dict[Any, Weights]]:
    """Train each case, one after the other, in the same ranks: return for each rank the weights of each case."""
    cases = PER_NODE if per_node else PER_DEVICE

    @distributed(gpus=list(gpus), backend=next(iter(cases.values())))
    def run() -> dict[Any, Weights]:
        found: dict[Any, Weights] = {}
        for name, backend in cases.items():
            for amp in TOLERANCES:
                model = make()
                with parallel_model(model, backend=backend, amp=amp):
                    fit(model, shard_loader(loader(), batch="global"), at=device())
                found[name, amp] = weights_of(model)
        found["uuid"] = str(torch.cuda.get_device_properties(device()).uuid)
        return found

    return run.all_ranks()


@pytest.mark.parametrize("amp", TOLERANCES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gpus", GPUS, ids=str)
def test_ranks_train_the_weights_of_the_cpu(gpus: tuple[int, ...], backend: str, amp: str | None) -> None:
    """Each rank ends with the weights that one process trains on the CPU."""
    for found in trained_by_ranks(gpus, per_node=backend in PER_NODE):
        assert_trained(found[backend, amp], amp=amp)


@pytest.mark.parametrize("gpus", GPUS, ids=str)
def test_ranks_run_on_the_gpus_that_were_asked_for(gpus: tuple[int, ...]) -> None:
    """The first rank is on the first GPU of the list, and so on, whatever its number in the worker."""
    wanted = [str(torch.cuda.get_device_properties(each).uuid) for each in gpus]
    assert [found["uuid"] for found in trained_by_ranks(gpus, per_node=False)] == wanted


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("origin", ["cpu", "meta"])
def test_a_device_holds_its_shards_and_one_unit(origin: str) -> None:
    """At the entry and at the end of a block under fsdp; afterwards the weights are where they came from."""

    @distributed(gpus=2, backend="fsdp")
    def run() -> list[int]:
        with torch.device(origin):
            model = Deep()
        take_workspaces(device())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with parallel_model(model, restore=origin == "cpu"):
            peaks = [torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]
            model(torch.ones(2, 512, device=device())).sum().backward()
            for each in model.parameters():
                each.grad = None
            torch.cuda.reset_peak_memory_stats()
        assert next(model.parameters()).is_cuda == (origin == "meta")
        return [*peaks, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]

    unit = 512 * 512 * 4
    for at_entry, in_the_block, at_end, after in run.all_ranks():
        assert in_the_block <= 4.1 * unit
        assert at_entry <= 5.1 * unit
        assert at_end <= 5.1 * unit
        assert after <= (0.1 if origin == "cpu" else 4.1) * unit


def test_uneven_batches_weigh_as_on_the_cpu() -> None:
    """Backward runs its hooks in a thread of the device, where the weight of the loss is known, too."""

    def uneven() -> DataLoader:
        return DataLoader(torch.utils.data.Subset(loader().dataset, range(51)), batch_size=16)

    @distributed(gpus=2)
    def run() -> list[Weights]:
        found = []
        for tail, average in (("weighted", "ranks"), ("exact", "tokens")):
            model = make()
            with parallel_model(model, average=average):
                fit(model, shard_loader(uneven(), batch="global", tail=tail))
            found.append(weights_of(model))
        return found

    expected = make()
    fit(expected, uneven())
    for found in run():
        torch.testing.assert_close(found, weights_of(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("amp", TOLERANCES)
@pytest.mark.parametrize("gpus", GPUS, ids=str)
def test_dp_trains_the_weights_of_the_cpu(gpus: tuple[int, ...], amp: str | None) -> None:
    """DataParallel in this process, whose model ends on the first GPU of the list."""
    model = make()
    with parallel_model(model, backend="dp", gpus=list(gpus), amp=amp):
        fit(model, shard_loader(loader()), at=torch.device("cuda", gpus[0]))
    assert {each.device for each in model.parameters()} == {torch.device("cuda", gpus[0])}
    assert_trained(weights_of(model), amp=amp)


@pytest.mark.parametrize("backend", ["dp", "ddp2"])
def test_dp_refuses_a_transform(backend: str) -> None:
    """Replicas run in threads, where torch.func's transforms are not."""
    model = make()
    refused = pytest.raises(ConfigError, match=r"(?s)inside a transform of torch\.func.*threads.*backend='ddp'")
    with parallel_model(model, backend=backend), refused:
        torch.func.vmap(model)(torch.randn(4, 8, device="cuda:0"))


@pytest.mark.parametrize(("stages", "amp"), PIPELINES, ids=str)
def test_balanced_trains_the_weights_of_the_cpu(stages: tuple[str, str], amp: str | None) -> None:
    """A pipeline over two devices, with batches where shard_loader puts them."""
    model = make()
    with parallel_model(model, backend=BalancedBackend(devices=stages, microbatches=2), amp=amp):
        fit(model, shard_loader(loader()))
    assert_trained(weights_of(model), amp=amp)


@pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="the pretended devices may lack peer access")
@pytest.mark.parametrize("has_peers", [True, False])
def test_devices_without_peer_access_are_named(
    has_peers: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The start line of a process that drives two GPUs says which of them copy through the host."""
    if not has_peers:
        monkeypatch.setenv("FAKE_CUDA_NO_PEERS", "1")
    caplog.set_level("INFO", logger="parallelize")
    model = make()
    with parallel_model(model, backend="dp"):
        fit(model, loader())
    assert ("no peer access between GPUs 0 and 1: copies go through the host" in caplog.text) is not has_peers
