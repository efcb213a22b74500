"""Tests of the fsdp backend beyond the contract: units, options, direct access, copies, state dicts, errors."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parallelize import ConfigError, FSDPBackend, SyncError, distributed, load, no_sync, parallel_model, rank, save
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


class Unet(nn.Module):
    """Lists of lists and of dictionaries, as of a diffusion model."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.ModuleDict({"res": nn.Sequential(nn.Linear(4, 4)), "more": nn.ModuleList([nn.Linear(4, 4)])})
            for _ in range(2)
        )
        self.heads = nn.ModuleDict({"out": nn.Linear(4, 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for level in self.down:
            x = x + level["more"][0](level["res"](x))
        return self.heads["out"](x)


def seeded(make: Callable[[], nn.Module] = Stack) -> Any:
    torch.manual_seed(7)
    return make().double()


def whole_batch(step: int = 0, width: int = 6) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def own_batch(step: int = 0, width: int = 6) -> torch.Tensor:
    return whole_batch(step, width).chunk(2)[rank() % 2]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.05)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], torch.Tensor] = own_batch,
    steps: range = range(2),
) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def trained(
    make: Callable[[], nn.Module] = Stack,
    batch: Callable[[int], torch.Tensor] = whole_batch,
    steps: range = range(2),
) -> Weights:
    """Train in this process alone."""
    model = seeded(make)
    train(model, adamw(model), batch, steps)
    return dict(model.state_dict())


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather" in str(func)
        return func(*args, **(kwargs or {}))


def test_options_change_no_result() -> None:
    """Units, and options about memory, train the weights of one process; units are gathered one by one."""
    cases: dict[str, tuple[FSDPBackend, Callable[[], nn.Module], int]] = {
        "lists": (FSDPBackend(), Stack, 4),
        "lists in dictionaries in lists": (FSDPBackend(), Unet, 5),
        "classes": (FSDPBackend(blocks=[nn.Linear]), Stack, 5),
        "size": (FSDPBackend(blocks=31), Stack, 2),
        "one group": (FSDPBackend(blocks=10**6), Stack, 1),
        "kept": (FSDPBackend(reshard_after_forward=False), Stack, 4),
        "offloaded": (FSDPBackend(cpu_offload=True), Stack, 4),
        "one copy": (FSDPBackend(shard_over=2), Stack, 4),
        "node": (FSDPBackend(shard_over="node"), Stack, 4),
    }

    @distributed(processes=2)
    def run() -> dict[str, Any]:
        found = {}
        for name, (backend, make, _) in cases.items():
            model = seeded(make)
            width = next(model.parameters()).shape[1]
            with parallel_model(model, backend=backend):
                train(model, adamw(model), functools.partial(own_batch, width=width))
                with torch.no_grad(), Gathers() as gathers:
                    model(own_batch(0, width))
            found[name] = gathers.count, dict(model.state_dict())
        return found

    for name, (count, weights) in run().items():
        _, make, expected = cases[name]
        batch = functools.partial(whole_batch, width=4 if make is Unet else 6)
        assert_close(weights, trained(make, batch))
        assert (name, count) == (name, expected)


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


def test_a_policy_computes_in_half_precision() -> None:
    """Parameters keep their dtype."""

    @distributed(processes=2)
    def run() -> list[set[torch.dtype]]:
        seen: set[torch.dtype] = set()
        model = seeded()
        model.head.register_forward_hook(lambda module, _args, _output: seen.add(module.weight.dtype))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with parallel_model(model, backend=FSDPBackend(mixed_precision=policy)):
            train(model, sgd(model))
        return [seen, {each.dtype for each in model.parameters()}]

    assert run() == [{torch.bfloat16}, {torch.float64}]


@pytest.mark.parametrize("shard_over", [3, 1, 0, -2, True, "nodes", None, 2.0])
def test_a_wrong_shard_over_is_refused(shard_over: Any) -> None:
    """Equally many ranks, at least two, shard each copy."""
    refused = pytest.raises(ConfigError, match=rf"(?s)shard_over={shard_over!r}\) in a world of 4.*a divisor of 4")
    with refused:
        FSDPBackend(shard_over=shard_over).ranks_per_copy(World(world_size=4, local_world_size=2))


