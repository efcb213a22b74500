"""The bytes of a model and of its training, as one rank counts them before an engine is chosen.

Glossary of this room:

    candidate        an engine with its options, among which backend="auto" chooses
    measured forward the one forward that counts what autograd saves, and leaves nothing behind
    saved            of tensors: kept in the graph by a forward, for its backward
    unit             a module whose parameters fsdp gathers together
    gathered         of a unit: its parameters are full on this device
    usable           of memory: nine tenths of what a device has for the model
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from parallelize.agreement.gather import gather_objects
from parallelize.backends.measuring import free_bytes
from parallelize.cluster.world import World
from parallelize.plugins.registry import find
from parallelize.run.containers import tensors_in
from parallelize.run.live_optimizers import live_optimizers
from parallelize.torch_patches.module_tensors import all_buffers, all_parameters
from parallelize.torch_patches.step import parameters_of

_USABLE_FRACTION = 0.9
"""The rest is for workspaces of libraries, and for gaps between tensors."""

_STATE_TENSORS: Mapping[str, int] = {"SGD": 0, "Muon": 0, "Adagrad": 1, "RMSprop": 1}
"""Class of torch -> how many tensors of a parameter's size its state has without options."""

_STATE_TENSORS_OF_OTHERS = 2
"""Adam has two, and its relatives; so are classes of others taken to have."""

_OPTIONS_WITH_STATE = ("momentum", "amsgrad", "centered")
"""Options of torch's optimizers that add a tensor to the state of each parameter."""


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Bytes of a whole model and of its training, and of the memory for them.

    Args:
        memory: what a device has for the model: its free memory, and what the model takes of it.
        parameters: parameters and buffers.
        gradients: the gradients of all trained parameters.
        optimizer_state: the state of the optimizers, which they may make at their first step.
        largest_unit: the parameters of the largest unit.
        outside_units: parameters and buffers that are in no unit.
        restored: full tensors that a device gets at the end of a block of fsdp.
        saved: what one forward saves, with its outputs and its loss; 0: it was not measured.
        backward: the most that backward takes under ddp while it frees what is saved: with the
            gradients that it has computed, and their copies in messages; infinity: the forward was
            not measured, or did not fit.
        is_on_meta: whether the model has no values yet, so that no forward can be measured.
        is_on_accelerator: whether it computes on another device than the CPU.
    """

    memory: float
    parameters: float
    gradients: float
    optimizer_state: float = 0
    largest_unit: float = 0
    outside_units: float = 0
    restored: float = 0
    saved: float = 0
    backward: float = math.inf
    is_on_meta: bool = False
    is_on_accelerator: bool = False

    @property
    def usable(self) -> float:
        """The bytes that an engine may need."""
        return self.memory * _USABLE_FRACTION

    @property
    def is_measurable(self) -> bool:
        """Whether a device can hold the whole model with its gradients, and so run a forward."""
        return not self.is_on_meta and self.parameters + self.gradients <= self.memory

    @property
    def why_unmeasured(self) -> str:
        """Why no forward has shown what backward takes."""
        if self.is_measurable:
            return "it has run out of memory"
        return "no device holds the whole model with its gradients, so that none has run"


class _FindsUnits(Protocol):
    """What this room asks the fsdp backend."""

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules whose parameters are gathered together, inner ones first."""


def count_bytes(
    model: nn.Module,
    *,
    world: World,
    device: torch.device,
    memory: int | None,
    restore: bool,
) -> ModelBytes:
    """Count the bytes of a model and of its training on this rank.

    Args:
        model: the user's model.
        world: ranks and sizes.
        device: on which this rank computes.
        memory: the user's limit for a device; None: what is free.
        restore: whether the block ends with full parameters.

    Returns:
        The bytes, without those of a measured forward.
    """
    tensors: list[torch.Tensor] = [*all_parameters(model), *all_buffers(model)]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    optimizers = live_optimizers(trained)
    # What lies on the device already, and is counted among the parts of the model.
    present = list(tensors)
    present += tensors_in([tensor.grad for tensor in trained])
    for optimizer in optimizers:
        present += tensors_in(optimizer.state)
    release_cache(device)
    free = free_bytes(device, world.local_world_size)
    free += bytes_of(tensor for tensor in present if tensor.device == device)
    units = _bytes_of_units(model) if world.world_size > 1 else []
    on_device = [tensor for tensor in tensors if tensor.device == device]
    return ModelBytes(
        memory=min(free, memory or free),
        parameters=bytes_of(tensors),
        gradients=bytes_of(trained),
        optimizer_state=_bytes_of_state(optimizers, trained),
        largest_unit=max(units, default=0),
        outside_units=bytes_of(tensors) - sum(units),
        restored=bytes_of(on_device) if restore else 0,
        is_on_meta=any(tensor.is_meta for tensor in tensors),
        is_on_accelerator=device.type != "cpu",
    )


def of_all_ranks(counted: ModelBytes, world: World) -> ModelBytes:
    """Return what holds on every rank: the least memory, and the most of the rest; a collective."""
    if world.world_size == 1:
        return counted
    ranks = [ModelBytes(**fields) for fields in gather_objects(dataclasses.asdict(counted))]
    most: dict[str, Any] = {}
    for name in dataclasses.asdict(counted):
        most[name] = max([getattr(rank, name) for rank in ranks])
    most["memory"] = min([rank.memory for rank in ranks])
    return ModelBytes(**most)


def release_cache(device: torch.device) -> None:
    """Give memory that nobody uses back to the device: its blocks may have sizes of no more use."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _bytes_of_units(model: nn.Module) -> list[int]:
    """Return the bytes of the parameters that each unit gathers."""
    backend: _FindsUnits = find("backends", "fsdp")()
    sizes = []
    seen: set[nn.Parameter] = set()
    for unit in backend.units(model):
        # A unit does not gather the parameters of the units inside of it, which come before it.
        parameters = set(all_parameters(unit)) - seen
        seen |= parameters
        sizes.append(bytes_of(parameters))
    return sizes


def _bytes_of_state(optimizers: list[Any], trained: list[torch.Tensor]) -> int:
    """Return the bytes that optimizers keep, or will keep for the trained parameters.

    Without optimizers, one is taken to be made in the block, and to be like Adam.
    """
    if not optimizers:
        return _STATE_TENSORS_OF_OTHERS * bytes_of(trained)
    size = 0
    for optimizer in optimizers:
        kept = tensors_in(optimizer.state)
        if kept:
            size += bytes_of(kept)
            continue
        tensor_count = _STATE_TENSORS.get(type(optimizer).__name__, _STATE_TENSORS_OF_OTHERS)
        for option in _OPTIONS_WITH_STATE:
            if optimizer.defaults.get(option):
                tensor_count += 1
        parameters = parameters_of(optimizer)
        size += tensor_count * bytes_of(tensor for tensor in parameters if tensor.requires_grad)
    return size


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, of which those on "meta" have none yet."""
    return sum([tensor.numel() * tensor.element_size() for tensor in tensors])
