"""States of random generators as plain values, also of devices that are not initialized."""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from parallelize.call.random_states import RandomStates

CUDA = (torch.device("cuda", 0),)
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu tests this on a GPU")


def draw() -> tuple[Any, ...]:
    return random.gauss(0, 1), np.random.randn(), torch.rand(3).tolist()


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Leave the generators, and the seed that torch has queued for GPUs, as they were."""
    before, tracker = RandomStates.capture(()), torch.cuda._lazy_seed_tracker
    queued = dict(vars(tracker))
    yield
    before.restore(())
    vars(tracker).update(queued)


def test_states_make_another_process_go_on() -> None:
    """Also in the middle of a pair of Gaussian numbers."""
    draw()
    states = pickle.loads(pickle.dumps(RandomStates.capture(())))
    expected = draw(), torch.initial_seed()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    states.begin(())
    assert (draw(), torch.initial_seed()) == expected


@without_cuda
def test_states_wait_until_the_devices_are_initialized() -> None:
    """The next call takes them along, unless the caller has seeded in between."""
    torch.manual_seed(3)
    assert RandomStates.capture(CUDA).torch_devices == (None,)
    states = dataclasses.replace(RandomStates.capture(()), torch_devices=(b"of rank 0",))
    states.restore(CUDA)
    assert RandomStates.capture(CUDA).torch_devices == (b"of rank 0",)
    assert not torch.cuda.is_initialized()
    torch.manual_seed(3)
    assert RandomStates.capture(CUDA).torch_devices == (None,)
    states.restore(CUDA)
    torch.cuda.manual_seed(3)
    assert RandomStates.capture(CUDA).torch_devices == (None,)


@without_cuda
def test_more_states_than_devices() -> None:
    """The machine of a job may have more devices than that of its caller, or none."""
    RandomStates.capture(CUDA * 2).restore((torch.device("cpu"),))
    RandomStates.capture((torch.device("cpu"),)).restore(CUDA)
    assert RandomStates.capture((*CUDA, torch.device("cpu"))).torch_devices == (None, None)
