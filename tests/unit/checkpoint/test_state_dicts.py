"""save() and load() of models, optimizers and other objects, in one process."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from ranks import as_rank
from torch import nn

from parallelize import ConfigError, checkpoints, load, parallel_model, save
from parallelize.checkpoint import background_save
from parallelize.checkpoint.checksum import checksum_of


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
    assert (others[0].extra, others[0].version_seen) == ({"tokens": 7}, 3)
    step(*others, 4)
    assert_equal(copy_states(*others), copy_states(model, optimizer, scheduler))


def test_loaded_tensors_do_not_share_memory_with_the_file(tmp_path):
    """Loaded tensors do not change when the file is overwritten in place."""
    model, optimizer, _ = trained()
    save(tmp_path / "a.pt", model=model, optimizer=optimizer, x=torch.ones(5))
    others = trained(0)
    values = load(tmp_path / "a.pt", model=others[0], optimizer=others[1])
    (tmp_path / "a.pt").write_bytes(b"\0" * (tmp_path / "a.pt").stat().st_size)
    assert_equal(copy_states(*others[:2]), copy_states(model, optimizer))
    assert_equal(values["x"], torch.ones(5))


def test_weights_have_their_clean_names(tmp_path):
    """A model in a block is saved under the names that its weights have outside of it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = list(model.state_dict())
    with parallel_model(model):
        save(tmp_path / "a.pt", model=model)
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    load(tmp_path / "a.pt", model=other)
    assert list(other.state_dict()) == names
    assert_equal(copy_states(other), copy_states(model))


def test_the_loss_scale_is_saved(tmp_path):
    """A block with loss scaling resumes with the saved loss scale; a model outside a block ignores it."""
    scaled = {"backend": "ddp", "amp": "O1"}

    def session(model):
        return model.forward.__func__.route.owner.session

    class Scale:
        def __init__(self, number):
            self.number = number

        def state_dict(self):
            return {"scale": self.number}

        def load_state_dict(self, state):
            self.number = state["scale"]

    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with parallel_model(model, **scaled):
        model.forward.__func__.route.owner.session = Scale(1024.0)
        save(tmp_path / "a.pt", model=model)
    with parallel_model(other, **scaled):
        other.forward.__func__.route.owner.session = Scale(1.0)
        load(tmp_path / "a.pt", model=other)
        assert session(other).number == 1024.0
    load(tmp_path / "a.pt", model=model)


def test_rng_states_can_be_left_alone(tmp_path):
    """With rng=False, or in a world of another size, load() leaves the RNG states alone."""
    save(tmp_path / "a.pt", x=1)
    drawn = torch.rand(1), random.random()
    for restored, options in ((True, {}), (False, {"rng": False})):
        load(tmp_path / "a.pt", **options)
        assert ((torch.rand(1), random.random()) == drawn) is restored
    load(tmp_path / "a.pt")
    with as_rank(1, 3):
        load(tmp_path / "a.pt")
    assert (torch.rand(1), random.random()) == drawn
    load(tmp_path / "a.pt")
    random.random()
    with as_rank(1, 3):
        load(tmp_path / "a.pt")
    assert random.random() != drawn[1]


@pytest.mark.parametrize("order", [["model", "optimizer"], ["optimizer", "model"]])
def test_lazy_modules_get_their_shapes(tmp_path, order):
    """A checkpoint of an initialized model loads into an uninitialized lazy one and its optimizer."""

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
    objects = dict(zip(["model", "optimizer"], lazy(), strict=True))
    load(tmp_path / "a.pt", **{name: objects[name] for name in order})
    assert_equal(copy_states(*objects.values()), copy_states(model, optimizer))
    assert_equal(
        copy_states(*trained_once(objects["model"], objects["optimizer"])), copy_states(*trained_once(model, optimizer))
    )


