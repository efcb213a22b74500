"""In a block the model remains the user's object, and after it nothing of the block is left in it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import nn
from zoo import ConvNet, Mlp

from parallelize import ConfigError, all_reduce, no_sync, parallel_model, rank

pytestmark = [
    pytest.mark.filterwarnings("default:Full backward hook is firing"),
]  # shown by workers

WORLD = 2
check = Checks(processes=WORLD, timeout=60)


def inputs(*, seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def images(*, seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@check
def hooks_fire_once() -> None:
    """Each hook of the model and of a submodule fires once per call, with gradients and without."""
    model = Mlp()
    fired: list[str] = []
    model.register_forward_hook(lambda *_: fired.append("model"))
    model.register_forward_pre_hook(lambda *_: fired.append("before"))
    model.encoder.register_forward_hook(lambda *_: fired.append("encoder"))
    model.register_full_backward_hook(lambda *_: fired.append("backward"))
    with parallel_model(model):
        model(inputs()).mean().backward()
        with torch.no_grad():
            model(inputs())
    assert fired == ["before", "encoder", "model", "backward", "before", "encoder", "model"]


@check
def parameters_start_as_rank_0s() -> list[torch.Tensor]:
    """Ranks that initialise differently get rank 0's parameters and buffers, trained or frozen."""
    found = []
    for frozen in (False, True):
        torch.manual_seed(rank())
        model = ConvNet()
        model.register_buffer("table", torch.randn(3))
        model.requires_grad_(not frozen)
        before = [each.clone() for each in (*model.parameters(), model.table)]
        with parallel_model(model):
            started = [each.detach().clone() for each in (*model.parameters(), model.table)]
            assert rank() == 1 or all(map(torch.equal, before, started))
        found += started
    return found


@check
def batch_norm_statistics_are_rank_0s_after_the_block() -> list[torch.Tensor]:
    """Running statistics, which differ between ranks, end as rank 0's, also if all parameters are frozen."""
    inside, after = [], []
    for frozen in (False, True):
        model = ConvNet().requires_grad_(not frozen)
        with parallel_model(model):
            model(images(seed=rank()).requires_grad_(True)).mean().backward()
            inside.append(model.encoder[1].running_mean.clone())
        after.append(model.encoder[1].running_mean)
    assert list(map(torch.equal, inside, after)) == [rank() == 0] * 2
    return after


@check
def eval_mode_with_gradients_averages_without_sending_buffers() -> torch.Tensor:
    """Fine-tuning in eval mode averages gradients; its forward waits for no other rank."""
    torch.manual_seed(0)
    model = ConvNet().eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with parallel_model(model):
        if rank() == 0:
            model(images())
        model(images(seed=rank())).mean().backward()
        optimizer.step()
    return model.head.weight.detach()


@check
def pickles_load_without_this_package() -> None:
    """torch.save and pickle inside the block write plain models, without a reference to this package."""
    model, file = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), io.BytesIO()
    with parallel_model(model, methods=["extra_repr"]):
        torch.save(model, file)
        pickled = pickle.dumps(model)
    for data in (pickled, file.getvalue()):
        assert b"parallelize" not in data
    file.seek(0)
    for loaded in (pickle.loads(pickled), torch.load(file, weights_only=False)):
        assert vars(loaded).keys() == vars(nn.Sequential()).keys()
        loaded(torch.ones(2, 2))


class PatchedForward(Mlp):
    """Has a forward on the instance, as torch.compile and monkey patches set one."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.head(self.encode(x))


@check
def a_forward_on_the_instance_is_the_one_that_runs() -> None:
    """A forward on the instance runs inside the block and in copies, and is restored after the block."""
    model, plain = PatchedForward(), Mlp()
    found = vars(model)["forward"]
    with parallel_model(model):
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(inputs()), 2 * plain(inputs()))
        torch.testing.assert_close(copy.deepcopy(model)(inputs()), 2 * plain(inputs()))
    assert vars(model)["forward"] is found


class Cached(Mlp):
    """Has an attribute that is None until it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.ones(())
        return self.scale * self.head(self.encode(x))


