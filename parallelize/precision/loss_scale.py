"""The loss scale, updated by the rules of torch.amp.GradScaler, and the kernels that apply it to gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from parallelize.plugins.base import Amp

__all__ = ["LossScale", "max_flag", "non_finite_flag", "scale_", "unscale_"]

K = TypeVar("K", bound=Hashable)


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

    def move_to(self, device: torch.device) -> None:
        """Move the scale to the device of the gradients, so that a step copies it nowhere."""
        if device != self._scale.device:
            self._scale, self._growth_tracker = self._scale.to(device), self._growth_tracker.to(device)
            self._per_device.clear()

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

    def factor(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the scale on the device of a gradient."""
        return self.on(gradient.device)[0]

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


def scale_(leaves: Iterable[torch.Tensor], factor: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Multiply the gradients of `leaves` in place.

    Args:
        leaves: leaf tensors; those without a gradient are ignored.
        factor: returns the 0-dim factor for a gradient, on its device; equal for all gradients.
    """
    for gradients in _foreach_groups(leaves, factor).values():
        with torch.no_grad():
            torch._foreach_mul_(gradients, factor(gradients[0]))


def unscale_(groups: Mapping[K, Sequence[torch.Tensor]], scale: LossScale) -> dict[K, torch.Tensor]:
    """Divide the gradients of leaves by the loss scale, in place, and check them for inf and nan.

    Args:
        groups: leaf tensors by group; leaves without a gradient are ignored.
        scale: loss scale by which the gradients were multiplied.

    Returns:
        For each group with gradients, a 0-dim fp32 tensor on the scale's device: 1 if a gradient has inf or nan, else
        0. The device is not synchronized.
    """
    flags_by_group = {}
    for key, leaves in groups.items():
        flags: dict[torch.device, torch.Tensor] = {}
        for (device, _), gradients in _foreach_groups(leaves, lambda each: scale.on(each.device)[1]).items():
            flag = flags.setdefault(device, torch.zeros((), device=device))
            with torch.no_grad():
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, scale.on(device)[1])
        if flags:
            flags_by_group[key] = max_flag(flags.values(), device=scale.device)
    return flags_by_group


def non_finite_flag(gradients: Iterable[torch.Tensor], *, device: torch.device) -> torch.Tensor:
    """Return 1 if a gradient has inf or nan, else 0, as a 0-dim fp32 tensor on `device`."""
    flags = [(~_local_values(each.detach()).isfinite()).any().float() for each in gradients]
    return max_flag([*flags, torch.zeros((), device=device)], device=device)


def max_flag(flags: Iterable[torch.Tensor], *, device: torch.device) -> torch.Tensor:
    """Return the maximum of 0-dim tensors (at least one) on `device`, as a new tensor.

    The maximum instead of the sum, because fused optimizers compare the flag with exactly 1.
    """
    return torch.stack([flag.to(device, non_blocking=device.type != "cpu") for flag in flags]).amax()


def _local_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse gradient, or the local shard of a DTensor."""
    values: Any = gradient._values() if gradient.is_sparse else gradient
    local: torch.Tensor = values.to_local() if hasattr(values, "full_tensor") else values
    return local


def _foreach_groups(
    leaves: Iterable[torch.Tensor], factor: Callable[[torch.Tensor], torch.Tensor]
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return the gradients of `leaves` grouped by device and dtype, as foreach kernels require.

    A gradient with a graph (create_graph=True) must not be changed in place: autograd may have saved it, and has to
    differentiate the factor too. It is multiplied out of place here, and the kernel gets a copy.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for leaf in leaves:
        gradient = leaf.grad
        if gradient is None:
            continue
        if gradient.requires_grad:
            with torch.enable_grad():
                leaf.grad = gradient * factor(gradient)
            gradient = gradient.detach().clone()
        gradient = _local_values(gradient)
        groups[gradient.device, gradient.dtype].append(gradient)
    return groups
