"""Private parts of torch that a release bypasses: the features that rely on them raise an error, once they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.utils.data import DataLoader, IterableDataset

from parallelize import ConfigError, shard_loader
from parallelize.data import iterable_style
from parallelize.runtime import loss_counts
from parallelize.torch_patches import backward
from parallelize.torch_patches.private import self_test

SELF_TESTS: dict[str, Any] = {
    "backward": backward.require_patchable_backward,
    "losses": loss_counts.require_readable_losses,
}
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def untested() -> Iterator[None]:
    """Let each self-test run again, here and in the tests that follow in this process."""
    for each in SELF_TESTS.values():
        each.cache_clear()
    yield
    for each in SELF_TESTS.values():
        each.cache_clear()


def test_a_self_test_runs_once() -> None:
    """One that succeeds is not repeated; one that fails raises each time, with torch's version and what still works."""
    runs: list[bool] = []

    @self_test("a feature", instead="use another one")
    def works() -> bool:
        runs.append(len(runs) > 1)
        return runs[-1]

    for _ in range(2):
        with pytest.raises(ConfigError, match=r"a feature with torch .*(?s:.*)use another one") as raised:
            works()
        assert torch.__version__ in str(raised.value)
    for _ in range(2):
        works()
    assert runs == [False, False, True]


def test_an_exception_is_the_cause() -> None:
    """An exception of the self-test is the cause of the error."""

    @self_test("a feature", instead="use another one")
    def works() -> bool:
        raise AttributeError("module 'torch' has no attribute")

    with pytest.raises(ConfigError) as raised:
        works()
    assert isinstance(raised.value.__cause__, AttributeError)


def test_modes_of_the_caller_do_not_disturb() -> None:
    """Self-tests succeed under the caller's grad mode, autocast, default device, dtype and hooks."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"), hooks:
        for each in SELF_TESTS.values():
            each()


def bypass_backward(monkeypatch: Patch) -> None:
    original = torch.autograd.backward
    monkeypatch.setattr(Tensor, "backward", original)


def hide_the_running_backward(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: -1)


def never_end_backward(monkeypatch: Patch) -> None:
    monkeypatch.setattr(backward, "at_end_of_backward", lambda callback: None)


def change_losses(monkeypatch: Patch) -> None:
    def cross_entropy(x: Tensor, _: Tensor, reduction: str = "mean") -> Tensor:
        return x.exp().sum()

    monkeypatch.setattr(nn.functional, "cross_entropy", cross_entropy)


@pytest.mark.parametrize(
    ("name", "alter"),
    [
        ("backward", bypass_backward),
        ("backward", hide_the_running_backward),
        ("backward", never_end_backward),
        ("losses", change_losses),
    ],
)
def test_an_altered_torch(name: str, alter: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Each self-test succeeds with this torch, and fails with one that bypasses what it tests."""
    SELF_TESTS[name]()
    SELF_TESTS[name].cache_clear()
    with monkeypatch.context() as patch:
        alter(patch)
        with pytest.raises(ConfigError, match="with torch"):
            SELF_TESTS[name]()


@pytest.fixture
def process_group() -> Iterator[None]:
    """A gloo group of one process; a DistributedDataParallel of the test is freed first, else it may block for ever.

    A Reducer that holds the last reference of a group waits for gloo's threads, with the GIL for which they wait.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_renamed_node_of_ddp(monkeypatch: Patch) -> None:
    """A loss behind a node that is not known has no count, so that average="tokens" refuses it."""

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    replica = DistributedDataParallel(Model(2, 2), static_graph=True)
    (count,) = loss_counts.loss_counts([replica(torch.ones(1, 2))], is_in_model=True)
    assert (count.kind, count.count) == ("mean", 2)
    sink = distributed._DDPSink
    monkeypatch.setattr(distributed, "_DDPSink", type(sink)("_Sink", (sink,), {}))
    (count,) = loss_counts.loss_counts([replica(torch.ones(1, 2))], is_in_model=True)
    assert (count.kind, count.count) == ("unknown", None)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_worker_info_that_is_not_replaced(monkeypatch: Patch) -> None:
    """An iterable dataset is refused if get_worker_info() does not return what counts the workers of all ranks."""
    loader = shard_loader(DataLoader(Stream(), batch_size=None))
    assert len(list(loader)) == 8
    monkeypatch.setattr(iterable_style, "get_worker_info", lambda: None)
    with pytest.raises(ConfigError, match="iterable dataset with torch"):
        list(loader)
