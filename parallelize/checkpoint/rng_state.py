"""RNG states of this process (torch, its accelerators, Python, NumPy), as plain values."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["get_rng_states", "set_rng_states"]


def get_rng_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the RNG states of torch on the CPU and on `devices`, of `random`, and of NumPy if it is imported."""
    version, words, gauss = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        numpy_state = [str(kind), torch.from_numpy(keys.astype("int64")), *map(float, rest)]
    return {
        "torch": torch.get_rng_state(),
        "accelerators": [torch.get_device_module(each).get_rng_state(each) for each in devices if each.type != "cpu"],
        "python": [version, torch.tensor(words), gauss],
        "numpy": numpy_state,
    }


def set_rng_states(state: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    """Restore the RNG states; skip those of accelerators if the number of accelerators has changed."""
    torch.set_rng_state(state["torch"].clone())
    accelerators = [each for each in devices if each.type != "cpu"]
    if len(accelerators) == len(state["accelerators"]):
        for device, device_state in zip(accelerators, state["accelerators"], strict=True):
            torch.get_device_module(device).set_rng_state(device_state.clone(), device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), int(position), int(has_gauss), cached))
