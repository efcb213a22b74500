"""Features that a CPU cannot show: device threads, graphs, half precision under fsdp, streams, memory, NCCL."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parallelize import BalancedBackend, FSDPBackend, distributed, parallel_model, shard_loader

pytestmark = pytest.mark.gpu


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(count)]


def train(model: nn.Module, data: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in batches() if data is None else data:
        loss = F.cross_entropy(model(x.cuda()).float(), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_one_gpu(**options: Any) -> Any:
    return distributed(gpus=[0, 0], process_group_backend="gloo", **options)


class Checkpointed(nn.Module):
    """Recomputes its layers with dropout in backward, which runs on autograd's thread of the device."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(checkpoint(lambda h: F.dropout(h.relu(), 0.5), x, use_reentrant=self.use_reentrant))


class Remembering(nn.Module):
    """Fills the containers that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, batch: dict[str, torch.Tensor], cache: dict[str, Any], *, outputs: list[Any]) -> torch.Tensor:
        output = self.layer(batch["x"])
        cache["calls"] = cache.get("calls", 0) + 1
        outputs.append(output.detach())
        return output


@pytest.mark.parametrize("backend", ["ddp", BalancedBackend(devices=("cuda:0",))])
def test_forward_fills_the_callers_containers(backend: Any) -> None:
    """A container in which nothing has to be moved is the caller's own; one with a batch on the CPU is copied."""
    model, cache, outputs, batch = Remembering(), {}, [], {"x": torch.randn(2, 8)}
    with parallel_model(model, gpus=1, backend=backend):
        for _ in range(2):
            output = model(batch, cache, outputs=outputs)
    assert cache == {"calls": 2}
    assert len(outputs) == 2
    assert torch.equal(outputs[1], output)
    assert (batch["x"].device.type, output.device.type) == ("cpu", "cuda")


@pytest.mark.parametrize("amp", [None, "bf16", "fp16"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_recomputed_on_the_device_thread(use_reentrant: bool, amp: str | None) -> None:
    """Dropout masks and autocast are those of the forward: losses equal those without checkpoints."""
    losses = []
    for way in (lambda function, x, **_: function(x), checkpoint):
        model = Checkpointed(use_reentrant=use_reentrant)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(Checkpointed.forward.__globals__, "checkpoint", way)
            with parallel_model(model, gpus=1, backend="ddp", amp=amp):
                torch.manual_seed(3)
                losses.append(train(model))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # off here, see `full_fp32`
@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="torch.compile needs a compiler")
def test_a_model_compiled_into_cuda_graphs_trains() -> None:
    """With torch.compile(mode="reduce-overhead"), losses are those of the plain model."""
    if "FAKE_CUDA" in os.environ:
        pytest.skip("the pretended device has no CUDA graphs")
    from torch._inductor import config as inductor

    plain, model = seeded(), seeded()
    plain.cuda()
    expected = train(plain)
    # With more than one, Inductor starts a pool of processes, which outlives the test.
    with inductor.patch(compile_threads=1), parallel_model(model, gpus=1, backend="ddp"):
        compiled = torch.compile(model, mode="reduce-overhead")
        found = train(compiled)
    assert found == pytest.approx(expected, rel=1e-3)


class BlockingReads(TorchDispatchMode):
    """Counts the operations for which the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        read = args[1] if function is torch.ops.aten.copy_.default else args[0] if args else None
        is_asynchronous = (kwargs or {}).get("non_blocking", args[2] if len(args) > 2 else False)
        is_copy = function in {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
        is_on_cpu = isinstance(outputs, torch.Tensor) and not outputs.is_cuda
        if isinstance(read, torch.Tensor) and read.is_cuda:
            is_item = function in {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
            self.count += is_item or (is_copy and is_on_cpu and not is_asynchronous)
        return outputs


def test_a_scaled_step_of_offloaded_shards_does_not_read_the_device() -> None:
    """The scale is on the host, and the ranks' verdict on inf is copied to it while the device goes on."""

    @on_one_gpu(backend=FSDPBackend(cpu_offload=True), amp="fp16")
    def run() -> list[int]:
        model, counts = seeded(), []
        with parallel_model(model):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for x, y in batches(12):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x.cuda()), y.cuda())
                with BlockingReads() as reads:
                    loss.backward()
                    optimizer.step()
                counts.append(reads.count)
            assert not any(each.is_cuda for each in model.parameters())
        return counts

    # The numbers of targets of the ranks are compared in the first eight steps.
    assert [counts[8:] for counts in run.all_ranks()] == [[0] * 4] * 2


