"""Tests of the fsdp backend beyond the contract: units, meshes, state dicts, errors."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from parallelize import ConfigError, FSDPBackend, SyncError, distributed, no_sync, parallel_model, rank
from parallelize.cluster.world import World

pytestmark = pytest.mark.slow

WORLD = 2


class Stack(nn.Module):
    """A model of repeated blocks, whose widths are not divisible by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def seeded() -> Stack:
    torch.manual_seed(7)
    return Stack()


def batch_of(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(WORLD * 4, 6, generator=torch.Generator().manual_seed(step)).chunk(WORLD)[rank]


def train_in_one_process(
    *, steps: int, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> dict[str, torch.Tensor]:
    model = seeded()
    chosen_optimizer = optimizer(model.parameters(), lr=0.05)
    for step in range(steps):
        chosen_optimizer.zero_grad()
        model(torch.cat([batch_of(rank, step) for rank in range(WORLD)])).square().mean().backward()
        chosen_optimizer.step()
    return dict(model.state_dict())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch_of(rank(), step)).square().mean().backward()
        optimizer.step()


def assert_close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(dict(weights), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("blocks", "sharded"),
    [
        (None, {"layers.0", "layers.1", "layers.2"}),
        ([nn.Linear], {"stem", "layers.0", "layers.1", "layers.2", "head"}),
        (31, {"stem"}),
        (10**6, set()),
    ],
    ids=["default", "classes", "size", "one group"],
)
def test_blocks_are_chosen_as_asked(blocks: Any, sharded: set[str]) -> None:
    """fully_shard is applied to members of module lists, modules of some classes, or modules of a minimum size."""

    @distributed(processes=WORLD)
    def run() -> tuple[set[str], dict[str, torch.Tensor]]:
        model = seeded()
        with parallel_model(model, backend=FSDPBackend(blocks=blocks)):
            found = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
            train(model, torch.optim.AdamW(model.parameters(), lr=0.05), steps=range(2))
        return found, model.state_dict()

    for found, weights in run.all_ranks():
        assert found == sharded
        assert_close(weights, train_in_one_process(steps=2))


@pytest.mark.parametrize(
    "backend",
    [
        FSDPBackend(reshard_after_forward=False),
        FSDPBackend(cpu_offload=True),
        FSDPBackend(shard_over=2),
        FSDPBackend(shard_over="node"),
        FSDPBackend(roll_call_s=0),
    ],
    ids=["kept", "offloaded", "one copy", "node", "no roll call"],
)
def test_options_change_no_result(backend: FSDPBackend) -> None:
    """Options about memory and timeouts train the same weights."""

    @distributed(processes=WORLD)
    def run() -> dict[str, torch.Tensor]:
        model = seeded()
        with parallel_model(model, backend=backend):
            train(model, torch.optim.AdamW(model.parameters(), lr=0.05), steps=range(2))
            with torch.no_grad():
                model(batch_of(rank()))
        return model.state_dict()

    assert_close(run(), train_in_one_process(steps=2))


def test_inference_mode_before_training_changes_no_result() -> None:
    """torch.inference_mode() before and between training steps: backward saves no inference tensor."""

    @distributed(processes=WORLD)
    def run() -> dict[str, torch.Tensor]:
        model = seeded()
        with parallel_model(model, backend="fsdp"):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            for step in range(2):
                with torch.inference_mode():
                    assert not model(batch_of(rank())).requires_grad
                train(model, optimizer, steps=range(step, step + 1))
        return model.state_dict()

    assert_close(run(), train_in_one_process(steps=2))


def test_hybrid_sharding_averages_over_copies() -> None:
    """shard_over=2 on four ranks averages the gradients of two copies, also in a second block."""

    @distributed(processes=4)
    def run() -> dict[str, torch.Tensor]:
        with parallel_model(seeded(), backend=FSDPBackend(shard_over=2)) as model:  # a block before this one
            model(batch_of(0)).sum().backward()
        model = seeded()
        with parallel_model(model, backend=FSDPBackend(shard_over=2)):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            for step in range(2):
                optimizer.zero_grad()
                model(batch_of(rank() % WORLD, step)).square().mean().backward()
                optimizer.step()
        return model.state_dict()

    for weights in run.all_ranks():
        assert_close(weights, train_in_one_process(steps=2))


def test_mixed_precision_policy_gathers_in_half_precision() -> None:
    """torch's policy computes in bfloat16; parameters keep their dtype."""

    @distributed(processes=WORLD)
    def run() -> set[torch.dtype]:
        seen: set[torch.dtype] = set()
        model = seeded()
        model.head.register_forward_hook(lambda module, _args, _output: seen.add(module.weight.dtype))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with parallel_model(model, backend=FSDPBackend(mixed_precision=policy)):
            train(model, torch.optim.SGD(model.parameters(), 0.1), steps=range(1))
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        return seen

    assert run() == {torch.bfloat16}


@pytest.mark.parametrize("shard_over", [3, 1, 0, -2, True, "nodes", None, 2.0])
def test_a_wrong_shard_over_is_refused(shard_over: Any) -> None:
    """Equally many ranks, at least two, shard each copy."""
    refused = pytest.raises(ConfigError, match=rf"(?s)shard_over={shard_over!r}\) in a world of 4.*a divisor of 4")
    with refused:
        FSDPBackend(shard_over=shard_over).ranks_per_copy(World(world_size=4, local_world_size=2))


def test_ranks_of_a_node_shard_a_copy() -> None:
    """shard_over="node" needs two ranks per node."""
    world = World(world_size=4, local_world_size=2)
    sizes = [FSDPBackend(shard_over=each).ranks_per_copy(world) for each in ("world", "node", 4, 2)]
    assert sizes == [4, 2, 4, 2]
    assert FSDPBackend(shard_over="node").ranks_per_copy(World(world_size=4, local_world_size=4)) == 4
    with pytest.raises(ConfigError, match="in a world of 6"):
        FSDPBackend(shard_over="node").ranks_per_copy(World(world_size=6, local_world_size=2, num_nodes=2))
    with pytest.raises(ConfigError, match=r"(?s)shard_over='node'\) \(1 on this node\) in a world of 2.*'world'"):
        FSDPBackend(shard_over="node").ranks_per_copy(World(world_size=2, local_world_size=1))


def test_without_restore_parameters_stay_sharded() -> None:
    """restore=False runs no collective at the end: each rank keeps its shards, and calling the model is an error."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = seeded()
        with parallel_model(model, backend="fsdp", restore=False):
            train(model, torch.optim.SGD(model.parameters(), 0.1), steps=range(1))
        assert type(model.layers[0]) is nn.Linear
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        with pytest.raises(SyncError, match=r"(?s)Stack is sharded.*restore=False"):
            model(batch_of(0))
        with pytest.raises(ConfigError, match="is sharded"), parallel_model(model):
            pass

    run()


def test_a_sharded_state_dict_is_the_default() -> None:
    """state_dict() returns each rank's shards under the keys of the plain model."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = seeded()
        keys = list(model.state_dict())
        with parallel_model(model, backend="fsdp"):
            state = model.state_dict()
            assert list(state) == keys
            assert all(isinstance(value, DTensor) for value in state.values())
            model.load_state_dict(state)

    run()


def test_a_module_replaced_inside_is_refused() -> None:
    """Its parameters would not be sharded."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = seeded()
        with parallel_model(model, backend="fsdp"):
            model.head = nn.Linear(5, 1)
            with pytest.raises(SyncError, match="Stack has changed: head was added or replaced"):
                model(batch_of(rank()))

    run()


@pytest.mark.parametrize("how", ["assign", "replace"])
def test_a_replaced_parameter_is_refused(how: str) -> None:
    """fully_shard would compute with its shards, and silently ignore the loaded or new parameter."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = seeded()
        loaded = {key: value.clone() for key, value in model.state_dict().items()}
        with parallel_model(model, backend="fsdp"):
            train(model, torch.optim.SGD(model.parameters(), 0.1), steps=range(1))
            if how == "assign":
                model.load_state_dict(loaded, assign=True)
            elif how == "replace":
                model.stem.weight = nn.Parameter(loaded["stem.weight"])
            with pytest.raises(SyncError, match=r"(?s)stem.weight of Stack was replaced inside the block.*assign=True"):
                torch.func.functional_call(model, {}, (batch_of(rank()),))

    run()


@pytest.mark.parametrize("given", ["own parameters", "loaded"])
def test_a_functional_call_is_refused(given: str) -> None:
    """fully_shard computes with its shards; functional_call would return parameters whose memory is freed."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = seeded()
        loaded = {key: value.clone() for key, value in model.state_dict().items()}
        with parallel_model(model, backend="fsdp"):
            tensors = loaded if given == "loaded" else dict(model.named_parameters())
            with pytest.raises(SyncError, match=r"(?s)functional_call of Stack under fsdp.*backend='ddp'"):
                torch.func.functional_call(model, tensors, (batch_of(rank()),))

    run()


@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_from_before_the_block_are_averaged(accumulates: bool) -> None:
    """A step in the block uses the mean of the ranks' gradients, also if more are accumulated in the block."""

    @distributed(processes=WORLD)
    def run() -> dict[str, torch.Tensor]:
        model = seeded()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        model(batch_of(rank(), 0)).square().mean().backward()
        if rank() == 0:
            model.head.bias.grad = None  # as if only some ranks ran a branch
        with parallel_model(model, backend="fsdp"):
            if accumulates:
                model(batch_of(rank(), 1)).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    model = seeded()
    for each in range(WORLD):
        (model(batch_of(each, 0)).square().mean() / WORLD).backward()
        if each == 0:
            model.head.bias.grad = None
    if accumulates:
        model(torch.cat([batch_of(each, 1) for each in range(WORLD)])).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    for weights in run.all_ranks():
        assert_close(weights, dict(model.state_dict()))


@pytest.mark.parametrize("how", ["no_sync", "no_sync around backward", "grad", "grad before"])
def test_a_step_on_unreduced_gradients_is_refused(how: str) -> None:
    """A step would find no gradient in the shards while unreduced gradients exist."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = seeded()
        with parallel_model(model, backend="fsdp"):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            train(model, optimizer, steps=range(1))
            optimizer.zero_grad()
            with no_sync(model) if how == "no_sync" else contextlib.nullcontext():
                loss = model(batch_of(rank())).mean()
                weight = model.head.weight  # unsharded until backward
                with no_sync(model) if how == "no_sync around backward" else contextlib.nullcontext():
                    if how.startswith("grad"):
                        gradient = torch.autograd.grad(loss, [weight])[0]
                        (weight if how == "grad before" else model.head.weight).grad = gradient
                    else:
                        loss.backward()
            with pytest.raises(SyncError, match=r"gradient of .* of Stack is not averaged"):
                optimizer.step()

    run()


def test_a_step_after_the_block_is_refused() -> None:
    """Sharded gradients are freed with the block: a step without gradients is refused, until new ones exist."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = seeded()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model, backend="fsdp"):
            model(batch_of(0)).sum().backward()
        with pytest.raises(SyncError, match=r"(?s)SGD steps after the block in which .* inside the block"):
            optimizer.step()
        train(model, optimizer, steps=range(1))

    run()


def test_a_step_after_the_block_is_accepted_if_all_gradients_were_used() -> None:
    """If every gradient was used, a step after the block does nothing, as in torch."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = seeded()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model, backend="fsdp"):
            train(model, optimizer, steps=range(2))
        optimizer.step()

    run()


def test_parameters_unfrozen_inside_the_block_train() -> None:
    """A block that is frozen at first and then trained gets the gradients of one process."""

    @distributed(processes=WORLD)
    def run() -> dict[str, torch.Tensor]:
        model = seeded()
        model.layers.requires_grad_(False)
        with parallel_model(model, backend="fsdp"):
            model(batch_of(rank())).mean().backward()
            model.zero_grad()
            model.requires_grad_(True)
            train(model, torch.optim.AdamW(model.parameters(), lr=0.05), steps=range(2))
        assert all(each.requires_grad for each in model.parameters())
        return model.state_dict()

    assert_close(run(), train_in_one_process(steps=2))


@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_parameters_unfrozen_after_an_evaluation_train(where: str) -> None:
    """A forward without backward leaves full parameters in the model, and shards in the optimizer: both are heeded."""

    @distributed(processes=WORLD, backend="fsdp")
    def run() -> tuple[list[bool], list[bool]]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with parallel_model(model):
            with torch.no_grad():
                model(batch_of(rank()))
            for each in model.parameters() if where == "model" else optimizer.param_groups[0]["params"]:
                each.requires_grad_()
            model(batch_of(rank())).sum().backward()
            trained = [each.grad is not None for each in model.parameters()]
            with torch.no_grad():
                model(batch_of(rank()))
            model[1].requires_grad_(False)
        return trained, [each.requires_grad for each in model.parameters()]

    assert run() == ([True] * 4, [True, True, False, False])


def test_training_in_half_precision_what_was_frozen_at_first_is_refused() -> None:
    """fully_shard has chosen no type for these gradients; where they are in fp32, training goes on."""

    @distributed(processes=2, backend="fsdp")
    def train(amp: str) -> str:
        model = nn.Linear(4, 1).requires_grad_(False)
        with parallel_model(model, amp=amp):
            model(torch.ones(2, 4))
            model.requires_grad_()
            model(torch.ones(2, 4)).sum().backward()
        return "trained"

    assert train("O1") == "trained"
    with pytest.raises(ConfigError, match="weight of Linear is trained from now on") as caught:
        train("O2")
    assert "torch.bfloat16" in caught.value.faults[0].why
    assert "enter parallel_model again" in caught.value.faults[0].fix


def test_tied_parameters_in_two_blocks_are_refused() -> None:
    """A parameter is gathered with one block only; within one group it stays tied."""

    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].weight = self.layers[0].weight

    @distributed(processes=WORLD)
    def run() -> None:
        model = Tied()
        refused = pytest.raises(ConfigError, match=r"layers.0.weight and layers.2.weight of Tied are one parameter")
        with refused, parallel_model(model, backend="fsdp"):
            pass
        with parallel_model(model, backend=FSDPBackend(blocks=10**6)):
            train(model, torch.optim.SGD(model.parameters(), 0.1), steps=range(1))
        assert model.layers[2].weight is model.layers[0].weight

    run()


def test_mixed_types_in_a_block_are_refused() -> None:
    """Complex and real parameters need different blocks, unless the complex ones are frozen."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)
            self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.filter).abs()

    def trained(model: Filter, backend: FSDPBackend) -> Filter:
        with parallel_model(model, backend=backend):
            train(model, torch.optim.SGD(model.parameters(), 0.1), steps=range(1))
        return model

    @distributed(processes=WORLD)
    def run() -> None:
        message = r"(?s)filter of Filter is torch.complex64 and linear.weight is torch.float32.*view_as_real.*blocks="
        with pytest.raises(ConfigError, match=message):
            trained(Filter(), FSDPBackend())
        assert trained(Filter(), FSDPBackend(blocks=[nn.Linear])).filter.is_complex()
        model = Filter()
        model.filter.requires_grad_(False)
        assert not trained(model, FSDPBackend()).filter.requires_grad

    run()