def test_ranks_of_a_node_shard_a_copy() -> None:
    """shard_over="node" needs two ranks per node, and as many on each."""
    world = World(world_size=4, local_world_size=2)
    sizes = [FSDPBackend(shard_over=each).ranks_per_copy(world) for each in ("world", "node", 4, 2)]
    assert sizes == [4, 2, 4, 2]
    for world in (
        World(world_size=6, local_world_size=2, num_nodes=2),
        World(world_size=2, local_world_size=1, num_nodes=2),
    ):
        with pytest.raises(ConfigError, match=rf"in a world of {world.world_size}, {world.local_world_size} per node"):
            FSDPBackend(shard_over="node").ranks_per_copy(world)


def test_weights_and_parts_are_used_directly() -> None:
    """Outside of forward, and in the forward of another unit: gathered, with averaged gradients."""
    uses: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
        "method": lambda model, x: model.encode(x),
        "part": lambda model, x: model.head(model.encode(x)) + model(x),
        "weight": lambda model, x: F.linear(model(x), model.head.weight.t()),
        "tied by hand": lambda model, x: model.encode(x) @ model.stem.weight,
        "normalized": lambda model, x: F.linear(x, model.stem.weight / model.stem.weight.norm(dim=1, keepdim=True)),
        "penalty": lambda model, x: model(x) + (model.stem.weight.T @ model.stem.weight - torch.eye(6)).square().sum(),
        "without a unit": lambda model, x: model(x, depth=2),
        "in evaluation": lambda model, x: model(x) * float(model.head.weight.detach().abs().sum()),
    }

    def fit(model: Stack, use: Callable[[Any, torch.Tensor], torch.Tensor], batch: Any) -> None:
        optimizer = adamw(model)
        for step in range(2):
            optimizer.zero_grad()
            use(model, batch(step)).square().mean().backward()
            optimizer.step()

    @distributed(processes=2)
    def run(name: str) -> tuple[Weights, Weights]:
        expected, model = seeded(), seeded()
        fit(expected, uses[name], whole_batch)
        with parallel_model(model, backend="fsdp"):
            fit(model, uses[name], own_batch)
        return dict(model.named_parameters()), dict(expected.named_parameters())

    for name in uses:
        assert_close(*run(name))


@pytest.mark.parametrize("blocks", [None, 10**6])
def test_outputs_may_be_changed_in_place(blocks: Any) -> None:
    """Also those that are views, as of a linear layer of sequences, which torch hooks to begin its backward."""

    def fit(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
        optimizer = adamw(model)
        for step in range(2):
            optimizer.zero_grad()
            output = model(batch(step).reshape(-1, 2, 6))
            output /= 2
            output += 1
            output.square().mean().backward()
            optimizer.step()

    @distributed(processes=2)
    def run() -> tuple[Weights, Weights]:
        expected, model = seeded(), seeded()
        fit(expected, whole_batch)
        with parallel_model(model, backend=FSDPBackend(blocks=blocks)):
            fit(model, own_batch)
        return dict(model.named_parameters()), dict(expected.named_parameters())

    assert_close(*run())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_train(reentrant: bool) -> None:
    """Units are gathered again for the recomputation."""

    class Checkpointed(Stack):
        def encode(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
            del depth
            x = self.stem(x)
            for layer in self.layers:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=reentrant))
            return x

    @distributed(processes=2)
    def run() -> Weights:
        model = seeded(Checkpointed)
        with parallel_model(model, backend="fsdp"):
            train(model, adamw(model))
        return dict(model.state_dict())

    assert_close(run(), trained())


