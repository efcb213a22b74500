"""Tests of the fsdp backend beyond the contract: units, options, direct access, copies, state dicts, errors."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parallelize import (
    ConfigError,
    FSDPBackend,
    SyncError,
    all_reduce,
    distributed,
    load,
    no_sync,
    parallel_model,
    rank,
    save,
)
from parallelize.cluster.world import World

pytestmark = pytest.mark.slow

Weights = dict[str, torch.Tensor]


class Stack(nn.Module):
    """A model of repeated blocks, whose widths are not divisible by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.head = nn.Linear(5, 1)

    def encode(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        return self.head(self.encode(x, depth))


def stages() -> nn.Module:
    """Return stages of blocks, as of a ResNet, and a head."""
    stage = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])  # noqa: E731 - a new one
    return nn.Sequential(nn.Linear(6, 6), stage(), stage(), nn.Linear(6, 1))


class Checkpointed(Stack):
    """Units are gathered again for the recomputation."""

    def encode(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers[:depth]:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


class Tied(Stack):
    """A weight of two units, and one that a unit shares with the rest of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = self.layers[0].weight
        self.middle = nn.Linear(5, 5)
        self.middle.weight = self.layers[1].weight

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        return self.head(self.middle(self.encode(x, depth)))


class Filter(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4, dtype=torch.float64)
        self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.filter).abs()


def seeded(make: Callable[[], nn.Module] = Stack) -> Any:
    torch.manual_seed(7)
    return make().double()


def whole_batch(step: int = 0) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def own_batch(step: int = 0) -> torch.Tensor:
    return whole_batch(step).chunk(2)[rank() % 2]


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.05)


Batch = Callable[[int], torch.Tensor]


def train(model: nn.Module, optimizer: Any, batch: Batch = own_batch, steps: range = range(2)) -> None:
    for step in steps:
        optimizer.zero_grad()
        square(model(batch(step))).backward()
        optimizer.step()


def trained(make: Callable[[], nn.Module] = Stack, steps: range = range(2)) -> Weights:
    """Train in this process alone."""
    model = seeded(make)
    train(model, adamw(model), whole_batch, steps)
    return dict(model.state_dict())


def fit(model: nn.Module, backend: Any = "fsdp", steps: range = range(2), **options: Any) -> None:
    """Train in a block of its own."""
    with parallel_model(model, backend=backend, **options):
        train(model, sgd(model), steps=steps)


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather_base" in str(func)  # of parameters; comparisons gather lists
        return func(*args, **(kwargs or {}))


# Programs: each trains in a block, and in one process on the batches of all ranks

# Trains a model on the batches of steps; returns what is compared beside the weights.
Program = Callable[[Any, Batch], Any]

USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "part": lambda model, x: model.head(model.encode(x)) + model(x),
    "weight": lambda model, x: F.linear(model(x), model.head.weight.t()),
    "normalized": lambda model, x: F.linear(x, model.stem.weight / model.stem.weight.norm(dim=1, keepdim=True)),
    "without a unit": lambda model, x: model(x, depth=2),
    "in evaluation": lambda model, x: model(x) * float(model.head.weight.detach().abs().sum()),
    "output changed in place": lambda model, x: model(x.reshape(-1, 2, 6)).div_(2).add_(1),  # a view, which torch hooks
}


def used(use: Callable[[Any, torch.Tensor], torch.Tensor]) -> Program:
    """Use weights and parts outside of forward, and in the forward of another unit."""

    def program(model: Any, batch: Batch) -> None:
        optimizer = adamw(model)
        for step in range(2):
            optimizer.zero_grad()
            square(use(model, batch(step))).backward()
            optimizer.step()

    return program


def simple(model: Any, batch: Batch) -> None:
    train(model, adamw(model), batch)


def penalized(model: Any, batch: Batch) -> None:
    """Read the gathered weights of units in the backward of a backward, before and after other forwards."""
    optimizer = adamw(model)
    for step in range(2):
        losses = [model(batch(step)).mean()]
        x = batch(step + 2).requires_grad_()
        (gradient,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
        losses += [(gradient.norm(dim=1) - 1).square().mean(), model(batch(step + 4)).mean()]
        optimizer.zero_grad()
        sum(losses).backward()
        assert all(each.grad is not None for each in model.parameters())
        optimizer.step()


def clipped_and_accumulated(model: Any, batch: Batch) -> torch.Tensor:
    """Gradients under no_sync are averaged, too, and cleared as others are; the norm is that of all shards."""
    optimizer = sgd(model)
    with no_sync(model):
        square(model(batch(2))).backward()
        model.zero_grad()
        (square(model(batch(0))) / 2).backward()
    (square(model(batch(1))) / 2).backward()
    norm = clip_grad_norm_(model.parameters(), 0.01) + 0
    optimizer.step()
    return norm


def with_a_grad_scaler(model: Any, batch: Batch) -> float:
    """It unscales the gradients, and skips a step if one of them is infinite on any rank."""
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).square().mean() * (torch.inf if step == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    return scaler.get_scale()


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Program]] = {
    **{name: (Stack, used(use)) for name, use in USES.items()},
    "tied": (Tied, simple),
    "checkpointed": (Checkpointed, simple),
    "penalty": (Stack, penalized),
    "clipped and accumulated": (Stack, clipped_and_accumulated),
    "grad scaler": (Stack, with_a_grad_scaler),
}

check = Checks(processes=2, timeout=120)


def check_program(name: str, backend: Any) -> None:
    make, program = PROGRAMS[name]
    expected, model = seeded(make), seeded(make)
    wanted = program(expected, whole_batch)
    with parallel_model(model, backend=backend):
        found = program(model, own_batch)
    assert_close([found, dict(model.named_parameters())], [wanted, dict(expected.named_parameters())])


for each_name in PROGRAMS:
    check[each_name] = functools.partial(check_program, each_name, "fsdp")
check["output changed in place, one group"] = functools.partial(
    check_program, "output changed in place", FSDPBackend(blocks=10**6)
)


@check
def options_change_no_result() -> None:
    """Units, and options about memory, train the weights of one process; units are gathered one by one."""
    cases: dict[str, tuple[FSDPBackend, Callable[[], nn.Module], int]] = {
        "lists": (FSDPBackend(), Stack, 4),
        "sequences of blocks": (FSDPBackend(), stages, 5),
        "classes": (FSDPBackend(blocks=[nn.Linear]), Stack, 5),
        "names": (FSDPBackend(blocks=["layers.0", "layers.2"]), Stack, 3),
        "names and classes": (FSDPBackend(blocks=["1", nn.Linear]), stages, 6),
        "size": (FSDPBackend(blocks=31), Stack, 2),
        "one group": (FSDPBackend(blocks=10**6), Stack, 1),
        "kept": (FSDPBackend(reshard_after_forward=False), Stack, 4),
        "offloaded": (FSDPBackend(cpu_offload=True), Stack, 4),
        "one copy": (FSDPBackend(shard_over=2), Stack, 4),
        "node": (FSDPBackend(shard_over="node"), Stack, 4),
    }
    for name, (backend, make, expected) in cases.items():
        model = seeded(make)
        with parallel_model(model, backend=backend, verify_every=1):  # of what is on every rank
            train(model, adamw(model))
            with torch.no_grad(), Gathers() as gathers:
                model(own_batch())
        assert_close(dict(model.state_dict()), trained(make))
        assert (name, gathers.count) == (name, expected)


@check
def a_policy_computes_in_half_precision() -> None:
    """Parameters keep their dtype."""
    seen: set[torch.dtype] = set()
    model = seeded()
    model.head.register_forward_hook(lambda module, _args, _output: seen.add(module.weight.dtype))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fit(model, FSDPBackend(mixed_precision=policy))
    assert [seen, {each.dtype for each in model.parameters()}] == [{torch.bfloat16}, {torch.float64}]


class Adapted(nn.Linear):
    """A frozen layer in half precision, and a trained adapter in full precision."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, dtype=torch.bfloat16)
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, width) / 4)
        self.up = nn.Parameter(torch.randn(width, 2) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float() + x @ self.down.T @ self.up.T


@check
def adapters_train_beside_frozen_weights_of_another_dtype() -> None:
    """In one unit; frozen weights keep their bits, and adapters are those of ddp."""

    def adapted(backend: Any) -> Weights:
        torch.manual_seed(7)
        model = nn.Sequential(Adapted(6), nn.Sequential(Adapted(6), nn.Linear(6, 1)))
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 0.05)
        with parallel_model(model, backend=backend):
            train(model, optimizer, lambda step: own_batch(step).float(), range(3))
        return dict(model.state_dict())

    expected = adapted("ddp")
    for backend in ("fsdp", FSDPBackend(blocks=[Adapted]), FSDPBackend(blocks=10**6)):
        torch.testing.assert_close(adapted(backend), expected)