def mismatches():
    """Return objects that do not fit the state of `trained()`, each with the expected message."""
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
        "unknown": ({"model": less}, "the checkpoint has norm.weight, .*, the model does not"),
        "kind": ({"model": optimizer}, "model=AdamW.*, where the checkpoint holds a model"),
        "name": ({"models": model}, "models= is not in .*\n.*\n.*did you mean 'model'"),
        "class": ({"optimizer": torch.optim.SGD(model.parameters(), lr=1)}, "saved from AdamW, loaded into SGD"),
        "groups": ({"optimizer": torch.optim.AdamW(model.parameters())}, "groups of 1 and 2 parameters"),
        "parameter": (
            {"optimizer": torch.optim.AdamW([{"params": wide.first.parameters()}, {"params": wide.norm.parameters()}])},
            r"parameter 1 has shape \(4,\) in the checkpoint, \(5,\) in the optimizer",
        ),
        "value": ({"epoch": 3}, r"load\(path\)\['epoch'\]"),
        "several": ({"model": wide, "models": model, "scheduler": optimizer}, "3 faults"),
    }


@pytest.mark.parametrize("case", mismatches())
def test_a_mismatch_changes_nothing(tmp_path, case):
    """All faults are reported at once, each with a fix, and no object has changed."""
    model, optimizer, scheduler = trained(2)
    save(tmp_path / "a.pt", model=model, optimizer=optimizer, scheduler=scheduler, epoch=2)
    objects, message = mismatches()[case]
    fitting = {"model": trained(5)[0], "optimizer": trained(5)[1], "scheduler": trained(5)[2]}
    objects = {**fitting, **objects}
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
    """If one object's load_state_dict raises, objects that were loaded before it are restored."""
    model, _, scheduler = trained(2)
    save(tmp_path / "a.pt", scheduler=scheduler, model=model, stubborn=Stubborn())
    others = trained(5)
    before = copy_states(*others)
    with pytest.raises(KeyError, match="not this one"):
        load(tmp_path / "a.pt", scheduler=others[2], model=others[0], stubborn=Stubborn())
    assert_equal(copy_states(*others), before)


class Refusing(Tagged):
    """Raises for marked extra state, which is set after the weights have been loaded."""

    def set_extra_state(self, state):
        if "marked" in state:
            raise KeyError("not this one")
        super().set_extra_state(state)


class Hooked(nn.Linear):
    """A Linear with a load_state_dict hook."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_load_state_dict_post_hook(lambda *_: None)


@pytest.mark.parametrize("order", list(itertools.permutations(["plain", "tagged", "hooked", "refusing"])))
def test_a_model_that_raises_leaves_the_others_unchanged(tmp_path, order):
    """If a model's own code raises, all models get their weights and extra state back, in any order."""

    def models():
        return {"plain": nn.Linear(1, 1), "tagged": Tagged(), "hooked": Hooked(), "refusing": Refusing()}

    saved, others = models(), models()
    saved["tagged"].extra, saved["refusing"].extra = {"tokens": 1}, {"marked": True}
    save(tmp_path / "a.pt", **saved)
    before = copy_states(*others.values())
    with pytest.raises(KeyError, match="not this one"):
        load(tmp_path / "a.pt", **{name: others[name] for name in order})
    assert_equal(copy_states(*others.values()), before)
    del saved["refusing"].extra["marked"]
    save(tmp_path / "a.pt", **saved)
    load(tmp_path / "a.pt", **others)
    assert_equal(copy_states(*others.values()), copy_states(*saved.values()))


def test_an_object_that_cannot_be_restored_is_logged(tmp_path, caplog):
    """The first error is raised, the other objects are restored, and the log names the object that is not."""
    save(tmp_path / "a.pt", first=Stubborn(), hooked=Hooked())
    hooked = Hooked()
    before = copy_states(hooked)
    with pytest.raises(KeyError, match="not this one"):
        load(tmp_path / "a.pt", hooked=hooked, first=Stubborn())
    assert_equal(copy_states(hooked), before)
    assert "first= could not be restored to its previous state: KeyError" in caplog.text