@pytest.mark.parametrize("is_penalty_first", [True, False])
def test_a_gradient_penalty_trains(is_penalty_first: bool) -> None:
    """The backward of a backward reads the gathered weights of units, before and after other forwards."""

    def fit(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
        optimizer = adamw(model)
        for step in range(2):
            losses = [model(batch(step)).mean()] if not is_penalty_first else []
            x = batch(step + 2).requires_grad_()
            (gradient,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
            losses += [(gradient.norm(dim=1) - 1).square().mean(), model(batch(step + 4)).mean()]
            optimizer.zero_grad()
            sum(losses).backward()
            assert all(each.grad is not None for each in model.parameters())
            optimizer.step()

    @distributed(processes=2)
    def run() -> tuple[Weights, Weights]:
        expected, model = seeded(), seeded()
        fit(expected, whole_batch)
        with parallel_model(model, backend="fsdp"):
            fit(model, own_batch)
        return dict(model.named_parameters()), dict(expected.named_parameters())

    assert_close(*run())


def test_blocks_follow_each_other() -> None:
    """fsdp, ddp and fsdp again, with evaluation in inference mode, train one model by one optimizer, then none does."""

    @distributed(processes=2)
    def run() -> Weights:
        model = seeded()
        optimizer = adamw(model)
        for step, backend in enumerate(("fsdp", "ddp", "fsdp")):
            with parallel_model(model, backend=backend):
                with torch.inference_mode():
                    assert not model(own_batch()).requires_grad
                train(model, optimizer, steps=range(step, step + 1))
        assert {type(each) for each in model.parameters()} == {nn.Parameter}
        train(model, optimizer, whole_batch, range(3, 4))
        return dict(model.state_dict())

    assert_close(run(), trained(steps=range(4)))


@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_cross_the_ends_of_a_block(accumulates: bool) -> None:
    """Those from before are averaged, and more may be added; those of the block are used by a step after it."""

    @distributed(processes=2)
    def run() -> Weights:
        model = seeded()
        optimizer = sgd(model)
        model(own_batch(0)).square().mean().backward()
        with parallel_model(model, backend="fsdp"):
            if accumulates:
                model(own_batch(1)).square().mean().backward()
        optimizer.step()
        return dict(model.state_dict())

    model = seeded()
    for step in range(1 + accumulates):
        model(whole_batch(step)).square().mean().backward()
    sgd(model).step()
    for weights in run.all_ranks():
        assert_close(weights, dict(model.state_dict()))


def test_clipping_and_accumulation() -> None:
    """Gradients under no_sync are averaged, too, and cleared as others are; the norm is that of all shards."""

    @distributed(processes=2)
    def run() -> tuple[float, Weights]:
        model = seeded()
        with parallel_model(model, backend="fsdp"):
            optimizer = sgd(model)
            with no_sync(model):
                model(own_batch(2)).square().mean().backward()
                model.zero_grad()
                (model(own_batch(0)).square().mean() / 2).backward()
            (model(own_batch(1)).square().mean() / 2).backward()
            norm = clip_grad_norm_(model.parameters(), 0.01).item()
            optimizer.step()
        return norm, dict(model.state_dict())

    model = seeded()
    for step in range(2):
        (model(whole_batch(step)).square().mean() / 2).backward()
    expected = clip_grad_norm_(model.parameters(), 0.01).item()
    sgd(model).step()
    for norm, weights in run.all_ranks():
        assert norm == pytest.approx(expected, rel=1e-9)
        assert_close(weights, dict(model.state_dict()))


@pytest.mark.parametrize("amp", [None, "O1", "O2"])
def test_parameters_are_frozen_and_unfrozen(amp: str | None) -> None:
    """What was frozen at the entry trains as soon as it is unfrozen, in half precision, too."""

    @distributed(processes=2)
    def run(amp: str | None) -> list[Any]:
        seen = []
        for backend in ("ddp", "fsdp"):
            model = seeded().float()
            model.layers.requires_grad_(False)
            with parallel_model(model, backend=backend, amp=amp):
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for step in range(4):
                    model(own_batch(step).float()).square().mean().backward()
                    optimizer.step()
                    seen.append([each.grad is not None for each in model.parameters()])
                    optimizer.zero_grad()
                    with torch.no_grad():
                        model(own_batch().float())
                    (model.layers if step < 2 else model.stem).requires_grad_(step == 1)
            seen.append([each.requires_grad for each in model.parameters()])
            seen.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        return seen

    found = run(amp)
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half], rtol=2e-2 if amp else 1e-5, atol=2e-2 if amp else 1e-6)


