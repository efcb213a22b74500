"""Sharded tensors that behave as the full tensors that one process has.

    the user's Parameter   a ShardedParameter in the block: the same object, whose data are this
        │                  rank's rows
        └── .shard         the DTensor of these rows, a leaf of autograd
    p.grad, p * 2, ...     a ShardedTensor, with a `shard` as well
    p[0], p.T, ...         a FullView of the gathered tensor: writes to it reach the shard

`shards.py` has the shards, `functions.py` which torch function needs what, and `calls.py` what runs
when one is called.

Nothing is watched or replaced besides: inside forward, fully_shard registers plain parameters.
Whatever is alive when the block ends becomes a plain tensor, in place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.backends.fsdp.calls import Gathered, Sharded, gradients_error, let_stand
from parallelize.backends.fsdp.shards import dtensor_of, full_tensor
from parallelize.run.sharded_tensors import ShardedTensors
from parallelize.torch_patches.backward import Pass, Run
from parallelize.torch_patches.module_tensors import all_parameters


class ShardedParameter(Sharded, nn.Parameter):
    """A parameter of a sharded model, or of a copy of one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a parameter with a copy of the shard."""
        rows = self.shard._local_tensor.clone()
        copied = nn.Parameter(rows, self.shard.requires_grad)
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__)
        stand_in(copied, dtensor_of(rows, self.shard), self.registry)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the full parameter, as a plain one."""
        full: Any = nn.Parameter(full_tensor(self.shard), self.requires_grad)
        return full.__reduce_ex__(protocol)


def stand_in(parameter: Any, shard: Any, registry: ShardedTensors) -> None:
    """Turn a parameter into one that stands for a shard, whose rows become its data.

    Hooks that the user has registered on the parameter move to the leaf of autograd.

    Args:
        parameter: the parameter; the object stays the same.
        shard: the DTensor of this rank's rows.
        registry: the sharded tensors of the run.
    """
    leaf: Any = nn.Parameter(shard)
    # DTensor would keep a gradient as the operation has produced it, such as replicated.
    leaf.register_hook(functools.partial(_cut_like_parameter, leaf.placements))
    hooks = list((parameter._backward_hooks or {}).values())
    late_hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    is_trained = parameter.requires_grad
    parameter.data = leaf._local_tensor
    parameter.__class__ = ShardedParameter
    let_stand(parameter, leaf, registry)
    for hook in hooks:
        parameter.register_hook(hook)
    for hook in late_hooks:
        parameter.register_post_accumulate_grad_hook(hook)
    leaf.requires_grad_(is_trained)


def _cut_like_parameter(placements: Any, gradient: Any) -> Any:
    """Return a gradient that is cut as its parameter. A hook of the leaf."""
    # The hooks of the leaf are also called with the plain gradients of the unit.
    if not isinstance(gradient, DTensor):
        return gradient
    # fully_shard adds to gradients on another stream.
    if gradient.device.type != "cpu":
        torch.accelerator.synchronize()
    return gradient.redistribute(placements=placements)


def registry_of(tensor: Any) -> ShardedTensors:
    """Return the sharded tensors of the run that a tensor is of.

    For a DTensor of the user's own, these are the tensors of no run.
    """
    if isinstance(tensor, Sharded):
        return tensor.registry
    return ShardedTensors()


@contextlib.contextmanager
def keeping_shards(model: nn.Module) -> Iterator[None]:
    """Let state dicts of a model have its shards in the context, in place of full tensors."""
    registries: set[ShardedTensors] = set()
    for parameter in all_parameters(model):
        if isinstance(parameter, Sharded):
            registries.add(parameter.registry)
    for registry in registries:
        registry.keeps_shards = True
    try:
        yield
    finally:
        for registry in registries:
            registry.keeps_shards = False


def gathered_view(tensor: Any, home: torch.device) -> Any:
    """Return the full tensor of a sharded one: what is written to it reaches the shard.

    Args:
        tensor: the sharded tensor.
        home: the device of the result.
    """
    full = full_tensor(tensor.shard).to(home)
    return Gathered(tensor.shard, full).as_view(full.detach())


def refuse_inputs(backward: Pass, run: Run) -> None:
    """Refuse a pass for some sharded parameters: it would give them no gradients. A subscriber."""
    if any(isinstance(root, Sharded) for root in backward.options["inputs"] or ()):
        raise gradients_error("backward(inputs=...) with")
    run(backward)
