"""Placement: moves parameters, buffers, gradients and optimizer state to the devices of their stages, and back."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced import refusals, units
from parallelize.backends.balanced.hardware import DeviceSpec
from parallelize.backends.balanced.partition import Chain, Memory, smallest_cap, split
from parallelize.backends.balanced.stage_threads import Stage, stages_on
from parallelize.torch_patches import step

__all__ = ["ModelPlacement", "initial_stages", "spec_of"]


class ModelPlacement:
    """Moves a model's tensors between devices during a block, and back at its end.

    Parameters stay the same objects, so optimizers created before the block keep working. Before each optimizer step,
    the optimizer's state is moved to the devices of its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = itertools.chain(model.parameters(), model.buffers())
        self._original_devices = [(tensor, tensor.device) for tensor in tensors]

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Keep optimizer state on its parameters' devices; on exit, move all tensors to their original devices."""
        optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

        def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            optimizers.add(optimizer)
            _move_optimizer_state(optimizer)

        handle = step.before_step(before_step)
        try:
            yield
        finally:
            handle.remove()
            for tensor, device in self._original_devices:
                _move_tensor(tensor, device)
            for optimizer in optimizers:
                _move_optimizer_state(optimizer)

    def move(self, module_stages: Sequence[tuple[nn.Module, int]], stages: Sequence[Stage]) -> None:
        """Move each parameter and buffer to the device of the earliest stage of the modules that contain it."""
        seen: set[int] = set()
        for module, stage in sorted(module_stages, key=lambda pair: pair[1]):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    _move_tensor(tensor, stages[stage].device)
        torch.clear_autocast_cache()  # of casts on the former devices


def spec_of(device: torch.device, specs: Sequence[DeviceSpec]) -> DeviceSpec:
    """Return the spec of a device; if the pipeline does not use the device, a spec that no model fits."""
    found = [spec for spec in specs if spec.device == str(device)]
    return found[0] if found else DeviceSpec(device=str(device), cap_bytes=-1.0)


def initial_stages(
    model: nn.Module, specs: Sequence[DeviceSpec], *, output_device: torch.device, memory_ratio: float
) -> tuple[tuple[Stage, ...], dict[int, list[int]]]:
    """Return stages that can hold an unprofiled model, and the stage of each submodule without submodules.

    If the full model fits on the output device, there is one stage, on this device.

    Args:
        model: model whose submodules are placed in the order in which they were added; their call order is not known.
        specs: specs of the devices; the last submodules go to the first device, which holds the loop's targets.
        output_device: device on which outputs are returned.
        memory_ratio: bytes of parameter, gradient and optimizer state, per byte of parameter.

    Raises:
        ConfigError: the parameters alone do not fit.
    """
    leaf_modules = [each for each in model.modules() if each is not model and not [*each.children()]]
    seen: dict[int, int] = {}
    sizes: list[float] = []
    for module in leaf_modules:
        new = units.parameter_bytes(module, seen)
        seen |= new
        sizes.append(memory_ratio * sum(new.values()))
    own = memory_ratio * sum(units.parameter_bytes(model, seen).values())
    if sum(sizes) + own <= spec_of(output_device, specs).cap_bytes:
        return stages_on([output_device]), {id(module): [0] for module in leaf_modules}
    order = [*specs[1:], specs[0]]
    sizes = [sizes[0] + own, *sizes[1:]] if sizes else [own]
    chain = Chain(seconds=sizes, memory=Memory(held=sizes))
    bounds = split(chain, caps=[spec.cap_bytes for spec in order], speeds=[1.0] * len(order))
    if bounds is None or not leaf_modules:
        needed_bytes = smallest_cap(chain.memory, len(order))
        what = "even without activations, the best split"
        raise refusals.too_large(needed_bytes, [spec.device for spec in specs], what=what)
    stages = stages_on([torch.device(spec.device) for spec in order])
    intervals = enumerate(itertools.pairwise(bounds))
    return stages, {id(module): [stage] for stage, (i, j) in intervals for module in leaf_modules[i:j]}


@torch.no_grad()
def _move_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device == device:
        return
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(device)
    tensor.grad = None if gradient is None else gradient.to(device)


def _move_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state, except step counters, to the devices of its parameters."""
    state: dict[Any, Any] = optimizer.state
    for parameter, kept in state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(kept, dict):
            continue
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device:
                kept[name] = value.to(parameter.device)
