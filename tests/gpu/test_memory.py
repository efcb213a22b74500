"""fsdp of a model that does not fit on one device: a device holds its shards, and one block at a time.

The peaks are those of tensors. A limit of the memory would be one of the allocator's segments, too, of 2 or 20 MiB.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cublas import take_workspaces
from torch import nn

from parallelize import FSDPBackend, device, distributed, load, parallel_model, save

pytestmark = pytest.mark.gpu2

WIDTH, BLOCKS = 256, 24


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)])


@distributed(gpus=2, seed=0)
def train(backend: FSDPBackend, path: Path, *, is_on_meta: bool) -> tuple[list[float], float, float]:
    """Return the losses, and the most that this device has held, in `load` and else, in sizes of the model."""
    with torch.device("meta" if is_on_meta else "cpu"):
        model = make()
    size = sum(parameter.nbytes for parameter in model.parameters())
    take_workspaces(device())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses = []
    with parallel_model(model, backend=backend):
        # Lists of tensors at once, foreach=True, would take the memory of two more tensors each.
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=False)
        for _ in range(3):
            loss = model(torch.ones(2, WIDTH, device=device())).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        save(path, model=model, optimizer=optimizer)
        held_before = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        load(path, model=model, optimizer=optimizer)
        held_in_load = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    for tensor in (*model.parameters(), *moments):
        assert tensor.device.type == "cpu"
        assert not hasattr(tensor, "full_tensor")
    held = max(held_before, torch.cuda.max_memory_allocated())
    return losses, (held_in_load - before) / size, (held - before) / size


@pytest.mark.parametrize("is_on_meta", [False, True], ids=["from the CPU", "from meta"])
@pytest.mark.parametrize(
    ("backend", "most", "most_in_load"),
    # The state that an optimizer loads takes the place of the one that it had.
    [(FSDPBackend(cpu_offload=True), 1 / 3, 1 / 3), (FSDPBackend(), 2.2, 3.1)],
    ids=["offloaded", "half of the weights, gradients and moments"],
)
def test_a_model_that_does_not_fit(
    backend: FSDPBackend, most: float, most_in_load: float, is_on_meta: bool, tmp_path: Path
) -> None:
    """At the entry, in training, at save and load, and at the end of the block, which gives it back on the CPU."""
    for losses, held_in_load, held in train.all_ranks(backend, tmp_path / "last", is_on_meta=is_on_meta):
        assert losses[0] > losses[1] > losses[2]
        assert held_in_load <= most_in_load
        assert held <= most


@distributed(gpus=2, seed=0)
def train_until_the_device_is_full(path: Path) -> list[torch.Tensor]:
    """Train a model that comes from the device, to which nothing can be given back; return what was saved."""
    model = make().to(device())
    said = pytest.warns(UserWarning, match=r"model stays sharded.* of cuda memory.*parallelize\.save")
    try:
        with said, parallel_model(model, backend="fsdp"):
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            model(torch.ones(2, WIDTH, device=device())).square().mean().backward()
            optimizer.step()
            expected = [torch.tensor(parameter.tolist()) for parameter in model.parameters()]
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
            torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    save(path, model=model)
    loaded = make()
    load(path, model=loaded)
    torch.testing.assert_close([parameter.detach() for parameter in loaded.parameters()], expected)
    return expected


def test_a_device_that_is_full_at_the_end(tmp_path: Path) -> None:
    """All ranks keep their shards, which can be saved."""
    assert train_until_the_device_is_full(tmp_path / "last")
