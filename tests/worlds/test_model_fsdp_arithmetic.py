"""Programs that compute with parameters, copy models and average weights train under fsdp as under ddp."""

from __future__ import annotations

import contextlib
import copy
import io
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from parallelize import FSDPBackend, SyncError, distributed, parallel_model, rank

pytestmark = pytest.mark.slow

Step = Callable[[], None]


class Net(nn.Module):
    """Widths are not divisible by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def seeded() -> Net:
    torch.manual_seed(7)
    return Net().double()


def batch_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64).chunk(2)[rank() % 2]


def pairs(copied: nn.Module, model: nn.Module) -> Any:
    return zip(copied.parameters(), model.parameters(), strict=True)


def ema_mul_add(copied: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for average, parameter in pairs(copied, model):
            average.mul_(0.9).add_(parameter, alpha=0.1)


def ema_data(copied: nn.Module, model: nn.Module) -> None:
    for average, parameter in pairs(copied, model):
        average.data = 0.9 * average.data + 0.1 * parameter.data


def ema_state_dict(copied: nn.Module, model: nn.Module) -> None:
    states = model.state_dict()
    for name, average in copied.state_dict().items():
        if average.is_floating_point():
            average.copy_(average * 0.9 + states[name] * 0.1)


def ema_foreach(copied: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(copied.parameters()), list(model.parameters()), 0.1)


def ema_lerp(copied: nn.Module, model: nn.Module) -> None:
    for average, parameter in pairs(copied, model):
        average.data.lerp_(parameter.data, 0.1)


UPDATES = (ema_mul_add, ema_data, ema_state_dict, ema_foreach, ema_lerp)
BACKENDS: dict[str, tuple[Any, int]] = {
    "fsdp": ("fsdp", 2),
    "kept": (FSDPBackend(reshard_after_forward=False), 2),
    "offloaded": (FSDPBackend(cpu_offload=True), 2),
    "hsdp": (FSDPBackend(shard_over=2), 4),
}


def average_weights(backend: Any) -> Any:
    """Train, update averages of every kind, and return what they predict and save."""
    model = seeded()
    before = [copy.deepcopy(model) for _ in UPDATES]
    averaged_before = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    predictions = []
    with parallel_model(model, backend=backend):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        inside = [copy.deepcopy(model) for _ in UPDATES]
        averaged = AveragedModel(model)
        for step in range(3):
            optimizer.zero_grad()
            model(batch_of(step)).square().mean().backward()
            optimizer.step()
            for update, copied, other in zip(UPDATES, before, inside, strict=True):
                update(copied, model)
                update(other, model)
            averaged.update_parameters(model)
            averaged_before.update_parameters(model)
            with torch.no_grad():
                predictions += [each.eval()(batch_of(9)) for each in (before[step], inside[step], averaged)]
                predictions.append(model(batch_of(9)))
        update_bn([batch_of(3)], averaged)
        file = io.BytesIO()
        torch.save([inside[1].state_dict(), copy.deepcopy(before[0]).state_dict()], file)
        file.seek(0)
        saved = torch.load(file)
    return predictions, saved, [each.state_dict() for each in (model, *before, *inside, averaged, averaged_before)]


def compute_with_parameters(backend: Any) -> Any:
    """Train with SAM, gradient noise, penalties, clipping, Lookahead and manual steps."""
    model = seeded()
    taken = list(model.parameters())
    seen: list[Any] = []
    with parallel_model(model, backend=backend):
        slow = [parameter.data.clone() for parameter in model.parameters()]
        generator = torch.Generator().manual_seed(1)
        for step in range(3):
            loss = model(batch_of(step)).square().mean() + 0.1 * sum(each.pow(2).sum() for each in model.parameters())
            (loss + (model.stem.weight @ torch.ones(6, dtype=torch.float64)).sum() * loss.detach()).backward()
            seen.append(nn.utils.clip_grad_norm_(taken, 1.0).item())
            with torch.no_grad():
                old = [parameter.data.clone() for parameter in model.parameters()]
                scale = 0.05 / torch.stack([each.grad.norm() for each in model.parameters()]).norm()
                for parameter in model.parameters():
                    parameter.add_(parameter.grad * scale)
            model.zero_grad()
            model(batch_of(step)).square().mean().backward()
            for parameter, value in zip(model.parameters(), old, strict=True):
                parameter.data = value
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.grad.add_(0.01 * noise)
                parameter.data -= 0.1 * parameter.grad
                parameter.data.clamp_(-0.4, 0.4)
            model.zero_grad()
            for parameter, value in zip(model.parameters(), slow, strict=True):
                value.add_(parameter.data - value, alpha=0.5)
                parameter.data.copy_(value)
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 0.99, model.parameters())
            model.head.weight.data[0, 1:3].mul_(0.5)
            seen += [model.stem.weight.detach() @ torch.ones(6, dtype=torch.float64), model.stem.weight.norm().item()]
            seen += [sum(each.numel() for each in model.parameters()), model.head.bias.tolist()]
            with torch.no_grad():
                seen.append(model(batch_of(9)))
    return seen, model.state_dict()


@pytest.mark.parametrize("program", [average_weights, compute_with_parameters])
@pytest.mark.parametrize("name", BACKENDS)
def test_programs_train_as_under_ddp(name: str, program: Callable[[Any], Any]) -> None:
    """Only `backend=` differs."""
    backend, processes = BACKENDS[name]
    expected = distributed(processes=processes)(program)("ddp")
    torch.testing.assert_close(distributed(processes=processes)(program)(backend), expected, rtol=1e-9, atol=1e-9)


def test_element_wise_work_sends_nothing() -> None:
    """Averages, perturbations and clipping run on this rank's shards."""

    @distributed(processes=2)
    def run() -> int:
        model = seeded()
        before = [copy.deepcopy(model) for _ in UPDATES]
        with parallel_model(model, backend="fsdp"):
            inside = [copy.deepcopy(model) for _ in UPDATES]
            averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            model(batch_of(0)).square().mean().backward()
            with CommDebugMode() as communication:
                for update, copied, other in zip(UPDATES, before, inside, strict=True):
                    update(copied, model)
                    update(other, model)
                averaged.update_parameters(model)
                for parameter in model.parameters():
                    parameter.data.sub_(0.1 * parameter.grad).clamp_(-1, 1)
            return communication.get_total_counts()

    assert run.all_ranks() == [0, 0]


