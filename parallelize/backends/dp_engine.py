"""Batches split over the devices of one process by DataParallel, and what the replicas return put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel
from typing_extensions import override

from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import leaves, map_leaves

__all__ = ["gathered", "splitter"]


def splitter(inner: Inner, *, devices: Sequence[torch.device]) -> nn.Module:
    """`inner` over several devices: each runs its share of the samples with a replica; on one device `inner` itself.

    Args:
        inner: calls the user's forward; its parameters are on the first device.
        devices: the outputs come to the first.

    Raises:
        ConfigError: a forward that cannot be bound to replicas.
    """
    if len(devices) == 1:
        return inner
    if not inner.is_replicable:
        raise ConfigError(
            f"{type(inner.model).__name__} with a forward of its own on the instance, over {len(devices)} devices",
            why="DataParallel makes replicas, and a compiled or patched forward is bound to the one model",
            fix="compile inside the block, or use backend='ddp'",
        )
    return _Splitter(inner, device_ids=list(devices))


class _Part:
    """What one replica has returned for how many samples."""

    def __init__(self, output: Any, *, samples: int) -> None:
        self.output = output
        self.samples = samples


class _Splitter(DataParallel[Inner]):
    """DataParallel for outputs of any container, dataclasses included, and for losses without dimensions."""

    @override
    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any) -> Any:
        if not any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves((inputs, kwargs))):
            # Nothing to split: every device would compute the same.
            return [inputs], [kwargs or {}]
        return super().scatter(inputs, kwargs, device_ids)

    @override
    def parallel_apply(self, replicas: Sequence[Inner], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        outputs = super().parallel_apply(replicas, inputs, kwargs)
        counts = [_samples(each) for each in zip(inputs, kwargs, strict=True)]
        return [_Part(output, samples=count) for output, count in zip(outputs, counts, strict=True)]

    @override
    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        device = torch.device(self.src_device_obj.type, int(self.output_device))
        return gathered([part.output for part in outputs], samples=[part.samples for part in outputs], device=device)


def gathered(outputs: Sequence[Any], *, samples: Sequence[int], device: torch.device) -> Any:
    """What one device would have returned for the whole batch.

    Args:
        outputs: of each replica, containers of the same form.
        samples: how many each replica was given.
        device: where the result belongs.

    Returns:
        The same containers. Tensors are joined along their first dimension; floating ones without dimensions are taken
        for a mean over samples, and averaged with the samples as weights; other tensors without dimensions become one
        of as many values as replicas; anything else is the first replica's.

    Raises:
        ConfigError: replicas that return containers of different lengths.
    """
    columns = [list(leaves(output)) for output in outputs]
    if len({len(column) for column in columns}) > 1:
        raise ConfigError(
            f"a forward that returns {' and '.join(str(len(column)) for column in columns)} values for its shares",
            why="the outputs of several devices are joined one by one",
            fix="return tensors whose first dimension counts samples, or use backend='ddp'",
        )
    rows = iter([_joined(row, samples=samples, device=device) for row in zip(*columns, strict=True)])
    return map_leaves(lambda _: next(rows), outputs[0])


def _joined(row: Sequence[Any], *, samples: Sequence[int], device: torch.device) -> Any:
    if not all(isinstance(each, torch.Tensor) for each in row):
        return row[0]
    parts = [each.to(device, non_blocking=True) for each in row]
    if parts[0].dim():
        return torch.cat(parts)
    column = torch.stack(parts)
    if not column.is_floating_point():
        return column
    # Not in half: a loss times its samples may be beyond fp16, and bf16 counts to 256.
    wide = torch.promote_types(column.dtype, torch.float32)
    weights = torch.tensor(samples, dtype=wide).to(device, non_blocking=True) / sum(samples)
    return (column * weights).sum().to(column.dtype)


def _samples(share: Any) -> int:
    """How many samples a replica's inputs are: the first dimension of the first tensor that has one."""
    return next((len(leaf) for leaf in leaves(share) if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