@check
def blocks_follow_each_other() -> None:
    """fsdp, ddp and fsdp again, with evaluation in inference mode, train one model by one optimizer, then none does."""
    model = seeded()
    optimizer = adamw(model)
    for step, backend in enumerate(("fsdp", "ddp", "fsdp")):
        with parallel_model(model, backend=backend):
            with torch.inference_mode():
                assert not model(own_batch()).requires_grad
            train(model, optimizer, steps=range(step, step + 1))
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    train(model, optimizer, whole_batch, range(3, 4))
    assert_close(dict(model.state_dict()), trained(steps=range(4)))


@check
def gradients_cross_the_ends_of_a_block() -> None:
    """Those from before are averaged, and more may be added; those of the block are used by a step after it."""
    for in_block in (0, 1):
        expected, model = seeded(), seeded()
        square(expected(whole_batch(0))).backward()
        square(model(own_batch(0))).backward()
        optimizer = sgd(model)
        with parallel_model(model, backend="fsdp"):
            for step in range(1, 1 + in_block):
                square(expected(whole_batch(step))).backward()
                square(model(own_batch(step))).backward()
        sgd(expected).step()
        optimizer.step()
        assert_close(dict(model.state_dict()), dict(expected.state_dict()))


class Gains(nn.Module):
    """Parameters without dimensions, whose names are equal but for a dot, or those of methods of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.layer.gain = nn.Parameter(torch.tensor(1.0))
        self.layer_gain = nn.Parameter(torch.tensor(1.0))
        self.values = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.layer.gain * self.layer_gain + self.values


class Drawn(nn.Linear):
    """Notes in `reset_parameters` that it has drawn its values."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._is_drawn = True


