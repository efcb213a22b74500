"""`seed=` seeds every rank equally; without it, ranks draw the caller's next numbers. The caller's RNG states stay."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from parallelize import distributed, parallel_model


@distributed(processes=2)
def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def rng_states() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_a_seed_gives_equal_numbers_on_every_rank_and_in_every_call() -> None:
    """Initial weights are equal on all ranks, and a run can be repeated."""
    first = draw.options(seed=7).all_ranks()
    assert first[0] == first[1]
    assert draw.options(seed=7).all_ranks() == first
    assert draw.options(seed=8)() != first[0]


def test_without_a_seed_every_rank_draws_the_callers_next_numbers() -> None:
    """Data is split alike on all ranks, as in one process, seeded by the caller or not; `seed=` wins."""
    for seed in (torch.seed, lambda: torch.manual_seed(7)):
        seed()
        two, one = draw.all_ranks(), draw.options(processes=1).all_ranks()
        assert draw.options(seed=7)() != two[0]
        assert two == one * 2 == [draw.__wrapped__()] * 2


@distributed(processes=2)
def initialize() -> tuple[list[float], list[float]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    with parallel_model(model):
        return model[0].weight.flatten().tolist(), model[1](torch.ones(64)).tolist()


def test_a_seed_of_the_caller_gives_the_model_of_one_process() -> None:
    """Dropout differs between the ranks; rank 0's is that of one process."""
    torch.manual_seed(0)
    [alone] = initialize.options(processes=1).all_ranks()
    first, second = initialize.all_ranks()
    assert first == alone
    assert second[0] == alone[0]
    assert second[1] != alone[1]


def test_generators_of_the_caller_are_unchanged() -> None:
    """Seeded or not, in other processes or in this one, a call does not change the caller's RNG states."""
    before = rng_states()
    for processes in (1, 2):
        for seed in (None, 3):
            draw.options(processes=processes, seed=seed)()
            assert rng_states() == before


def test_one_process_starts_from_the_seed_too() -> None:
    """The same seed gives one process the numbers of rank 0."""
    assert draw.options(processes=1, seed=7)() == draw.options(seed=7)()
