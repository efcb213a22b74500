"""Models whose data decide which parameters and blocks a rank uses train under fsdp what one process trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import FSDPBackend, SyncError, distributed, parallel_model, rank

pytestmark = pytest.mark.slow

SAMPLES = 8


def mlp(width: int = 6, hidden: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))


class Mixture(nn.Module):
    """A mixture of experts: each sample goes to the experts with the highest scores."""

    def __init__(self, num_experts: int = 4, top: int = 1, *, has_shared: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(6, num_experts)
        self.experts = nn.ModuleList([mlp() for _ in range(num_experts)])
        self.shared = mlp() if has_shared else None
        self.top = top

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top)
        output = x if self.shared is None else x + self.shared(x)
        for index, expert in enumerate(self.experts):
            samples, places = (chosen == index).nonzero(as_tuple=True)
            if len(samples):
                scores = weights[samples, places].unsqueeze(1)
                output = output.index_add(0, samples, expert(x[samples]) * scores)
        return output


class Mixtures(nn.Module):
    """Layers of mixtures: the layers are units, and the experts are not."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixture(**options) for _ in range(2)])
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Checkpointed(Mixtures):
    """Each layer is computed again in backward."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Reentrant(Checkpointed):
    """Of layers whose inputs need gradients: else they would get none, in one process, too."""

    use_reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.stem(x))


class Alone(nn.Module):
    """One mixture: its experts are units."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mixture = Mixture(**options)
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixture(x))


class CheckpointedWhole(nn.Module):
    """A mixture is computed again in backward, with all units in it."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.mixture = Mixture()
        self.head = nn.Linear(6, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.mixture, self.stem(x), use_reentrant=self.use_reentrant)
        return self.head(x)


class Nested(nn.Module):
    """Experts in lists of lists, chosen by group, then in the group."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList([nn.ModuleList([mlp(), mlp()]) for _ in range(2)])
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(x)
        for number, group in enumerate(self.groups):
            for place, expert in enumerate(group):
                samples = ((x[:, 0] > 0) == number) & ((x[:, 1] > 0) == place)
                if samples.any():
                    output = output.index_put((samples.nonzero()[:, 0],), expert(x[samples]))
        return self.head(output)


class Dropped(nn.Module):
    """A rank skips the layers that none of its samples needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp() for _ in range(4)])
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            is_used = (x[:, number] > 0.6).unsqueeze(1)
            if is_used.any():
                x = torch.where(is_used, self.run(layer, x), x)
        return self.head(x)

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)


class DroppedReentrant(Dropped):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.stem(x))

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=True)


class Heads(nn.Module):
    """Each sample has a head; ranks go through theirs in different orders."""

    def __init__(self, *, computes_all: bool = False) -> None:
        super().__init__()
        self.trunk = mlp()
        self.heads = nn.ModuleList([mlp() for _ in range(3)])
        self.computes_all = computes_all

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tasks = (x[:, 0].abs() * 10).long() % 3
        features = self.trunk(x)
        order = torch.unique_consecutive(tasks).tolist()
        output = torch.zeros_like(features)
        if self.computes_all:
            outputs = [head(features) for head in self.heads]
            for task in dict.fromkeys(order):
                chosen = (tasks == task).nonzero()[:, 0]
                output = output.index_add(0, chosen, outputs[task][chosen])
            return output
        for task in dict.fromkeys(order):
            chosen = (tasks == task).nonzero()[:, 0]
            output = output.index_add(0, chosen, self.heads[task](features[chosen]))
        return output


class Recurrent(nn.Module):
    """A block that a sample goes through until it is done: ranks call it different numbers of times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mlp(), mlp()])
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = (x[:, 0].abs() * 3).long()
        for step in range(int(counts.max())):
            block = self.blocks[step % 2]
            x = torch.where((counts > step).unsqueeze(1), block(x), x)
        return self.head(x)


class Outer(nn.Module):
    """A unit with units in it, of which a rank uses those of its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixture(num_experts=3), Mixture(num_experts=3)])
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            is_used = (x[:, number] > 0).unsqueeze(1)
            if is_used.any():
                x = torch.where(is_used, layer(x), x)
        return self.head(x)


class Frozen(Dropped):
    """Frozen layers before and between trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)


Make = Callable[[], nn.Module]


def seeded(make: Make) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


def whole_batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)


