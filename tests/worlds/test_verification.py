"""Programs that would train other weights on each rank are told by name; their right counterparts are accepted."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import Mlp

from parallelize import SyncError, all_reduce, distributed, no_sync, parallel_model, rank

WORLD = 2


def batch(step: int, of_rank: int | None = None) -> Tensor:
    number = rank() if of_rank is None else of_rank
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(WORLD * step + number))


def local(model: nn.Module, wrong: bool) -> contextlib.AbstractContextManager[Any]:
    return no_sync(model) if wrong else contextlib.nullcontext()


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def mlp() -> Mlp:
    torch.manual_seed(7)
    return Mlp()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


# wrong -> trains in a block, and returns what has to be equal on all ranks
Program = Callable[[bool], Any]

PROGRAMS: dict[str, tuple[Program, str]] = {}


def told(message: str) -> Callable[[Program], Program]:
    """Register a program whose wrong form raises an error with `message`, a pattern."""

    def register(program: Program) -> Program:
        PROGRAMS[program.__name__] = program, message
        return program

    return register


def accepted(program: Callable[[], Any]) -> Callable[[], Any]:
    """Register a program that has no wrong form."""
    PROGRAMS[program.__name__] = (lambda _wrong: program()), ""
    return program


Inside = Callable[[Mlp, torch.optim.Optimizer, bool], Any]


def told_in_a_block(message: str, **options: Any) -> Callable[[Inside], Inside]:
    """Register a program that uses a model in its block, with an optimizer; with no message, one that is accepted."""

    def register(inside: Inside) -> Inside:
        def program(wrong: bool) -> Any:
            model = mlp()
            optimizer = sgd(model)
            with parallel_model(model, **options):
                found = inside(model, optimizer, wrong)
            return found, model.state_dict()

        PROGRAMS[inside.__name__] = program, message
        return inside

    return register


DIFFER_AT_END = r"of 4 parameters differ between the ranks at the end of the block: .* of Mlp by up to \d"
NOT_AVERAGED = "{} of Mlp.* is not averaged over the ranks: it differs between rank 0 and rank 1"


def fit(model: Any, after_backward: Callable[[int], None], *, steps: int = 7, **options: Any) -> Any:
    """Train a model, with changes between backward and step; return its weights."""
    optimizer = sgd(model)
    with parallel_model(model, **options):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            square(model(batch(step))).backward()
            after_backward(step)
            optimizer.step()
    return model.state_dict()


def add_noise(model: nn.Module, *, wrong: bool) -> None:
    generator = torch.Generator().manual_seed(rank() if wrong else 0)
    for each in model.parameters():
        each.grad.add_(0.1 * torch.randn(each.shape, generator=generator))


@told(f"4 {DIFFER_AT_END}.*verify_every=1 finds the step")
def noise_from_step_5_on(wrong: bool) -> Any:
    model = mlp()
    return fit(model, lambda step: add_noise(model, wrong=wrong) if step >= 5 else None)


@told("1 of 4 parameters differ between the ranks after 2 optimizer steps: encoder.bias of Mlp by up to 0.01")
def weight_written_between_verified_steps(wrong: bool) -> Any:
    model = mlp()

    def write(step: int) -> None:
        model.encoder.bias.data[0] += 1e-2 if step == 2 and (rank() == 1 or not wrong) else 0.0

    return fit(model, write, verify_every=2)


@told_in_a_block(f"4 {DIFFER_AT_END}")
def hand_written_descent_under_no_sync(model: Mlp, _: Any, wrong: bool) -> None:
    for step in range(3):
        model.zero_grad()
        with local(model, wrong):
            model.loss(batch(step)).backward()
        with torch.no_grad():
            for each in model.parameters():
                each.sub_(0.1 * each.grad)


PLATEAU = r"{} of group 0 of {}: {} on rank 0, {} on rank 1, {}.*ReduceLROnPlateau.*all_reduce\(metric, 'mean'\)"


def plateau(make: Callable[[Any], torch.optim.Optimizer], *, wrong: bool, **options: Any) -> Any:
    """Train with a scheduler that is fed with this rank's metric; rank 1 has reached a plateau."""
    model = mlp()
    with parallel_model(model, **options):
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for step in range(1, 4):
            optimizer.zero_grad()
            square(model(batch(step))).backward()
            optimizer.step()
            scheduler.step(float(step if rank() == 1 and wrong else -step))
    return [float(group["lr"]) for group in optimizer.param_groups], model.state_dict()


@told(PLATEAU.format("lr", "SGD", "0.1", "0.025", "at the end of the block"))
def scheduler_of_its_own_metric(wrong: bool) -> Any:
    return plateau(lambda parameters: torch.optim.SGD(parameters, 0.1), wrong=wrong)


