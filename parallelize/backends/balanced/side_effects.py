"""Side effects of forward: detects random numbers and state stored on the model, restores RNG states and buffers."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.microbatch_rng import default_generator
from parallelize.backends.balanced.microbatch_split_join import split_dims
from parallelize.backends.balanced.opaque_inputs import changed_input_error
from parallelize.backends.balanced.profiling import Profiler, Timings
from parallelize.errors import ConfigError
from parallelize.runtime.containers import map_leaves

__all__ = [
    "StateSnapshot",
    "check_side_effects",
    "clone_inference_tensors",
    "explain_split_failure",
    "preserving_state",
]


class StateSnapshot:
    """Copy of a model's current buffers, and of the RNG states of the CPU and of `devices`."""

    def __init__(self, model: nn.Module, devices: frozenset[torch.device]) -> None:
        self._generators = [default_generator(device) for device in {torch.device("cpu"), *devices}]
        self._states = [generator.get_state() for generator in self._generators]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def has_drawn(self) -> bool:
        """Return whether random numbers were drawn after the snapshot."""
        pairs = zip(self._generators, self._states, strict=True)
        return any(not torch.equal(generator.get_state(), state) for generator, state in pairs)

    def restore(self) -> None:
        """Restore the buffers and RNG states of the snapshot."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = buffer
                buffer.copy_(value)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


@contextlib.contextmanager
def preserving_state(model: nn.Module, devices: frozenset[torch.device]) -> Iterator[None]:
    """On exit, restore the model's buffers and the RNG states of the CPU and of `devices`."""
    before = StateSnapshot(model, devices)
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def explain_split_failure(profiler: Profiler, inputs: Any, *, microbatches: int | None) -> Iterator[None]:
    """Replace an exception that occurs only on a part of a batch by an explanation; `inputs` are the full batch.

    Raises:
        ConfigError: forward fails on a part of the batch, but not on the full batch.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if microbatches == 1 or not _runs(profiler, inputs):
            raise
        raise refusals.split_failure(split_dims(inputs, dim=profiler.batch_dim), error) from error


def check_side_effects(profiler: Profiler, inputs: Any, *, microbatches: int | None) -> Profiler:
    """Run a micro-batch to detect side effects; return the profiler, with `draws` set if forward draws numbers.

    Raises:
        ConfigError: forward leaves state on the model, or in an input object, that other micro-batches would see.
    """
    if _uses_python_rng(lambda: profiler.run(inputs)):
        warnings.warn(
            f"forward of {type(profiler.model).__name__} draws from random or numpy.random: under backend='balanced' "
            "micro-batches draw in varying order. Draw with torch, or before the model is called.",
            stacklevel=2,
        )
    before = StateSnapshot(profiler.model, frozenset(stage.device for stage in profiler.stages))
    replace(profiler, draws=False).run(inputs)
    profiler = replace(profiler, draws=before.has_drawn())
    if microbatches != 1:
        runs: list[Timings] = []
        changed = _changed_state(profiler.model, lambda: runs.append(profiler.run(inputs)))
        if changed:
            raise refusals.stateful(changed)
        for name in runs[0].changed_inputs:
            raise changed_input_error(inputs, name)
    return profiler


def _runs(profiler: Profiler, inputs: Any) -> bool:
    try:
        profiler.run(inputs)
    except Exception:  # noqa: BLE001  # any error of the user's forward
        return False
    return True


def clone_inference_tensors(inputs: Any) -> Any:
    """Return the inputs, with clones of tensors made in inference mode: autograd cannot save these."""
    return map_leaves(lambda x: x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x, inputs)


def _uses_python_rng(call: Callable[[], object]) -> bool:
    """Return whether a call draws from the global generator of Python's `random` or of NumPy."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy and str(numpy.random.get_state())
    call()
    return before != (random.getstate(), numpy and str(numpy.random.get_state()))


def _changed_state(model: nn.Module, call: Callable[[], object]) -> list[str]:
    """Return names of the modules' attributes and buffers that a call changes, except batch norm's statistics."""
    before = _state(model)
    call()
    after = _state(model)
    return sorted(name for name in after if name not in before or not _is_same(before[name], after[name]))


def _state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, value in module.__dict__.items():
            if not name.startswith(
                ("_parameters", "_buffers", "_modules", "_forward", "_backward", "_is_full_backward_hook")
            ):
                found[dot + name] = (value, len(value)) if isinstance(value, (list, dict, set)) else value
        if not isinstance(module, _BatchNorm):
            buffers = {name: each for name, each in module._buffers.items() if each is not None}
            found.update({f"{dot}{name}": (each, each._version) for name, each in buffers.items()})
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] == other[1]
    return one is other or (isinstance(one, (bool, int, float, str)) and type(one) is type(other) and one == other)
