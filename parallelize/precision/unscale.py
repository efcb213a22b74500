"""Scaling and unscaling of gradients by foreach kernels, with the check for inf and nan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from parallelize.precision.loss_scale import LossScale

__all__ = ["max_flag", "non_finite_flag", "scale_", "unscale_"]

K = TypeVar("K", bound=Hashable)


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
    local: torch.Tensor = values._local_tensor if hasattr(values, "full_tensor") else values
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