@check
def what_reset_parameters_notes_is_kept() -> None:
    with torch.device("meta"):
        model = Drawn(6, 4)
    del model._is_drawn
    with parallel_model(model, backend="fsdp"):
        assert model._is_drawn
    assert model._is_drawn
    assert not [name for name in vars(model) if "fsdp" in name or "composable" in name]


@check
def whole_parameters_may_have_any_name() -> None:
    model = seeded(Gains)
    with parallel_model(model, backend="fsdp"):
        train(model, adamw(model))
    assert_close(dict(model.state_dict()), trained(Gains))


@check
def parameters_are_frozen_and_unfrozen() -> None:
    """What was frozen at the entry trains as soon as it is unfrozen, in half precision, too."""

    def frozen(backend: str, amp: Any) -> list[Any]:
        seen, model = [], seeded().float()
        model.layers.requires_grad_(False)
        with parallel_model(model, backend=backend, amp=amp):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(4):
                square(model(own_batch(step).float())).backward()
                optimizer.step()
                seen.append([each.grad is not None for each in model.parameters()])
                optimizer.zero_grad()
                with torch.no_grad():
                    model(own_batch().float())
                for each in (model.layers if step < 2 else model.stem).parameters():
                    each.requires_grad = step == 1
        seen.append([each.requires_grad for each in model.parameters()])
        return [*seen, nn.utils.parameters_to_vector(model.parameters()).detach()]

    for amp, tolerance in ((None, 1e-5), ("O1", 2e-2), ("O2", 2e-2)):
        torch.testing.assert_close(frozen("fsdp", amp), frozen("ddp", amp), rtol=tolerance, atol=tolerance)