class Scaled(torch.Tensor):
    """A tensor of 8-bit codes and a scale, as torchao's optimizers hold their state."""

    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _context, _size, _stride):
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        del types, kwargs
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


class EightBit(torch.optim.Optimizer):
    """An optimizer whose state is of tensor subclasses."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for each in self.param_groups[0]["params"]:
            codes = torch.randint(-9, 9, each.shape, dtype=torch.int8)
            self.state[each]["moment"] = Scaled(codes, torch.rand(1))


@pytest.mark.parametrize("in_background", [None, False, True])
def test_tensor_subclasses_that_torch_may_load(tmp_path, in_background, monkeypatch):
    """A registered tensor subclass is saved as it is, also by the writer process; another one is refused."""
    monkeypatch.setattr(background_save, "MIN_BYTES", 0)
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    optimizer, fresh = EightBit(model.parameters()), EightBit(other.parameters())
    optimizer.step()
    with pytest.raises(ConfigError, match=r"optimizer\['state'\]\[0\]\['moment'\] is of type .*Scaled"):
        save(tmp_path / "step-000000001.pt", optimizer=optimizer)
    with torch.serialization.safe_globals([Scaled]):
        if in_background is None:
            save(tmp_path / "step-000000001.pt", model=model, optimizer=optimizer)
        else:
            with checkpoints(tmp_path, every=1, in_background=in_background, optimizer=optimizer) as saved:
                saved.step()
                saved.wait()
                copied = (tmp_path / "step-000000001.pt").read_bytes()
            (tmp_path / "step-000000001.pt").write_bytes(copied)
        load(tmp_path / "step-000000001.pt", optimizer=fresh)
        with pytest.raises(ConfigError, match="is of a tensor subclass"):
            save(tmp_path / "folder", sharded=True, optimizer=optimizer)
    pairs = zip(optimizer.state.values(), fresh.state.values(), strict=True)
    for found in [(mine["moment"], theirs["moment"]) for mine, theirs in pairs]:
        assert [type(each) for each in found] == [Scaled, Scaled]
        assert torch.equal(found[0].codes, found[1].codes)
        assert torch.equal(found[0].scale, found[1].scale)
    with pytest.raises(ConfigError, match=r"holds .*Scaled, which is not a safe type"):
        load(tmp_path / "step-000000001.pt", optimizer=fresh)


class Renamed(nn.Linear):
    """Reads files that an older version of it has written under other names."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(_module, state, prefix, *_):
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


def test_hooks_that_rename_are_honoured(tmp_path):
    """A load_state_dict pre-hook may rename weights; without it the same file is refused and nothing changes."""
    torch.save({"model": {"kernel": torch.ones(2, 2), "bias": torch.zeros(2)}}, tmp_path / "a.pt")
    model, plain = Renamed(), nn.Linear(2, 2)
    load(tmp_path / "a.pt", model=model)
    assert torch.equal(model.weight, torch.ones(2, 2))
    before = copy_states(plain)
    with pytest.raises(ConfigError, match="no weight in the checkpoint"):
        load(tmp_path / "a.pt", model=plain)
    assert_equal(copy_states(plain), before)


def test_what_does_not_fit_is_logged(tmp_path, caplog):
    """strict=False loads the weights that fit, and logs the others; another shape is still refused."""
    first, second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    torch.save({"model": {"0.weight": torch.ones(2, 2), "head": torch.ones(1)}}, tmp_path / "a.pt")
    load(tmp_path / "a.pt", strict=False, model=second)
    assert torch.equal(second[0].weight, torch.ones(2, 2))
    assert "missing in the checkpoint, and ignored: 0.bias" in caplog.text
    assert "unexpected in the checkpoint, and ignored: head" in caplog.text
    torch.save({"model": {"weight": torch.ones(3, 2)}}, tmp_path / "b.pt")
    with pytest.raises(ConfigError, match="has shape"):
        load(tmp_path / "b.pt", strict=False, model=first)
