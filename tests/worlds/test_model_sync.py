"""Gradients that bypass the engine are refused before an optimizer step; all others equal those of one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import BRANCHED, ZOO, Branched, Mlp

from parallelize import DDPBackend, SyncError, all_reduce, distributed, no_sync, parallel_model, rank
from parallelize.cluster.world import World
from parallelize.inplace import step_watch

pytestmark = pytest.mark.slow

WORLD = 2


def batch_of(rank: int, *, samples: int = 4, step: int = 0) -> torch.Tensor:
    """Return the batch of a rank; one process gets the batches of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(WORLD * samples, 6, generator=generator).chunk(WORLD)[rank]


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(7)
    return make()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: each.grad for name, each in model.named_parameters()}


def assert_one_process_is_the_same(
    ranks: list[Any], loss_of: Callable[[Any, torch.Tensor], torch.Tensor], *, make: Callable[[], nn.Module] = Mlp
) -> None:
    """Assert that every rank's gradients are those of one process for the mean of the ranks' losses."""
    model = seeded(make)
    sum(loss_of(model, batch_of(rank)) / WORLD for rank in range(WORLD)).backward()
    for got in ranks:
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7)


def assert_averaged(loss_of: Callable[[Any, torch.Tensor], torch.Tensor], **options: Any) -> None:
    """Assert that one backward and step on every rank are accepted, with the gradients of one process."""

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Mlp)
        with parallel_model(model, **options):
            loss_of(model, batch_of(rank())).backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
        assert "loss" not in vars(model)
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), loss_of)


def bypasses() -> dict[str, Callable[[Mlp, torch.Tensor], torch.Tensor]]:
    def functional(model: Mlp, x: torch.Tensor) -> torch.Tensor:
        weights = dict(model.named_parameters())
        return torch.func.functional_call(model.encoder, {"weight": weights["encoder.weight"] * 2.0}, (x,)).sum()

    return {
        "submodule": lambda model, x: model.encoder(x).sum(),
        "method": lambda model, x: model.loss(x),
        "functional": functional,
        "parameter": lambda model, x: model.head.weight.square().sum() * x.mean(),
    }


@pytest.mark.parametrize("name", list(bypasses()))
def test_a_gradient_that_bypasses_the_engine_is_refused(name: str) -> None:
    """After using a submodule, a method or a parameter directly, SyncError names the parameter, and weights stay."""

    @distributed(processes=WORLD)
    def train() -> tuple[str, bool]:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = copy.deepcopy(model.state_dict())
        with parallel_model(model):
            bypasses()[name](model, batch_of(rank())).backward()
            with pytest.raises(SyncError) as caught:
                optimizer.step()
        unchanged = all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        return str(caught.value), unchanged

    for message, unchanged in train.all_ranks():
        assert "is not averaged over the ranks" in message
        assert "head.weight of Mlp" in message if name == "parameter" else "encoder.weight of Mlp" in message
        assert "methods=[...]" in message
        assert unchanged


@pytest.mark.parametrize("name", list(bypasses()))
def test_without_the_guard_ranks_would_drift_apart(name: str) -> None:
    """Meta-test: without the comparison, ranks step on different gradients."""

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor]:
        step_watch.differences = lambda _tensors: iter(())  # type: ignore[assignment]  # in this process, which ends with the call
        model = seeded(Mlp)
        with parallel_model(model):
            (bypasses()[name](model, batch_of(rank())) * (rank() + 1)).backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        return model.state_dict()

    first, second = train.all_ranks()
    assert not all(torch.equal(first[key], second[key]) for key in first)