@check
def buffers_are_kept_alike_as_asked() -> None:
    """As under ddp: rank 0's, the mean, or each rank's own."""

    def statistics(backend: Any, buffers: str | None) -> Weights:
        model = seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        fit(model, backend, range(3), buffers=buffers)
        return dict(model[1].named_buffers())

    for how in ("rank0", "mean"):
        assert_close(statistics("fsdp", how), statistics("ddp", how))
    own = statistics(FSDPBackend(broadcast_buffers=False), None)
    assert own["num_batches_tracked"] == 3
    assert not torch.equal(own["running_mean"], all_reduce(own["running_mean"], "mean"))


@check
def buffers_that_differ_at_the_end_are_told() -> None:
    """As under ddp, with their names, unless the user has said how they are kept."""

    def told(backend: Any, buffers: str | None) -> list[str]:
        model = seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        model.gain = nn.Parameter(torch.tensor(1.0))  # replicated, with gradients of its own
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, backend, buffers=buffers)
        return [str(each.message) for each in caught if "buffers differ" in str(each.message)]

    expected = told("ddp", None)
    assert told("fsdp", None) == expected
    assert len(expected) == (rank() == 0)
    for backend, buffers in (("fsdp", "rank0"), ("fsdp", "mean"), (FSDPBackend(broadcast_buffers=False), None)):
        assert told(backend, buffers) == []


@check
def hooks_of_parameters() -> None:
    """They change the averaged gradients, as under ddp, whenever they are registered."""

    def hooked(backend: str, when: int) -> Any:
        seen: list[int] = []
        model = seeded()
        with contextlib.ExitStack() as block:
            for step in range(-1, 3):
                if step == when:
                    for each in model.parameters():
                        each.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
                        each.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.numel()))
                if step < 0:
                    block.enter_context(parallel_model(model, backend=backend))
                    optimizer = sgd(model)
                else:
                    train(model, optimizer, steps=range(step, step + 1))
        assert seen
        return dict(model.state_dict()), sorted(seen)

    for when in (-1, 0, 1):  # before the block, in it, after a step
        assert_close(hooked("fsdp", when), hooked("ddp", when))


@check
def copies() -> None:
    """They are sharded, may be trained, and outlive the block and an exception in it, as does a pickle of the model."""

    def copied(backend: str) -> list[torch.Tensor]:
        model, found = seeded(), []
        with contextlib.suppress(KeyError), parallel_model(model, backend=backend):
            train(model, sgd(model))
            found.append(pickle.loads(pickle.dumps(model))(whole_batch()).detach())
            average, own = copy.deepcopy(model), copy.deepcopy(model)
            for step in range(2):
                own.zero_grad()
                square(own(own_batch(step) if backend == "fsdp" else whole_batch(step))).backward()
                with torch.no_grad():
                    for one, other in zip(average.parameters(), model.parameters(), strict=True):
                        one.lerp_(other * 2, 0.5)
                    for each in own.parameters():
                        each.sub_(0.1 * each.grad)
                train(model, sgd(model))
            raise KeyError
        with torch.no_grad():
            return [*found, average(whole_batch()), own(whole_batch())]

    assert_close(copied("fsdp"), copied("ddp"))


@check
def state_dicts() -> None:
    """Full by default, sharing memory with the model; with full_state_dict=False they are gathered when read."""
    for full in (True, False):
        model = seeded()
        keys = list(model.state_dict())
        with parallel_model(model, backend=FSDPBackend(full_state_dict=full)):
            train(model, adamw(model))
            state = model.state_dict()
            assert list(state) == keys
            file = io.BytesIO()
            if not full:
                torch.save({key: each.full_tensor() for key, each in state.items()}, file)
            elif rank() == 0:  # alone
                torch.save(state, file)
            saved = {key: each.clone() for key, each in state.items()}
            train(model, adamw(model))
            assert torch.equal(state["head.weight"], model.head.weight)
            model.load_state_dict(saved)
        assert_close(dict(model.state_dict()), trained())
        file.seek(0)
        if rank() == 0:
            assert_close(torch.load(file), trained())


@check
def other_parameters_are_refused() -> None:
    """fully_shard would compute with its own, and ignore them."""
    for how in ("module", "parameter", "assign", "functional_call"):
        model = seeded()
        loaded = {key: value.clone() for key, value in model.state_dict().items()}
        message = "Stack has changed: head was" if how == "module" else r"stem.weight was replaced"
        refused = pytest.raises(SyncError, match=message)
        with refused, parallel_model(model, backend="fsdp"):
            train(model, sgd(model))
            if how == "module":
                model.head = nn.Linear(5, 1).double()
            elif how == "parameter":
                model.stem.weight = nn.Parameter(loaded["stem.weight"])
            elif how == "assign":
                model.load_state_dict(loaded, assign=True)
            given = loaded if how == "functional_call" else {}
            torch.func.functional_call(model, given, (own_batch(),))