def test_tied_parameters_train() -> None:
    """A weight of two units, and one that a unit shares with the rest of the model."""

    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].weight = self.layers[0].weight
            self.middle = nn.Linear(5, 5)
            self.middle.weight = self.layers[1].weight

        def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
            return self.head(self.middle(self.encode(x, depth)))

    @distributed(processes=2)
    def run() -> tuple[bool, Weights]:
        model = seeded(Tied)
        with parallel_model(model, backend="fsdp"):
            train(model, adamw(model))
        is_tied = model.layers[2].weight is model.layers[0].weight and model.middle.weight is model.layers[1].weight
        return is_tied, dict(model.state_dict())

    is_tied, weights = run()
    assert is_tied
    assert_close(weights, trained(Tied))


@pytest.mark.parametrize("foreach", [False, True])
def test_scalars_train_as_under_ddp(foreach: bool) -> None:
    """0-dim parameters are whole on each rank; clipping, steps and noise act on them as on shards."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.scale = nn.Parameter(torch.ones([]))
            self.other = nn.Parameter(torch.ones([]))
            self.shift = nn.Parameter(torch.zeros([]), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale.exp() * self.other + self.shift

    @distributed(processes=2)
    def run() -> list[Any]:
        found = []
        for backend in ("ddp", "fsdp"):
            model = seeded(Scaled)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=foreach)
            model(own_batch()).square().mean().backward()  # gradients from before the block
            with parallel_model(model, backend=backend):
                for step in range(4):
                    if step == 2:
                        model.shift.requires_grad_()
                    with no_sync(model) if step == 1 else contextlib.nullcontext():
                        model(own_batch(step)).square().mean().backward()
                    if step == 1:
                        continue
                    clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(dict(model.named_parameters()))
        return found

    assert_close(*run())


def test_buffers_are_kept_alike_as_asked() -> None:
    """As under ddp: rank 0's, the mean, or each rank's own."""

    def statistics(backend: Any, buffers: str | None) -> Weights:
        model = seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        with parallel_model(model, backend=backend, buffers=buffers):
            train(model, sgd(model), steps=range(3))
        return dict(model[1].named_buffers())

    @distributed(processes=2)
    def run() -> list[Any]:
        shared = [[statistics(each, how) for each in ("ddp", "fsdp")] for how in ("rank0", "mean")]
        return [shared, statistics(FSDPBackend(broadcast_buffers=False), None)]

    results = run.all_ranks()
    for (shared, _), own in zip(results, [each[1] for each in results], strict=True):
        assert own["num_batches_tracked"] == 3
        for expected, found in shared:
            assert_close(found, expected)
    assert not torch.equal(results[0][1]["running_mean"], results[1][1]["running_mean"])


@pytest.mark.parametrize("when", ["before", "inside", "after a step"])
def test_hooks_of_parameters(when: str) -> None:
    """They change the averaged gradients, as under ddp."""

    def fit(backend: str) -> Any:
        seen: list[int] = []
        model = seeded()

        def register() -> None:
            for each in model.parameters():
                each.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
                each.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.numel()))

        if when == "before":
            register()
        with parallel_model(model, backend=backend):
            optimizer = sgd(model)
            for step in range(3):
                if (step, when) in {(0, "inside"), (1, "after a step")}:
                    register()
                train(model, optimizer, steps=range(step, step + 1))
        return dict(model.state_dict()), sorted(seen)

    @distributed(processes=2)
    def run() -> Any:
        return fit("ddp"), fit("fsdp")

    for expected, found in run.all_ranks():
        assert_close(found, expected)
        assert found[1]


def test_element_by_element_work_sends_nothing() -> None:
    """Steps, averages and perturbations run on this rank's rows."""

    @distributed(processes=2)
    def run() -> int:
        model = seeded()
        with parallel_model(model, backend=FSDPBackend(full_state_dict=False)), torch.no_grad():
            inside, optimizer = copy.deepcopy(model), adamw(model)
            with torch.enable_grad():
                train(model, optimizer, steps=range(1))  # ranks compare their parameters at the first step
                model(own_batch()).square().mean().backward()
            with CommDebugMode() as sent:
                for one, other in zip(inside.parameters(), model.parameters(), strict=True):
                    one.lerp_(other, 0.1)
                torch._foreach_lerp_(list(inside.parameters()), list(model.parameters()), 0.1)
                for name, value in inside.state_dict().items():
                    value.copy_(value * 0.9 + model.state_dict()[name] * 0.1)
                for each in model.parameters():
                    each.data.sub_(0.1 * each.grad).clamp_(-1, 1)
                optimizer.step()
        return sent.get_total_counts()

    assert run.all_ranks() == [0, 0]