def test_a_reference_to_a_submodule_taken_before_the_block_is_refused() -> None:
    """A reference to a submodule from before the block bypasses the engine too."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Mlp)
        encoder = model.encoder
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            model(batch_of(rank())).mean().backward()
            optimizer.step()
            encoder(batch_of(rank())).mean().backward()
            with pytest.raises(SyncError, match=r"encoder.weight of Mlp is not averaged"):
                optimizer.step()

    train()


def test_a_regulariser_in_the_same_backward_is_averaged() -> None:
    """A loss of the model's output and of its submodules needs one backward, which averages every gradient."""

    def loss_of(model: Mlp, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() + model.encoder(x).abs().mean() + model.head.weight.square().sum()

    assert_averaged(loss_of)


def test_a_named_method_is_routed() -> None:
    """methods=["loss"] runs a method through the engine: its gradients are averaged."""
    assert_averaged(lambda model, x: model.loss(x), methods=["loss"])


def test_two_forwards_before_one_backward_are_averaged() -> None:
    """Two calls of the model, one backward on the sum of their losses."""

    def loss_of(model: Mlp, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() + model(x + 1).mean()

    assert_averaged(loss_of)


def test_two_backwards_for_two_forwards_are_refused() -> None:
    """The second backward averages nothing, and the error suggests to sum the losses."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Mlp)
        with parallel_model(model):
            first, second = model(batch_of(rank())).mean(), model(batch_of(rank())).square().mean()
            first.backward()
            second.backward()
            with pytest.raises(SyncError, match="call backward once, on the sum"):
                torch.optim.SGD(model.parameters(), 0.1).step()

    train()


class TrainsItself(nn.Module):
    """A module whose forward trains its network, as some training_step methods do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def training_step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.net(x).square().mean().backward()
        self.optimizer.step()

    def forward(self, x: torch.Tensor) -> None:
        self.training_step(x)


@pytest.mark.parametrize("method", ["forward", "training_step"])
def test_a_forward_that_trains_names_the_way_out(method: str) -> None:
    """The error names the method that was called and the part to pass; that part is then trained as in one process."""

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor]:
        model = seeded(TrainsItself)
        message = rf"(?s)TrainsItself.{method} runs backward.*parallel_model\(model.net\)"
        refused = pytest.raises(SyncError, match=message)
        with parallel_model(model, methods=["training_step"]), refused:
            getattr(model, method)(batch_of(rank()))
        with parallel_model(model.net):
            model.training_step(batch_of(rank()))
        return model.state_dict()

    model = seeded(TrainsItself)
    model.training_step(torch.cat([batch_of(each) for each in range(WORLD)]))
    for state in train.all_ranks():
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


class TwoHeads(nn.Module):
    """Two outputs of one trunk, which a reentrant checkpoint may run."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, reentrant: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x
        for _ in range(2):
            hidden = (
                self.trunk(hidden) if reentrant is None else checkpoint(self.trunk, hidden, use_reentrant=reentrant)
            )
        return self.first(hidden), self.second(hidden)


@pytest.mark.parametrize("how", ["two backwards", "reentrant"])
def test_a_gradient_that_is_computed_twice_is_explained(how: str) -> None:
    """The user's backward raises an error of this package, and both ways out that it names are averaged."""

    def wrong(model: TwoHeads, x: torch.Tensor) -> None:
        first, second = model(x, True if how == "reentrant" else None)
        if how == "reentrant":
            (first + second).mean().backward()
        first.mean().backward(retain_graph=True)
        second.mean().backward()

    def right(model: TwoHeads, x: torch.Tensor) -> torch.Tensor:
        first, second = model(x, False if how == "reentrant" else None)
        return first.mean() + second.mean()

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor | None]:
        model, x = seeded(TwoHeads), batch_of(rank()).requires_grad_()
        backend = DDPBackend(find_unused_parameters=how == "reentrant")
        refused = pytest.raises(SyncError, match=r"(?s)a second time.*on the sum of the losses.*use_reentrant=False")
        with parallel_model(model, backend=backend), refused:
            wrong(model, x)
        model.zero_grad()
        with parallel_model(model, backend=backend):
            right(model, x).backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), right, make=TwoHeads)


def test_a_gradient_that_bypassed_the_engine_is_averaged_by_the_next_backward() -> None:
    """A later backward through the model averages all that has accumulated."""

    def loss_of(model: Mlp, x: torch.Tensor) -> torch.Tensor:
        return model.encoder(x).mean() + model(x).mean()

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Mlp)
        x = batch_of(rank())
        with parallel_model(model):
            model.encoder(x).mean().backward()
            model(x).mean().backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), loss_of)


