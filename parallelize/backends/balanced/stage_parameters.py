"""Stage parameters: per-stage leaves that replace parameters during one forward and its backward.

    Parameter p (the user's)        stage parameter of p on stage 0         micro-batches 0, 1, 2, ...
    p.grad  <── once: the sum ──         its .grad  <── once per segment ── segments of stage 0

A stage parameter shares p's memory; if p is on another device (tied weights, parameters used by several stages), it is
a copy. It sums the gradients of all micro-batches, so p gets one gradient per backward: hooks of p run once, DDP
reduces once, `torch.autograd.grad` does not modify p.grad, and gradients accumulate over steps as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from parallelize.backends.balanced.segment import guard_gradients

__all__ = ["HalfParameters", "StageParameters"]


@dataclass(frozen=True)
class HalfParameters:
    """Parameters that modules use in half precision.

    Args:
        dtype: the half-precision type.
        parameters: id of a parameter -> the parameter, held so that its id stays valid.
    """

    dtype: torch.dtype
    parameters: dict[int, nn.Parameter]

    @classmethod
    def from_model(cls, model: nn.Module, dtype: torch.dtype, excluded: tuple[type[nn.Module], ...]) -> HalfParameters:
        """Collect the fp32 parameters of a model, except those of modules of the excluded classes."""
        owned = [
            each
            for module in model.modules()
            if not isinstance(module, excluded)
            for each in module.parameters(recurse=False)
        ]
        return cls(dtype, {id(each): each for each in owned if each.dtype is torch.float32})


class StageParameters:
    """The stage parameters of one forward, created on first use.

    No lock is needed, because only one micro-batch at a time runs on a stage.
    """

    def __init__(self, devices: Sequence[torch.device], *, half_parameters: HalfParameters | None = None) -> None:
        self._half_parameters = half_parameters
        self._devices = tuple(devices)
        self._pipeline_devices = frozenset(devices)
        # For each stage: id of a tensor -> the tensor, held so that its id stays valid, and the stage's version of it.
        self._by_stage: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in devices]

    def get(self, tensor: torch.Tensor, *, stage: int) -> torch.Tensor:
        """Return a stage's version of a tensor that this forward has not produced: a parameter, buffer or constant."""
        known = self._by_stage[stage].get(id(tensor))
        if known is not None:
            return known[1]
        device = self._devices[stage]
        # In a pipeline of GPUs, a CPU tensor stays on the CPU until the user's code moves it.
        is_local = tensor.device == device or tensor.device not in self._pipeline_devices
        if is_local and not tensor.requires_grad:
            return tensor
        with torch.no_grad():
            stage_parameter = tensor.detach() if is_local else tensor.detach().to(device)
        if tensor.requires_grad:
            guard_gradients(stage_parameter.requires_grad_())
        self._by_stage[stage][id(tensor)] = tensor, stage_parameter
        return stage_parameter

    def has(self, tensor: torch.Tensor, *, stage: int) -> bool:
        """Return whether a stage already has its own version of a tensor."""
        return id(tensor) in self._by_stage[stage]

    @property
    def ids(self) -> set[int]:
        """Return the ids of all stage parameters."""
        # list() copies the values, since other stages add entries concurrently.
        return {id(stage_parameter) for known in self._by_stage for _, stage_parameter in list(known.values())}

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which stages compute with a tensor; stage parameters keep the original dtype."""
        half = self._half_parameters
        return tensor.dtype if half is None or id(tensor) not in half.parameters else half.dtype

    def trainable(self, stage: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each tensor that requires grad and that a stage has used, with its stage parameter."""
        return [pair for pair in self._by_stage[stage].values() if pair[0].requires_grad]