def replace(model: Any, how: str) -> None:
    """Change which parameters a model has."""
    if how == "parameter":
        model.stem.weight = nn.Parameter(torch.cat([model.stem.weight.detach()] * 2))
    elif how == "module":
        model.head = nn.Linear(5, 1).double()
    elif how == "added":
        model.head.extra = nn.Parameter(torch.ones(3))
    else:
        del model.stem.bias


@check
def other_parameters_are_found_without_a_forward() -> None:
    """At a step of any optimizer, when the state is read or saved, and at the end of the block."""
    uses: dict[str, Callable[[Any], Any]] = {
        "step": lambda model: torch.optim.SGD([model.stem.weight], 0.1).step(),
        "state_dict": lambda model: model.state_dict(),
        "save": lambda model: save(checkpoint_file(), model=model),
    }
    for use in uses.values():
        model = seeded()
        with parallel_model(model, backend="fsdp"):
            train(model, sgd(model))
            weight = model.stem.weight
            replace(model, "parameter")
            with pytest.raises(SyncError, match=r"(?s)stem.weight was replaced in the block.*copy into"):
                use(model)
            model.stem.weight = weight
            train(model, sgd(model))
    for how, message in {
        "parameter": "stem.weight was replaced",
        "module": "head.weight was added",
        "added": "head.extra was added",
        "deleted": "stem.bias was replaced",
    }.items():
        for options in ({}, {"restore": False}):
            model = seeded()
            refused = pytest.raises(SyncError, match=f"(?s){message}.*backend='ddp'")
            with refused, parallel_model(model, backend="fsdp", **options):
                train(model, sgd(model))
                replace(model, how)


@check
def a_state_dict_may_be_read_in_an_evaluating_forward() -> None:
    """While gathered parameters are registered."""
    model, expected = seeded(), seeded()
    model.head.register_forward_hook(lambda *_: seen.append(model.state_dict()))
    seen: list[Weights] = []
    with parallel_model(model, backend="fsdp"):
        with torch.no_grad():
            assert_close(model(own_batch()), expected(own_batch()))
        assert_close({key: value + 0 for key, value in seen[0].items()}, dict(expected.state_dict()))


@check
def a_step_in_backward_is_named() -> None:
    """The parameters outside of all units get their gradients when backward ends."""
    model = seeded()
    model.layers[0].bias.register_post_accumulate_grad_hook(lambda _: sgd(model).step())
    refused = pytest.raises(SyncError, match=r"(?s)SGD.step\(\) inside backward.*call step\(\) after backward")
    with refused, parallel_model(model, backend="fsdp"):
        square(model(own_batch())).backward()


@check
def gradients_that_cannot_be_reduced_are_refused() -> None:
    """Sparse ones, several dtypes in a unit, those of torch.autograd.grad, and hooks that wait for all of them."""
    with pytest.raises(ConfigError, match=r"(?s)0 has sparse=True under fsdp.*backend='ddp'"):
        fit(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)))
    with pytest.raises(ConfigError, match=r"(?s)Filter are of torch.complex128 and torch.float64.*view_as_real"):
        fit(Filter())
    fit(Filter(), FSDPBackend(blocks=[nn.Linear]))
    model = Filter()
    model.filter.requires_grad_(False)
    fit(model)
    model = seeded()
    model.scale = nn.Parameter(torch.tensor(1.0))  # of no unit
    fit(model)
    model = seeded()
    with parallel_model(model, backend="fsdp"):
        loss = model(own_batch()).sum()
        with pytest.raises(SyncError, match=r"(?s)torch.autograd.grad of sharded parameters.*call backward"):
            torch.autograd.grad(loss, list(model.parameters()))
        with pytest.raises(SyncError, match=r"(?s)backward\(inputs=...\) with sharded parameters.*call backward"):
            loss.backward(inputs=list(model.parameters()))
        with pytest.raises(SyncError, match=r"(?s)register_multi_grad_hook of sharded parameters.*use register_hook"):
            torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), print)


