"""What stands for a parameter on a stage during one forward and its backward.

    Parameter p (the user's)            shadow of p on stage 0            micro-batches 0, 1, 2, ...
    p.grad  <── once, the whole sum ──  shadow.grad  <── once for each ──  segments of stage 0

The shadow shares p's memory, or is a copy where p lies on another device (tied weights, parameters used by several
stages). Backwards of micro-batches add up in the shadow, so that p gets its gradient once: hooks fire once, DDP reduces
once, `torch.autograd.grad` leaves p.grad alone, gradients accumulate over steps as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from parallelize.backends.balanced.captured_tensors import closed

__all__ = ["Half", "Shadows"]


@dataclass(frozen=True)
class Half:
    """Which parameters modules are handed in half precision.

    Args:
        dtype: the half-precision type.
        parameters: id of each -> itself, which thereby keeps its id.
    """

    dtype: torch.dtype
    parameters: dict[int, nn.Parameter]

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype, apart: tuple[type[nn.Module], ...]) -> Half:
        """The fp32 parameters of a model, but for those of modules of some classes."""
        owned = [
            each
            for module in model.modules()
            if not isinstance(module, apart)
            for each in module.parameters(recurse=False)
        ]
        return cls(dtype, {id(each): each for each in owned if each.dtype is torch.float32})


class Shadows:
    """Those of one forward, made when a stage first uses a parameter.

    One micro-batch at a time is on a stage, so nothing here needs a lock.

    Args:
        devices: of each stage.
        half: the parameters that are used in half precision; None: none is.
    """

    def __init__(self, devices: Sequence[torch.device], *, half: Half | None = None) -> None:
        self._half = half
        self._devices = tuple(devices)
        self._ours = frozenset(devices)
        # Per stage: id of the tensor -> the tensor, which thereby keeps its id, and its shadow.
        self._made: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in devices]

    def of(self, tensor: torch.Tensor, *, stage: int) -> torch.Tensor:
        """What a stage uses for a tensor that this forward has not made: a parameter, a buffer, a constant."""
        made = self._made[stage].get(id(tensor))
        if made is not None:
            return made[1]
        device = self._devices[stage]
        # A CPU tensor in a pipeline of GPUs is where its author wants it, and crosses when its author moves it.
        is_here = tensor.device == device or tensor.device not in self._ours
        if is_here and not tensor.requires_grad:
            return tensor
        with torch.no_grad():
            shadow = tensor.detach() if is_here else tensor.detach().to(device)
        if tensor.requires_grad:
            closed(shadow.requires_grad_())
        self._made[stage][id(tensor)] = tensor, shadow
        return shadow

    def knows(self, tensor: torch.Tensor, *, stage: int) -> bool:
        """Whether a stage has a shadow of a tensor."""
        return id(tensor) in self._made[stage]

    @property
    def ids(self) -> set[int]:
        """Those of all shadows."""
        # Copied at once: other stages make theirs meanwhile.
        return {id(shadow) for made in self._made for _, shadow in list(made.values())}

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """The type in which a stage uses a tensor. Shadows keep the parameter's: gradients add up in them."""
        half = self._half
        return tensor.dtype if half is None or id(tensor) not in half.parameters else half.dtype

    def trained(self, stage: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that a stage has used and that want a gradient, each with its shadow."""
        return [pair for pair in self._made[stage].values() if pair[0].requires_grad]
