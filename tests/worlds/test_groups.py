"""The process groups of a block: each has the backend that its tensors need, and purposes share one where they can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import outputs_of_ranks
from torch import nn

from parallelize import distributed, load, parallel_model, rank, save

pytestmark = pytest.mark.slow

DEFAULT = OFFLOADED = "gloo and pretended"
GRADIENTS_AND_COMPARISONS = COMPARISONS = ROWS = SAVES = "gloo"


@pytest.mark.parametrize(
    ("backend", "world_size", "made"),
    [
        ("ddp", 2, [DEFAULT, GRADIENTS_AND_COMPARISONS]),
        ("fsdp", 2, [DEFAULT, COMPARISONS, ROWS, SAVES]),
        ("fsdp", 4, [DEFAULT, COMPARISONS, ROWS, ROWS, SAVES]),
        ("offloaded", 2, [DEFAULT, COMPARISONS, OFFLOADED, SAVES]),
    ],
    ids=["ddp", "fsdp", "copies", "offloaded"],
)
def test_groups_of_a_bound_default_group(backend: str, world_size: int, made: list[str], tmp_path: Path) -> None:
    """A program trains and saves, also in the background, on a default group that is bound to a device.

    Its other groups have gloo alone, here for tensors on the CPU: a second backend would connect the ranks for nothing.
    Only offloaded rows are on the CPU and on the device.
    """
    script = Path(__file__).with_name("bound_group.py")
    outputs = outputs_of_ranks(script, backend, 2, tmp_path / "saved", world_size=world_size, per_node=world_size)
    assert str(made) in outputs[0].splitlines(), outputs


DESCRIPTORS = Path("/proc/self/fd")


@distributed(processes=4)
def sockets_of_a_block(path: Path) -> int:
    """Return how many sockets a block opens that trains, compares and saves."""

    def sockets() -> int:
        return sum(str(each.readlink()).startswith("socket:") for each in DESCRIPTORS.iterdir() if each.is_symlink())

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = sockets()
    with parallel_model(model):
        model(torch.ones(3, 4) * rank()).sum().backward()
        optimizer.step()
        save(path, model=model)
        return sockets() - before


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="open files are seen on Linux only")
def test_a_block_connects_the_ranks_once_more(tmp_path: Path) -> None:
    """Gradients and comparisons share a group: each of four ranks has three connections, and a socket that listens."""
    assert sockets_of_a_block.all_ranks(tmp_path / "model.pt") == [4] * 4


@distributed(processes=2)
def save_in_backward(path: Path) -> list[str]:
    """Save between two buckets, one of which rank 0 alone has sent by then.

    Return the sums of the gradients.
    """
    torch.manual_seed(0)
    # The head has more than a mebibyte, so that it is the first bucket.
    model = nn.ModuleDict({"trunk": nn.Linear(4, 512), "head": nn.Linear(512, 600)})
    with parallel_model(model):
        for step in range(2):  # the first pass sends nothing early
            hidden = model["trunk"](torch.ones(3, 4) * (rank() + 1))
            hidden.register_hook(lambda _: save(path, model=model))
            is_unused = step == 1 and rank() == 1
            output = hidden if is_unused else model["head"](hidden)
            output.sum().backward()
    return [f"{parameter.grad.sum():.4g}" for parameter in model.parameters() if parameter.grad is not None]


def test_a_save_in_backward_is_not_mixed_up_with_gradients(tmp_path: Path) -> None:
    """There, ranks send the buckets before it or after it, so that it has a group of its own."""
    one, other = save_in_backward.all_ranks(tmp_path / "model.pt")
    assert one == other
    assert len(one) == 4
    load(tmp_path / "model.pt")
