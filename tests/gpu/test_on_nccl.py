"""What goes wrong on several GPUs and on no CPU: NCCL's rules, its host that goes on, memory, overlap.

A strict xfail is a known fault, which goes with its mend.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import (
    DDPBackend,
    SyncError,
    barrier,
    checkpoints,
    device,
    distributed,
    parallel_model,
    rank,
)

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="needs the pretended CUDA of tests/fake_cuda"),
]


def known(reason: str, *, raises: type[Exception] = AssertionError) -> pytest.MarkDecorator:
    """Mark a test that fails until its fault is mended."""
    return pytest.mark.xfail(strict=True, raises=raises, reason=reason)


def transposed() -> nn.Module:
    model = nn.Linear(4, 8)
    model.weight = nn.Parameter(torch.randn(4, 8).t())
    return model


def permuted() -> nn.Module:
    """Return a convolution whose weight is in the order of TensorFlow."""
    model = nn.Conv2d(3, 8, 3)
    model.weight = nn.Parameter(torch.randn(3, 3, 3, 8).permute(3, 2, 0, 1))
    return model


def channels_last() -> nn.Module:
    model = nn.Conv2d(3, 8, 3)
    model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
    return model


@pytest.mark.parametrize("make", [transposed, permuted, channels_last])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_weights_of_another_layout_are_sent(backend: str, make: Any) -> None:
    """NCCL sends contiguous memory only; each rank has rank 0's values, where the model has them."""

    @distributed(gpus=2)
    def run() -> list[float]:
        torch.manual_seed(rank())
        model = make()
        with parallel_model(model, backend=backend):
            pass
        return model.weight.flatten().tolist()

    first, second = run.all_ranks()
    torch.manual_seed(0)
    assert first == second == make().weight.flatten().tolist()


class Experts(nn.Module):
    """One expert of several, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.head(self.experts[which](x))


def test_experts_that_each_rank_chooses() -> None:
    """Under fsdp the output is that of the rank's expert."""

    @distributed(gpus=2, timeout="60s")
    def difference() -> float:
        torch.manual_seed(0)
        model = Experts()
        x, which = torch.ones(2, 64), rank()
        expected = model(x, which)
        with parallel_model(model, backend="fsdp"):
            found = model(x.to(device()), which)
        return (found.cpu() - expected).abs().max().item()

    assert max(difference.all_ranks()) < 1e-5


class Deep(nn.Module):
    """Equal layers without biases, each of a MiB of parameters."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_model_of_which_a_device_holds_shards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """From meta, with the states of Adam: a device holds half of all, and a block ends as it has trained."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    layers = 24

    @distributed(gpus=2)
    def run() -> bool:
        with torch.device("meta"):
            model = Deep(layers)
        model_bytes = layers * 512 * 512 * 4
        total = torch.cuda.get_device_properties(device()).total_memory
        torch.cuda.set_per_process_memory_fraction(
            2.6 * model_bytes / total
        )  # of 4, for weights, gradients, two states
        with parallel_model(model, backend="fsdp"):
            optimizer = torch.optim.Adam(model.parameters(), foreach=False)
            for _ in range(2):
                model(torch.ones(2, 512, device=device())).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return True

    assert run()


def test_a_deadlock_behind_a_read_is_found() -> None:
    """Rank 0 waits in a barrier, rank 1 goes on and reads its loss, behind an all-reduce that rank 0 never joins."""

    @distributed(gpus=2, timeout="2min")
    def run() -> None:
        model = nn.Linear(4, 2)
        with parallel_model(model):
            for step in range(3):
                if rank() == 0 and step == 1:
                    barrier("saved")
                loss = model(torch.ones(3, 4, device=device()) * rank()).sum()
                loss.backward()
                loss.item()

    with pytest.raises(SyncError, match="ranks wait for each other"):
        run()


class WithPooler(nn.Module):
    """Layers, a head, and a layer that no loss uses, registered last."""

    def __init__(self, *, uses_all: bool) -> None:
        super().__init__()
        self.blocks, self.head = Deep(8), nn.Linear(512, 512, bias=False)
        self.pooler, self.uses_all = nn.Linear(512, 512, bias=False), uses_all

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.blocks(x))
        return self.pooler(y) if self.uses_all else y


@pytest.mark.parametrize("uses_all", [True, False])
def test_gradients_are_sent_while_backward_runs(uses_all: bool) -> None:
    """Also with a parameter that has no gradient: nearly all buckets are under way when the first layer's begins."""

    @distributed(gpus=2)
    def sent_before_the_end() -> list[int]:
        from fake_cuda.counters import launches

        model, counts = WithPooler(uses_all=uses_all), []
        first = model.blocks.layers[0].weight
        with parallel_model(model, backend=DDPBackend(bucket_cap_mb=0.9)):
            first.register_hook(lambda _: counts.append(launches("a collective")))
            for _ in range(4):
                begin = launches("a collective")
                model(torch.ones(2, 512, device=device())).sum().backward()
                counts[-1] -= begin
                for parameter in model.parameters():
                    parameter.grad = None
        return counts[2:]

    for counts in sent_before_the_end.all_ranks():
        assert min(counts) >= 6