def test_copies() -> None:
    """They are sharded, may be trained, and outlive the block and an exception in it, as does a pickle of the model."""

    def fit(backend: str) -> list[torch.Tensor]:
        model, found = seeded(), []
        with contextlib.suppress(KeyError), parallel_model(model, backend=backend):
            train(model, sgd(model))
            found.append(pickle.loads(pickle.dumps(model))(whole_batch()).detach())
            average, own = copy.deepcopy(model), copy.deepcopy(model)
            for step in range(2):
                own.zero_grad()
                own(own_batch(step) if backend == "fsdp" else whole_batch(step)).square().mean().backward()
                with torch.no_grad():
                    for one, other in zip(average.parameters(), model.parameters(), strict=True):
                        one.lerp_(other * 2, 0.5)
                    for each in own.parameters():
                        each.sub_(0.1 * each.grad)
                train(model, sgd(model))
            raise KeyError
        with torch.no_grad():
            return [*found, average(whole_batch()), own(whole_batch())]

    @distributed(processes=2)
    def run() -> list[Any]:
        return [fit(backend) for backend in ("ddp", "fsdp")]

    for expected, found in run.all_ranks():
        assert_close(found, expected)


def test_state_dicts() -> None:
    """Full by default, sharing memory with the model; with full_state_dict=False they are gathered when read."""

    @distributed(processes=2)
    def run() -> list[Any]:
        found: list[Any] = []
        for full in (True, False):
            model = seeded()
            keys = list(model.state_dict())
            with parallel_model(model, backend=FSDPBackend(full_state_dict=full)):
                train(model, adamw(model))
                state = model.state_dict()
                assert list(state) == keys
                file = io.BytesIO()
                if full:
                    if rank() == 0:  # alone
                        torch.save(state, file)
                else:
                    torch.save({key: each.full_tensor() for key, each in state.items()}, file)
                saved = {key: each.clone() for key, each in state.items()}
                train(model, adamw(model))
                assert torch.equal(state["head.weight"], model.head.weight)
                model.load_state_dict(saved)
            found.append(dict(model.state_dict()))
            if rank() == 0:
                file.seek(0)
                found.append(torch.load(file))
        return found

    for found in run():
        assert_close(found, trained())


def test_without_restore_parameters_stay_sharded(tmp_path: Any) -> None:
    """restore=False: no rank holds full parameters; state dicts, save and calls work; a block refuses the model."""

    @distributed(processes=2)
    def run() -> list[Any]:
        model = seeded()
        with parallel_model(model, backend="fsdp", restore=False):
            train(model, adamw(model))
        num_local = sum(each.to_local().numel() for each in model.parameters())
        assert num_local < sum(each.numel() for each in model.parameters())
        save(tmp_path / "checkpoint.pt", model=model)
        with pytest.raises(ConfigError, match="is sharded"), parallel_model(model):
            pass
        loaded = seeded()
        load(tmp_path / "checkpoint.pt", model=loaded)
        with torch.no_grad():
            outputs = model(whole_batch())
        return [{name: each + 0 for name, each in model.state_dict().items()}, dict(loaded.state_dict()), outputs]

    state, loaded, outputs = run()
    model = seeded()
    model.load_state_dict(trained())
    assert_close(state, trained())
    assert_close(loaded, trained())
    assert_close(outputs, model(whole_batch()).detach())


