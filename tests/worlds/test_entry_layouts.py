"""Parameters and buffers of any layout start from rank 0's values, and are sent as every process group takes them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize import ConfigError, distributed, load, parallel_model, rank, save
from parallelize.backends import broadcast
from parallelize.backends.broadcast import RegisteredBuffers, broadcast_from_rank_0
from parallelize.run.containers import leaves

pytestmark = pytest.mark.slow

check = Checks(processes=2)


class Collectives(TorchDispatchMode):
    """Counts collectives, and notes tensors that NCCL's process group refuses.

    They are not contiguous in their memory format. A rank that raised an error would leave the other one waiting.

    Source: check_gpu_single_tensor of torch's ProcessGroupNCCL.cpp
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count += 1
            for tensor in leaves(args):
                if isinstance(tensor, torch.Tensor):
                    suggested: Any = torch._prims_common.suggest_memory_format(tensor)
                    if not tensor.is_contiguous(memory_format=suggested):
                        self.refused.append(f"{func}: {tuple(tensor.shape)}, {tensor.stride()}")
        return func(*args, **(kwargs or {}))


@check
def a_transposed_tensor_is_noted() -> None:
    """The mode sees what NCCL would refuse."""
    with Collectives() as collectives:
        dist.broadcast(torch.ones(2, 3).t(), 0)
    assert [collectives.count, collectives.refused] == [1, ["c10d.broadcast_.default: (3, 2), (1, 3)"]]


def transposed() -> nn.Module:
    model = nn.Linear(4, 8)
    model.weight = nn.Parameter(torch.randn(4, 8).t())
    return model


def large_and_transposed() -> nn.Module:
    model = nn.Linear(513, 515)
    model.weight = nn.Parameter(torch.randn(513, 515).t())
    assert model.weight.nbytes > broadcast._ALONE_BYTES
    return model