@pytest.mark.parametrize("compared", ["weights", "gradients of another parameter"])
def test_a_comparison_reads_the_device_once(compared: str) -> None:
    """`verify_every=1`, and a parameter in no model of the block, wait for the device once in a step."""

    @on_one_gpu(verify_every=1 if compared == "weights" else 0)
    def run() -> list[int]:
        model, counts = seeded(), []
        with parallel_model(model):
            own = nn.Parameter(torch.ones(4, device="cuda"))
            others = [] if compared == "weights" else [own]
            optimizer = torch.optim.SGD([*model.parameters(), *others], 0.1)
            for x, y in batches(12):
                optimizer.zero_grad()
                own.grad = torch.ones_like(own)
                F.cross_entropy(model(x.cuda()), y.cuda()).backward()
                with BlockingReads() as reads:
                    optimizer.step()
                counts.append(reads.count)
        return counts

    assert [counts[8:] for counts in run.all_ranks()] == [[1] * 4] * 2


def test_a_loop_on_a_side_stream() -> None:
    """Forward, backward and step on the user's stream: losses are those of the default stream."""
    expected = train(seeded().cuda())
    model = seeded()
    stream = torch.cuda.Stream()
    with parallel_model(model, gpus=1, backend="ddp"):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = train(model, shard_loader(batches()))
        torch.cuda.current_stream().wait_stream(stream)
    assert found == pytest.approx(expected, rel=1e-5)


class Packed(nn.Module):
    """A linear layer over packed sequences, whose lengths torch needs on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.layer(packed.data).sum()


@pytest.mark.parametrize("is_on_device", [False, True])
def test_lengths_of_packed_sequences(is_on_device: bool) -> None:
    """Lengths may be on the CPU, or where shard_loader has moved them; torch's function is restored after the block."""
    x, lengths = torch.randn(4, 5, 3), torch.tensor([2, 5, 1, 3])
    model = Packed()
    expected = model(x, lengths).item()
    with parallel_model(model, gpus=1, backend="ddp"):
        for x_here, lengths_here in shard_loader([(x, lengths)]) if is_on_device else [(x.cuda(), lengths)]:
            assert lengths_here.is_cuda == is_on_device
            loss = model(x_here, lengths_here)
            loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    with pytest.raises(RuntimeError, match="lengths"):
        pack_padded_sequence(x.cuda(), lengths.cuda(), enforce_sorted=True)


nccl = pytest.mark.skipif(
    not dist.is_nccl_available() or "FAKE_CUDA" in os.environ, reason="this torch has no NCCL, or no real GPU"
)


@nccl
def test_nccl_is_aborted_in_a_collective(run_script: Any) -> None:
    """Abort returns while work is queued on the device, and the process ends."""
    found = run_script(
        """
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        torch.cuda._sleep(100_000_000)
        dist.all_reduce(x)
        dist.distributed_c10d._abort_process_group()
        torch.cuda.synchronize()
        print("aborted")
        """
    )
    assert "aborted" in found.stdout


@nccl
def test_a_run_of_one_gpu_under_torchrun_uses_nccl(run_script: Any) -> None:
    """torchrun with one process: training, collectives and values go through the group of CPU and GPU."""
    found = run_script(
        """
        import torch
        import torch.distributed as dist
        from torch import nn

        from parallelize import all_reduce, distributed, parallel_model

        @distributed()
        def train():
            model = nn.Linear(4, 2)
            with parallel_model(model):
                model(torch.ones(3, 4)).sum().backward()
            return dist.get_backend_config(), all_reduce(torch.ones(1, device="cuda"), "sum").item()

        print(*train())
        """,
        launcher=("-m", "torch.distributed.run", "--nproc-per-node=1"),
    )
    assert "nccl" in found.stdout
    assert "1.0" in found.stdout
