"""What has changed in a worker is written into the caller's own objects, or named."""

from __future__ import annotations

import array
import logging
import random
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from parallelize.call.object_states import restore, states_of
from parallelize.call.outcome import Outcome
from parallelize.call.unreturned import UnreturnedChanges, data_of, unreturned_warnings
from parallelize.cluster.world import World


class Masked(nn.Module):
    def __init__(self, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2, 2) if mask is None else mask)


EXPANDED = torch.tensor(1.0).expand(2, 2)  # its elements share memory


def changed(*objects: Any, change: Callable[..., object]) -> dict[int, Any]:
    """Return the states of objects that a function has changed."""
    change(*objects)
    return states_of(objects)


def fill(module: nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.full(tensor.shape, 3.0)


def test_buffers_that_refuse_a_copy() -> None:
    """One of inference mode is updated; one whose elements share memory is named, and stays as it is if unchanged."""
    with torch.inference_mode():
        inference = torch.ones(2, 2)
    for mask, problems in ((inference, 0), (EXPANDED, 1)):
        module, trained = Masked(mask), Masked()
        found = restore([module], changed(trained, change=fill))
        assert [problem.startswith("Masked: mask ") for problem in found] == [True] * problems
        assert torch.equal(module.mask, trained.mask) is not bool(problems)
        assert torch.equal(module.linear.weight, trained.linear.weight)
    module = Masked(EXPANDED)
    assert restore([module], changed(Masked(), change=lambda it: fill(it.linear))) == []
    assert module.mask.stride() == (0, 0)


def test_tensors_that_cannot_be_written_are_named() -> None:
    """Tensors on the meta device have no values to write; all others are updated."""
    with torch.device("meta"):
        module = Masked()
    module.mask = torch.zeros(2, 2)
    [problem] = restore([module], changed(Masked(), change=fill))
    assert problem.startswith("Masked: linear.bias, linear.weight ")
    assert "not copied back; return the object" in problem
    assert torch.equal(module.mask, torch.full((2, 2), 3.0))


def test_modes_and_frozen_parameters_come_back() -> None:
    """As they would be after the function has run in this process."""
    ours, theirs = nn.Sequential(nn.Linear(1, 1), nn.Dropout()), nn.Sequential(nn.Linear(1, 1), nn.Dropout())

    def change(_: nn.Module) -> None:
        theirs[0].requires_grad_(False)
        theirs[1].eval()

    assert restore([ours], changed(theirs, change=change)) == []
    assert (ours.training, ours[1].training) == (True, False)
    assert not any(each.requires_grad for each in ours.parameters())


def test_an_optimizer_goes_on_where_the_call_ended() -> None:
    """Its state, settings and parameters that no module has are written into the caller's optimizer."""
    ours, theirs = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer, their_optimizer = torch.optim.Adam(ours.parameters()), torch.optim.Adam(theirs.parameters(), lr=7.0)
    scheduler, their_scheduler = (torch.optim.lr_scheduler.StepLR(each, 1) for each in (optimizer, their_optimizer))

    def train(*_: Any) -> None:
        theirs(torch.ones(1, 1)).sum().backward()
        their_optimizer.step()
        their_scheduler.step()

    assert restore([optimizer, scheduler], changed(their_optimizer, their_scheduler, change=train)) == []
    assert torch.equal(ours.weight, theirs.weight)
    assert optimizer.state_dict()["param_groups"] == their_optimizer.state_dict()["param_groups"]
    assert torch.equal(optimizer.state[ours.weight]["exp_avg"], their_optimizer.state[theirs.weight]["exp_avg"])
    assert scheduler.last_epoch == 1


def test_a_wrapper_keeps_the_groups_of_its_optimizer() -> None:
    """Sharpness-aware minimization holds another optimizer's list of groups: one learning rate for both."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    groups, group, state = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
    states = changed(optimizer, change=lambda _: group.update(lr=7.0))
    group["lr"] = 1.0
    assert restore([optimizer], states) == []
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is group
    assert optimizer.state is state
    assert group["lr"] == 7.0


def test_an_optimizer_with_other_groups_is_named() -> None:
    """A group that the function added does not fit into the caller's optimizer."""
    ours, theirs = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0) for _ in range(2))
    group = {"params": [torch.zeros(1, requires_grad=True)]}
    [problem] = restore([ours], changed(theirs, change=lambda it: it.add_param_group(group)))
    assert problem.startswith("SGD: its state (")


