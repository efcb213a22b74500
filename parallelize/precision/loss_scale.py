"""The loss scale: a number on the device that grows and shrinks by GradScaler's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from parallelize.plugins.base import Amp

__all__ = ["LossScale"]


class LossScale:
    """What losses are multiplied by, so that gradients do not underflow in fp16.

    It never leaves its device unless a checkpoint asks: neither reading, nor using, nor updating it waits for the GPU.

    Args:
        amp: first scale and the rules of its growth.
        device: where it lives.

    Source: torch.amp.GradScaler, whose `state_dict` this one reads and writes.
    """

    def __init__(self, amp: Amp, *, device: torch.device) -> None:
        self._scale = torch.full((), amp.init_scale, dtype=torch.float32, device=device)
        self._tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_factor = amp.growth_factor
        self._backoff_factor = amp.backoff_factor
        self._growth_interval = amp.growth_interval
        self._copies: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self._scale.device

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and its reciprocal on a device, fp32 tensors without dimensions; as they are until `update`."""
        if device not in self._copies:
            # A copy to the CPU that nobody waits for may be read too early: there is no stream to order it.
            scale = self._scale.detach().clone().to(device, non_blocking=device.type != "cpu")
            # By way of double, as GradScaler takes it: the reciprocal of an fp32 number rounds once only.
            self._copies[device] = scale, scale.double().reciprocal().float()
        return self._copies[device]

    def update(self, found: torch.Tensor) -> None:
        """Shrink the scale if `found` is not 0; grow it after enough calls with 0.

        Args:
            found: fp32 without dimensions, on `device`.
        """
        torch._amp_update_scale_(
            self._scale,
            self._tracker,
            found,
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
        )
        self._copies.clear()

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's: plain numbers. Waits for the device."""
        return {
            "scale": self._scale.item(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": int(self._tracker.item()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, of this class or of torch.amp.GradScaler."""
        self._scale.fill_(state["scale"])
        self._tracker.fill_(state["_growth_tracker"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._copies.clear()
