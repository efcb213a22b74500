"""Units: which submodules are not split further, and where a stage may begin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from parallelize.backends.balanced.profiling import Line, Profile, find_units, measure_units


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


def found() -> tuple[Model, Profile]:
    model = Model()
    return model, find_units(model, lambda: model(torch.randn(4, 8)), samples=4)


def test_units_are_in_call_order() -> None:
    """Not those inside of a module that is called twice, nor a shared one without parameters."""
    _, profile = found()
    expected = [f"blocks.{i}{name}" for i in range(2) for name in ("", ".linear")]
    assert [*profile.units] == [*expected, "blocks.2", "last", "last.1"]
    unit = 8 * 8 * 4 + 8 * 4
    assert profile.parameters.tolist() == [64, unit, 64, unit, unit + 64, 2 * unit, 0]  # with the unused one
    # Inside of a block, its argument may still be needed.
    assert profile.moved.tolist() == [32, 64, 32, 64, 32, 32, 64]


def test_seconds_of_backward() -> None:
    """Twice as long as forward, but nothing before the first trained unit; gradients of parameters are added."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).requires_grad_(requires_grad=False)
    model[1].weight.requires_grad_()

    def prepare(size: int) -> Callable[[], torch.Tensor]:
        x = torch.randn(size, 256)
        return lambda: model(x)

    profile = measure_units(
        model, find_units(model, prepare(64), samples=64), prepare, sizes=(256, 512), device=torch.device("cpu")
    )
    assert profile.trained.tolist() == [0, 256 * 256 * 4, 0, 0]
    assert profile.costs["backward"].at(512)[0] == 0
    passes = profile.costs["backward"].at(512) / profile.costs["forward"].at(512)
    assert passes[2:].tolist() == pytest.approx([2, 2])
    assert passes[1] > 2


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
    profile = find_units(model, lambda: model(torch.randn(4, 8)), samples=4)
    assert (profile.units, profile.places) == (("first", "same", "last"), (0, 2))


def test_a_compiled_module_is_one_unit() -> None:
    """Calls inside of it are not followed."""
    model = nn.Sequential(nn.Linear(8, 8), torch.compile(Residual(nn.ReLU()), backend="eager"), nn.Linear(8, 8))
    model[2].compile(backend="eager")
    with torch.compiler.set_stance("force_eager"):
        profile = find_units(model, lambda: model(torch.randn(4, 8)), samples=4)
    assert profile.units == ("0", "1", "2")


def test_bytes_that_autograd_saves() -> None:
    """Each storage counts once, for the unit that saves it first; parameters do not."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())

    def prepare(size: int) -> Callable[[], torch.Tensor]:
        x = torch.randn(size, 8)
        return lambda: model(x)

    profile = find_units(model, prepare(2), samples=2)
    profile = measure_units(model, profile, prepare, sizes=(2, 4), device=torch.device("cpu"))
    assert profile.costs["saved"].at(1).tolist() == [32, 32, 0, 32]
    assert profile.output_bytes == 16 * 8
    assert all((profile.costs[each].at(4) > 0).all() for each in ("forward", "backward"))


def test_a_line_has_no_negative_part() -> None:
    """Noise that makes the larger size faster, or the smaller one too fast, is no negative cost."""
    small, large = torch.tensor([2.0, 1.0, 1.0]), torch.tensor([3.0, 0.5, 4.0])
    fixed, per_sample = Line.through((1, 2), (small, large))
    assert fixed.tolist() == [1.0, 0.5, 0.0]
    assert per_sample.tolist() == [1.0, 0.0, 2.0]