def test_a_gradient_that_zero_grad_has_removed_is_accepted() -> None:
    """zero_grad removes the local gradient, so that a step is safe."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            for set_to_none in (True, False):
                model.encoder(batch_of(rank())).mean().backward()
                optimizer.zero_grad(set_to_none=set_to_none)
                optimizer.step()

    train()


def test_another_models_optimizer_steps_freely() -> None:
    """The guard checks the parameters of its own model only."""

    @distributed(processes=WORLD)
    def train() -> None:
        model, other = seeded(Mlp), nn.Linear(2, 2)
        with parallel_model(model):
            model.encoder(batch_of(rank())).mean().backward()
            other(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(other.parameters(), 0.1).step()

    train()


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_an_unmanaged_parameter_is_refused_if_ranks_differ(backend: str) -> None:
    """A criterion's weights in the model's optimizer are refused, unless in a block or averaged by the user."""

    @distributed(processes=WORLD, backend=backend)
    def train() -> torch.Tensor:
        model, criterion = seeded(Mlp), seeded(lambda: nn.Linear(1, 1))

        def step(optimizer: torch.optim.Optimizer, *, averaged: bool) -> None:
            optimizer.zero_grad()
            criterion(model(batch_of(rank()))).square().mean().backward()
            for each in criterion.parameters() if averaged else ():
                each.grad = all_reduce(each.grad)
            optimizer.step()

        with parallel_model(model):
            optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.1)
            with pytest.raises(SyncError, match=r"(?s)a parameter of shape \(1, 1\) in SGD.*model, criterion"):
                step(optimizer, averaged=False)
            step(optimizer, averaged=True)
        with parallel_model(model, criterion):
            step(torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.1), averaged=False)
        return criterion.weight.detach()

    first, second = train.all_ranks()
    assert torch.equal(first, second)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 2, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)


def test_sparse_gradients_are_checked() -> None:
    """Sparse gradients that bypass the model, or are assigned, are refused as dense ones are."""

    @distributed(processes=WORLD)
    def train() -> None:
        model, tokens = seeded(Sparse), torch.arange(3) + rank()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.embedding(tokens).square().mean().backward()
            with pytest.raises(SyncError, match=r"the gradient of embedding.weight of Sparse is not averaged"):
                optimizer.step()
            loss = model(tokens).square().mean()
            (model.embedding.weight.grad,) = torch.autograd.grad(loss, [model.embedding.weight])
            with pytest.raises(SyncError, match=r"(?s)embedding.weight of Sparse.*: it differs.*no backward"):
                optimizer.step()

    train()


def test_unused_parameters_are_named() -> None:
    """The error names the unused branch and the option, at the step and at the next forward."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Branched)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            model(batch_of(rank())).mean().backward()
            with pytest.raises(SyncError, match=r"no gradient to right.weight, right.bias of Branched") as caught:
                optimizer.step()
            assert "DDPBackend(find_unused_parameters=True)" in str(caught.value)
            with pytest.raises(SyncError, match=r"no gradient to right.weight"):
                model(batch_of(rank()))

    train()


def test_unused_parameters_are_found_when_asked_for() -> None:
    """find_unused_parameters=True trains a model with branches, also if ranks take different ones."""

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor]:
        model = seeded(Branched)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model, backend=DDPBackend(find_unused_parameters=True), verify_every=1):
            for step in range(4):
                optimizer.zero_grad()
                BRANCHED.loss(model(batch_of(rank(), step=step), right=(rank() + step) % 2 == 0)).backward()
                optimizer.step()
        return model.state_dict()

    first, second = train.all_ranks()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("under_no_sync", [True, False], ids=["no_sync", "around the engine"])
def test_a_branch_used_in_the_first_micro_batch_only_is_averaged(under_no_sync: bool) -> None:
    """find_unused_parameters averages gradients of a branch that the last micro-batch does not use."""

    def loss_of(model: Branched, x: torch.Tensor) -> torch.Tensor:
        return model(x, right=True).square().mean() + model(x).mean()

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Branched)
        x = batch_of(rank())
        with parallel_model(model, backend=DDPBackend(find_unused_parameters=True)):
            if under_no_sync:
                with no_sync(model):
                    model(x, right=True).square().mean().backward()
            else:
                model.right(x).square().mean().backward()
            model(x).mean().backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), loss_of, make=Branched)


