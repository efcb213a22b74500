"""What goes from things into a checkpoint and back, in one process."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from ranks import place
from torch import nn

from parallelize import ConfigError, load, parallel_model, save
from parallelize.checkpoint.checksum import digest


class Tagged(nn.Module):
    """Has a version of its own, tied weights, a buffer that is not saved, and extra state."""

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
    """A model, its optimizer and scheduler after some steps."""
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


def as_it_is(*things):
    """A deep copy of the state of things."""
    return copy.deepcopy([each.state_dict() for each in things])


def assert_equal(a, b):
    """Bitwise, whatever the containers hold."""
    assert digest(a) == digest(b)


def test_training_goes_on_as_if_nothing_had_been(tmp_path):
    """Model, optimizer, scheduler and random generators of a new process go on bitwise as the old ones."""
    model, optimizer, scheduler = trained()
    model.extra = {"tokens": 7}
    save(tmp_path / "a.pt", model=model, optimizer=optimizer, scheduler=scheduler, epoch=2)
    step(model, optimizer, scheduler, 4)
    others = trained(0)
    assert load(tmp_path / "a.pt", model=others[0], optimizer=others[1], scheduler=others[2]) == {"epoch": 2}
    assert (others[0].extra, others[0].version_seen) == ({"tokens": 7}, 3)
    step(*others, 4)
    assert_equal(as_it_is(*others), as_it_is(model, optimizer, scheduler))


def test_nothing_is_kept_of_the_file(tmp_path):
    """What was loaded has memory of its own: the file may be overwritten in place."""
    model, optimizer, _ = trained()
    save(tmp_path / "a.pt", model=model, optimizer=optimizer, x=torch.ones(5))
    others = trained(0)
    found = load(tmp_path / "a.pt", model=others[0], optimizer=others[1])
    (tmp_path / "a.pt").write_bytes(b"\0" * (tmp_path / "a.pt").stat().st_size)
    assert_equal(as_it_is(*others[:2]), as_it_is(model, optimizer))
    assert_equal(found["x"], torch.ones(5))


def test_weights_have_their_clean_names(tmp_path):
    """A model in a block, compiled or not, is saved under the names that it has without this library."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = list(model.state_dict())
    with parallel_model(model):
        save(tmp_path / "a.pt", model=model)
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    load(tmp_path / "a.pt", model=other)
    assert list(other.state_dict()) == names
    assert_equal(as_it_is(other), as_it_is(model))


def test_the_loss_scale_goes_along(tmp_path):
    """A block with loss scaling goes on with the scale of the one that was saved; a plain model ignores it."""
    scaled = {"backend": "ddp", "amp": "O1"}

    def session(model):
        return model.forward.__func__.route.inner.session

    class Scale:
        def __init__(self, number):
            self.number = number

        def state_dict(self):
            return {"scale": self.number}

        def load_state_dict(self, state):
            self.number = state["scale"]

    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with parallel_model(model, **scaled):
        model.forward.__func__.route.inner.session = Scale(1024.0)
        save(tmp_path / "a.pt", model=model)
    with parallel_model(other, **scaled):
        other.forward.__func__.route.inner.session = Scale(1.0)
        load(tmp_path / "a.pt", model=other)
        assert session(other).number == 1024.0
    load(tmp_path / "a.pt", model=model)


def test_generators_are_left_alone_when_asked(tmp_path):
    """With rng=False, and in a world of another size, random numbers go on as they were."""
    save(tmp_path / "a.pt", x=1)
    drawn = torch.rand(1), random.random()
    for restored, options in ((True, {}), (False, {"rng": False})):
        load(tmp_path / "a.pt", **options)
        assert ((torch.rand(1), random.random()) == drawn) is restored
    load(tmp_path / "a.pt")
    with place(1, 3):
        load(tmp_path / "a.pt")
    assert (torch.rand(1), random.random()) == drawn
    load(tmp_path / "a.pt")
    random.random()
    with place(1, 3):
        load(tmp_path / "a.pt")
    assert random.random() != drawn[1]


