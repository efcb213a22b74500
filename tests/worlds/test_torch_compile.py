"""Compiled models in a block of two ranks: the number of graphs is that of torch.compile without this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parallelize import DDPBackend, distributed, parallel_model, rank

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)


def nested() -> nn.Module:
    return nn.Sequential(Net(), nn.Tanh())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "own class": (Net, (6, 3)),
    "torch's class": (sequential, (6, 3)),
    "transformer": (encoder, (6, 4, 8)),
    "nested": (nested, (6, 3)),
}

# When each model is compiled; "submodule": its first submodule, with fullgraph=True.
MOMENTS = {
    "own class": ("before", "after"),
    "torch's class": ("before", "inside"),
    "transformer": ("inside",),
    "nested": ("submodule",),
}


def train(name: str, when: str, backend: str, amp: str | None) -> tuple[int, list[torch.Tensor]]:
    """Train a model that is compiled at `when`; return the number of its graphs, and its weights."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build()
    call: Any = torch.compile(model, backend=graphs) if when == "before" else model
    with parallel_model(model, backend=backend, amp=amp):
        if when == "inside":
            model.compile(backend=graphs)
        if when == "submodule" and isinstance(model, nn.Sequential):
            model[0].compile(backend=graphs, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + rank()))
            loss = call(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if when == "after":
        model.compile(backend=graphs)
        model(torch.zeros(shape))
    return graphs.frame_count, [each.detach() for each in model.parameters()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by torch.compile
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_is_one_graph(name: str, backend: str) -> None:
    """A model is one graph in every precision, and its weights equal those without compiling.

    Under fsdp with O2 the encoder layer is left out: its norms are units of fully_shard, at which torch.compile splits.
    """
    levels = (None, "O1") if (name, backend) == ("transformer", "fsdp") else (None, "O1", "O2")

    @distributed(processes=2)
    def run(moments):
        return {(when, amp): train(name, when, backend, amp) for when in moments for amp in levels}

    found = run((*MOMENTS[name], "never"))
    for when in MOMENTS[name]:
        assert {amp: found[when, amp][0] for amp in levels} == dict.fromkeys(levels, 1), when
        for amp in levels:
            torch.testing.assert_close(found[when, amp][1], found["never", amp][1], rtol=1e-5, atol=1e-6)


def test_a_plain_model_compiles_after_a_block_with_amp() -> None:
    """A model whose class is torch's own is one graph without amp, too, in a process that has run a block with amp."""
    from torch._dynamo.testing import CompileCounterWithBackend

    with parallel_model(sequential(), backend="ddp", processes=1, amp="bf16"):
        pass
    model, graphs = sequential(), CompileCounterWithBackend("eager")
    with parallel_model(model, backend="ddp", processes=1):
        model.compile(backend=graphs)
        F.mse_loss(model(torch.zeros(2, 3)), torch.ones(2, 2)).backward()
    assert graphs.frame_count == 1


def test_graphs_are_split_at_buckets() -> None:
    """A compiled model is a graph for each bucket, whose gradients are sent while backward computes the next."""

    @distributed(processes=2, backend=DDPBackend(bucket_cap_mb=1))
    def run() -> int:
        from torch._dynamo.testing import CompileCounterWithBackend

        graphs = CompileCounterWithBackend("eager")
        model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))  # 1.4 MB each
        with parallel_model(model):
            model.compile(backend=graphs)
            model(torch.full((2, 600), rank() + 1.0)).mean().backward()
        return graphs.frame_count

    assert run.all_ranks() == [3, 3]