@check
def what_would_be_lost_is_refused() -> None:
    """Writes in forward, another loss than of the output, another dtype or shape, a parameter that two models share."""

    @torch.no_grad()
    def write(head: nn.Linear, _: Any) -> None:
        head.weight.mul_(0.9)

    model = seeded()
    model.head.register_forward_pre_hook(write)
    with pytest.raises(SyncError, match=r"(?s)forward has written to head.weight.*outside of forward"):
        fit(model)
    model = seeded()
    kept: list[torch.Tensor] = []
    model.stem.register_forward_hook(lambda _module, _args, output: kept.append(output))
    with parallel_model(model, backend="fsdp"):
        assert model.double().to("cpu") is model  # nothing changes
        with pytest.raises(SyncError, match=r"data of torch.float16 and .* for a sharded parameter"):
            model.half()
        loss = model(own_batch()).sum()
        kept[0].sum().backward()
        with pytest.raises(SyncError, match="gradients of a loss are not in the parameters of SGD"):
            sgd(model).step()
    with pytest.raises(SyncError, match="backward after the block"):
        loss.backward()
    first, second = seeded(), seeded()
    second.head.weight = first.head.weight
    refused = pytest.raises(ConfigError, match=r"head\.weight of Stack, which another model of the block shares")
    with refused, parallel_model(first, second, backend="fsdp"):
        pass
    with pytest.raises(ConfigError, match=r"(?s)blocks=\['Conv2d'\].*no submodule of Stack"):
        fit(seeded(), FSDPBackend(blocks=[nn.Conv2d]))


def test_names_of_units_are_those_of_submodules() -> None:
    """An unknown name is an error with the most similar names, or with what else was meant."""
    model = seeded()
    assert FSDPBackend(blocks="layers.1").units(model) == [model.layers[1]]  # type: ignore[arg-type]  # one name
    chosen = FSDPBackend(blocks=["stem", nn.Linear, "layers.1"]).units(model)
    assert chosen == [model.head, *reversed(model.layers), model.stem]
    refused = {
        "layer.1": r"(?s)blocks=\['layer.1'\].*Stack has no submodule of this name.*such as .*layers.1",
        "decoder": "such as stem, layers, head",
        "Linear": "pass the class itself",
        "layers": "a ModuleList is not called itself",
    }
    for name, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            FSDPBackend(blocks=[name]).units(model)

    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x)

    model.layers = Chain(model.layers)
    assert FSDPBackend(blocks=["layers"]).units(model) == [model.layers]


def checkpoint_file() -> Path:
    """Return a path in the folder of these tests, which all ranks have."""
    return Path(tempfile.gettempdir(), "fsdp.pt")


@check
def without_restore_parameters_stay_sharded() -> None:
    """No rank holds full parameters; state dicts, save and calls work; a block refuses the model."""
    model, loaded = seeded(), seeded()
    with parallel_model(model, backend="fsdp", restore=False):
        train(model, adamw(model))
    num_local = sum(each.to_local().numel() for each in model.parameters())
    assert num_local < sum(each.numel() for each in model.parameters())
    save(checkpoint_file(), model=model)
    with pytest.raises(ConfigError, match="is sharded"), parallel_model(model):
        pass
    load(checkpoint_file(), model=loaded)
    assert_close(dict(loaded.state_dict()), trained())
    assert_close({name: each + 0 for name, each in model.state_dict().items()}, trained())
    with torch.no_grad():
        assert_close(model(whole_batch()), loaded(whole_batch()))


@check
def what_a_block_leaves_sharded_stays_so_at_the_end_of_a_later_one() -> None:
    """No device has memory for the full parameters and moments of a model for which `restore=False` is needed."""
    kept, later = seeded(), seeded()
    optimizer = adamw(kept)
    with parallel_model(kept, backend="fsdp", restore=False):
        train(kept, optimizer)
    with parallel_model(later, backend="fsdp"):
        train(later, adamw(later))
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(hasattr(tensor, "full_tensor") for tensor in [*kept.parameters(), *moments])
    assert not any(hasattr(tensor, "full_tensor") for tensor in later.parameters())
    assert_close({name: each + 0 for name, each in kept.state_dict().items()}, trained())


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


