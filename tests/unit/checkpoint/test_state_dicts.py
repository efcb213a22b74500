"""save() and load() of models, optimizers and other objects, in one process."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from checksum import checksum_of
from ranks import as_rank
from torch import nn

from parallelize import ConfigError, load, save


class Tagged(nn.Module):
    """Has its own state-dict version, tied weights, a non-persistent buffer and extra state."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.extra = {"tokens": 0}
        self.version_seen = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.version_seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def forward(self, x):
        return self.norm(self.second(self.first(x)))


def trained(steps: int = 3):
    """Return a model, its optimizer and its scheduler after some steps."""
    torch.manual_seed(0)
    model = Tagged()
    optimizer = torch.optim.AdamW(
        [{"params": model.first.parameters(), "lr": 0.1}, {"params": model.norm.parameters()}]
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=20)
    step(model, optimizer, scheduler, steps)
    return model, optimizer, scheduler


def step(model, optimizer, scheduler, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(8, 4)) - torch.rand(8, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()


def copy_states(*objects):
    """Return deep copies of the state dicts."""
    return copy.deepcopy([each.state_dict() for each in objects])


def assert_equal(a, b):
    """Compare nested values bitwise."""
    assert checksum_of(a) == checksum_of(b)


def test_a_resumed_run_matches_an_uninterrupted_one(tmp_path):
    """Training from a loaded model, optimizer, scheduler and RNG state is bitwise as without the interruption."""
    model, optimizer, scheduler = trained()
    model.extra = {"tokens": 7}
    save(tmp_path / "a.pt", model=model, optimizer=optimizer, scheduler=scheduler, epoch=2)
    step(model, optimizer, scheduler, 4)
    others = trained(0)
    assert load(tmp_path / "a.pt", model=others[0], optimizer=others[1], scheduler=others[2]) == {"epoch": 2}
    (tmp_path / "a.pt").write_bytes(b"\0" * (tmp_path / "a.pt").stat().st_size)  # they share no memory with the file
    assert (others[0].extra, others[0].version_seen) == ({"tokens": 7}, 3)
    step(*others, 4)
    assert_equal(copy_states(*others), copy_states(model, optimizer, scheduler))


def test_rng_states_can_be_left_alone(tmp_path):
    """With rng=False, or in a world of another size, load() leaves the RNG states alone."""

    def drawn():
        return torch.rand(1).item(), random.random()

    save(tmp_path / "a.pt", model=nn.Linear(1, 1))
    first = drawn()
    load(tmp_path / "a.pt")
    assert drawn() == first
    load(tmp_path / "a.pt", rng=False)
    with as_rank(1, 3):
        load(tmp_path / "a.pt")
    assert drawn() != first


def mismatches():
    """Return objects that do not fit the state of `trained()`, each with the expected message."""
    model, optimizer, _ = trained(0)
    wide, more, less = Tagged(), Tagged(), Tagged()
    wide.norm = nn.BatchNorm1d(5)
    more.third = nn.Linear(1, 1)
    del less.norm
    sgd, adamw = torch.optim.SGD(model.parameters(), lr=1), torch.optim.AdamW(model.parameters())
    of_wide = torch.optim.AdamW([{"params": each.parameters()} for each in (wide.first, wide.norm)])
    return {
        "shape": ({"model": wide}, "size mismatch for norm.weight"),
        "missing": ({"model": more}, r'Missing key\(s\) in state_dict: "third.weight", "third.bias"'),
        "unknown": ({"model": less}, r'Unexpected key\(s\) in state_dict: "norm.weight"'),
        "kind": ({"model": optimizer}, "model=AdamW.*, where the checkpoint holds a model"),
        "name": ({"models": model}, "models= is not in .*\n.*\n.*did you mean 'model'"),
        "class": ({"optimizer": sgd}, "class: AdamW in the checkpoint, SGD in"),
        "groups": ({"optimizer": adamw}, r"group sizes: \[1, 2\] in the check"),
        "parameter": ({"optimizer": of_wide}, r"shape of parameter 1: \[4\] in the checkpoint, \[5\] in the optimizer"),
        "value": ({"epoch": 3}, r"load\(path\)\['epoch'\]"),
        "several": ({"model": wide, "models": model, "scheduler": optimizer}, "3 faults"),
    }


@pytest.mark.parametrize("case", mismatches())
def test_a_mismatch_changes_nothing(tmp_path, case):
    """All faults are reported at once, each with a fix, and no object has changed."""
    names = "model", "optimizer", "scheduler"
    save(tmp_path / "a.pt", **dict(zip(names, trained(2), strict=True)), epoch=2)
    wrong, message = mismatches()[case]
    objects = {**dict(zip(names, trained(5), strict=True)), **wrong}
    stateful = [each for each in objects.values() if hasattr(each, "state_dict")]
    before, generator = copy_states(*stateful), torch.get_rng_state()
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path / "a.pt", **objects)
    assert all(each.fix for each in caught.value.faults)
    assert_equal(copy_states(*stateful), before)
    assert torch.equal(torch.get_rng_state(), generator)


class Stubborn:
    """Raises whenever its state is loaded."""

    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        raise KeyError("not this one")


def test_an_object_that_raises_leaves_the_others_unchanged(tmp_path):
    """If an object's own load_state_dict raises, models and optimizers have not been changed."""
    model, optimizer, _ = trained(2)
    save(tmp_path / "a.pt", model=model, optimizer=optimizer, stubborn=Stubborn())
    others = trained(5)
    before = copy_states(*others)
    with pytest.raises(KeyError, match="not this one"):
        load(tmp_path / "a.pt", model=others[0], optimizer=others[1], stubborn=Stubborn())
    assert_equal(copy_states(*others), before)


def test_hooks_that_rename_are_honoured(tmp_path):
    """A load_state_dict pre-hook may rename weights; without it the same file is refused and nothing changes."""

    def rename(_module, state, prefix, *_):
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    torch.save({"model": {"kernel": torch.ones(2, 2), "bias": torch.zeros(2)}}, tmp_path / "a.pt")
    model, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_load_state_dict_pre_hook(rename)
    load(tmp_path / "a.pt", model=model)
    assert torch.equal(model.weight, torch.ones(2, 2))
    before = copy_states(plain)
    with pytest.raises(ConfigError, match=r'Missing key\(s\) in state_dict: "weight"'):
        load(tmp_path / "a.pt", model=plain)
    assert_equal(copy_states(plain), before)


def test_what_does_not_fit_is_logged(tmp_path, caplog):
    """strict=False loads the weights that fit, and logs the others; another shape is still refused."""
    first, second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    torch.save({"model": {"0.weight": torch.ones(2, 2), "head": torch.ones(1)}}, tmp_path / "a.pt")
    load(tmp_path / "a.pt", strict=False, model=second)
    assert torch.equal(second[0].weight, torch.ones(2, 2))
    assert "model= does not have exactly the weights in the checkpoint" in caplog.text
    assert "missing_keys=['0.bias']" in caplog.text
    assert "unexpected_keys=['head']" in caplog.text
    torch.save({"model": {"weight": torch.ones(3, 2)}}, tmp_path / "b.pt")
    with pytest.raises(ConfigError, match="size mismatch for weight"):
        load(tmp_path / "b.pt", strict=False, model=first)