class Meter:
    """Not of torch: it has a state, and says so, unless it is not ready."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.total, self.is_ready = 0, is_ready

    def state_dict(self) -> dict[str, int]:
        if not self.is_ready:
            raise RuntimeError("fit me first")
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"]


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (torch.Generator, lambda it: torch.rand(1, generator=it).item()),
        (lambda: random.Random(0), lambda it: it.random()),
        (lambda: np.random.PCG64(0), lambda it: np.random.Generator(it).random()),
        (lambda: np.random.RandomState(0), lambda it: it.rand()),
        (Meter, lambda it: setattr(it, "total", it.total + 1) or it.total),
    ],
    ids=["torch", "random", "numpy", "old numpy", "state_dict"],
)
def test_generators_and_what_has_a_state_dict_go_on(make: Any, draw: Callable[[Any], float]) -> None:
    """The next number is that after the numbers of the call."""
    ours, theirs, alone = make(), make(), make()
    assert restore([ours], changed(theirs, change=draw)) == []
    assert [draw(alone), draw(alone)][1] == draw(ours)


def test_a_state_that_cannot_be_read_stays() -> None:
    """The object may be of no use yet."""
    assert changed(Meter(is_ready=False), change=lambda it: setattr(it, "total", 1)) == {}


class Cached(Dataset[int]):
    def __init__(self) -> None:
        self.cache: dict[int, int] = {}


class Counting(torch.optim.SGD):
    count = 0


class Trainer:
    def __init__(self) -> None:
        self.history: list[float] = [0.5]
        self.best = {"loss": float("nan"), "nested": [1]}
        self.epoch, self.rate, self.nan = 300, 0.5, float("nan")
        self.tensor = torch.zeros(2)
        self.array = np.zeros(2)
        self.model = nn.Linear(1, 1)
        self.optimizer = Counting(self.model.parameters(), lr=1.0)
        self.data = Cached()
        self.lock = threading.Lock()
        self.log = logging.getLogger("of a trainer")
        self._best = SimpleNamespace(loss=1)


CHANGES: dict[str, tuple[Callable[[Trainer], object], list[str]]] = {
    "append": (lambda it: it.history.append(0.1), ["it.history"]),
    "item": (lambda it: it.history.__setitem__(0, 0.1), ["it.history"]),
    "nested": (lambda it: it.best["nested"].append(1), ["it.best"]),
    "number": (lambda it: setattr(it, "epoch", it.epoch + 1), ["it.epoch"]),
    "new attribute": (lambda it: vars(it).update(new=1), ["it.new"]),
    "tensor in place": (lambda it: it.tensor.add_(1), ["it.tensor"]),
    "array in place": (lambda it: it.array.__iadd__(1), ["it.array"]),
    "new model": (lambda it: setattr(it, "model", nn.Linear(1, 1)), ["it.model"]),
    "optimizer's own": (lambda it: setattr(it.optimizer, "count", 1), ["optimizer.count"]),
    "private, of a library's class": (lambda it: setattr(it._best, "loss", 0), ["it._best"]),
    "equal number": (lambda it: setattr(it, "rate", float("0.5")), []),
    "equal nan": (lambda it: setattr(it, "nan", float("nan")), []),
    "dataset": (lambda it: it.data.cache.update({1: 1}), []),
    "weights come back": (lambda it: it.model.weight.data.mul_(2), []),
    "logger": (lambda it: it.log.isEnabledFor(len(it.log._cache)), []),  # fills its cache
    "mode comes back": (lambda it: it.model.eval(), []),
    "optimizer comes back": (lambda it: it.optimizer.param_groups[0].update(lr=2.0), []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_named(name: str) -> None:
    """By the attribute of an argument; not what comes back, nor what datasets cache."""
    change, names = CHANGES[name]
    it = Trainer()
    changes = UnreturnedChanges(
        [it.model, it.optimizer], lambda: {**data_of("it", it), **data_of("optimizer", it.optimizer)}
    )
    assert changes.names() == []
    change(it)
    assert changes.names() == names


MIB = 2**20


class Copies:
    """Pickles a copy of its elements, as classes of compiled libraries do."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.elements = make()

    def __reduce__(self) -> Any:
        return Copies, (self.elements + 0,)


