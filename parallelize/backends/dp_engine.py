"""DataParallel over the devices of one process, with outputs in any container."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel
from typing_extensions import override

from parallelize.backends.batches import columns_of, summed_loss
from parallelize.errors import ConfigError
from parallelize.gradients.target_counts import join_weights
from parallelize.plugins.base import Inner, LocalEngine
from parallelize.run.containers import leaves, with_leaves
from parallelize.torch_patches.transforms import refuse_transform


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
        model_name = type(inner.model).__name__
        raise ConfigError(
            f"{model_name} with a forward set on the instance, over {len(devices)} devices",
            why="DataParallel replicates the model, and a compiled or patched forward is bound to "
            "the original",
            fix="compile inside the block, or use backend='ddp'",
        )
    return _DataParallel(inner, device_ids=list(devices))


class _DataParallel(DataParallel[Inner]):
    """DataParallel whose outputs may be in any container, and may be 0-dim losses.

    torch's forward calls these methods in this order:

        scatter          the inputs of each device
        parallel_apply   the output of each replica, each beside its inputs
        gather           one output, on the first device
    """

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        refuse_transform(
            "the replicas run in threads of their own, which no transform follows",
            fix="use backend='ddp', with one process per GPU",
        )
        return super().forward(*inputs, **kwargs)

    @override
    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any
    ) -> Any:
        if count_of_samples((inputs, kwargs)) is None:
            # Without a tensor to divide, every device would compute the same: the first one does.
            return [inputs], [kwargs or {}]
        return super().scatter(inputs, kwargs, device_ids)

    @override
    def parallel_apply(
        self, replicas: Sequence[Inner], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        outputs = super().parallel_apply(replicas, inputs, kwargs)
        # `gather` gets nothing but the outputs, and weights losses by the samples of the inputs.
        inputs_of_replicas = zip(inputs, kwargs, strict=True)
        return list(zip(outputs, inputs_of_replicas, strict=True))

    @override
    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        outputs_of_replicas, inputs_of_replicas = zip(*outputs, strict=True)
        device = torch.device(self.src_device_obj.type, int(self.output_device))
        return gathered_outputs(outputs_of_replicas, inputs_of_replicas, device=device)


def gathered_outputs(outputs: Sequence[Any], inputs: Sequence[Any], *, device: torch.device) -> Any:
    """Return the output of a batch that several devices have computed, on one device.

    Tensors are concatenated along their first dimension. 0-dim floating-point tensors add up to the
    loss of the batch: means are weighted by the number of their targets, sums are added, and others
    are averaged by samples. Other 0-dim tensors are stacked, one value for each device. Values that
    are no tensors are taken from the first device.

    Args:
        outputs: of each device, in containers of the same structure.
        inputs: of each device, in any containers.
        device: device of the result.

    Raises:
        ConfigError: the devices return different numbers of values.
    """
    counts = [len(leaves(output)) for output in outputs]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"forward returns {' and '.join(map(str, counts))} values on different devices",
            why="the outputs of several devices are joined value by value",
            fix="return tensors whose first dimension counts samples, or use backend='ddp'",
        )
    samples = []
    for inputs_of_device in inputs:
        count_of_device = count_of_samples(inputs_of_device)
        samples.append(1 if count_of_device is None else count_of_device)
    gathered = []
    for column in columns_of(outputs):
        first = column[0]
        if not all(isinstance(leaf, torch.Tensor) for leaf in column):
            gathered.append(first)
        elif first.dim() == 0 and first.is_floating_point():
            weights, count = join_weights(column, samples=samples, inputs=inputs[0])
            gathered.append(summed_loss(column, weights, count, device))
        else:
            tensors = [leaf.to(device, non_blocking=True) for leaf in column]
            # torch cannot concatenate tensors without dimensions.
            if first.dim() == 0:
                gathered.append(torch.stack(tensors))
            else:
                gathered.append(torch.cat(tensors))
    return with_leaves(outputs[0], gathered)


def count_of_samples(inputs: Any) -> int | None:
    """Return the length of the first tensor that has dimensions; None: there is none."""
    for leaf in leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    return None