def test_a_gradient_from_no_sync_alone_is_refused() -> None:
    """find_unused_parameters does not average gradients accumulated before the engine was rebuilt."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Branched)
        x = batch_of(rank())
        with parallel_model(model, backend=DDPBackend(find_unused_parameters=True)):
            with no_sync(model):
                model(x, right=True).mean().backward()
            model.left.bias.requires_grad_(False)
            model(x).mean().backward()
            with pytest.raises(SyncError, match=r"(?s)right.weight of Branched is not averaged.*under no_sync"):
                torch.optim.SGD(model.parameters(), 0.1).step()

    train()


@pytest.mark.parametrize("how", ["no_sync", "unused"])
def test_a_local_gradient_of_a_frozen_parameter_is_refused(how: str) -> None:
    """A parameter frozen with a local gradient is refused by the step, until zero_grad."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Branched)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = batch_of(rank())
        reason = "under no_sync" if how == "no_sync" else "never completed"
        with parallel_model(model):
            with no_sync(model) if how == "no_sync" else contextlib.nullcontext():
                model(x).mean().backward()
            model.right.requires_grad_(False)
            model.left.weight.requires_grad_(False)
            model(x).mean().backward()
            with pytest.raises(SyncError, match=rf"(?s)left.weight of Branched is not averaged.*{reason}"):
                optimizer.step()
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

    train()


def test_a_step_inside_backward_is_refused() -> None:
    """An optimizer in a backward hook would step on gradients that are not averaged yet."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Mlp)
        optimizers = {each: torch.optim.SGD([each], 0.1) for each in model.parameters()}
        with parallel_model(model):
            for each in model.parameters():
                each.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
            with pytest.raises(SyncError, match="inside backward"):
                model(batch_of(rank())).mean().backward()

    train()


def test_gradients_assigned_by_hand_are_compared() -> None:
    """Gradients of torch.autograd.grad are refused if ranks differ, and accepted once the user has averaged them."""

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)

        def assign(*, averaged: bool) -> None:
            loss = model(batch_of(rank())).mean()
            for each, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
            ):
                each.grad = all_reduce(gradient) if averaged else gradient

        with parallel_model(model):
            assign(averaged=False)
            with pytest.raises(
                SyncError, match=r"(?s)encoder.weight of Mlp.*: it differs.*no backward in this block computed it"
            ):
                optimizer.step()
            assign(averaged=True)
            optimizer.step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), lambda model, x: model(x).mean())


def test_gradients_assigned_by_hand_are_compared_for_every_optimizer() -> None:
    """A step on averaged gradients does not hide that the next optimizer's gradients are not averaged."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Mlp)
        encoder, head = (torch.optim.SGD(part.parameters(), 0.1) for part in (model.encoder, model.head))
        with parallel_model(model):
            loss = model(batch_of(rank())).square().mean()
            parameters = [*model.parameters()]
            for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                each.grad = gradient
            for each in model.encoder.parameters():
                each.grad = all_reduce(each.grad)
            encoder.step()
            with pytest.raises(SyncError, match=r"the gradient of head.weight of Mlp is not averaged.*: it differs"):
                head.step()

    train()


@pytest.mark.parametrize("trained_before", [False, True])
def test_gradients_from_a_copy_are_compared(trained_before: bool) -> None:
    """Reptile assigns differences to a copy that each rank has trained, also if the model itself never runs."""

    @distributed(processes=WORLD)
    def train() -> torch.Tensor:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(*, averaged: bool) -> None:
            fast = copy.deepcopy(model)
            fast(batch_of(rank())).square().mean().backward()
            torch.optim.SGD(fast.parameters(), 0.1).step()
            for slow, other in zip(model.parameters(), fast.parameters(), strict=True):
                moved = slow.detach() - other.detach()
                slow.grad = all_reduce(moved) if averaged else moved
            optimizer.step()

        with parallel_model(model):
            if trained_before:
                model(batch_of(rank())).mean().backward()
                optimizer.step()
            for _ in range(2):
                with pytest.raises(SyncError, match=r"(?s)encoder.weight of Mlp.*differs.*no backward in this block"):
                    step(averaged=False)
                step(averaged=True)
        return model.encoder.weight.detach()

    assert torch.equal(*train.all_ranks())