class Scaled(torch.Tensor):
    """A subclass of a user's own."""


def in_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(MIB)


LARGE: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.ones(4 * MIB),
    "bytes of a tensor": lambda: torch.ones(16 * MIB, dtype=torch.uint8),
    "requires grad": lambda: torch.ones(4 * MIB, requires_grad=True),
    "expanded": lambda: torch.ones(1).expand(10**9),
    "slice": lambda: torch.ones(2048, 4096)[:, ::2],
    "subclass": lambda: torch.ones(4 * MIB).as_subclass(Scaled),
    "sparse": lambda: torch.ones(1024, 1024).to_sparse(),
    "sparse rows": lambda: torch.ones(1024, 1024).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4 * MIB), 1.0, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(MIB), torch.ones(2 * MIB)], layout=torch.jagged),
    "meta": lambda: torch.ones(4 * MIB, device="meta"),
    "inference": in_inference,
    "storage": lambda: torch.ones(4 * MIB).untyped_storage(),
    "dataset": lambda: TensorDataset(torch.ones(4 * MIB)),
    "array": lambda: np.ones(2 * MIB),
    "slice of an array": lambda: np.ones((2048, 2048))[:, ::2],
    "masked array": lambda: np.ma.masked_less(np.ones(2 * MIB), 0.5),
    "records": lambda: np.zeros(MIB, dtype=[("a", "U3"), ("b", "f4")]),
    "objects": lambda: np.array([None] * MIB, dtype=object),
    "array.array": lambda: array.array("d", bytes(16 * MIB)),
    "bytes": lambda: bytes(16 * MIB),
    "bytearray": lambda: bytearray(16 * MIB),
    "text": lambda: "\N{GREEK SMALL LETTER ALPHA}" * (8 * MIB),
    "list": lambda: [float(index) for index in range(MIB)],
    "set": lambda: set(range(MIB)),
    "dict": lambda: {index: [index] for index in range(2**18)},
    "list of tensors": lambda: [torch.ones(64) for _ in range(2**15)],
    "attributes": lambda: SimpleNamespace(**{f"a{index}": 1 for index in range(2**16)}),
}


def bytes_to_compare(item: object) -> int:
    """Return the memory that Python and NumPy take at most for the comparisons of a call that changes nothing."""
    objects = {"alone": item, "inner": [1, item], "attribute": SimpleNamespace(item=item, count=1)}

    def data() -> dict[str, object]:
        return {key: value for name, each in objects.items() for key, value in data_of(name, each).items()}

    tracemalloc.start()
    try:
        unreturned = UnreturnedChanges([], data).names()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert unreturned == []
    return most


@pytest.mark.filterwarnings("ignore::UserWarning")  # types of tensors that torch is not sure about
@pytest.mark.parametrize("name", LARGE)
def test_a_comparison_copies_no_large_object(name: str) -> None:
    """Whatever its type is, and wherever it is found: it is data, and a copy of it may not fit."""
    assert bytes_to_compare(LARGE[name]()) < 4 * MIB