@told(PLATEAU.format("lr", "AdamW", "0.125", "0.03125", "at the end of the block"))
def scheduler_of_its_own_metric_and_a_rate_in_a_tensor(wrong: bool) -> Any:
    rate = torch.tensor(0.125)
    return plateau(lambda parameters: torch.optim.AdamW(parameters, rate.clone()), wrong=wrong)


@told(PLATEAU.format("lr", "Adam", "0.1", "0.025", "at the end of the block"))
def scheduler_of_its_own_metric_under_fsdp(wrong: bool) -> Any:
    return plateau(lambda parameters: torch.optim.Adam(parameters, 0.1), wrong=wrong, backend="fsdp")


@told(PLATEAU.format("lr", "Adam", "0.1", "0.05", "after 2 optimizer steps"))
def scheduler_of_its_own_metric_under_fsdp_with_verified_steps(wrong: bool) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, 0.1)

    return plateau(make, wrong=wrong, backend="fsdp", verify_every=2)


@told(r"lr of group 1 of Adam: 0.05 on rank 0, 0.1 on rank 1, at its step 3")
def schedules_that_differed_before_the_end(wrong: bool) -> Any:
    """As the rates of plateaus that the ranks reach one after the other, under fsdp."""
    model = mlp()
    with parallel_model(model, backend="fsdp"):
        groups = [{"params": model.encoder.parameters()}, {"params": model.head.parameters()}]
        optimizer = torch.optim.Adam(groups, 0.1)
        for step in range(1, 7):
            optimizer.zero_grad()
            square(model(batch(step))).backward()
            optimizer.step()
            optimizer.param_groups[1]["lr"] = 0.05 if step >= 2 + 2 * (rank() == 1 and wrong) else 0.1
    return model.state_dict()


@told_in_a_block(r"betas of group 1 of AdamW: \['0.9', '0.999'\] on rank 0, \['0.8', '0.999'\] on rank 1")
def momentum_of_one_group(model: Mlp, _: Any, wrong: bool) -> None:
    groups = [{"params": model.encoder.parameters()}, {"params": model.head.parameters(), "name": f"rank {rank()}"}]
    optimizer = torch.optim.AdamW(groups)
    if wrong and rank() == 1:
        optimizer.param_groups[1]["betas"] = (0.8, 0.999)
    square(model(batch(0))).backward()
    optimizer.step()


@told_in_a_block("")
def optimizers_of_which_one_rank_has_freed_some(model: Mlp, _: Any, __: bool) -> None:
    kept = []
    for step in range(3):
        optimizer = sgd(model)
        if rank() == 1:
            kept.append(optimizer)
        optimizer.zero_grad()
        square(model(batch(step))).backward()
        optimizer.step()


class Codebook(Mlp):
    """Its forward moves a frozen parameter to this rank's mean, as that of a VQ-VAE."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self.book, self.wrong = nn.Parameter(torch.zeros(6), requires_grad=False), wrong

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.book.lerp_(x.mean(0) if self.wrong else all_reduce(x.mean(0), "mean"), 0.1)
        return super().forward(x - self.book)


@told("1 of 5 parameters differ between the ranks at the end of the block: book of Codebook by up to ")
def frozen_parameter_written_in_forward(wrong: bool) -> Any:
    torch.manual_seed(7)
    model = Codebook(wrong=wrong)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
    with parallel_model(model):
        square(model(batch(0))).backward()
        optimizer.step()
    return model.state_dict()


@told_in_a_block(NOT_AVERAGED.format("head.weight"))
def gradients_assigned_for_the_second_optimizer(model: Mlp, _: Any, wrong: bool) -> None:
    found = torch.autograd.grad(square(model(batch(0))), list(model.parameters()))
    for (name, each), gradient in zip(model.named_parameters(), found, strict=True):
        each.grad = gradient if wrong and name.startswith("head") else all_reduce(gradient, "mean")
    sgd(model.encoder).step()
    sgd(model.head).step()


@told_in_a_block(NOT_AVERAGED.format("encoder.weight") + ".*accumulated under no_sync")
def gradients_of_no_sync_alone(model: Mlp, optimizer: Any, wrong: bool) -> None:
    with no_sync(model):
        square(model(batch(0))).backward()
    if not wrong:
        square(model(batch(1))).backward()
    optimizer.step()


@told_in_a_block(NOT_AVERAGED.format("encoder.weight"))
def closure_under_no_sync(model: Mlp, _: Any, wrong: bool) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with local(model, wrong):
            loss = square(model(batch(0)))
            loss.backward()
        return loss

    optimizer.step(closure=closure)


class Deaf(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        del closure
        super().step()


@told_in_a_block(NOT_AVERAGED.format("encoder.weight"))
def closure_that_is_ignored(model: Mlp, _: Any, wrong: bool) -> None:
    with local(model, wrong):
        square(model(batch(0))).backward()
    Deaf(model.parameters(), 0.1).step(lambda: 0.0)


@told("the gradient of weight of Embedding is not averaged over the ranks: it differs between rank 0 and rank 1")
def sparse_gradient_assigned(wrong: bool) -> Any:
    torch.manual_seed(7)
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = sgd(model)
    with parallel_model(model):
        loss = square(model(torch.arange(3) + rank()))
        if wrong:
            (model.weight.grad,) = torch.autograd.grad(loss, [model.weight])
        else:
            loss.backward()
        optimizer.step()
    return model.state_dict()


@told_in_a_block(r"the gradient of a tensor of shape \(\) in Adam .*differs between .*parallel_model\(model, tensor\)")
def tensor_outside_of_the_block(model: Mlp, optimizer: Any, wrong: bool) -> Tensor:
    """SAC's log_alpha."""
    temperature = torch.zeros((), requires_grad=True)
    output = model(batch(0))
    square(output).backward()
    (temperature * output.detach().mean()).backward()
    if not wrong:
        temperature.grad = all_reduce(temperature.grad, "mean")
    optimizer.step()
    torch.optim.Adam([temperature], 0.1).step()
    return temperature