def steps_of(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> list[Any]:
    """Train with accumulation in the last step, and evaluate; return which parameters have had gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
    seen: list[Any] = []
    for step in range(5):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        if step == 4:
            model(batch(step + 1)).square().mean().backward()
        seen.append([parameter.grad is not None for parameter in model.parameters()])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model(batch(step + 2))
    return seen


Train = Callable[[nn.Module, Callable[[int], torch.Tensor]], Any]


def check_model(make: Make, backend: Any, train: Train = steps_of) -> None:
    """The weights, and which parameters have no gradient, are those of one process."""
    alone, model = seeded(make), seeded(make)
    expected = train(alone, whole_batch)
    with parallel_model(model, backend=backend):
        found = train(model, lambda step: whole_batch(step).chunk(2)[rank() % 2])
    assert found == expected
    torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=1e-6, atol=1e-8)


FSDP: Any = "fsdp"
EXPERTS = FSDPBackend(blocks=[nn.Sequential])
NESTED = FSDPBackend(blocks=[Mixture, nn.Sequential])
MODELS: dict[str, tuple[Make, Any]] = {
    "4 experts": (Mixtures, FSDP),
    "64 experts": (functools.partial(Mixtures, num_experts=64), FSDP),
    "top 2": (functools.partial(Mixtures, top=2), FSDP),
    "shared expert": (functools.partial(Mixtures, has_shared=True), FSDP),
    "checkpointed": (Checkpointed, FSDP),
    "reentrant": (Reentrant, FSDP),
    "experts are units": (Alone, FSDP),
    "64 experts are units": (functools.partial(Alone, num_experts=64), FSDP),
    "top 2 of units": (functools.partial(Alone, top=2), FSDP),
    "experts by class": (Mixtures, EXPERTS),
    "experts by class, checkpointed": (Checkpointed, EXPERTS),
    "units in units": (Outer, NESTED),
    "nested lists": (Nested, FSDP),
    "layer drop": (Dropped, FSDP),
    "layer drop, kept": (Dropped, FSDPBackend(reshard_after_forward=False)),
    "layer drop, offloaded": (Dropped, FSDPBackend(cpu_offload=True)),
    "layer drop, reentrant": (DroppedReentrant, FSDP),
    "frozen layers": (Frozen, FSDP),
    "heads": (Heads, FSDP),
    "heads, all computed": (functools.partial(Heads, computes_all=True), FSDP),
    "recurrent": (Recurrent, FSDP),
}


def steps_by(loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Train:
    """Return how to train with a loss of the program's own."""

    def train(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
        seen: list[Any] = []
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            seen.append([parameter.grad is not None for parameter in model.parameters()])
            optimizer.step()
        return seen

    return train


def loss_and_input_gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The inputs need gradients, as those of an attack or of an earlier model do."""
    return model(x.requires_grad_()).square().mean()


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss with a penalty of the gradient of the inputs."""
    output = model(x.requires_grad_())
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.square().mean() + gradient.square().sum(1).mean()


def penalized_alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The penalty is of a second forward, whose outputs have no gradients (R1 of discriminators)."""
    loss = model(x).square().mean()
    flipped = x.flip(1).requires_grad_()
    (gradient,) = torch.autograd.grad(model(flipped).sum(), flipped, create_graph=True)
    return loss + gradient.square().sum(1).mean()


def hooked_parameters(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> list[Any]:
    """Return which parameters have had a hook called, as that of an optimizer in backward, in each step."""
    names: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
    names_of_steps = []
    for step in range(4):
        names.clear()
        model(batch(step)).square().mean().backward()
        names_of_steps.append(sorted(set(names)))
        model.zero_grad()
    return names_of_steps


LOSSES = {
    "inputs with gradients": loss_and_input_gradient,
    "penalty": penalized,
    "penalty of a second forward": penalized_alone,
}

check = Checks(processes=2, timeout=120)
for each_name, (make, backend) in MODELS.items():
    check[each_name] = functools.partial(check_model, make, backend)
for loss_name, loss_of in LOSSES.items():
    for model_name, make in {"experts": Mixtures, "units": Alone}.items():
        train = steps_by(loss_of)
        check[f"{loss_name}, {model_name}"] = functools.partial(check_model, make, FSDP, train)
check["hooks of parameters"] = functools.partial(check_model, Mixtures, FSDP, hooked_parameters)
for is_reentrant in (False, True):
    make = functools.partial(CheckpointedWhole, use_reentrant=is_reentrant)
    kept = FSDPBackend(blocks=[nn.Sequential], reshard_after_forward=False)
    check[f"kept, checkpointed whole, {is_reentrant}"] = functools.partial(check_model, make, kept)


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([mlp()])
        self.decoder = nn.ModuleList([mlp()])

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder[0](x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder[0](x)

    def recode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


@check
def different_methods_are_refused() -> None:
    """Ranks that call different methods would compute with the parameters of others: it is said, with the blocks."""
    model = seeded(Methods)
    with parallel_model(model, backend="fsdp", methods=["encode", "decode"]):
        for _ in range(2):
            model.decode(model.encode(whole_batch(0)))
        method = model.decode if rank() else model.encode
        with pytest.raises(SyncError, match=r"(?s)different blocks.*in encode: encoder.0.*in decode: decoder.0"):
            method(whole_batch(0))


@check
def different_methods_of_one_block_are_refused() -> None:
    """They have gathered the same blocks: the names of the methods differ alone."""
    model = seeded(Methods)
    with parallel_model(model, backend="fsdp", methods=["encode", "recode"]):
        method = model.recode if rank() else model.encode
        with pytest.raises(SyncError, match=r"(?s)different blocks.*in encode: .*in recode: "):
            method(whole_batch(0))


@check
def a_forward_that_fails_at_other_blocks_is_named() -> None:
    """Ranks that catch an error of a forward have gathered other experts: the next forward says that one has failed."""
    model = seeded(Alone)
    with parallel_model(model, backend="fsdp"):
        model(whole_batch(0).chunk(2)[rank()])
        if rank() == 0:
            handle = model.mixture.experts[0].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(whole_batch(0))
            handle.remove()
        with pytest.raises(SyncError, match=r"(?s)different blocks.*rank 0, in forward, after a call that has failed"):
            model(whole_batch(0))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # in evaluation
@pytest.mark.parametrize("name", check)
def test_a_check_holds_on_all_ranks(name: str) -> None:
    """What the check's docstring says; a model trains the weights of one process."""
    check.assert_holds(name)


def test_four_ranks() -> None:
    """Two ranks of each copy route their data on their own; the copies have the same gradients.

    If two ranks hold a unit after forward, all ranks gather it for a backward in which they differ.
    """

    @distributed(processes=4)
    def run() -> None:
        for options in ({"shard_over": 2}, {"reshard_after_forward": 2}):
            for make in (Mixtures, Alone, Dropped, Recurrent):
                check_model(make, FSDPBackend(**options))
            check_model(Outer, FSDPBackend(blocks=[Mixture, nn.Sequential], **options))

    run()
