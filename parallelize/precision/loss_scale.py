"""The loss scale: a number on the device, updated by the rules of torch.amp.GradScaler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from parallelize.plugins.base import Amp

__all__ = ["LossScale"]


class LossScale:
    """The factor that losses are multiplied by, so that fp16 gradients do not underflow.

    Only `state_dict` synchronizes with the GPU.

    Args:
        amp: the initial scale and its growth and backoff options.
        device: the device that holds the scale.

    Source: torch.amp.GradScaler; the keys of `state_dict` are the same.
    """

    def __init__(self, amp: Amp, *, device: torch.device) -> None:
        self._scale = torch.full((), amp.init_scale, dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_factor = amp.growth_factor
        self._backoff_factor = amp.backoff_factor
        self._growth_interval = amp.growth_interval
        self._per_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """The device that holds the scale."""
        return self._scale.device

    def for_grad(self, *, has_half_outputs: bool) -> list[LossScale]:
        """Return the scales that torch.autograd.grad tries in turn, the last of them 1; synchronizes with the device.

        Args:
            has_half_outputs: whether backward starts in fp16, in which the loss scale may be out of range.
        """
        value = self._scale.item()
        values = [value / 2.0**8] if has_half_outputs else [value, value / 2.0**8]
        tried = [each for each in values if each > 1]
        return [LossScale(Amp(init_scale=each), device=self.device) for each in (*tried, 1.0)]

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scale, reciprocal) as 0-dim fp32 tensors on `device`; later updates do not change these tensors."""
        if device not in self._per_device:
            # Blocking for the CPU, where a non-blocking copy could be read before it completes.
            scale = self._scale.detach().clone().to(device, non_blocking=device.type != "cpu")
            # In fp64, as GradScaler does, so that the reciprocal is rounded only once.
            self._per_device[device] = scale, scale.double().reciprocal().float()
        return self._per_device[device]

    def update(self, found_inf: torch.Tensor) -> None:
        """Shrink the scale if `found_inf` is not 0; grow it after `growth_interval` calls with 0.

        Args:
            found_inf: 0-dim fp32 tensor on `device`.
        """
        torch._amp_update_scale_(
            self._scale,
            self._growth_tracker,
            found_inf,
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
        )
        self._per_device.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state under the keys of torch.amp.GradScaler, as plain numbers; synchronizes with the device."""
        return {
            "scale": self._scale.item(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": int(self._growth_tracker.item()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of this class or of torch.amp.GradScaler."""
        self._scale.fill_(state["scale"])
        self._growth_tracker.fill_(state["_growth_tracker"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._per_device.clear()
