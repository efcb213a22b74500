"""Gradients in bulk: into the scaled domain and back, with a check for inf and nan on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from parallelize.precision.loss_scale import LossScale

__all__ = ["scale_", "unscale_", "worst"]

K = TypeVar("K", bound=Hashable)


def scale_(leaves: Iterable[torch.Tensor], scale: LossScale) -> None:
    """Multiply the gradients that lie in `leaves` by the loss scale, in place: exact, by a power of two."""
    for (device, _), gradients in _in_bulk(leaves, scale, inverse=False).items():
        with torch.no_grad():
            torch._foreach_mul_(gradients, scale.on(device)[0])


def unscale_(groups: Mapping[K, Sequence[torch.Tensor]], scale: LossScale) -> dict[K, torch.Tensor]:
    """Divide the gradients that lie in leaves by the loss scale, in place, and look for inf and nan.

    Args:
        groups: leaf tensors; those without a gradient are passed over.
        scale: by which they were multiplied.

    Returns:
        For each group that has gradients an fp32 tensor without dimensions on the scale's device: 1 if any of them is
        inf or nan, else 0. Nothing waits for it.
    """
    found = {}
    for key, leaves in groups.items():
        flags: dict[torch.device, torch.Tensor] = {}
        for (device, _), gradients in _in_bulk(leaves, scale, inverse=True).items():
            flag = flags.setdefault(device, torch.zeros((), device=device))
            with torch.no_grad():
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, scale.on(device)[1])
        if flags:
            found[key] = worst(flags.values(), device=scale.device)
    return found


def worst(flags: Iterable[torch.Tensor], *, device: torch.device) -> torch.Tensor:
    """The largest of tensors without dimensions (at least one), on a device; never one of them itself.

    Not their sum: fused optimizers compare the flag with exactly 1.
    """
    return torch.stack([flag.to(device, non_blocking=device.type != "cpu") for flag in flags]).amax()


def _in_bulk(
    leaves: Iterable[torch.Tensor], scale: LossScale, *, inverse: bool
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """The values of all gradients by device and type: what a multi-tensor kernel takes at once.

    A gradient with a history (create_graph=True) is no such value: others may have saved it, and its own derivative
    must know of the factor. It is multiplied here, out of place, and a copy stands for it that the kernel may change.
    """
    bulk: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for leaf in leaves:
        gradient = leaf.grad
        if gradient is None:
            continue
        if gradient.requires_grad:
            with torch.enable_grad():
                leaf.grad = gradient * scale.on(gradient.device)[1 if inverse else 0]
            gradient = gradient.detach().clone()
        if gradient.is_sparse:
            gradient = gradient._values()
        bulk[gradient.device, gradient.dtype].append(gradient if type(gradient) is torch.Tensor else _local(gradient))
    return bulk


def _local(gradient: Any) -> torch.Tensor:
    """The part that this rank has of a sharded gradient, a DTensor; ranks agree on what they found before the step."""
    part: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return part