@told(r"the gradient of a tensor of shape \(1, 1\) in SGD.* differs between ")
def criterion_outside_of_a_block_of_shards(wrong: bool) -> Any:
    model, criterion = mlp(), nn.Linear(1, 1)
    nn.init.ones_(criterion.weight)
    nn.init.ones_(criterion.bias)
    with parallel_model(model, backend="fsdp"):
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.1)
        square(criterion(model(batch(0)))).backward()
        for each in () if wrong else criterion.parameters():
            each.grad = all_reduce(each.grad, "mean")
        optimizer.step()
    return criterion.state_dict()


@told(r"parallel_model\(ReLU\), which has no parameters")
def model_without_parameters(wrong: bool) -> Any:
    with parallel_model(nn.ReLU() if wrong else mlp()):
        return None


@told_in_a_block(r"SGD.step\(\) inside backward.*call step\(\) after backward")
def step_in_backward(model: Mlp, _: Any, wrong: bool) -> None:
    optimizers = {each: torch.optim.SGD([each], 0.1) for each in model.parameters()}
    for each in model.parameters() if wrong else ():
        each.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    square(model(batch(0))).backward()
    for each in optimizers.values():
        each.step()


@told(r"backward after the parallel_model block, of a forward of Mlp inside it.*the whole loop inside the block")
def backward_after_the_block(wrong: bool) -> Any:
    model = mlp()
    with parallel_model(model):
        loss = square(model(batch(0)))
        if not wrong:
            loss.backward()
    if wrong:
        loss.backward()
    return [each.grad for each in model.parameters()]


@told(r"Mlp on rank 1 has head.weight \(trained, \(2, 8\)")
def another_shape(wrong: bool) -> Any:
    model = mlp()
    model.head = nn.Linear(8, 1 + rank() if wrong else 2)
    with parallel_model(model):
        return model.state_dict()


@told_in_a_block("a tensor of shape .* it differs .* was added to a model that has not been called since")
def module_used_before_a_forward(model: Mlp, _: Any, wrong: bool) -> None:
    model.extra = nn.Linear(6, 2)
    if not wrong:
        model(batch(0))
    square(model.extra(batch(0))).backward()
    sgd(model).step()