def test_a_comparison_copies_no_data_frame() -> None:
    """Of numbers, and of text, which pandas may keep as arrays of objects or buffers of Arrow."""
    pandas = pytest.importorskip("pandas")
    for column in (np.ones(2 * MIB), [f"row {index}" for index in range(2**18)]):
        assert bytes_to_compare(pandas.DataFrame({"x": column})) < 2 * MIB


class Holder:
    def __init__(self) -> None:
        self.tensor, self.array = torch.ones(MIB), np.ones(MIB)
        self.both = {"tensor": torch.ones(MIB), "array": np.ones(MIB), "count": 1}
        self.copies = [Copies(lambda: np.ones(MIB)), Copies(lambda: torch.ones(MIB))]
        self.inference = in_inference()
        self.meta = torch.ones(MIB, device="meta")


LARGE_CHANGES: dict[str, tuple[Callable[[Holder], object], list[str]]] = {
    "nothing": (lambda it: it, []),
    "read": (lambda it: (it.tensor.sum(), it.tensor[5:], it.array.sum(), it.both["tensor"] + 1), []),
    "tensor in place": (lambda it: it.tensor.add_(1), ["it.tensor"]),
    "an element": (lambda it: it.tensor.__setitem__(7, 2.0), ["it.tensor"]),
    "a view of a tensor": (lambda it: it.tensor[5:].view(-1).zero_(), ["it.tensor"]),
    "another tensor": (lambda it: setattr(it, "tensor", torch.ones(MIB)), ["it.tensor"]),
    "other elements": (lambda it: setattr(it.tensor, "data", torch.zeros(MIB)), ["it.tensor"]),
    "another array": (lambda it: setattr(it, "array", np.ones(MIB)), ["it.array"]),
    "in a dict": (lambda it: it.both["tensor"].mul_(2), ["it.both"]),
    "another in a dict": (lambda it: it.both.update(array=np.ones(MIB)), ["it.both"]),
    "beside large ones": (lambda it: it.both.update(count=2), ["it.both"]),
    "smaller": (lambda it: it.both.update(tensor=torch.ones(1)), ["it.both"]),
    "another of inference mode": (lambda it: setattr(it, "inference", torch.ones(MIB)), ["it.inference"]),
}


@pytest.mark.parametrize("name", LARGE_CHANGES)
def test_changes_of_large_tensors_are_named(name: str) -> None:
    """By identity and version; the small parts beside them as ever; copies that a class pickles are not compared."""
    change, names = LARGE_CHANGES[name]
    it = Holder()
    changes = UnreturnedChanges([], lambda: data_of("it", it))
    change(it)
    assert changes.names() == names


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_what_is_written_to_a_file_is_not_lost(tmp_path: Path, mode: Any) -> None:
    """A memmap's changes are in its file, but not those of a private one."""
    np.zeros(100).tofile(tmp_path / "x")
    memmap = np.memmap(tmp_path / "x", dtype=np.float64, mode=mode)
    changes = UnreturnedChanges([], lambda: {"whole": memmap, "part": memmap[:50], "plain": np.asarray(memmap)})
    memmap[3] = 1.0
    assert changes.names() == ([] if mode == "r+" else ["part", "plain", "whole"])


def test_the_warning() -> None:
    """Names five changes, and numbers of which each rank has evaluated its own samples; equal ones are of all."""
    outcomes = [Outcome(rank, "host", 1, 0.5, evaluated="0.5") for rank in range(2)]
    assert unreturned_warnings(outcomes) == []
    [text] = unreturned_warnings([*outcomes, Outcome(2, "host", 1, None, evaluated="0.7")])
    assert text.startswith("rank 0 returned 0.5, and rank 2 0.7: each evaluated its own samples")
    assert unreturned_warnings([Outcome.returned(World(), 1)]) == []
    [text] = unreturned_warnings([Outcome.returned(World(), 1, unreturned=[f"x{index}" for index in range(7)])])
    assert text.startswith("x0, x1, x2, x3, x4 and 2 more changed in the workers and do not come back: ")
