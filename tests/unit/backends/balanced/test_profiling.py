"""Units: which submodules are not split further, and where a stage may begin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize.backends.balanced.profiling import (
    Chain,
    Profile,
    UnitMeter,
    find_chain,
    profile_of,
)

ADDING_S = 1e-9


class Residual(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(8), nn.Linear(8, 8), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(self.norm(x)))


class Model(nn.Module):
    """Blocks that share an activation, one of which is called twice, and two layers of which one changes its input."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.GELU()
        self.blocks = nn.ModuleList(Residual(act) for _ in range(3))
        self.last, self.unused = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[2]):
            x = block(x)
        return self.last(x)


def chain_of(model: nn.Module) -> Chain:
    return find_chain(model, lambda: model(torch.randn(4, 8)), forwards=1)


def measured(model: nn.Module, x: torch.Tensor, *, microbatches: int = 2) -> Profile:
    chain = find_chain(model, lambda: model(x), forwards=microbatches)
    torch.clear_autocast_cache()
    meter = UnitMeter(model, chain.units, torch.device("cpu"))
    measurements = meter.measure([lambda: model(x.clone())] * 4)
    samples = microbatches * len(x)
    return profile_of(
        chain, measurements, forwards=microbatches, samples=samples, microbatches=microbatches, adding_s=ADDING_S
    )


def test_units_are_in_call_order() -> None:
    """Not those inside of a module that is called twice, nor a shared one without parameters."""
    chain = chain_of(Model())
    blocks = ["blocks.0", "blocks.0.linear", "blocks.1", "blocks.1.linear", "blocks.2"]
    assert [*chain.units] == [*blocks, "last", "last.1"]
    unit = 8 * 8 * 4 + 8 * 4
    # The unused layer belongs to the unit before it.
    assert chain.parameters.tolist() == [64, unit, 64, unit, unit + 64, 2 * unit, 0]
    # Inside of a block, its argument may still be needed.
    assert chain.moved.tolist() == [128, 256, 128, 256, 128, 128, 256]


class Encoder(nn.Module):
    """Calls a submodule that the model around it has, too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.act = shared, nn.Linear(8, 8), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(self.embed(x)))


class WithEncoder(nn.Module):
    """An encoder and a decoder that share a layer."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        if is_first:
            self.shared = shared
        self.encoder, self.decoder = Encoder(shared), Encoder(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_unit_of_a_caller_begins_with_its_call(is_first: bool) -> None:
    """A module that calls a unit from outside of it before its own ones gives those no name.

    Else the arguments of its first unit would be moved too early, and computed on the device of the outer unit. A unit
    that is called several times has its own name, since its arguments are moved at each call.
    """
    chain = chain_of(WithEncoder(is_first=is_first))
    first = "shared" if is_first else "encoder.embed"
    assert chain.units == (first, "encoder.layer", "encoder.act", "decoder.layer", "decoder.act")


def test_seconds_of_backward() -> None:
    """Twice a forward, once with frozen parameters, and nothing before the first trained unit.

    The gradients are added to those of other micro-batches.
    """
    layers = [nn.Linear(256, 256) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Tanh()).requires_grad_(requires_grad=False)
    model[1].weight.requires_grad_()
    profile = measured(model, torch.randn(256, 256))
    assert profile.chain.trained.tolist() == [0, 256 * 256 * 4, 0, 0, 0]
    passes = torch.tensor([0, 2, 1, 1, 2])
    added = profile.chain.trained * ADDING_S
    assert torch.equal(profile.backward_s, profile.forward_s * passes + added)
    assert (profile.forward_s > 0).all()
    # The host of a CPU computes.
    assert profile.host_share == 1.0


def test_seconds_of_smaller_micro_batches() -> None:
    """If only half a micro-batch fits, a micro-batch takes twice as long, and saves twice as much."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    chain = find_chain(model, lambda: model(x), forwards=4)
    meter = UnitMeter(model, chain.units, torch.device("cpu"))
    measurements = meter.measure([lambda: model(x.clone())] * 2)
    whole, half = (
        profile_of(chain, measurements, forwards=forwards, samples=16, microbatches=4, adding_s=0.0)
        for forwards in (4, 8)
    )
    assert torch.equal(2 * whole.forward_s, half.forward_s)
    assert torch.equal(2 * whole.saved, half.saved)


def test_an_argument_that_is_changed_after_the_call() -> None:
    """What returns its argument, which is then changed, has changed it, too."""

    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.same, self.last = nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.same(self.first(x))
            y += 1
            return self.last(y)

    model = Changed()
    chain = chain_of(model)
    assert (chain.units, chain.places) == (("first", "same", "last"), (0, 2))


def test_a_compiled_module_is_one_unit() -> None:
    """Calls inside of it are not followed."""
    model = nn.Sequential(nn.Linear(8, 8), torch.compile(Residual(nn.ReLU()), backend="eager"), nn.Linear(8, 8))
    model[2].compile(backend="eager")
    with torch.compiler.set_stance("force_eager"):
        assert chain_of(model).units == ("0", "1", "2")


def test_bytes_that_autograd_saves() -> None:
    """Each storage counts once, for the unit that saves it first; parameters do not."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    profile = measured(model, torch.randn(4, 8), microbatches=2)
    assert profile.saved.tolist() == [2 * 128, 2 * 128, 0, 2 * 128]
    assert (profile.chain.output_bytes, profile.chain.loss_bytes) == (2 * 128, 2 * 512)


def test_bytes_that_micro_batches_share() -> None:
    """Mixed precision casts a parameter once for all micro-batches, which save the same cast."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        profile = measured(model, torch.randn(4, 8), microbatches=2)
    # The first layer computes no gradient of its input, for which it would need the cast.
    assert profile.saved.tolist() == [2 * 64, 2 * 64 + 8 * 8 * 2]


class Listed(nn.Module):
    """Overrides `parameters` for its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def parameters(self) -> list[nn.Parameter]:  # type: ignore[override]  # as some users do
        return [self.last.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def test_a_model_that_overrides_parameters() -> None:
    """All parameters count, and calls inside such a module are found."""
    profile = measured(nn.Sequential(Listed(), nn.Tanh()), torch.randn(4, 8))
    assert profile.chain.units == ("0", "0.last", "1")
    assert profile.chain.trained.tolist() == [288, 288, 0]