def test_the_kernels_of_a_bucket() -> None:
    """One copies its gradients, one computes the means on the way, and one copies these back."""
    names = ["aten::cat", "a collective", "copy_"]  # of one gradient; CUDA copies all of a bucket by one kernel
    others = ["aten::mul", "aten::mul_", "aten::div", "aten::div_", "aten::_to_copy"]

    @distributed(gpus=2)
    def kernels() -> list[int]:
        from fake_cuda.counters import launches

        model, counts = Deep(6), []
        with parallel_model(model, backend=DDPBackend(bucket_cap_mb=0.9)):
            for _ in range(4):
                loss = model(torch.ones(2, 512, device=device())).sum()
                before = [launches(name) for name in names + others]
                loss.backward()
                counts = [launches(name) - count for name, count in zip(names + others, before, strict=True)]
                for parameter in model.parameters():
                    parameter.grad = None
        return counts

    for counts in kernels.all_ranks():
        assert dict(zip(names + others, counts, strict=True)) == dict.fromkeys(names, 6) | dict.fromkeys(others, 0)


def test_the_peak_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, and a bucket or two beside them, if the means are there when the next bucket is complete."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")

    @distributed(gpus=2)
    def peak_of_gradients() -> float:
        model = Deep(16)
        for parameter in model.parameters():
            parameter.register_hook(lambda _: torch.cuda.synchronize())
        with parallel_model(model, backend=DDPBackend(bucket_cap_mb=1.1)):
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = None
                loss = model(torch.ones(2, 512, device=device())).sum()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                loss.backward()
            return (torch.cuda.max_memory_allocated() - before) / sum(each.nbytes for each in model.parameters())

    assert max(peak_of_gradients.all_ranks()) < 1.25


def test_the_groups_of_a_block() -> None:
    """The default group, one for gradients, and gloo for what is compared: each mesh has a socket to every rank."""

    @distributed(gpus=2)
    def groups() -> tuple[int, int]:
        from fake_cuda.counters import communicators, gloo_meshes

        model = nn.Linear(4, 2)
        with parallel_model(model):
            model(torch.ones(3, 4, device=device()) * rank()).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            return communicators(), gloo_meshes()

    for nccl, gloo in groups.all_ranks():
        assert nccl == 2
        assert gloo <= 2


def test_the_memory_of_background_saves_is_given_back(tmp_path: Path) -> None:
    """When the block ends that saves."""

    @distributed(gpus=2, backend="fsdp")
    def pinned() -> int:
        from fake_cuda.counters import pinned_bytes

        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        before = pinned_bytes()
        with parallel_model(model), checkpoints(tmp_path, every=2, model=model, optimizer=optimizer) as saved:
            for _ in range(2):
                model(torch.ones(2, 64, device=device()) * rank()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                saved.step()
            saved.wait()
        return pinned_bytes() - before

    assert pinned.all_ranks() == [0, 0]


def test_a_forward_on_another_stream() -> None:
    """Its gradients are averaged on the stream of backward: their memory is reused after both."""

    @distributed(gpus=2)
    def train() -> list[float]:
        model, side = Deep(4), torch.cuda.Stream()
        x, losses = torch.ones(2, 512, device=device()) * (1 + rank()), []
        with parallel_model(model, backend=DDPBackend(bucket_cap_mb=1.1)):
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            for _ in range(4):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    loss = model(x).square().mean()
                torch.cuda.current_stream().wait_stream(side)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    first, *_, last = train()
    assert last < first


def test_work_on_the_stream_of_the_forward() -> None:
    """It gets no memory that gradients were sent in while another stream copies their means."""

    @distributed(gpus=2)
    def train() -> float:
        model, side = Deep(4), torch.cuda.Stream()
        x = torch.ones(2, 512, device=device()) * (1 + rank())
        with parallel_model(model, backend=DDPBackend(bucket_cap_mb=0.9)):
            side.wait_stream(torch.cuda.current_stream())
            for _ in range(4):
                with torch.cuda.stream(side):
                    loss = model(x).square().mean()
                torch.cuda.current_stream().wait_stream(side)
                loss.backward()
                with torch.cuda.stream(side):
                    noise = [torch.zeros(512 * 512 + 1, device=device()) for _ in range(8)]
                del noise
            return model.layers[0].weight.grad.norm().item()

    assert train() > 0


def test_a_closure_gets_the_loss_of_all_ranks() -> None:
    """A line search on a device compares the mean over the ranks, on each of them."""

    @distributed(gpus=2)
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        x = torch.randn(8, 4, device=device()) + rank()
        with parallel_model(model):
            optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=3)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            return [optimizer.step(closure).item() for _ in range(2)]

    one, other = losses.all_ranks()
    assert one == other
    assert one[1] < one[0]