def permuted() -> nn.Module:
    """A kernel in the order of TensorFlow and JAX: height, width, input channels, output channels."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    model[0].weight = nn.Parameter(torch.randn(3, 3, 3, 8).permute(3, 2, 0, 1))
    return model


def channels_last() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()).to(memory_format=torch.channels_last)


def other_strides_on_rank_1() -> nn.Module:
    model = nn.Linear(4, 8)
    if rank() == 1:
        model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    return model


def without_dimensions() -> nn.Module:
    model = nn.Linear(4, 8)
    model.scale = nn.Parameter(torch.randn(()))
    model.register_buffer("count", torch.randint(1000, ()))
    return model


def empty() -> nn.Module:
    model = nn.Linear(4, 8)
    model.none = nn.Parameter(torch.randn(0, 3))
    model.rows_of_nothing = nn.Parameter(torch.randn(3, 0))
    model.register_buffer("nothing", torch.zeros(0))
    return model


def buffers() -> nn.Module:
    model = nn.Linear(4, 8)
    model.register_buffer("mask", (torch.randn(5, 3) > 0).t())
    model.register_buffer("phases", torch.randn(5, 3, dtype=torch.complex64).t())
    model.register_buffer("halves", torch.randn(2, 5, 3).half().permute(2, 0, 1))
    with torch.inference_mode():
        table = torch.randn(3)
    model.register_buffer("table", table)
    return model


def of_rare_dtypes() -> nn.Module:
    """What process groups do not send as it is."""
    model = nn.Linear(4, 8)
    model.short = nn.Parameter(torch.randint(100, (3, 5), dtype=torch.int16).t(), requires_grad=False)
    model.register_buffer("unsigned", torch.randint(100, (3, 5)).to(torch.uint16))
    model.register_buffer("wide", torch.randint(100, (3,)).to(torch.uint32))
    model.register_buffer("large", torch.randint(100, (1024, 1025)).to(torch.int16))
    model.register_buffer("eighth", torch.randn(3, 5).to(torch.float8_e4m3fn))
    assert model.large.nbytes > broadcast._ALONE_BYTES
    return model


def parts_of_larger_tensors() -> nn.Module:
    model = nn.Linear(4, 8)
    model.weight = nn.Parameter(torch.randn(8, 10)[:, 2:6])
    model.bias = nn.Parameter(torch.randn(8, 8).diagonal())
    model.register_buffer("rows", torch.randn(8, 4)[::2])
    return model


class Quantized(nn.Module):
    """Frozen parameters of integers and booleans, which index, scale and mask what a linear layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = 4
        self.linear = nn.Linear(4, 4)
        layer = self.linear
        self.order = nn.Parameter(torch.randperm(4), requires_grad=False)
        layer.mask = nn.Parameter(torch.rand(4) > 0.3, requires_grad=False)
        layer.codes = nn.Parameter(torch.randint(255, (4, 4), dtype=torch.uint8), requires_grad=False)
        layer.signed = nn.Parameter(torch.randint(9, (4, 4), dtype=torch.int8).t(), requires_grad=False)
        layer.scale = nn.Parameter(torch.randn(1))
        layer.temperature = nn.Parameter(torch.randn((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = (self.linear.codes.float() - self.linear.signed) / 255
        mixed = self.linear(x)[:, self.order] * self.linear.mask @ codes
        return mixed * self.linear.scale * self.linear.temperature.float()


def integers() -> nn.Module:
    return Quantized()


def expanded() -> nn.Module:
    model = nn.Linear(4, 8)
    model.frozen = nn.Parameter(torch.randn(3, 1).expand(3, 2), requires_grad=False)
    model.register_buffer("rows", torch.randn(1, 3).expand(5, 3))
    return model


MAKES: tuple[Callable[[], nn.Module], ...] = (
    *(transposed, large_and_transposed, permuted, channels_last, other_strides_on_rank_1, without_dimensions, empty),
    *(buffers, expanded, of_rare_dtypes, parts_of_larger_tensors, integers),
)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def train_from_rank_0(make: Callable[[], nn.Module], backend: str) -> None:
    """The ranks enter a block with different models; compare them, and the gradients of a pass, with rank 0's model."""
    model, expected = seeded(make, rank()), seeded(make, 0)
    inputs = torch.randn(2, 3, 5, 5) if isinstance(model, nn.Sequential) else torch.randn(2, model.in_features)
    expected(inputs).square().mean().backward()
    with Collectives() as collectives, parallel_model(model, backend=backend):
        model(inputs).square().mean().backward()
    assert collectives.count > 1
    assert collectives.refused == []
    torch.testing.assert_close(values_of(model), values_of(expected), rtol=0, atol=0)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


for each_backend, each_make in itertools.product(("ddp", "fsdp"), MAKES):
    check[f"{each_backend}, {each_make.__name__}"] = functools.partial(train_from_rank_0, each_make, each_backend)


class FewRows(nn.Module):
    """Parameters of fewer rows than ranks, of none, and of integers; all of them are in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Quantized() for _ in range(2))
        for block in self.blocks:
            block.wide = nn.Parameter(torch.randn(2, 4))
            block.none = nn.Parameter(torch.randn(4, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) @ (block.wide.T @ block.wide) + block.none.sum()
        return x


def trained(folder: Path) -> dict[str, Any]:
    """Train, save, train on and load again; return the values after these."""
    torch.manual_seed(0)
    model, inputs = FewRows(), torch.randn(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    reached = dict[str, Any]()

    def train(name: str) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        reached[name] = {key: value.clone() for key, value in model.state_dict().items()}

    with parallel_model(model):
        train("first")
        save(folder / "saved", model=model, optimizer=optimizer)
        train("second")
        load(folder / "saved", model=model, optimizer=optimizer)
        train("again")
    reached["after"] = values_of(model)
    return reached


def test_few_rows_and_integers_train_and_are_saved(tmp_path: Path) -> None:
    """Three ranks train what one does, and go on from a checkpoint, under ddp and fsdp."""
    one = distributed(processes=1)(trained)(tmp_path / "one")
    torch.testing.assert_close(one["again"], one["second"], rtol=0, atol=0)
    for backend in ("ddp", "fsdp"):
        three = distributed(processes=3, backend=backend)(trained)(tmp_path / backend)
        torch.testing.assert_close(three, one, rtol=1e-5, atol=1e-6)


def transposed_through_blocks(options: dict[str, Any]) -> torch.Tensor:
    """Step before, in and after blocks; return the weight, which is transposed at first."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 4), torch.randn(8, 4)
    model.weight = nn.Parameter(torch.randn(4, 4).t())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    for _ in range(2):
        train()
        with parallel_model(model):
            train()
    train()
    return model.weight.detach().clone()


@pytest.mark.filterwarnings("ignore:.*outside of parallel_model")
def test_state_from_before_the_block_has_the_strides_of_rows() -> None:
    """Fused steps on a CPU ignore strides: state of a transposed parameter goes with its rows, which are contiguous."""
    for options in ({"fused": True}, {"foreach": True}):
        one = distributed(processes=1)(transposed_through_blocks)(options)
        two = distributed(processes=2, backend="fsdp")(transposed_through_blocks)(options)
        torch.testing.assert_close(two, one)


@check
def floats_of_one_byte_are_refused_on_cpus() -> None:
    """Under fsdp gloo would have to gather them."""
    model = nn.Linear(4, 8)
    model.frozen = nn.Parameter(torch.randn(4).to(torch.float8_e4m3fn), requires_grad=False)
    expected = pytest.raises(ConfigError, match=r"(?s)frozen of Linear is torch.float8_e4m3fn under fsdp.*uint8")
    with expected, parallel_model(model, backend="fsdp"):
        pass


@check
def messages_are_few() -> None:
    """Small tensors of one dtype and device share a message, and a large contiguous one is overwritten where it is."""
    sizes = [3, broadcast._ALONE_BYTES // 4, 5, 0, 7]
    tensors = [torch.full((size,), float(rank() + 1)) for size in sizes]
    tensors += [torch.full((2, size), rank() + 1).t() for size in sizes]
    sent = []
    original = dist.broadcast

    def recorded(tensor: torch.Tensor, **options: Any) -> None:
        sent.append((tensor.dtype, tensor.numel(), tensor.data_ptr() == tensors[1].data_ptr()))
        original(tensor, **options)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dist, "broadcast", recorded)
        broadcast_from_rank_0(tensors)
        assert sent == [
            (torch.float32, sizes[1], True),
            (torch.int64, 2 * sizes[1], False),
            (torch.float32, 15, False),
            (torch.int64, 30, False),
        ]
        sent.clear()
        patches.setattr(broadcast, "_MESSAGE_BYTES", 30)
        broadcast_from_rank_0([torch.zeros(4) for _ in range(5)])
        assert [count for _, count, _ in sent] == [8, 8, 4]
    assert all(bool((tensor == 1).all()) for tensor in tensors)


@check
def buffers_keep_their_versions() -> None:
    """What a forward has saved of a buffer can be differentiated after the buffers were sent, or averaged."""
    for count in (1, 2):
        model = nn.Module()
        for number in range(count):
            model.register_buffer(f"mean_{number}", torch.full((2,), float(rank())))
        registered = RegisteredBuffers(model)
        weight = torch.ones(2, requires_grad=True)
        loss = (weight * model.mean_0).sum()
        registered.average()
        registered.broadcast()
        loss.backward()
        assert model.mean_0.tolist() == [0.5, 0.5]


@check
def a_buffer_with_gaps_is_sent_without_them() -> None:
    """One that the program puts in the place of another in the block, and that no other buffer goes with."""
    whole = torch.full((6,), float(rank()))
    model = nn.Module()
    model.register_buffer("every_second", whole[::2])
    with Collectives() as collectives:
        RegisteredBuffers(model).broadcast()
        RegisteredBuffers(model).average()
    assert collectives.refused == []
    assert whole.tolist() == [0.0, rank()] * 3


@check
def buffers_in_every_forward() -> None:
    """Buffers of any layout are sent and averaged in training."""
    for how in ("rank0", "mean"):
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        model.register_buffer("moved", torch.full((3, 2), float(rank())).t())
        with Collectives() as collectives, parallel_model(model, backend="ddp", buffers=how):
            model.moved.fill_(rank())
            model(torch.randn(4, 4)).sum().backward()
            assert bool((model.moved == {"rank0": 0.0, "mean": 0.5}[how]).all())
        assert collectives.refused == []


@pytest.mark.parametrize("name", check)
def test_a_check_holds_on_all_ranks(name: str) -> None:
    """What the check's docstring says."""
    check.assert_holds(name)
