"""`seed=` seeds every rank equally; without it, ranks and calls draw independently. The caller's RNG states stay."""

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
    assert draw.options(seed=8)() != first[0]


def test_without_a_seed_all_draws_differ() -> None:
    """Workers are forks of one server, but no rank or call repeats the numbers of another."""
    rows = [*draw.all_ranks(), *draw.all_ranks(), draw.options(processes=1)()]
    for numbers in zip(*rows, strict=True):
        assert len(set(numbers)) == len(rows), rows


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
