"""How much memory and how many threads `load` takes, and what it leaves of a state that the program keeps."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checksum import checksum_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize import load, save
from parallelize.checkpoint import files

WIDTH, LAYERS = 32, 12
LAYER = 4 * WIDTH * WIDTH


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes of copies, made in the context, and of some tensors from before, that live at one time."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._storages = dict[int, tuple[StorageWeakRef, int]]()
        for tensor in tensors:
            self._add(tensor)
        self.before = self._live()
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        # Tensors of the file share its memory, and are made by other functions.
        if function in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self._add(output)
            self.peak = max(self.peak, self._live())
        return output

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def _live(self) -> int:
        live = 0
        for storage, size in self._storages.values():
            if not storage.expired():
                live += size
        return live


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, WIDTH)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for entry in optimizer.state.values() for value in entry.values() if value.ndim]


def values_of(*objects: Any) -> str:
    return checksum_of([each.state_dict() for each in objects])


@pytest.mark.parametrize(("steps", "more_layers"), [(1, 1), (0, 2 * LAYERS)])
def test_moments_are_in_memory_once(tmp_path: Path, steps: int, more_layers: int) -> None:
    """Those that an optimizer has give way to the loaded ones one by one, where torch holds all of both."""
    model, optimizer = trained(2)
    save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    others = trained(steps)
    with CopiedBytes(moments(others[1])) as copied:
        load(tmp_path / "a.pt", model=others[0], optimizer=others[1])
    small = LAYERS * 64  # numbers of steps
    assert copied.peak <= copied.before + more_layers * LAYER + small
    assert checksum_of([each.state_dict() for each in others]) == checksum_of(
        [model.state_dict(), optimizer.state_dict()]
    )


def test_a_state_that_the_program_keeps_is_not_changed(tmp_path: Path) -> None:
    """As with torch, it can be loaded again after another one was loaded."""
    model, optimizer = trained(2)
    save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    other_model, other = trained(1)
    kept = other.state_dict()
    expected = copy.deepcopy(kept)
    load(tmp_path / "a.pt", model=other_model, optimizer=other)
    assert checksum_of(kept) == checksum_of(expected)


def test_hooks_get_the_whole_state_before_the_optimizer_changes(tmp_path: Path) -> None:
    """A hook that compares the new state with the old one finds both."""
    _, optimizer = trained(2)
    save(tmp_path / "a.pt", optimizer=optimizer)
    _, other = trained(1)
    expected = [copy.deepcopy(each.state_dict()["state"]) for each in (other, optimizer)]
    seen = []

    def see(own: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        seen.extend([copy.deepcopy(own.state_dict()["state"]), copy.deepcopy(state["state"])])

    other.register_load_state_dict_pre_hook(see)
    load(tmp_path / "a.pt", optimizer=other)
    assert checksum_of(seen) == checksum_of(expected)


def test_a_folder_is_read_into_memory_once(tmp_path: Path) -> None:
    """What was read from the shards is the new state of the optimizer, without another copy."""
    model, optimizer = trained(2)
    save(tmp_path / "a", sharded=True, model=model, optimizer=optimizer)
    others = trained(0)
    with CopiedBytes([]) as copied:
        load(tmp_path / "a", model=others[0], optimizer=others[1])
    assert copied.peak < LAYER
    assert checksum_of([each.state_dict() for each in others]) == checksum_of(
        [model.state_dict(), optimizer.state_dict()]
    )


def test_threads_verify_the_shards_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards are verified at one time: each of the first two waits for the other one."""
    model, _ = trained(0)
    save(tmp_path / "a", sharded=True, model=model)
    both, numbers = threading.Barrier(2), iter(range(LAYERS))
    verified = files.zip_checksum

    def wait_for_another(item: Any) -> str:
        if next(numbers) < 2:
            both.wait(timeout=60)
        return verified(item)

    monkeypatch.setattr(files, "zip_checksum", wait_for_another)
    other, _ = trained(1)
    load(tmp_path / "a", model=other)
    assert checksum_of(other.state_dict()) == checksum_of(model.state_dict())
