"""Forged files, which torch.load(weights_only=True) reads: refused before any object is changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checksum import checksum_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import ConfigError, ParallelizeError, load, save, shard_loader

DELETED = object()
JUNK: list[Any] = [
    None,
    -1,
    2**70,
    "junk",
    [],
    {},
    ["junk", -1],
    {"junk": [1]},
    torch.full((3,), 7.0),
    torch.zeros(2, 2).to_sparse(),
    torch.empty(2, device="meta"),
    DELETED,
]


def objects_of(seed: int) -> dict[str, Any]:
    """Return objects of each kind after one step; the loader is in the middle of an epoch."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    data = TensorDataset(torch.randn(8, 2))
    loader = shard_loader(DataLoader(data, batch_size=2, shuffle=True), seed=0)
    (batch,) = next(iter(loader))
    model(batch).sum().backward()
    optimizer.step()
    scheduler.step()
    return {"loader": loader, "scheduler": scheduler, "optimizer": optimizer, "model": model}


def state_of(objects: dict[str, Any]) -> str:
    """Return a checksum of all that `load` may change."""
    states = {name: thing.state_dict() for name, thing in objects.items()}
    numbers = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    return f"{checksum_of(states)} {checksum_of(numbers[0])} {numbers[1:]}"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in nested dictionaries and lists; of long lists, of three."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    if isinstance(value, (list, tuple)):
        for number in range(min(len(value), 3)):
            yield from places(value[number], (*path, number))


def changed(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    """Return a copy of a value with junk at a path."""
    key, *rest = path
    if isinstance(value, tuple):
        return tuple(changed(list(value), path, junk))
    result = copy.copy(value)
    if rest:
        result[key] = changed(result[key], tuple(rest), junk)
    elif junk is DELETED:
        del result[key]
    else:
        result[key] = junk
    return result


def refuses(path: Path, objects: dict[str, Any], before: str) -> bool:
    """Load; return whether that is refused. Nothing has changed then."""
    try:
        load(path, **objects)
    except ParallelizeError:
        assert state_of(objects) == before
        return True
    return False


@pytest.mark.parametrize("count", [2, pytest.param(len(JUNK), marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_no_junk_is_found_out_after_an_object_has_changed(tmp_path: Path, count: int) -> None:
    """Any value of a file is replaced by junk: the load is refused and changes nothing, or it ends."""
    save(tmp_path / "right.pt", **objects_of(0), epoch=3)
    content = torch.load(tmp_path / "right.pt", weights_only=True)
    objects = objects_of(1)
    before, refused, ended = state_of(objects), 0, 0
    for number, path in enumerate(places(content)):
        chosen = [JUNK[(number + offset) % len(JUNK)] for offset in range(count)]
        for junk in chosen:
            torch.save(changed(content, path, junk), tmp_path / "forged.pt")
            try:
                is_refused = refuses(tmp_path / "forged.pt", objects, before)
            except Exception as exc:
                raise AssertionError(f"{junk!r} at {path}") from exc
            if is_refused:
                refused += 1
            else:
                ended += 1
                objects = objects_of(1)
                before = state_of(objects)
    assert refused > 3 * ended > 0


FORGED = {
    "record": (["_parallelize"], [1]),
    "format": (["_parallelize", "format"], "2"),
    "objects of others": (["_parallelize", "objects"], {"other": {"kind": "model"}}),
    "kind": (["_parallelize", "objects", "model", "kind"], "optimizer"),
    "random states": (["_parallelize", "rng"], [1, 2]),
    "random state": (["_parallelize", "rng", 0, "torch"], torch.zeros(5, dtype=torch.uint8)),
    "position in NumPy's words": (["_parallelize", "rng", 0, "numpy.random", "state", "pos"], 10**6),
    "version": (["model"], "versions"),
    "negative epoch": (["loader", "epoch"], -1),
    "position beyond the data": (["loader", "start"], 10**9),
    "moment of another shape": (["optimizer", "state", 0, "exp_avg"], torch.zeros(7)),
    "moment that is a text": (["optimizer", "state", 0, "exp_avg"], "junk"),
    "no step": (["optimizer", "state", 0, "step"], DELETED),
    "learning rate": (["optimizer", "param_groups", 0, "lr"], "junk"),
    "milestones": (["scheduler", "milestones"], 3),
    "sparse weight": (["model", "0.weight"], torch.zeros(2, 2).to_sparse()),
    "weight without values": (["model", "0.weight"], torch.empty(2, 2, device="meta")),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_values_are_config_errors(tmp_path: Path, name: str) -> None:
    """What is forged on purpose is a ConfigError; models, optimizers, loaders and RNG stay as they are."""
    save(tmp_path / "a.pt", **objects_of(0), epoch=3)
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    path, junk = FORGED[name]
    if junk == "versions":
        content["model"]._metadata["1"] = {"version": "junk"}
    else:
        content = changed(content, tuple(path), junk)
    torch.save(content, tmp_path / "a.pt")
    objects = objects_of(1)
    before = state_of(objects)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "a.pt", **objects)
    assert caught.value.faults[0].fix
    assert state_of(objects) == before


def shared(levels: int) -> list[Any]:
    """Return lists that hold each other, with 10^levels leaves in a file of some hundred bytes."""
    lists: list[Any] = [0] * 10
    for _ in range(levels - 1):
        lists = [lists] * 10
    return lists


@pytest.mark.timeout(60)
def test_shared_lists_are_walked_once(tmp_path: Path) -> None:
    """Lists with 10^12 leaves are saved and loaded, and stay one list in several places."""
    lists = shared(12)
    torch.save({"a": lists, "b": (lists, {"c": lists})}, tmp_path / "theirs.pt")
    save(tmp_path / "ours.pt", a=lists, b=(lists, {"c": lists}))
    for name in ("theirs.pt", "ours.pt"):
        found = load(tmp_path / name)
        assert found["a"][0] is found["a"][9]
        assert found["b"][0] is found["b"][1]["c"]
    with pytest.raises(ConfigError, match="sharded=False"):
        save(tmp_path / "folder", sharded=True, a=lists)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("lists", ["shared", "cyclic"])
@pytest.mark.parametrize("place", ["model", "optimizer", "scheduler", "other"])
def test_shared_lists_in_states_end(tmp_path: Path, lists: str, place: str) -> None:
    """In the state of each kind of object, such lists are refused before anything changes, or loaded."""
    objects = objects_of(0)
    save(tmp_path / "a.pt", **objects, other=1)
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    tangled = shared(12)
    if lists == "cyclic":
        tangled.append(tangled)
    paths = {"model": ["model", "0.bias"], "optimizer": ["optimizer", "state", 0, "exp_avg"]}
    path = paths.get(place, ["scheduler", "base_lrs"] if place == "scheduler" else ["other"])
    torch.save(changed(content, tuple(path), tangled), tmp_path / "a.pt")
    before = state_of(objects)
    if place == "other" and lists == "shared":
        assert load(tmp_path / "a.pt", rng=False, **objects)["other"][0][0] is not None
        return
    with pytest.raises(ConfigError):
        load(tmp_path / "a.pt", **objects)
    assert state_of(objects) == before
