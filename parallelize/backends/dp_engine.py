"""DataParallel over the devices of one process, extended to gather outputs in any container."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel
from typing_extensions import override

from parallelize.errors import ConfigError
from parallelize.gradients.target_counts import attach_count, join_weights, number_on
from parallelize.plugins.base import Inner, LocalEngine
from parallelize.run.containers import leaves, with_leaves
from parallelize.torch_patches.transforms import refuse_transform

__all__ = ["DPEngine", "data_parallel", "gather_outputs"]


class DPEngine(LocalEngine):
    """Engine of a DataParallel, which moves inputs to its devices itself."""

    moves_inputs = True


def data_parallel(inner: Inner, *, devices: Sequence[torch.device]) -> nn.Module:
    """Wrap `inner` in DataParallel over several devices; return `inner` itself for one device.

    Args:
        inner: calls the user's forward; its parameters are on the first device.
        devices: each runs a replica; outputs are gathered on the first.

    Raises:
        ConfigError: the model's forward cannot be bound to replicas.
    """
    if len(devices) == 1:
        return inner
    if not inner.is_replicable:
        raise ConfigError(
            f"{type(inner.model).__name__} with a forward set on the instance, over {len(devices)} devices",
            why="DataParallel replicates the model, and a compiled or patched forward is bound to the original",
            fix="compile inside the block, or use backend='ddp'",
        )
    return _DataParallel(inner, device_ids=list(devices))


class _DataParallel(DataParallel[Inner]):
    """DataParallel that gathers outputs in any container, such as dataclasses, and averages 0-dim losses."""

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        refuse_transform(
            "the replicas run in threads of their own, which no transform follows",
            fix="use backend='ddp', with one process per GPU",
        )
        return super().forward(*inputs, **kwargs)

    @override
    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any) -> Any:
        if not any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves((inputs, kwargs))):
            # Without a tensor to split, every device would compute the same: use the first device only.
            return [inputs], [kwargs or {}]
        return super().scatter(inputs, kwargs, device_ids)

    @override
    def parallel_apply(self, replicas: Sequence[Inner], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        outputs = super().parallel_apply(replicas, inputs, kwargs)
        return list(zip(outputs, zip(inputs, kwargs, strict=True), strict=True))

    @override
    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        device = torch.device(self.src_device_obj.type, int(self.output_device))
        return gather_outputs(*zip(*outputs, strict=True), device=device)


def gather_outputs(outputs: Sequence[Any], inputs: Sequence[Any], *, device: torch.device) -> Any:
    """Join the outputs of all replicas into one output for the full batch, on one device.

    Args:
        outputs: one per replica, in containers of the same structure.
        inputs: one per replica, in any containers.
        device: device of the result.

    Returns:
        The same containers, with tensors concatenated along their first dimension. 0-dim floating-point tensors add up
        to the loss of the batch: means are weighted by the number of their targets, sums are added, and others are
        averaged by samples. Other 0-dim tensors are stacked, one value per replica. Leaves that are not tensors are
        taken from the first replica.

    Raises:
        ConfigError: the replicas return different numbers of leaves.
    """
    columns = [list(leaves(output)) for output in outputs]
    if len({len(column) for column in columns}) > 1:
        raise ConfigError(
            f"forward returns {' and '.join(str(len(column)) for column in columns)} values on different devices",
            why="the outputs of several devices are joined value by value",
            fix="return tensors whose first dimension counts samples, or use backend='ddp'",
        )
    rows = zip(*columns, strict=True)
    return with_leaves(outputs[0], [_gather_leaf(row, inputs, device=device) for row in rows])


def _gather_leaf(row: Sequence[Any], inputs: Sequence[Any], *, device: torch.device) -> Any:
    if not all(isinstance(each, torch.Tensor) for each in row):
        return row[0]
    tensors = [each.to(device, non_blocking=True) for each in row]
    if tensors[0].dim():
        return torch.cat(tensors)
    column = torch.stack(tensors)
    if not column.is_floating_point():
        return column
    # In fp32: a loss times its samples may overflow fp16, and bf16 represents integers exactly up to 256 only.
    wide_dtype = torch.promote_types(column.dtype, torch.float32)
    weights, count = join_weights(row, samples=[_count_samples(each) for each in inputs], inputs=inputs[0])
    factors = torch.stack([number_on(device, weight, wide_dtype) for weight in weights])
    joined = (column * factors).sum().to(column.dtype)
    if joined.requires_grad:
        attach_count(joined, count)
    return joined


def _count_samples(replica_inputs: Any) -> int:
    """Return a replica's number of samples: the first dimension of the first input tensor that is not 0-dim."""
    return next((len(leaf) for leaf in leaves(replica_inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