@check
def models_on_meta_get_their_values() -> None:
    """By reset_parameters, as rank 0 draws them, or by load; a module without it is NaN until then, which is said."""
    with torch.device("meta"):
        model, loaded, other = Stack().double(), Stack().double(), nn.Sequential(Gain(), nn.Linear(6, 1))
    alone, optimizer = seeded(), adamw(model)
    torch.manual_seed(rank())
    with parallel_model(model, backend="fsdp"):
        alone.load_state_dict(model.state_dict())
        assert all(each.isfinite().all() for each in alone.parameters())
        train(model, optimizer)
        save(checkpoint_file(), model=model)
    with parallel_model(loaded, backend="fsdp"):
        load(checkpoint_file(), model=loaded)
    train(alone, adamw(alone), whole_batch)
    for each in (model, loaded):
        assert_close(dict(each.state_dict()), dict(alone.state_dict()))
    with pytest.raises(ConfigError, match=r"0\.gain of Sequential is on the meta device"), parallel_model(other):
        pass
    said = pytest.warns(UserWarning, match="a Gain on the meta device has no reset_parameters")
    with said, parallel_model(other, backend="fsdp"):
        assert other[0].gain.isnan().all()
        other[0].gain.data.fill_(2.0)
    assert other[0].gain.tolist() == [2.0] * 6


@pytest.mark.filterwarnings(r"ignore:FSDP2-wrapped module \(Linear\) returned a view:UserWarning")  # changed in place
@pytest.mark.parametrize("name", check)
def test_a_check_holds_on_all_ranks(name: str) -> None:
    """What the check's docstring says; a program trains the weights of one process."""
    check.assert_holds(name)


def test_copies_of_shards_on_four_ranks() -> None:
    """shard_over=2 averages over two copies, also in a second block; copies that differ at the end are an error."""

    @distributed(processes=4)
    def run() -> Weights:
        backend = FSDPBackend(shard_over=2)
        with parallel_model(seeded(), backend=backend) as model:  # a block before this one
            model(own_batch()).sum().backward()
        model = seeded()
        with parallel_model(model, backend=backend):
            train(model, adamw(model))
        other = seeded()
        refused = pytest.raises(SyncError, match="copies of Stack differ")
        with refused, parallel_model(other, backend=backend), torch.no_grad():
            other.stem.weight.mul_(1 + rank() // 2)
        return dict(model.state_dict())

    for weights in run.all_ranks():
        assert_close(weights, trained())


def test_equally_many_ranks_shard_each_copy() -> None:
    """At least two; with shard_over="node", those of a node, and as many on each."""
    world = World(world_size=4, local_world_size=2)
    sizes = [FSDPBackend(shard_over=each).ranks_per_copy(world) for each in ("world", "node", 4, 2)]
    assert sizes == [4, 2, 4, 2]
    with pytest.raises(ConfigError, match=r"(?s)shard_over=3\) in a world of 4.*a divisor of 4"):
        FSDPBackend(shard_over=3).ranks_per_copy(world)
    for wrong in (1, True, "nodes"):
        with pytest.raises(ConfigError, match=f"shard_over={wrong!r}"):
            FSDPBackend(shard_over=wrong)
    with pytest.raises(ConfigError, match="in a world of 6, 2 per node"):
        FSDPBackend(shard_over="node").ranks_per_copy(World(world_size=6, local_world_size=2, num_nodes=2))


def test_equally_many_ranks_keep_a_copy_after_forward() -> None:
    """A number of ranks that does not divide those of a copy is refused, before anything is sharded."""
    world = World(world_size=4, local_world_size=2)
    sizes = [FSDPBackend(reshard_after_forward=each).ranks_per_copy(world) for each in (None, False, True, 1, 2, 4)]
    assert sizes == [4] * 6
    with pytest.raises(ConfigError, match=r"(?s)reshard_after_forward=4\), where 2 ranks shard.*a divisor of 2"):
        FSDPBackend(reshard_after_forward=4, shard_over=2).ranks_per_copy(world)
