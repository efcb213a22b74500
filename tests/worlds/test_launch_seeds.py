"""`seed=` seeds every rank equally; without it, ranks draw the caller's next numbers. The caller's RNG states stay."""

from __future__ import annotations

import random

import numpy as np
import torch

from parallelize import distributed


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
    assert draw.options(processes=1, seed=7).all_ranks() == first[:1]
    assert draw.options(seed=8)() != first[0]


def test_without_a_seed_every_rank_draws_the_callers_next_numbers() -> None:
    """Data is split alike on all ranks, as in one process, seeded by the caller or not; `seed=` wins."""
    for seed in (torch.seed, lambda: torch.manual_seed(7)):
        seed()
        two, one = draw.all_ranks(), draw.options(processes=1).all_ranks()
        assert draw.options(seed=7)() != two[0]
        assert two == one * 2 == [draw.__wrapped__()] * 2


def test_generators_of_the_caller_are_unchanged() -> None:
    """Seeded or not, in other processes or in this one, a call does not change the caller's RNG states."""
    before = rng_states()
    for processes in (1, 2):
        for seed in (None, 3):
            draw.options(processes=processes, seed=seed)()
            assert rng_states() == before