def test_gradients_from_before_the_block_are_compared() -> None:
    """They are refused, but accepted if a closure removes them first."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch_of(rank())).mean()
            loss.backward()
            return loss

        model(batch_of(rank())).mean().backward()
        with parallel_model(model):
            with pytest.raises(SyncError, match=r"(?s)encoder.weight of Mlp.*differs.*no backward in this block"):
                optimizer.step()
            optimizer.step(closure)

    train()


def test_a_closure_is_checked_too() -> None:
    """step(closure) steps on the closure's gradients: a bypass in it is refused."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Mlp)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure(through: bool) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch_of(rank())).mean() if through else model.loss(batch_of(rank()))
            loss.backward()
            return loss

        with parallel_model(model, verify_every=1):
            optimizer.step(lambda: closure(True))
            with pytest.raises(SyncError, match="is not averaged"):
                optimizer.step(lambda: closure(False))
            with pytest.raises(SyncError, match="is not averaged"):
                optimizer.step(closure=lambda: closure(False))

    train()


@pytest.mark.parametrize("start_frozen", [("head",), ("head", "encoder")])
def test_unfreezing_inside_the_block_is_followed(start_frozen: tuple[str, ...]) -> None:
    """A parameter unfrozen between forwards is averaged from the next forward on."""

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Mlp)
        for name in start_frozen:
            model.get_submodule(name).requires_grad_(False)
        with parallel_model(model):
            output = model(batch_of(rank())).mean()
            if output.requires_grad:
                output.backward()
            model.requires_grad_(True)
            model.zero_grad()
            model(batch_of(rank())).mean().backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), lambda model, x: model(x).mean())


@pytest.mark.parametrize("part", ["encoder", "head"])
def test_freezing_between_two_forwards_of_one_backward_is_followed(part: str) -> None:
    """The engine is rebuilt between a forward and its backward, whose saved tensors stay valid."""

    def loss_of(model: Mlp, x: torch.Tensor) -> torch.Tensor:
        first = model(x).square().mean()
        model.get_submodule(part).requires_grad_(False)
        return first + model(2 * x).square().mean()

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor]:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, batch_of(rank())).backward()
                optimizer.step()
                model.requires_grad_(True)
        return model.state_dict()

    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch_of(rank) for rank in range(WORLD)])).backward()
        optimizer.step()
        model.requires_grad_(True)
    for got in train.all_ranks():
        torch.testing.assert_close(got, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def test_replaced_parameters_are_followed() -> None:
    """After replacing a submodule, or load_state_dict(assign=True), new parameters start equal and are averaged."""

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Mlp)
        with parallel_model(model):
            model(batch_of(rank())).mean().backward()
            torch.manual_seed(rank())
            model.head = nn.Linear(8, 1)
            model(batch_of(rank())).mean().backward()
            model.load_state_dict(seeded(Mlp).state_dict(), assign=True)
            model.requires_grad_(True).zero_grad()
            model(batch_of(rank())).mean().backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), lambda model, x: model(x).mean())