@check
def copies_have_attributes_that_are_none() -> None:
    """A copy and a pickle of a model in a block have all of its attributes, and run."""
    model = Cached()
    with parallel_model(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for copied in copies:
            assert vars(copied).keys() == vars(Cached()).keys()
            copied(inputs())


@check
def backward_decides_whether_gradients_are_averaged() -> None:
    """no_sync around the forward alone leaves nothing local; around the backward alone, it does."""
    model = Mlp()
    with parallel_model(model):
        with no_sync(model):
            loss = model(inputs(seed=rank())).mean()
        loss.backward()
        averaged = torch.cat([each.grad.flatten() for each in model.parameters()])
        model.zero_grad()
        loss = model(inputs(seed=rank())).mean()
        with no_sync(model):
            loss.backward()
        local = torch.cat([each.grad.flatten() for each in model.parameters()])
        torch.testing.assert_close(all_reduce(local, "mean"), averaged)
        assert not torch.allclose(local, averaged)


@pytest.mark.parametrize("name", check)
def test_a_block_leaves_the_model_to_the_user(name: str) -> None:
    """A check holds on all ranks, and what it returns is equal on them."""
    first, second = (each[name] for each in check.outcomes)
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_forwards_of_the_user_stay() -> None:
    """One that is set inside the block stays after it; a reference to a routed one runs the plain model then."""
    model = Mlp()
    with parallel_model(model):
        kept = model.forward
    torch.testing.assert_close(kept(inputs()), model(inputs()))

    def mine(x: torch.Tensor) -> torch.Tensor:
        return x

    with parallel_model(model):
        model.forward = mine
    assert vars(model)["forward"] is mine


def test_several_models_come_as_a_tuple() -> None:
    """Two models are returned as a tuple, each with its own engine; a second block can follow."""
    one, two = Mlp(), nn.Linear(1, 1)
    for _ in range(2):
        with parallel_model(one, two) as (first, second):
            assert (first, second) == (one, two)
            second(first(inputs())).mean().backward()


def test_no_sync_outside_a_block_does_nothing() -> None:
    """The same script runs without a block."""
    model = Mlp()
    with no_sync(model):
        model(inputs()).mean().backward()
    with parallel_model(model), no_sync(model):
        model(inputs()).mean().backward()


def refused_models() -> dict[str, tuple[Any, str]]:
    shared = nn.Linear(2, 2)
    lazy = nn.Sequential(nn.LazyLinear(3))
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    return {
        "nothing": ((), r"(?s)no model was passed.*parallel_model\(model\)"),
        "no module": (([1],), r"(?s)parallel_model\(list\).*optimizers=.*shard_loader"),
        "wrapped": ((nn.DataParallel(Mlp()),), r"(?s)parallel_model\(DataParallel\(\.\.\.\)\).*pass the plain model"),
        "lazy": ((lazy,), r"(?s)0\.weight of Sequential has no size yet.*run one batch through the model"),
        "meta": ((empty,), r"(?s)weight of Linear is on the meta device.*to_empty"),
        "twice": ((shared, shared), r"(?s)parallel_model\(Linear, Linear\).*also another argument.*outer model only"),
        "nested": ((shared, nn.Sequential(shared)), r"(?s)the Linear is 0 of Sequential.*methods=\[\.\.\.\]"),
    }


@pytest.mark.parametrize("case", list(refused_models()))
def test_models_that_cannot_be_parallel_are_refused(case: str) -> None:
    """The error has what, why and fix, and comes before a model is changed."""
    models, message = refused_models()[case]
    with pytest.raises(ConfigError, match=message), parallel_model(*models):
        pass


def test_a_model_in_two_blocks_is_refused() -> None:
    """The same model, a part of it, and a module around it are refused inside its block."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with parallel_model(model):
        for other, message in (
            (model, r"parallel_model\(Sequential\) inside a parallel_model block of Sequential"),
            (model[0], r"parallel_model\(Linear\) inside a parallel_model block of Sequential"),
            (nn.Sequential(model), r"parallel_model\(Sequential\) inside a parallel_model block of Sequential"),
        ):
            with pytest.raises(ConfigError, match=message), parallel_model(other):
                pass


def test_an_unknown_method_is_refused() -> None:
    """The error suggests a method of the model."""
    refused = pytest.raises(ConfigError, match=r"(?s)no model of the block has a method 'los'.*did you mean 'loss'")
    with refused, parallel_model(Mlp(), methods="los"):
        pass
