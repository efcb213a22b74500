"""Application of fully_shard to a model at the entry of a block, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from parallelize.backends.broadcast import broadcast_from_rank_0, place
from parallelize.backends.fsdp.meshes import Meshes
from parallelize.backends.fsdp.stand_in import StandIn
from parallelize.backends.fsdp.units import is_sharded
from parallelize.plugins.base import Inner, Session
from parallelize.torch_patches.module_tensors import all_buffers, all_parameters

if TYPE_CHECKING:
    from parallelize.backends.fsdp.plugin import FSDPBackend


def shard(
    stand_in: StandIn,
    inner: Inner,
    units: Sequence[nn.Module],
    *,
    options: FSDPBackend,
    meshes: Meshes,
    device: torch.device,
) -> None:
    """Move each unit to the device, with rank 0's values, and keep this rank's rows.

    It is a collective. One unit follows the other, so that the device never has the whole model.

    Args:
        stand_in: gets the units.
        inner: the root, whose unit has the parameters outside of all other units.
        units: submodules of the model, inner ones first.
        options: options of the backend.
        meshes: the ranks that shard.
        device: device on which the model computes.
    """
    modules_in_fp32: list[nn.Module] = []
    if options.mixed_precision is None and inner.session.weights_dtype is not None:
        classes = inner.session.fp32_modules
        modules_in_fp32 = [module for module in inner.modules() if isinstance(module, classes)]
    offload = OffloadPolicy()
    if options.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    sharded: set[torch.Tensor] = set()
    # A module that stays in fp32 is a unit of its own, inside others.
    for module in dict.fromkeys([*modules_in_fp32, *units, inner]):
        place(module, device)
        tensors = _give_values_of_rank_0(module, sharded)
        arguments = {
            "mesh": meshes.of_shards,
            "reshard_after_forward": options.reshard_after_forward,
            "mp_policy": _policy(options, inner.session, stays_in_fp32=module in modules_in_fp32),
            "offload_policy": offload,
            "ignored_params": _parameters_of_other_units(module, sharded),
        }
        stand_in.shard(module, meshes.of_rows, arguments)
        sharded.update(tensors)
    stand_in.complete()


def _give_values_of_rank_0(module: nn.Module, sharded: set[torch.Tensor]) -> list[torch.Tensor]:
    """Overwrite the tensors of a unit with rank 0's, and return them; a collective.

    Args:
        module: the module of the unit.
        sharded: the tensors of earlier units, which have rank 0's values already.
    """
    tensors = []
    for tensor in (*all_parameters(module), *all_buffers(module)):
        if tensor in sharded:
            continue
        tensors.append(tensor)
        # fully_shard refuses parameters with other strides: transposed ones, and channels_last.
        if isinstance(tensor, nn.Parameter) and is_sharded(tensor):
            tensor.data = tensor.data.contiguous()
    broadcast_from_rank_0(tensors)
    return tensors


def _parameters_of_other_units(module: nn.Module, sharded: set[torch.Tensor]) -> set[nn.Parameter]:
    """Return the parameters of a module that its unit does not shard.

    A parameter of another unit gathers itself where this unit uses it.
    """
    parameters = set()
    for parameter in all_parameters(module):
        if parameter in sharded or not is_sharded(parameter):
            parameters.add(parameter)
    return parameters


def _policy(options: FSDPBackend, session: Session, *, stays_in_fp32: bool) -> MixedPrecisionPolicy:
    """Return the dtypes in which FSDP2 gathers the parameters of a unit and reduces its gradients.

    Args:
        options: options of the backend, which come before the session.
        session: the mixed precision of the block.
        stays_in_fp32: whether the weights of the unit are not cast, if the session casts weights.
    """
    if options.mixed_precision is not None:
        return options.mixed_precision
    if session.weights_dtype is None:
        return MixedPrecisionPolicy(reduce_dtype=session.communication_dtype)
    # Autocast casts inputs per operation. fully_shard would cast all inputs, even integers that are
    # stored as floats.
    return MixedPrecisionPolicy(
        param_dtype=None if stays_in_fp32 else session.weights_dtype,
        reduce_dtype=session.communication_dtype or torch.float32,
        cast_forward_inputs=False,
    )
