"""Programs in the style of published scripts train the same bits on 1, 2, 4 and 8 processes under `logical=8`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
from one_word.worlds import OPTIONS, PROGRAMS
from torch import Tensor

from parallelize import distributed

pytestmark = pytest.mark.one_word

NAMES = (
    "mnist",
    "imagenet",
    "nanogpt",
    "bert",
    "packed_rnn",
    "amp_bf16",
    "cyclegan",
    "vqvae",
    "ddpm",
    "sam",
    "accumulation",
    "reptile",
)


def train(names: list[str]) -> dict[str, dict[str, Tensor]]:
    return {name: {key: each.detach() for key, each in PROGRAMS[name]().items()} for name in names}


@functools.cache
def trained(processes: int) -> Mapping[str, Mapping[str, Tensor]]:
    """Return the weights of all programs, by their names."""
    found = {}
    for names in ([name for name in NAMES if name in OPTIONS], [name for name in NAMES if name not in OPTIONS]):
        options = OPTIONS.get(names[0], {})
        found |= distributed(processes=processes, logical=8, seed=0, **options)(train)(names)
    return found


@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_number_of_processes(name: str, processes: int) -> None:
    """The weights, buffers and averages that a program returns are bitwise those of one process."""
    want, got = trained(1)[name], trained(processes)[name]
    assert want.keys() == got.keys()
    assert not [key for key, each in want.items() if not torch.equal(got[key], each)]