def test_a_parameter_that_appears_after_the_last_forward_is_refused() -> None:
    """A parameter unfrozen and trained directly, without a forward of the model in between, is named."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = seeded(Mlp)
        model.head.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            model(batch_of(rank())).mean().backward()
            model.head.requires_grad_(True)
            model.head(torch.randn(3, 8)).mean().backward()
            with pytest.raises(SyncError, match=r"(?s)head.weight of Mlp is not averaged.*unfrozen"):
                optimizer.step()

    train()


def test_a_model_frozen_for_a_while_keeps_its_engine() -> None:
    """A GAN freezes its discriminator for the generator's step: no engine is rebuilt, and both are averaged."""

    @distributed(processes=WORLD)
    def train() -> tuple[Any, Any]:
        torch.manual_seed(rank())
        generator, discriminator = nn.Linear(6, 6), Mlp()
        steps = torch.optim.SGD(generator.parameters(), 0.1), torch.optim.SGD(discriminator.parameters(), 0.1)
        with parallel_model(generator, discriminator, verify_every=1) as (g, d):
            assert g is generator
            assert d is discriminator
            for step in range(3):
                x = batch_of(rank(), step=step)
                discriminator.requires_grad_(True)
                steps[1].zero_grad()
                (discriminator(generator(x).detach()) - discriminator(x)).mean().backward()
                steps[1].step()
                discriminator.requires_grad_(False)
                steps[0].zero_grad()
                (-discriminator(generator(x))).mean().backward()
                steps[0].step()
        return generator.state_dict(), discriminator.state_dict()

    first, second = train.all_ranks()
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("how", ["shape", "count", "frozen", "buffer"])
def test_ranks_with_different_models_are_refused(how: str) -> None:
    """The error names the first parameter or buffer that differs in shape, number or requires_grad."""

    @distributed(processes=WORLD)
    def train() -> str:
        odd = rank() == 1
        model = Mlp()
        if how == "shape":
            model.head = nn.Linear(8, 2 if odd else 1)
        elif how == "count" and odd:
            model.extra = nn.Linear(1, 1)
        elif how == "frozen" and odd:
            model.encoder.bias.requires_grad_(False)
        elif how == "buffer" and odd:
            model.register_buffer("table", torch.zeros(2))
        with pytest.raises(SyncError) as caught, parallel_model(model):
            pass
        return str(caught.value)

    named = {"shape": "head.weight", "count": "extra.weight", "frozen": "encoder.bias", "buffer": "table"}[how]
    for message in train.all_ranks():
        assert f"Mlp on rank 1 has {named} (" in message


def test_verify_every_names_the_first_parameter_that_differs() -> None:
    """A weight that one rank changes is found at the next comparison, and not before."""

    @distributed(processes=WORLD, verify_every=2)
    def train() -> int:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        steps = 0

        def run() -> None:
            nonlocal steps
            for step in range(6):
                optimizer.zero_grad()
                model(batch_of(rank(), step=step)).mean().backward()
                if step == 2 and rank() == 1:
                    model.encoder.bias.data[0] += 1e-6
                optimizer.step()
                steps += 1

        differs = pytest.raises(SyncError, match=r"encoder.bias of Mlp differs .* rank 1 after 4 optimizer steps")
        with differs, parallel_model(model):
            run()
        return steps

    assert train.all_ranks() == [3, 3]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False], ids=["model", "part"])
def test_checkpointed_forwards_are_averaged(reentrant: bool, whole: bool) -> None:
    """Activation checkpointing of both kinds, of a submodule or of the model."""

    class Checkpointed(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            encoded = torch.utils.checkpoint.checkpoint(self.encode, x, use_reentrant=reentrant)
            return self.head(encoded)

    def loss_of(model: Mlp, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_(True)  # reentrant checkpointing needs an input that requires grad
        output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant) if whole else model(x)
        return output.square().mean()

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Mlp if whole else Checkpointed)
        with parallel_model(model):
            for _ in range(2):
                model.zero_grad()
                loss_of(model, batch_of(rank())).backward()
                torch.optim.SGD(model.parameters(), 0.0).step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), lambda model, x: model(x).square().mean())


def test_a_static_graph_is_averaged() -> None:
    """static_graph=True averages with nested backwards (reentrant checkpoints) and an unused parameter."""

    class Static(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.utils.checkpoint.checkpoint(self.encode, x, use_reentrant=True))

    @distributed(processes=WORLD, backend=DDPBackend(static_graph=True))
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Static)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        with parallel_model(model):
            for _ in range(3):
                optimizer.zero_grad()
                model(batch_of(rank()).requires_grad_(True)).square().mean().backward()
                optimizer.step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), lambda model, x: model(x).square().mean())


@pytest.mark.parametrize("how", ["saliency", "attack", "penalty"])
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "wrapped"])
def test_a_static_graph_is_recorded_in_a_backward_that_accumulates_gradients(how: str, ours: bool) -> None:
    """Averaging begins even if autograd.grad for an input comes first, for the same forward or another."""

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_(True)
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True, create_graph=how == "penalty")
        if how == "attack":
            loss = model((x + slope.sign()).detach()).square().mean()
        return loss + slope.square().sum(1).mean() if how == "penalty" else loss

    def wrapped(module: nn.Module, _world: World) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, static_graph=True)

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        options: dict[str, Any] = {"backend": DDPBackend(static_graph=True)} if ours else {"wrap": wrapped}
        with parallel_model(model, **options):
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(model, batch_of(rank())).backward()
                optimizer.step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), loss_of)