class Both(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, super().forward(x)


@accepted
def backward_after_the_block_that_reaches_no_parameter() -> None:
    """Through an input that a model has returned, and to an input alone."""
    outside, model = nn.Linear(6, 6), Both()
    x = outside(batch(0))
    with parallel_model(model):
        features, output = model(x)
    (saliency,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    features.sum().backward()
    assert saliency.any()
    assert outside.weight.grad.any()


@told_in_a_block("")
def training_after_a_refused_step(model: Mlp, optimizer: Any, _: bool) -> None:
    """The step leaves the weights, and without its gradients training goes on."""
    before = copy.deepcopy(model.state_dict())
    with no_sync(model):
        square(model(batch(0))).backward()
    with pytest.raises(SyncError, match="is not averaged"):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    optimizer.zero_grad()
    optimizer.step()
    square(model(batch(1))).backward()
    optimizer.step()


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        raise ZeroDivisionError


@accepted
def training_after_a_backward_that_raises() -> Any:
    """No rank waits for it, its gradients are refused, and the next pass is averaged."""
    found = []
    for raises in (True, False):
        model = mlp()
        optimizer = sgd(model)
        with parallel_model(model):
            for step in range(4):
                if raises:
                    output = model(Raising.apply(batch(9).requires_grad_()))  # after all gradients of the model
                    with pytest.raises(ZeroDivisionError):
                        square(output).backward()
                    if step == 2:
                        with pytest.raises(SyncError, match="is not averaged"):
                            optimizer.step()
                optimizer.zero_grad()
                square(model(batch(step))).backward()
                optimizer.step()
        found.append(model.state_dict())
    torch.testing.assert_close(*found, rtol=0, atol=0)
    return found


class Sharpness(torch.optim.Optimizer):
    """m-SAM: its closure runs with weights that each rank has moved along its own gradient, and moved back then."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        parameters = self.param_groups[0]["params"]
        before = [each.clone() for each in parameters]
        for each in parameters:
            each.add_(each.grad)
            each.grad = None
        with torch.enable_grad():
            closure()
        for each, old in zip(parameters, before, strict=True):
            each.copy_(old - 0.1 * each.grad)


@told_in_a_block("", verify_every=1)
def weights_that_each_rank_perturbs_until_the_step(model: Mlp, _: Any, __: bool) -> None:
    """Only what a step leaves is compared."""
    optimizer = Sharpness(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        with no_sync(model):
            square(model(batch(step))).backward()
        optimizer.step(lambda step=step: square(model(batch(step))).backward())


@told_in_a_block("", buffers="mean")
def buffers_of_a_module_that_is_added(model: Mlp, *_: Any) -> None:
    """They begin as rank 0's, and follow `buffers=`."""
    model.encoder = nn.Sequential(model.encoder, nn.BatchNorm1d(8))
    model.encoder[1].running_mean.fill_(float(rank()))
    square(model(batch(0))).backward()


@accepted
def weights_that_ranks_have_changed_between_two_blocks() -> Any:
    """They get rank 0's parameters, as at the first block, with a warning."""
    model, found = mlp(), []
    for change in (0.1, 0.0, 0.1 * rank(), 0.0):
        with torch.no_grad():
            model.head.weight.add_(change)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with parallel_model(model):
                pass
        found.append([str(each.message) for each in caught])
    assert [len(each) for each in found] == [0, 0, int(rank() == 0), 0]
    assert rank() == 1 or "changed differently on the ranks since its last parallel_model block" in found[2][0]
    return model.state_dict()


def outcomes(*, wrong: bool) -> dict[str, Any]:
    """Return what each program returns, or the error that it raises, as text."""
    found: dict[str, Any] = {}
    for name, (program, message) in PROGRAMS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of optimizers, and of inputs that are equal
            try:
                found[name] = program(wrong) if message or not wrong else None
            except (Exception, pytest.fail.Exception) as exc:  # noqa: BLE001 - the test reports it
                found[name] = f"{type(exc).__name__}: {exc}".replace("\n", " ")
    return found


@pytest.fixture(scope="module")
def found() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the outcomes of the wrong and of the right programs, by rank."""

    @distributed(processes=WORLD)
    def run() -> tuple[dict[str, Any], dict[str, Any]]:
        return outcomes(wrong=True), outcomes(wrong=False)

    return run.all_ranks()


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_wrong_is_told_and_what_is_right_is_accepted(name: str, found: list[Any]) -> None:
    """The check finds the wrong form of the program on all ranks, and lets the right one train equal weights."""
    for wrong, right in found:
        assert not PROGRAMS[name][1] or re.search(f"^(Sync|Config)Error: .*{PROGRAMS[name][1]}", str(wrong[name]))
        assert not isinstance(right[name], str), right[name]
    torch.testing.assert_close(found[0][1][name], found[1][1][name], rtol=0, atol=0)


class Tracked(Mlp):
    """Keeps a running mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x)


def test_buffers_that_differ_are_rank_0s_with_a_warning_or_their_mean() -> None:
    """A running mean under buffers="mean" is that of one process; no warning where `buffers=` is given or all agree."""

    @distributed(processes=WORLD)
    def run() -> list[tuple[Tensor, list[str]]]:
        found = []
        for make, buffers in ((Tracked, None), (Tracked, "rank0"), (Tracked, "mean"), (Mlp, None)):
            torch.manual_seed(7)
            model = make()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fit(model, lambda _: None, steps=3, buffers=buffers)
            messages = [str(each.message) for each in caught if "buffers" in str(each.message)]
            found.append((getattr(model, "mean", torch.zeros(6)), messages))
        return found

    expected = torch.zeros(6)
    for step in (1, 2, 3):
        expected.lerp_(torch.cat([batch(step, each) for each in range(WORLD)]).mean(0), 0.5)
    first, second = run.all_ranks()
    for (mean, _), (other, messages) in zip(first, second, strict=True):
        assert torch.equal(mean, other)
        assert messages == []  # rank 0 alone warns
    ((_, (warning,)), *others) = first
    assert "rank 0's are kept: mean of Tracked." in warning
    assert [messages for _, messages in others] == [[], [], []]
    torch.testing.assert_close(first[2][0], expected)
    assert not torch.allclose(first[0][0], expected, atol=1e-2)
