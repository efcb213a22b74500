"""What stands for a parameter on a stage during one forward and its backward.

    Parameter p (the user's)            shadow of p on stage 0            micro-batches 0, 1, 2, ...
    p.grad  <── once, the whole sum ──  shadow.grad  <── once for each ──  segments of stage 0

The shadow shares p's memory, or is a copy where p lies on another device (tied weights, parameters used by several
stages). Backwards of micro-batches add up in the shadow, so that p gets its gradient once: hooks fire once, DDP reduces
once, `torch.autograd.grad` leaves p.grad alone, gradients accumulate over steps as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Shadows"]


class Shadows:
    """Those of one forward, made when a stage first uses a parameter.

    One micro-batch at a time is on a stage, so nothing here needs a lock.

    Args:
        devices: of each stage.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
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
        shadow.requires_grad_(tensor.requires_grad)
        self._made[stage][id(tensor)] = tensor, shadow
        return shadow

    def trained(self, stage: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that a stage has used and that want a gradient, each with its shadow."""
        return [pair for pair in self._made[stage].values() if pair[0].requires_grad]