class Boxed(Mlp):
    """Returns its output in a container."""

    def __init__(self, box: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.box = box

    def forward(self, x: torch.Tensor) -> Any:
        return self.box(super().forward(x))


@dataclass
class Box:
    y: torch.Tensor


class Opaque:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_a_tensor_in_a_dataclass_is_averaged(option: str) -> None:
    """DistributedDataParallel finds the tensors of an output in dataclasses, too."""

    @distributed(processes=WORLD, backend=DDPBackend(**{option: True}))
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(lambda: Boxed(Box))
        with parallel_model(model):
            output = model(batch_of(rank()))
            assert type(output) is Box
            output.y.square().mean().backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), lambda model, x: model(x).square().mean())


def test_a_packed_sequence_is_averaged_under_a_static_graph() -> None:
    """Its tensor is found, and gets no hook, which pickle would warn of."""

    class Packing(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            return nn.utils.rnn.pack_padded_sequence(super().forward(x)[None], torch.tensor([4]), batch_first=True)

    @distributed(processes=WORLD, backend=DDPBackend(static_graph=True))
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Packing)
        with parallel_model(model):
            packed = model(batch_of(rank()))
            assert not packed.data._backward_hooks
            packed.data.square().mean().backward()
            torch.optim.SGD(model.parameters(), 0.0).step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), lambda model, x: model(x).square().mean())


def test_a_static_graph_without_output_tensors_is_refused() -> None:
    """With static_graph=True, an output in an opaque object would leave the first gradients without averaging."""

    @distributed(processes=WORLD, backend=DDPBackend(static_graph=True))
    def train() -> None:
        model = seeded(lambda: Boxed(Opaque))
        with parallel_model(model):
            model(batch_of(rank())).y.square().mean().backward()
            with pytest.raises(SyncError, match=r"(?s)gradients of Boxed are not averaged.*static_graph.*dataclass"):
                torch.optim.SGD(model.parameters(), 0.1).step()

    train()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_static_graph_may_begin_under_no_sync(reentrant: bool) -> None:
    """Accumulation with static_graph=True works from the first micro-batch on, where torch alone aborts."""

    class Checkpointed(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.utils.checkpoint.checkpoint(self.encode, x, use_reentrant=reentrant))

    @distributed(processes=WORLD, backend=DDPBackend(static_graph=True))
    def train() -> dict[str, torch.Tensor | None]:
        model = seeded(Checkpointed)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        with parallel_model(model):
            for _ in range(2):
                optimizer.zero_grad()
                for micro in batch_of(rank()).chunk(2):
                    with no_sync(model) if micro[0, 0] == batch_of(rank())[0, 0] else contextlib.nullcontext():
                        (model(micro.clone().requires_grad_(True)).square().mean() / 2).backward()
                optimizer.step()
        return gradients(model)

    assert_one_process_is_the_same(train.all_ranks(), lambda model, x: model(x).square().mean())


@pytest.mark.parametrize("name", list(ZOO))
def test_the_zoo_trains_as_hand_written_ddp_does(name: str) -> None:
    """Weights and buffers are bitwise those of torch's DistributedDataParallel on the same batches."""

    @distributed(processes=WORLD)
    def train() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        animal = ZOO[name]

        def run(model: nn.Module, called: nn.Module) -> dict[str, torch.Tensor]:
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            torch.manual_seed(rank())
            for _ in range(4):
                optimizer.zero_grad()
                animal.loss(called(*animal.batch(4))).backward()
                optimizer.step()
            return copy.deepcopy(model.state_dict())

        ours, theirs = seeded(animal.make), seeded(animal.make)
        with parallel_model(ours):
            mine = run(ours, ours)
        return mine, run(theirs, nn.parallel.DistributedDataParallel(theirs))

    for mine, theirs in train.all_ranks():
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), key
