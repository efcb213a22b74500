"""Writes of a forward to its model's gathered parameters, such as a momentum encoder's update, reach the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from parallelize.runtime.torch_compile import compilation_disabled
from parallelize.torch_patches.backward import is_in_backward

__all__ = ["keep_writes"]


@dataclass
class _Parameter:
    """A gathered parameter, with its storage as fully_shard allocates it, and this rank's rows there and in the shard.

    Attributes:
        parameter: the gathered parameter.
        whole: all of the storage.
        rows: this rank's rows of `whole`.
        shard: this rank's rows as the shard holds them.
    """

    parameter: nn.Parameter
    whole: torch.Tensor
    rows: torch.Tensor
    shard: torch.Tensor

    @property
    def version(self) -> tuple[int, int]:
        """A value that changes when the parameter is written, or gets other data."""
        return self.parameter._version, self.parameter.untyped_storage()._cdata

    @property
    def is_cheap(self) -> bool:
        """Whether rows are copied without a conversion."""
        return self.rows.dtype is self.shard.dtype and self.rows.device == self.shard.device


@contextlib.contextmanager
def keep_writes(root: nn.Module) -> Iterator[None]:
    """Copy the gathered parameters that a forward has written to their shards, inside the context; sends nothing.

    Args:
        root: the root of fully_shard.
    """
    with contextlib.ExitStack() as stack:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                unit = _Unit(module)
                # After fully_shard's own hook, which gathers parameters, and before the one that frees them.
                stack.callback(module.register_forward_pre_hook(unit.before_forward).remove)
                stack.callback(module.register_forward_hook(unit.after_forward, prepend=True).remove)
        yield


class _Unit:
    """A unit of fully_shard, whose parameters are compared before and after its forward."""

    def __init__(self, unit: Any) -> None:
        self._unit = unit
        self._known: list[_Parameter] = []
        self._before: list[tuple[int, int]] = []

    def before_forward(self, _module: nn.Module, _args: Any) -> None:
        """Record the versions of the gathered parameters."""
        group = self._unit._get_fsdp_state()._fsdp_param_group
        if group is not None and not is_in_backward():
            with compilation_disabled():
                self._known = self._known or list(map(_parameter, group.fsdp_params))
            self._before = [each.version for each in self._known]

    def after_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Copy the parameters whose versions have changed to their shards."""
        written = [each for each, version in zip(self._known, self._before, strict=False) if each.version != version]
        if written and not is_in_backward():
            with torch.no_grad():
                _copy([each for each in written if len(each.shard)])
        self._before = []


def _parameter(fsdp_param: Any) -> _Parameter:
    sharded = fsdp_param.sharded_param.detach()
    shard, placements = sharded.to_local(), sharded.placements
    dim = placements.index(Shard(0))
    num_rows = -(-sharded.shape[0] // sharded.device_mesh.size(dim))
    start = min(sharded.device_mesh.get_local_rank(dim) * num_rows, sharded.shape[0])
    whole = fsdp_param.all_gather_outputs[0][: sharded.numel()].view(sharded.shape)
    return _Parameter(fsdp_param._unsharded_param, whole, whole[start : start + len(shard)], shard)


def _copy(parameters: Sequence[_Parameter]) -> None:
    for each in parameters:
        if each.parameter.untyped_storage()._cdata != each.whole.untyped_storage()._cdata:  # `p.data = new`
            each.whole.copy_(each.parameter.detach())
            each.parameter.data = each.whole
    cheap = [each for each in parameters if each.is_cheap]
    if cheap:
        torch._foreach_copy_([each.shard for each in cheap], [each.rows for each in cheap])
    for each in parameters:
        if not each.is_cheap and not each.parameter.requires_grad:
            rows = each.rows.to(each.shard.device)
            is_same = rows == each.shard.to(rows.dtype)
            each.shard.copy_(torch.where(is_same, each.shard, rows.to(each.shard.dtype)))
