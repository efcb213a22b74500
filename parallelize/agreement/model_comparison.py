"""Do the ranks hold the same parameters and buffers? Each sends 8 bytes for all of them.

    1   one fingerprint of all tensors; if it is equal on all ranks, the comparison ends here
    2   one fingerprint of each tensor, to find the tensors that differ
    3   for the message, the largest difference in each of the first three tensors that differ

Each line takes collectives of its own, which all ranks make together.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from parallelize.agreement.fingerprint import differences, fingerprint
from parallelize.errors import SyncError
from parallelize.gradients import differentiable
from parallelize.run.context import current, is_main
from parallelize.run.groups import GroupPurpose, group_of_data_ranks
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.module_tensors import (
    all_named_buffers,
    all_named_parameters,
    local_part,
)

_MOST_SHOWN = 3
"""Differing tensors that a message names."""


class NamedTensor(NamedTuple):
    """A tensor, with what an error calls it, such as "encoder.weight of Mlp"."""

    name: str
    tensor: torch.Tensor


def parameters_of_models(models: Sequence[nn.Module]) -> list[NamedTensor]:
    """Return the parameters of several models."""
    parameters = []
    for model in models:
        for name, parameter in all_named_parameters(model):
            parameters.append(NamedTensor(f"{name} of {type(model).__name__}", parameter))
    return parameters


def floating_buffers_of(models: Sequence[nn.Module]) -> list[NamedTensor]:
    """Return the floating-point buffers of several models, such as the means of batch norm.

    Each rank may have changed them by its own samples. Buffers of integers count steps, or never
    change.
    """
    buffers = []
    for model in models:
        for name, buffer in all_named_buffers(model):
            if buffer.is_floating_point():
                buffers.append(NamedTensor(f"{name} of {type(model).__name__}", buffer))
    return buffers


def fingerprint_of(named_tensors: Sequence[NamedTensor]) -> torch.Tensor:
    """Return one fingerprint of all tensors, 0-dim."""
    return fingerprint([tensor for _name, tensor in named_tensors])


def differing_parameters_error(when: str, parameters: Sequence[NamedTensor]) -> SyncError:
    """Find the parameters that differ, and return the error that names them; a collective.

    Args:
        when: such as "at the end of the block", for the message.
        parameters: all compared parameters, of which some differ.
    """
    differing = _differing(parameters)
    shown = []
    for name, parameter in differing[:_MOST_SHOWN]:
        shown.append(f"{name} by up to {_largest_difference(parameter):.3g}")
    return SyncError(
        f"{len(differing)} of {len(parameters)} parameters differ between the ranks {when}: "
        f"{', '.join(shown)}",
        why="code that only some ranks run, or that draws random numbers, has changed gradients "
        "after their averaging, or the parameters themselves",
        fix="make the same changes on every rank, with numbers that are equal on all of them "
        "(parallelize.all_reduce, generators with equal seeds); verify_every=1 finds the step",
    )


def warn_of_differing_buffers(buffers: Sequence[NamedTensor]) -> bool:
    """Warn on rank 0 if buffers differ; a collective unless there are none.

    Returns:
        Whether they differ, on every rank.
    """
    if not buffers or not differences([fingerprint_of(buffers)]):
        return False
    names = listed_names(_differing(buffers))
    if is_main():
        advice = ""
        if "running_mean" in names:
            advice = (
                " On GPUs, nn.SyncBatchNorm.convert_sync_batchnorm(model) trains batch norm as "
                "one process does."
            )
        warnings.warn(
            f"buffers differ between the ranks, and rank 0's are kept: {names}. Each rank has "
            "updated its own from its part of the batch. parallel_model(model, buffers='mean') "
            "keeps their mean, buffers='rank0' keeps rank 0's without this warning." + advice,
            stacklevel=user_stacklevel(),
        )
    return True


def _differing(named_tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Return the tensors that are not the same on all ranks; a collective."""
    tensors = [tensor for _name, tensor in named_tensors]
    return [named_tensors[difference.index] for difference in differences(tensors)]


def _largest_difference(tensor: torch.Tensor) -> float:
    """Return how far an element of any rank is from the first rank's at most; a collective.

    Of a DTensor, the ranks that hold the same part are compared: see `differences`.
    """
    run = current()
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    values = local_part(tensor.detach()).to(run.device, dtype).contiguous()
    values_of_first = values.clone()
    sent = values_of_first
    if sent.is_complex():
        # Not every process group sends complex numbers.
        sent = torch.view_as_real(sent)
    group = group_of_data_ranks(run.data_ranks, run.world, run.device, GroupPurpose.GRADIENTS)
    dist.broadcast(sent, run.data_ranks.first_rank, group)
    difference = (values - values_of_first).abs().max()
    return float(differentiable.all_reduce(difference, "max"))


def listed_names(named_tensors: Sequence[NamedTensor], most: int = _MOST_SHOWN) -> str:
    """Return the first names as text, and how many more there are: "a, b, c and 2 more"."""
    names = [name for name, _tensor in named_tensors]
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text