def test_one_rank_alone_cannot_read_a_copy() -> None:
    """It would wait forever for the slices of the others."""

    @distributed(processes=2)
    def run() -> None:
        model = seeded()
        with parallel_model(model, backend=FSDPBackend(roll_call_s=2)):
            copied = copy.deepcopy(model)
            if rank() == 0:
                with pytest.raises(
                    SyncError, match=r"(?s)1 of 2 ranks read or save parameters of the model.*on all ranks"
                ):
                    copied.state_dict()["head.weight"].numpy()
            torch.distributed.barrier()
            raise KeyError

    with pytest.raises(KeyError):
        run()


def test_a_copy_may_be_trained_by_each_rank_alone() -> None:
    """Each rank's own updates change its own copy, as under ddp; a step by torch.optim in the block is refused."""

    def run(backend: str) -> torch.Tensor:
        model = seeded()
        with parallel_model(model, backend=backend):
            copied = copy.deepcopy(model)
            for step in range(2):
                copied.zero_grad()
                copied(batch_of(step)).square().mean().backward()
                with torch.no_grad():
                    for parameter in copied.parameters():
                        parameter.sub_(0.1 * parameter.grad)
            with pytest.raises(SyncError, match=r"tensor of shape .* it differs between rank 0 and rank 1"):
                torch.optim.SGD(copied.parameters(), 0.1).step()
        return nn.utils.parameters_to_vector(copied.parameters()).detach()

    expected = distributed(processes=2)(run).all_ranks("ddp")
    assert not torch.equal(expected[0], expected[1])
    torch.testing.assert_close(distributed(processes=2)(run).all_ranks("fsdp"), expected)


