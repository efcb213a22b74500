"""Mixed precision on a GPU: fp16 with loss scaling, each level, replicas, two ranks on one GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parallelize import parallel_model
from parallelize.errors import ConfigError

pytestmark = pytest.mark.gpu

STEPS = 20
HALF = torch.float16


class ConvNet(nn.Module):
    """Convolutions and batch norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


class Transformer(nn.Module):
    """Attention and layer norm, over the rows of an image."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(24, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.layer(self.embed(x.flatten(2))).mean(1))


NETS = {"conv": (ConvNet, (3, 8, 8)), "transformer": (Transformer, (6, 4, 6))}


def batches(shape):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(16, *shape, generator=generator)
        yield x.cuda(), torch.randint(0, 5, (16,), generator=generator).cuda()


@pytest.fixture(autouse=True)
def repeatable():
    """Deterministic kernels, so that two loops can be compared bit for bit."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def by_hand(model, shape, *, dtype, fused):
    """Train by hand: autocast over the forward, the loss in fp32, GradScaler for the rest."""
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is HALF, init_scale=2.0**24, growth_interval=4)
    losses = []
    for x, y in batches(shape):
        with torch.autocast("cuda", dtype):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return torch.stack(losses)


def unchanged(model, shape, optimizer):
    losses = []
    for x, y in batches(shape):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach().float())
    return torch.stack(losses)


def block(model, amp, **options):
    return parallel_model(model, amp=amp, backend="ddp", gpus=1, **options)


def amp_of(dtype, level="O1"):
    from parallelize.plugins.base import Amp

    return Amp(level=level, dtype=dtype, init_scale=2.0**24, growth_interval=4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("net", NETS)
def test_o1_is_the_hand_written_loop(net, dtype, fused):
    """Losses and weights are equal, bit for bit, with skipped first steps (the scale starts too high) and growth."""
    make, shape = NETS[net]
    hand, ours = make(), make()
    expected = by_hand(hand, shape, dtype=dtype, fused=fused)
    with block(ours, amp_of(dtype)):
        found = unchanged(ours, shape, torch.optim.AdamW(ours.parameters(), lr=0.01, fused=fused))
    assert torch.equal(found, expected)
    for here, there in zip(ours.parameters(), hand.parameters(), strict=True):
        assert torch.equal(here.cpu(), there.cpu())


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("net", NETS)
def test_the_other_levels_train(net, level):
    """Losses are near those of fp32, and weights are fp32 after."""
    make, shape = NETS[net]
    full, ours = make().cuda(), make()
    expected = unchanged(full, shape, torch.optim.SGD(full.parameters(), lr=0.05))
    with block(ours, amp_of(HALF, level) if level == "O3" else level):
        found = unchanged(ours, shape, torch.optim.SGD(ours.parameters(), lr=0.05))
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    assert {each.dtype for each in ours.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_step_waits_for_the_device():
    """With a fused optimizer a scaled step waits for nothing that it has started itself."""
    model = ConvNet()
    data = list(batches((3, 8, 8)))
    with block(model, amp_of(HALF)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        unchanged(model, (3, 8, 8), optimizer)
        try:
            for x, y in data:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_replicas_compute_in_the_dtype(level, dtype):
    """DataParallel over the same GPU twice: autocast is on in the thread of each replica, in the requested dtype."""
    from parallelize.plugins.base import Amp

    seen = []

    class Watching(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append((torch.get_autocast_dtype("cuda"), self.weight.dtype, out.dtype))
            return out

    model = nn.Sequential(Watching(8, 8), nn.ReLU(), Watching(8, 5))
    weights = torch.float32 if level == "O1" else dtype
    with parallel_model(model, amp=Amp(level=level, dtype=dtype), backend="dp", gpus=[0, 0]):
        model(torch.randn(6, 8, device="cuda")).float().square().mean().backward()
        assert seen == [(dtype, weights, dtype)] * 4
        assert {each.grad.dtype for each in model.parameters()} == {torch.float32}


def test_a_captured_graph_is_refused():
    """A graph would replay one decision about inf forever."""
    if "FAKE_CUDA" in os.environ:
        pytest.skip("the pretended device has no CUDA graphs")
    model = ConvNet()
    x, _ = next(batches((3, 8, 8)))
    with block(model, "fp16"):
        model(x).sum().backward()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                loss = model(x).sum()
                with pytest.raises(ConfigError, match="CUDA graph"):
                    loss.backward()
            finally:
                graph.capture_end()