def test_sparse_gradients_are_refused() -> None:
    """An embedding with sparse=True is refused at the entry."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))
        refused = pytest.raises(ConfigError, match=r"(?s)0 has sparse=True under fsdp.*backend='ddp'")
        with refused, parallel_model(model, backend="fsdp"):
            pass

    run()


def test_block_classes_that_the_model_does_not_have_are_refused() -> None:
    """No submodule would be a unit."""

    @distributed(processes=WORLD)
    def run() -> None:
        refused = pytest.raises(ConfigError, match=r"blocks=\['Conv2d'\].*\n.*no submodule of Stack")
        with refused, parallel_model(seeded(), backend=FSDPBackend(blocks=[nn.Conv2d])):
            pass

    run()


def test_verify_every_is_refused() -> None:
    """verify_every cannot compare parameters of which every rank holds another shard."""

    @distributed(processes=WORLD, backend="fsdp", verify_every=1)
    def run() -> None:
        with pytest.raises(ConfigError, match="verify_every=1 with backend='fsdp'"), parallel_model(seeded()):
            pass

    run()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_train(reentrant: bool) -> None:
    """Recomputation inside backward is accepted as a call through the model."""

    class Checkpointed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = torch.tanh(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant))
            return self.head(x)

    @distributed(processes=WORLD)
    def run() -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        model = Checkpointed()
        with parallel_model(model, backend="fsdp"):
            train(model, torch.optim.AdamW(model.parameters(), lr=0.05), steps=range(2))
        return model.state_dict()

    assert_close(run(), train_in_one_process(steps=2))


def test_clipping_and_accumulation_use_full_gradients() -> None:
    """clip_grad_norm_ clips by the norm over all shards; no_sync accumulates without reducing."""

    @distributed(processes=WORLD)
    def run() -> tuple[float, dict[str, torch.Tensor]]:
        model = seeded()
        with parallel_model(model, backend="fsdp"):
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            with no_sync(model):
                (model(batch_of(rank(), 0)).square().mean() / 2).backward()
            (model(batch_of(rank(), 1)).square().mean() / 2).backward()
            norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            total_norm = norm.item()
        return total_norm, model.state_dict()

    model = seeded()
    for step in range(2):
        for each in range(WORLD):
            (model(batch_of(each, step)).square().mean() / 2 / WORLD).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
    torch.optim.SGD(model.parameters(), 1.0).step()
    for norm, weights in run.all_ranks():
        assert norm == pytest.approx(expected, rel=1e-4)
        assert_close(weights, dict(model.state_dict()))


def test_a_block_can_follow_a_block() -> None:
    """fsdp, ddp and fsdp again train the same model and optimizer."""

    @distributed(processes=WORLD)
    def run() -> dict[str, torch.Tensor]:
        model = seeded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step, backend in enumerate(("fsdp", "ddp", "fsdp")):
            with parallel_model(model, backend=backend):
                train(model, optimizer, steps=range(step, step + 1))
        dist.barrier()
        return model.state_dict()

    assert_close(run(), train_in_one_process(steps=3))


@pytest.mark.parametrize("broadcasts", [True, False])
def test_buffers_are_those_of_rank_0(broadcasts: bool) -> None:
    """As under ddp, running statistics are rank 0's before each training forward and after the block."""

    @distributed(processes=WORLD)
    def run() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with parallel_model(model, backend=FSDPBackend(broadcast_buffers=broadcasts)):
            for step in range(3):
                optimizer.zero_grad()
                model(torch.full((2, 4), 1.0 + step + rank())).sum().backward()
                optimizer.step()
        return dict(model[1].named_buffers())

    first, second = run.all_ranks()
    assert first["num_batches_tracked"] == second["num_batches_tracked"] == 3
    assert torch.equal(first["running_mean"], second["running_mean"]) is broadcasts
