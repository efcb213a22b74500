"""In a block the model remains the user's object, and after it nothing of the block is left in it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ConvNet, Mlp, TiedTransformer

from parallelize import ConfigError, SyncError, all_reduce, distributed, no_sync, parallel_model, rank

WORLD = 2


def inputs(*, seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def test_attributes_methods_and_references_hold() -> None:
    """Type, attributes, methods, parameters and references do not change, in one process and in two."""

    def check() -> None:
        model = Mlp()
        model.note = {"any": "thing"}
        encoder, parameters = model.encoder, model.parameters()
        names = [name for name, _ in model.named_parameters()]
        with parallel_model(model) as same:
            assert same is model
            assert type(model) is Mlp
            assert model.note == {"any": "thing"}
            assert model.encoder is encoder
            assert [name for name, _ in model.named_parameters()] == names
            assert list(model.state_dict()) == names
            assert model.encode(inputs()).shape == (4, 8)
            assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
            model.eval()
            assert not model.encoder.training
            model.train()
            model.later = 1
        assert model.later == 1
        assert "forward" not in vars(model)

    check()
    distributed(processes=WORLD)(check)()


def test_hooks_fire_once() -> None:
    """Each hook of the model and of a submodule fires once per call, with gradients and without."""

    @distributed(processes=WORLD)
    def count() -> list[str]:
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
        return fired

    assert count() == ["before", "encoder", "model", "backward", "before", "encoder", "model"]


def test_forward_called_by_name_is_routed() -> None:
    """model.forward(x) averages gradients like model(x)."""

    @distributed(processes=WORLD)
    def train() -> torch.Tensor:
        model = Mlp()
        with parallel_model(model):
            model.forward(inputs(seed=rank())).mean().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        return model.encoder.weight.detach()

    assert torch.equal(*train.all_ranks())


def test_parameters_start_as_rank_0s() -> None:
    """Ranks that initialise differently get rank 0's parameters and buffers, trained or frozen."""

    @distributed(processes=WORLD)
    def start(frozen: bool) -> list[torch.Tensor]:
        torch.manual_seed(rank())
        model = ConvNet()
        model.register_buffer("table", torch.randn(3))
        model.requires_grad_(not frozen)
        before = [each.clone() for each in (*model.parameters(), model.table)]
        with parallel_model(model):
            started = [each.detach().clone() for each in (*model.parameters(), model.table)]
            assert rank() == 1 or all(map(torch.equal, before, started))
        return started

    for frozen in (False, True):
        first, second = start.all_ranks(frozen)
        assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_statistics_are_rank_0s_after_the_block(frozen: bool) -> None:
    """Running statistics, which differ between ranks, end as rank 0's, also if all parameters are frozen."""

    @distributed(processes=WORLD)
    def train() -> tuple[torch.Tensor, torch.Tensor]:
        model = ConvNet().requires_grad_(not frozen)
        x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(rank()))
        with parallel_model(model):
            model(x.requires_grad_(True)).mean().backward()
            inside = model.encoder[1].running_mean.clone()
        return inside, model.encoder[1].running_mean

    (first, first_after), (second, second_after) = train.all_ranks()
    assert not torch.equal(first, second)
    assert torch.equal(first_after, first)
    assert torch.equal(second_after, first)


def test_eval_mode_with_gradients_averages_without_sending_buffers() -> None:
    """Fine-tuning in eval mode averages gradients; its forward waits for no other rank."""

    @distributed(processes=WORLD)
    def train() -> torch.Tensor:
        torch.manual_seed(0)
        model = ConvNet().eval()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            if rank() == 0:
                model(torch.randn(4, 1, 8, 8))  # rank 0 only, in eval mode with gradients
            model(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(rank()))).mean().backward()
            optimizer.step()
        return model.head.weight.detach()

    assert torch.equal(*train.all_ranks())


def test_pickles_load_without_this_package() -> None:
    """torch.save and pickle inside the block write plain models, without a reference to this package."""

    @distributed(processes=WORLD)
    def dump() -> tuple[bytes, bytes]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        with parallel_model(model, methods=["extra_repr"]):
            file = io.BytesIO()
            torch.save(model, file)
            return pickle.dumps(model), file.getvalue()

    for data in dump():
        assert b"parallelize" not in data
    pickled, saved = dump()
    for loaded in (pickle.loads(pickled), torch.load(io.BytesIO(saved), weights_only=False)):
        assert vars(loaded).keys() == vars(nn.Sequential()).keys()
        loaded(torch.ones(2, 2))


def test_a_copy_made_inside_averages_nothing() -> None:
    """A deep copy (EMA) runs forward and backward on one rank without the others."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = Mlp()
        with parallel_model(model):
            average = copy.deepcopy(model)
            assert not any(one is other for one in average.parameters() for other in model.parameters())
            if rank() == 0:
                average(inputs()).mean().backward()
            model(inputs()).mean().backward()

    train()


class PatchedForward(Mlp):
    """Has a forward on the instance, as torch.compile and monkey patches set one."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.head(self.encode(x))


