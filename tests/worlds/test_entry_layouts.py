"""Parameters and buffers of any layout start from rank 0's values, and are sent as every process group takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize import parallel_model, rank
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


def expanded() -> nn.Module:
    model = nn.Linear(4, 8)
    model.frozen = nn.Parameter(torch.randn(3, 1).expand(3, 2), requires_grad=False)
    model.register_buffer("rows", torch.randn(1, 3).expand(5, 3))
    return model


OF_ALL = (transposed, large_and_transposed, permuted, channels_last, other_strides_on_rank_1, without_dimensions, empty)
OF_BACKEND: Mapping[str, tuple[Callable[[], nn.Module], ...]] = {
    "ddp": (*OF_ALL, buffers),
    "fsdp": (*OF_ALL, buffers, expanded),
}


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


for each_backend, makes in OF_BACKEND.items():
    for each_make in makes:
        check[f"{each_backend}, {each_make.__name__}"] = functools.partial(train_from_rank_0, each_make, each_backend)


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