def test_the_mode_leaves_with_the_block() -> None:
    """The stack of function modes is as before after a block that ends by an exception, with modes of the user."""

    @distributed(processes=2)
    def run() -> int:
        def fail() -> None:
            with torch.device("cpu"), parallel_model(seeded(), backend="fsdp") as model, torch.device("cpu"):
                model(batch_of(0)).sum().backward()
                raise KeyError

        for _ in range(2):
            with pytest.raises(KeyError):
                fail()
        return torch._C._len_torch_function_stack()

    assert run() == 0


@pytest.mark.parametrize("foreach", [False, True])
def test_steps_are_bitwise_those_of_sharded_tensors(foreach: bool) -> None:
    """Clipping and AdamW compute on local tensors what they compute without the mode, and count their writes."""

    @distributed(processes=2, backend="fsdp")
    def run(with_mode: bool) -> tuple[torch.Tensor, list[int]]:
        from parallelize.backends.sharded_arithmetic import semantics

        model = seeded()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=foreach, amsgrad=True)
        with parallel_model(model):
            for step in range(3):
                optimizer.zero_grad(set_to_none=False)
                model(batch_of(step)).square().mean().backward()
                with contextlib.nullcontext() if with_mode else semantics.suspended():
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
            writes = [each.grad._version for each in model.parameters()]
        return nn.utils.parameters_to_vector(model.parameters()).detach(), writes

    expected, expected_writes = run(False)
    found, writes = run(True)
    assert torch.equal(found, expected)
    assert all(map(operator.ge, writes, expected_writes))


def test_element_wise_results_are_shards() -> None:
    """Local results have the layout of their operands, for other dtypes, too; unequal layouts are exact."""

    @distributed(processes=2, backend="fsdp")
    @torch.no_grad()
    def run() -> list[bool]:
        with parallel_model(seeded()) as model:
            weight, other = (layer.weight for layer in model.layers)
            bias = model.layers[0].bias
            full, full_other, full_bias = (each.full_tensor() for each in (weight, other, bias))
            results = [
                (weight * other + 1, full * full_other + 1),
                (weight > other, full > full_other),
                (weight.t().sqrt(), full.t().sqrt()),
                (torch.where(weight > 0, weight, other), torch.where(full > 0, full, full_other)),
                (torch.where(weight > 0)[0], torch.where(full > 0)[0]),
                (weight + bias, full + full_bias),
                (weight * torch.tensor(3.0), full * 3.0),
                (torch._foreach_maximum([weight, bias], [other, bias])[0], torch.maximum(full, full_other)),
            ]
            gathered = [(one.full_tensor() if isinstance(one, DTensor) else one, two) for one, two in results]
            return [torch.equal(one.nan_to_num(), two.nan_to_num()) for one, two in gathered]

    assert run() == [True] * 8


def test_gradient_hooks_of_parameters() -> None:
    """Hooks registered before the block, and inside it before or after a forward, change gradients as under ddp."""

    def train(backend: str, when: str) -> Any:
        seen: list[int] = []
        model = seeded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def register() -> None:
            for each in model.parameters():
                each.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
                each.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.numel()))

        if when == "before":
            register()
        with parallel_model(model, backend=backend):
            for step in range(3):
                if (step, when) in {(0, "inside"), (1, "after a step")}:
                    register()
                optimizer.zero_grad()
                model(batch_of(step)).square().mean().backward()
                optimizer.step()
        return model.state_dict(), seen

    @distributed(processes=2)
    def run(when: str) -> Any:
        return train("ddp", when), train("fsdp", when)

    for when in ("before", "inside", "after a step"):
        for (expected, of_ddp), (found, of_fsdp) in run.all_ranks(when):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
            assert sorted(of_ddp) == sorted(of_fsdp) != []


def test_rank_0_alone_saves() -> None:
    """A rank that saves alone gets an error in words, before a collective in which it would be alone."""

    @distributed(processes=2)
    def run() -> None:
        model = seeded()
        with parallel_model(model, backend=FSDPBackend(roll_call_s=2)):
            state = model.state_dict()
            if rank() == 0:
                with pytest.raises(SyncError, match=r"(?s)1 of 2 ranks read or save.*full_state_dict"):
                    torch.save(state, io.BytesIO())

    run()