def test_models_on_meta_get_their_values(tmp_path: Any) -> None:
    """By reset_parameters, as rank 0 draws them, or by load; a module without it is NaN until then, which is said."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    @distributed(processes=2)
    def run() -> Any:
        with torch.device("meta"):
            model, other = Stack().double(), nn.Sequential(Gain(), nn.Linear(6, 1))
        torch.manual_seed(rank())
        optimizer = adamw(model)
        with parallel_model(model, backend="fsdp"):
            first = [each.detach() + 0 for each in model.parameters()]
            train(model, optimizer)
            save(tmp_path / "checkpoint.pt", model=model)
        with pytest.raises(ConfigError, match=r"0\.gain of Sequential is on the meta device"), parallel_model(other):
            pass
        with warnings.catch_warnings(record=True) as caught, parallel_model(other, backend="fsdp"):
            assert other[0].gain.isnan().all()
            other[0].gain.data.fill_(2.0)
        assert "a Gain on the meta device has no reset_parameters" in str(caught[0].message)
        with torch.device("meta"):
            loaded = Stack().double()
        with parallel_model(loaded, backend="fsdp"):
            load(tmp_path / "checkpoint.pt", model=loaded)
        return first, dict(model.state_dict()), dict(loaded.state_dict()), other[0].gain.detach()

    (first, weights, loaded, gain), (other_first, other_weights, _, _) = run.all_ranks()
    assert_close(other_first, first)
    assert_close(other_weights, weights)
    assert_close(loaded, weights)
    assert gain.tolist() == [2.0] * 6
    model = seeded()
    for parameter, value in zip(model.parameters(), first, strict=True):
        parameter.data = value
    train(model, adamw(model), whole_batch)
    assert_close(dict(model.state_dict()), weights)


@pytest.mark.parametrize("how", ["module", "parameter", "assign", "functional_call"])
def test_other_parameters_are_refused(how: str) -> None:
    """fully_shard would compute with its own, and ignore them."""

    @distributed(processes=2)
    def run() -> None:
        model = seeded()
        loaded = {key: value.clone() for key, value in model.state_dict().items()}
        with parallel_model(model, backend="fsdp"):
            train(model, sgd(model))
            if how == "module":
                model.head = nn.Linear(5, 1).double()
            elif how == "parameter":
                model.stem.weight = nn.Parameter(loaded["stem.weight"])
            elif how == "assign":
                model.load_state_dict(loaded, assign=True)
            given = loaded if how == "functional_call" else {}
            message = "Stack has changed: head was" if how == "module" else r"stem.weight was replaced"
            with pytest.raises(SyncError, match=message):
                torch.func.functional_call(model, given, (own_batch(),))

    run()


def test_gradients_that_cannot_be_reduced_are_refused() -> None:
    """Sparse ones, several dtypes in a unit, and those of torch.autograd.grad."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)
            self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.filter).abs()

    def fit(model: nn.Module, backend: Any = "fsdp") -> nn.Module:
        with parallel_model(model, backend=backend):
            train(model, sgd(model))
        return model

    def filtered() -> Any:
        model = Filter()
        model.linear.double()
        return model

    @distributed(processes=2)
    def run() -> None:
        with pytest.raises(ConfigError, match=r"(?s)0 has sparse=True under fsdp.*backend='ddp'"):
            fit(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)))
        with pytest.raises(ConfigError, match=r"(?s)Filter are of torch.complex128 and torch.float64.*view_as_real"):
            fit(filtered())
        fit(filtered(), FSDPBackend(blocks=[nn.Linear]))
        model = filtered()
        model.filter.requires_grad_(False)
        fit(model)
        model = seeded()
        with parallel_model(model, backend="fsdp"):
            loss = model(own_batch()).sum()
            with pytest.raises(SyncError, match=r"(?s)torch.autograd.grad of sharded parameters.*call backward"):
                torch.autograd.grad(loss, list(model.parameters()))

    run()


