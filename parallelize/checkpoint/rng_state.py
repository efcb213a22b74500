"""Where this process's generators of random numbers stand, as plain values."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["put_generators", "take_generators"]


def take_generators(devices: Sequence[torch.device]) -> dict[str, Any]:
    """The state of torch's generators on the CPU and on `devices`, of random's, of numpy's if it is imported."""
    version, words, gauss = random.getstate()
    numpy = _numpy()
    of_numpy = None
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        of_numpy = [str(kind), torch.from_numpy(keys.astype("int64")), *map(float, rest)]
    return {
        "torch": torch.get_rng_state(),
        "accelerators": [_module(each).get_rng_state(each) for each in devices if each.type != "cpu"],
        "python": [version, torch.tensor(words), gauss],
        "numpy": of_numpy,
    }


def put_generators(state: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    """Put the generators where they were; those of other devices than were saved stay as they are."""
    torch.set_rng_state(state["torch"].clone())
    accelerators = [each for each in devices if each.type != "cpu"]
    if len(accelerators) == len(state["accelerators"]):
        for device, of_device in zip(accelerators, state["accelerators"], strict=True):
            _module(device).set_rng_state(of_device.clone(), device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy = _numpy()
    if numpy is not None and state["numpy"] is not None:
        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), int(position), int(has_gauss), cached))


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _numpy() -> Any:
    return sys.modules.get("numpy")