@pytest.mark.parametrize("order", [["model", "optimizer"], ["optimizer", "model"]])
def test_lazy_modules_get_their_shapes(tmp_path, order):
    """Into a model that has not seen a batch yet, and its optimizer, goes what was saved of one that has."""

    def lazy():
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 1))
        return model, torch.optim.Adam(model.parameters(), foreach=False)

    def trained_once(model, optimizer):
        model(torch.arange(8.0).reshape(4, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained_once(*lazy())
    save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    things = dict(zip(["model", "optimizer"], lazy(), strict=True))
    load(tmp_path / "a.pt", **{name: things[name] for name in order})
    assert_equal(as_it_is(*things.values()), as_it_is(model, optimizer))
    assert_equal(
        as_it_is(*trained_once(things["model"], things["optimizer"])), as_it_is(*trained_once(model, optimizer))
    )


def mismatches():
    """What cannot take the state of `trained()`, and what the error says of it."""
    model, optimizer, _ = trained(0)
    wide = Tagged()
    wide.norm = nn.BatchNorm1d(5)
    more = Tagged()
    more.third = nn.Linear(1, 1)
    less = Tagged()
    del less.norm
    return {
        "shape": ({"model": wide}, r"norm.weight has shape \(4,\) in the checkpoint, \(5,\) in the model"),
        "missing": ({"model": more}, "no third.weight, third.bias in the checkpoint"),
        "unknown": ({"model": less}, "the checkpoint has norm.weight, .*, the model has not"),
        "kind": ({"model": optimizer}, "model=AdamW.*, where the checkpoint holds a model"),
        "name": ({"models": model}, "models= is not in .*\n.*\n.*did you mean 'model'"),
        "class": ({"optimizer": torch.optim.SGD(model.parameters(), lr=1)}, "it was AdamW and is SGD"),
        "groups": ({"optimizer": torch.optim.AdamW(model.parameters())}, "groups of 1 and 2 parameters"),
        "parameter": (
            {"optimizer": torch.optim.AdamW([{"params": wide.first.parameters()}, {"params": wide.norm.parameters()}])},
            r"parameter 1 had shape \(4,\) and has \(5,\)",
        ),
        "value": ({"epoch": 3}, r"load\(path\)\['epoch'\]"),
        "several": ({"model": wide, "models": model, "scheduler": optimizer}, "3 faults"),
    }


@pytest.mark.parametrize("case", mismatches())
def test_what_does_not_fit_changes_nothing(tmp_path, case):
    """Every fault is told at once, with a fix, and nothing has changed: not even what would have fitted."""
    model, optimizer, scheduler = trained(2)
    save(tmp_path / "a.pt", model=model, optimizer=optimizer, scheduler=scheduler, epoch=2)
    things, message = mismatches()[case]
    fitting = {"model": trained(5)[0], "optimizer": trained(5)[1], "scheduler": trained(5)[2]}
    things = {**fitting, **things}
    objects = [each for each in things.values() if hasattr(each, "state_dict")]
    before, generator = as_it_is(*objects), torch.get_rng_state()
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path / "a.pt", **things)
    assert all(each.fix for each in caught.value.faults)
    assert_equal(as_it_is(*objects), before)
    assert torch.equal(torch.get_rng_state(), generator)


class Stubborn:
    """Takes no state."""

    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        raise KeyError("not this one")


def test_a_thing_that_refuses_leaves_the_others_as_they_were(tmp_path):
    """When one thing's own load_state_dict raises, what was loaded before it gets its state back."""
    model, _, scheduler = trained(2)
    save(tmp_path / "a.pt", scheduler=scheduler, model=model, stubborn=Stubborn())
    others = trained(5)
    before = as_it_is(*others)
    with pytest.raises(KeyError, match="not this one"):
        load(tmp_path / "a.pt", scheduler=others[2], model=others[0], stubborn=Stubborn())
    assert_equal(as_it_is(*others), before)


class Refusing(Tagged):
    """Takes no extra state that is marked, when its weights have been loaded already."""

    def set_extra_state(self, state):
        if "marked" in state:
            raise KeyError("not this one")
        super().set_extra_state(state)


class Hooked(nn.Linear):
    """Has nothing of its own but a hook."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_load_state_dict_post_hook(lambda *_: None)


@pytest.mark.parametrize("order", list(itertools.permutations(["plain", "tagged", "hooked", "refusing"])))
def test_a_model_that_refuses_leaves_the_others_as_they_were(tmp_path, order):
    """When a model's own code raises, all models get their weights and extra state back, whatever the order."""

    def things():
        return {"plain": nn.Linear(1, 1), "tagged": Tagged(), "hooked": Hooked(), "refusing": Refusing()}

    saved, others = things(), things()
    saved["tagged"].extra, saved["refusing"].extra = {"tokens": 1}, {"marked": True}
    save(tmp_path / "a.pt", **saved)
    before = as_it_is(*others.values())
    with pytest.raises(KeyError, match="not this one"):
        load(tmp_path / "a.pt", **{name: others[name] for name in order})
    assert_equal(as_it_is(*others.values()), before)
    del saved["refusing"].extra["marked"]
    save(tmp_path / "a.pt", **saved)
    load(tmp_path / "a.pt", **others)
    assert_equal(as_it_is(*others.values()), as_it_is(*saved.values()))


def test_what_does_not_take_its_own_state_back_is_told(tmp_path, caplog):
    """The first failure is raised, the others have their states back, and the log names the one that has not."""
    save(tmp_path / "a.pt", first=Stubborn(), hooked=Hooked())
    hooked = Hooked()
    before = as_it_is(hooked)
    with pytest.raises(KeyError, match="not this one"):
        load(tmp_path / "a.pt", hooked=hooked, first=Stubborn())
    assert_equal(as_it_is(hooked), before)
    assert "first= has refused the state that it had, too: KeyError" in caplog.text