def test_writes_in_forward_are_refused() -> None:
    """A momentum encoder that is updated there would lose its update."""

    class Momentum(Stack):
        def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
            with torch.no_grad():
                self.head.weight.mul_(0.9)
            return super().forward(x, depth)

    @distributed(processes=2)
    def run() -> None:
        model = seeded(Momentum)
        with parallel_model(model, backend="fsdp"):
            model(own_batch())

    with pytest.raises(SyncError, match=r"(?s)forward has written to head.weight.*outside of forward"):
        run()


def test_backward_after_the_block_is_refused() -> None:
    """Its gradients would reach no parameter."""

    @distributed(processes=2)
    def run() -> None:
        model = seeded()
        with parallel_model(model, backend="fsdp"):
            loss = model(own_batch()).sum()
        with pytest.raises(SyncError, match="backward after the block"):
            loss.backward()

    run()


def test_what_would_be_lost_is_refused() -> None:
    """A loss that is not of the model's output, another dtype or shape, and a parameter that two models share."""

    @distributed(processes=2)
    def run() -> None:
        model = seeded()
        kept: list[torch.Tensor] = []
        model.stem.register_forward_hook(lambda _module, _args, output: kept.append(output))
        with parallel_model(model, backend="fsdp"):
            assert model.double().to("cpu") is model  # nothing changes
            with pytest.raises(SyncError, match=r"data of torch.float16 and .* for a sharded parameter"):
                model.half()
            model(own_batch())
            kept[0].sum().backward()
            with pytest.raises(SyncError, match="gradients of a loss are not in the parameters of SGD"):
                sgd(model).step()
        first, second = seeded(), seeded()
        second.head.weight = first.head.weight
        refused = pytest.raises(ConfigError, match=r"head\.weight of Stack, which another model of the block shares")
        with refused, parallel_model(first, second, backend="fsdp"):
            pass

    run()


def test_a_grad_scaler_of_the_user() -> None:
    """It unscales the gradients, and skips a step if one of them is infinite on any rank."""

    def fit(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> float:
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            scaler.scale(loss * (torch.inf if step == 1 else 1)).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    @distributed(processes=2)
    def run() -> list[Any]:
        expected, model = seeded(), seeded()
        scales = [fit(expected, whole_batch)]
        with parallel_model(model, backend="fsdp"):
            scales.append(fit(model, own_batch))
        return [scales, dict(model.named_parameters()), dict(expected.named_parameters())]

    scales, found, expected = run()
    assert scales == [4.0, 4.0]
    assert_close(found, expected)


def test_wrong_options_are_refused() -> None:
    """Block classes that the model does not have, and a comparison of parameters that are sharded."""

    @distributed(processes=2)
    def run() -> None:
        refused = pytest.raises(ConfigError, match=r"(?s)blocks=\['Conv2d'\].*no submodule of Stack")
        with refused, parallel_model(seeded(), backend=FSDPBackend(blocks=[nn.Conv2d])):
            pass
        refused = pytest.raises(ConfigError, match="verify_every=1 with backend='fsdp'")
        with refused, parallel_model(seeded(), backend="fsdp", verify_every=1):
            pass

    run()


def test_a_rank_that_computes_alone_is_named() -> None:
    """An evaluation, or a read of a parameter, on rank 0 only waits for the others, which have gone on."""

    @distributed(processes=2)
    def run(how: str) -> None:
        model = seeded()
        with parallel_model(model, backend="fsdp"):
            train(model, sgd(model))
            if rank() == 0:
                with torch.no_grad():
                    model(own_batch()) if how == "forward" else model.head.weight.tolist()
            train(model, sgd(model))

    for how in ("forward", "read"):
        with pytest.raises(SyncError) as caught:
            run(how)
        text = str(caught.value)
        assert re.search(r"rank 0 waits at test_fsdp.py:\d+ .*rank 1 waits at test_fsdp.py:\d+", text, re.DOTALL), text
