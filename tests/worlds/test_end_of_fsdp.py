"""Tests of what a block of fsdp leaves: full tensors, or shards where these do not fit or only some ranks have them."""

from __future__ import annotations

import contextlib
import copy
import io
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import nn

from parallelize import distributed, load, parallel_model, rank, save

WIDTH = 1024
UNITS = 12
MIB = 2**20

check = Checks(processes=2, timeout=120)


def small_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def large_model() -> nn.Sequential:
    """Return a model of 48 MiB."""
    torch.manual_seed(7)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(UNITS)])


def batch(model: nn.Module) -> torch.Tensor:
    return whole_batch(model).chunk(2)[rank()]


def whole_batch(model: nn.Module) -> torch.Tensor:
    width = next(model.parameters()).shape[1]
    return torch.randn(4, width, generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, read: Any = None) -> None:
    read = read or batch
    for _ in range(2):
        optimizer.zero_grad()
        model(read(model)).square().mean().backward()
        optimizer.step()


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the state of an optimizer that has the sizes of parameters."""
    return [value for state in optimizer.state.values() for value in state.values() if value.ndim]


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


@contextlib.contextmanager
def little_memory(left_bytes: int) -> Iterator[None]:
    """Let this process take only so many bytes more."""
    taken_kib = next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize")
    )
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken_kib * 1024 + left_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@check
def a_copy_on_one_rank_stays_sharded_alone() -> None:
    """The state of the optimizer, and the copy that all ranks have made, are plain; the copy is named."""
    model = small_model()
    alone, alone_optimizer = small_model(), None
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.warns(UserWarning, match="4 sharded tensors stay sharded after the block"))
        stack.enter_context(parallel_model(model, backend="fsdp"))
        average = copy.deepcopy(model)
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        train(model, optimizer)
        best: Any = copy.deepcopy(model) if rank() == 0 else None
    alone_optimizer = torch.optim.Adam(alone.parameters(), 0.05)
    train(alone, alone_optimizer, whole_batch)
    assert not any(is_sharded(tensor) for tensor in [*model.parameters(), *average.parameters()])
    torch.testing.assert_close(dict(average.state_dict()), dict(small_model().state_dict()))
    assert tensors_of(optimizer)
    torch.testing.assert_close(tensors_of(optimizer), tensors_of(alone_optimizer))
    torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()))
    if rank() == 0:
        assert all(is_sharded(tensor) for tensor in best.parameters())
        torch.save(optimizer.state_dict(), io.BytesIO())


@check
def copies_that_each_rank_makes_at_other_places_are_not_mixed() -> None:
    """Equally many tensors of equal shapes do not belong together if the steps between them do not."""
    model = small_model()
    said = pytest.warns(UserWarning, match="stay sharded")
    with said, parallel_model(model, backend="fsdp"):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        first: Any = copy.deepcopy(model) if rank() == 0 else None
        train(model, optimizer)
        last: Any = copy.deepcopy(model) if rank() == 1 else None
    kept = first if rank() == 0 else last
    assert all(is_sharded(tensor) for tensor in kept.parameters())
    assert not any(is_sharded(tensor) for tensor in model.parameters())


@check
def what_one_rank_frees_later_mixes_no_tensors() -> None:
    """A tensor that stands for a gradient counts once: also if it was freed, and is made again."""
    model, held = small_model(), []
    with parallel_model(model, backend="fsdp"):
        model(batch(model)).square().mean().backward()
        for parameter in model.parameters():
            for _ in range(3):
                gradient = parameter.grad
                if rank() == 1:
                    held += [gradient, gradient.data]
                del gradient
        copies = [torch.zeros_like(parameter) for parameter in model.parameters()]
        held.clear()
    assert not any(map(is_sharded, copies))


@check
def attributes_that_one_rank_reads_mix_no_tensors() -> None:
    """As in `if is_main(): assert p.grad is not None`."""
    model = small_model()
    with parallel_model(model, backend="fsdp"):
        model(batch(model)).square().mean().backward()
        if rank() == 0:
            assert all(parameter.grad is not None for parameter in model.parameters())
            assert all(parameter.data.dtype is torch.float32 for parameter in model.parameters())
        copies = [torch.zeros_like(parameter) for parameter in model.parameters()]
    assert not any(map(is_sharded, copies))


@check
def a_gradient_that_one_rank_has_dropped_is_dropped_by_all() -> None:
    """No rank waits for the shards of a gradient that another one does not have."""
    model = small_model()
    with parallel_model(model, backend="fsdp"):
        model(batch(model)).sum().backward()
        if rank() == 1:
            model[0].weight.grad = None
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


@check
def without_room_on_one_rank_all_keep_shards() -> None:
    """It is said how to save them, and they can be saved, trained on and loaded."""
    model, loaded, path = large_model(), large_model(), Path(tempfile.gettempdir(), "end.pt")
    limits = contextlib.ExitStack()
    warning = r"model stays sharded.*rank 1 on .* needs 48\.0 MiB of cpu memory.*parallelize\.save"
    said = pytest.warns(UserWarning, match=warning)
    with limits, said, parallel_model(model, backend="fsdp"):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        train(model, optimizer)
        if rank() == 1:
            limits.enter_context(little_memory(24 * MIB))
    assert all(is_sharded(parameter) for parameter in model.parameters())
    save(path, model=model)
    load(path, model=loaded)
    alone = large_model()
    train(alone, torch.optim.SGD(alone.parameters(), 0.05), whole_batch)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(alone.state_dict()))


@check
def without_room_for_gradients_only_these_are_dropped() -> None:
    """The parameters are what the training was for."""
    model, limits = large_model(), contextlib.ExitStack()
    said = pytest.warns(UserWarning, match=r"(?s)gradients of parameters are dropped.*needs 96\.0 MiB")
    with limits, said, parallel_model(model, backend="fsdp"):
        model(batch(model)).square().mean().backward()
        limits.enter_context(little_memory(112 * MIB))
    assert not any(is_sharded(parameter) for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@check
def without_room_for_its_state_an_optimizer_keeps_shards() -> None:
    """The parameters are plain, and the optimizer goes on in the next block, whose end has room."""
    model, alone, limits = large_model(), large_model(), contextlib.ExitStack()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    said = pytest.warns(UserWarning, match=r"(?s)states of optimizers .* stay sharded.*needs 96\.0 MiB")
    with limits, said, parallel_model(model, backend="fsdp"):
        train(model, optimizer)
        optimizer.zero_grad()
        limits.enter_context(little_memory(112 * MIB))
    assert not any(is_sharded(parameter) for parameter in model.parameters())
    assert all(is_sharded(tensor) for tensor in tensors_of(optimizer))
    with parallel_model(model, backend="fsdp"):
        train(model, optimizer)
    assert not any(is_sharded(tensor) for tensor in tensors_of(optimizer))
    alone_optimizer = torch.optim.Adam(alone.parameters(), 1e-4)
    for _ in range(2):
        train(alone, alone_optimizer, whole_batch)
    torch.testing.assert_close(tensors_of(optimizer), tensors_of(alone_optimizer), rtol=1e-3, atol=1e-6)


@check
def what_will_not_fit_is_said_at_the_entry() -> None:
    """With its bytes, and what to do; nothing is said of shards that are to stay."""
    with torch.device("meta"):
        model, kept = large_model(), large_model()
    at_entry = pytest.warns(UserWarning, match=r"will stay sharded.* needs 48\.0 MiB.*restore=False")
    at_end = pytest.warns(UserWarning, match="the model stays sharded")
    with little_memory(60 * MIB), at_end, contextlib.ExitStack() as block, at_entry:
        block.enter_context(parallel_model(model, backend="fsdp"))
    with little_memory(60 * MIB), parallel_model(kept, backend="fsdp", restore=False):
        pass


@pytest.mark.parametrize("name", check)
def test_a_check_holds_on_all_ranks(name: str) -> None:
    """What the check's docstring says."""
    check.assert_holds(name)


@distributed(processes=2)
def fit_and_leave_sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    with parallel_model(model, backend="fsdp", restore=False):
        train(model, optimizer)
    return "trained"


def test_an_optimizer_that_stays_sharded_does_not_come_back() -> None:
    """Rank 0, which alone sends states to the caller, does not wait for the other ranks' shards; a warning says so."""
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    of_model = pytest.warns(UserWarning, match=r"Sequential: .* not copied back")
    of_optimizer = pytest.warns(UserWarning, match=r"Adam: its state .* not copied back.*parallelize\.save")
    with of_model, of_optimizer:
        assert fit_and_leave_sharded(model, optimizer) == "trained"
    assert not optimizer.state