def test_a_forward_on_the_instance_is_the_one_that_runs() -> None:
    """A forward on the instance runs inside the block and in copies, and is restored after the block."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = PatchedForward()
        plain = Mlp()
        found = vars(model)["forward"]
        with parallel_model(model):
            plain.load_state_dict(model.state_dict())
            torch.testing.assert_close(model(inputs()), 2 * plain(inputs()))
            torch.testing.assert_close(copy.deepcopy(model)(inputs()), 2 * plain(inputs()))
        assert vars(model)["forward"] is found

    run()


def test_a_forward_replaced_inside_stays() -> None:
    """A forward that the user sets inside the block stays after it."""
    model = Mlp()

    def mine(x: torch.Tensor) -> torch.Tensor:
        return x

    with parallel_model(model):
        model.forward = mine
    assert vars(model)["forward"] is mine


def test_a_bound_forward_kept_after_the_block_runs_the_plain_model() -> None:
    """A reference to the routed method still works after the block."""
    model = Mlp()
    with parallel_model(model):
        kept = model.forward
    torch.testing.assert_close(kept(inputs()), model(inputs()))


def test_a_model_that_calls_itself_is_averaged_once() -> None:
    """Recursive calls inside forward are not routed: gradients are averaged once."""

    class Recursive(Mlp):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self.head(self.encode(x)) if depth == 0 else self(x, depth=depth - 1) + self.forward(x, depth=0)

    @distributed(processes=WORLD)
    def train() -> torch.Tensor:
        model = Recursive()
        with parallel_model(model):
            model(inputs(seed=rank())).mean().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        return model.head.weight.detach()

    assert torch.equal(*train.all_ranks())


def test_weight_tying_parametrizations_and_frozen_parts_train() -> None:
    """Tied weights stay tied, parametrized weights train, frozen ones keep their values."""

    @distributed(processes=WORLD)
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        tied, normed = TiedTransformer(), nn.utils.parametrizations.weight_norm(nn.Linear(6, 2))
        tied.block.requires_grad_(False)
        frozen = tied.block.linear1.weight.clone()
        steps = [torch.optim.SGD(each.parameters(), 0.1) for each in (tied, normed)]
        with parallel_model(tied, normed):
            tied(torch.randint(11, (2, 5))).mean().backward()
            normed(inputs(seed=rank())).square().mean().backward()
            for step in steps:
                step.step()
        assert tied.head.weight is tied.embedding.weight
        assert torch.equal(tied.block.linear1.weight, frozen)
        return [each.detach() for each in (*tied.parameters(), *normed.parameters())]

    first, second = train.all_ranks()
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("when", ["before", "inside", "in place before", "in place inside"])
def test_compiled_models_are_averaged(when: str) -> None:
    """Gradients are averaged after torch.compile(model) or model.compile(), before the block or inside."""

    @distributed(processes=WORLD)
    def train() -> torch.Tensor:
        model: Any = Mlp()
        if when == "before":
            model = torch.compile(model, backend="eager")
        elif when == "in place before":
            model.compile(backend="eager")
        keys = list(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            called = torch.compile(model, backend="eager") if when == "inside" else model
            if when == "in place inside":
                model.compile(backend="eager")
            for step in range(3):
                optimizer.zero_grad()
                called(inputs(seed=rank() + step)).mean().backward()
                optimizer.step()
            assert list(model.state_dict()) == keys
        model(inputs())
        return next(model.parameters()).detach()

    assert torch.equal(*train.all_ranks())


def test_nested_blocks_of_different_models() -> None:
    """A block inside another averages the gradients of its own model, and may end first."""

    @distributed(processes=WORLD)
    def train() -> list[torch.Tensor]:
        one, two = Mlp(), nn.Linear(1, 1)
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)
        with parallel_model(one):
            with parallel_model(two):
                two(one(inputs(seed=rank()))).mean().backward()
                optimizer.step()
            optimizer.zero_grad()
            one(inputs(seed=rank())).mean().backward()
            optimizer.step()
        return [each.detach() for each in (*one.parameters(), *two.parameters())]

    first, second = train.all_ranks()
    assert all(map(torch.equal, first, second))


def test_several_models_come_as_a_tuple() -> None:
    """Two models are returned as a tuple, each with its own engine; a second block can follow."""
    one, two = Mlp(), nn.Linear(1, 1)
    for _ in range(2):
        with parallel_model(one, two) as (first, second):
            assert (first, second) == (one, two)
            second(first(inputs())).mean().backward()


def test_backward_decides_whether_gradients_are_averaged() -> None:
    """no_sync around the forward alone leaves nothing local; around the backward alone, it does."""

    @distributed(processes=WORLD)
    def train() -> None:
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
            torch.testing.assert_close(all_reduce(local), averaged)
            assert not torch.allclose(local, averaged)

    train()


def test_gradients_accumulated_under_no_sync_are_refused() -> None:
    """A step is refused if all micro-batches ran under no_sync."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = Mlp()
        with parallel_model(model):
            with no_sync(model):
                model(inputs(seed=rank())).mean().backward()
            with pytest.raises(SyncError, match="accumulated under no_sync"):
                torch.optim.SGD(model.parameters(), 0.1).step()

    train()


def test_no_sync_outside_a_block_does_nothing() -> None:
    """The same script runs without a block."""
    model = Mlp()
    with no_sync(model):
        model(inputs()).mean().backward()
    with parallel_model(model), no_sync(model):
        model(inputs()).mean().backward()


def test_a_backward_after_the_block_is_refused() -> None:
    """A block around the forward alone, as of autocast, would leave its gradients local."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = Mlp()
        with parallel_model(model):
            loss = model(inputs(seed=rank())).square().mean()
        with pytest.raises(SyncError, match="backward after the parallel_model block, of a forward of Mlp inside it"):
            loss.backward()

    train()


def test_the_plain_model_trains_after_the_block() -> None:
    """After the block one rank may train alone."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = inputs(seed=rank())
        with parallel_model(model):
            model(x).mean().backward()
        optimizer.step()
        if rank() == 0:
            model(x).mean().backward()
            optimizer.step()

    train()


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
