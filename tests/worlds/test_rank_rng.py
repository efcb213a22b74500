"""Global generators that are equal on all ranks are split when a block begins, reproducibly, or warned of."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import outputs_of_ranks
from torch import nn
from zoo import Mlp

from parallelize import distributed, parallel_model, rank

pytestmark = pytest.mark.slow


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@distributed(processes=2)
def seeded_run() -> dict[str, Any]:
    """Train a model with dropout in a script that seeds itself, and enter more blocks."""
    seed_all(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(rank())
    drawn = {"before": draw()}
    with parallel_model(model):
        drawn["block"] = draw()
        drawn["mask"] = tuple(model[1](torch.ones(32)).tolist())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            optimizer.step()
        other, state = Mlp(), torch.get_rng_state()
        with parallel_model(other):
            pass
        drawn["is kept"] = torch.equal(state, torch.get_rng_state())
    drawn["after"] = draw()
    drawn["weights"] = tuple(model[0].weight.flatten().tolist())
    seed_all(3)
    random.seed(rank())
    with parallel_model(model):
        drawn["again"] = draw()
    return drawn


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks draws."""
    return seeded_run.all_ranks()


def test_equal_generators_are_split_reproducibly(ranks: list[dict[str, Any]]) -> None:
    """Rank 0 draws what one process draws, the others something else, the same in every run; weights stay equal."""
    first, second = ranks
    assert seeded_run.all_ranks() == [first, second]
    (alone,) = seeded_run.options(processes=1).all_ranks()
    assert first["before"] == second["before"] == alone["before"]
    for name in ("block", "mask"):
        assert first[name] == alone[name]
    for one, other in zip(first["block"], second["block"], strict=True):
        assert one != other
    assert first["mask"] != second["mask"]
    assert first["after"] == second["after"]  # folds of a cross-validation are drawn between blocks
    assert first["weights"] == second["weights"]


def test_generators_that_differ_are_left_alone(ranks: list[dict[str, Any]]) -> None:
    """A nested block does not split again, and a rank that has seeded one generator itself keeps that one."""
    first, second = ranks
    assert first["is kept"]
    assert second["is kept"]
    assert second["again"][1] == random.Random(1).random()
    assert first["again"][0] != second["again"][0]


def test_a_seed_of_the_run_seeds_every_rank() -> None:
    """It wins over split_rng=."""

    @distributed(processes=2, seed=7)
    def drawn(**options: Any) -> tuple[float, ...]:
        with parallel_model(Mlp(), **options):
            return draw()

    values = drawn.all_ranks()
    assert len(set(values)) == 2
    assert drawn.all_ranks(split_rng=False) == values


def test_a_seed_of_a_block_in_a_script_seeds_its_process(tmp_path: Path) -> None:
    """Rank 0 draws what one process draws, and all ranks do so after the block."""
    script = tmp_path / "script.py"
    script.write_text(
        "from worlds.test_rank_rng import Mlp, draw, parallel_model\n"
        "with parallel_model(Mlp(), seed=3):\n"
        "    print(draw())\n"
        "print(draw())\n"
    )
    [alone] = outputs_of_ranks(script, world_size=1)
    first, second = outputs_of_ranks(script, world_size=2, per_node=2)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_all(3)
    assert alone == first == f"{draw()}\n{draw()}\n"
    random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])
    assert second.splitlines()[0] != first.splitlines()[0]
    assert second.splitlines()[1] == first.splitlines()[1]


def test_equal_generators_may_stay_equal() -> None:
    """With split_rng=False, those that the script has seeded alike."""

    @distributed(processes=2)
    def drawn() -> tuple[float, ...]:
        seed_all(3)
        random.seed(rank())
        with parallel_model(Mlp(), split_rng=False):
            return draw()

    first, second = drawn.all_ranks()
    assert (first[0], first[2]) == (second[0], second[2])
    assert first[1] != second[1]
