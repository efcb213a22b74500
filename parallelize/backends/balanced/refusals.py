"""Errors for models, batches and calls that this backend does not support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner

__all__ = [
    "CannotSplitError",
    "another_model",
    "captured",
    "check_supported",
    "inner_backward",
    "no_batch",
    "not_a_tensor",
    "not_sample_by_sample",
    "one_value_per_channel",
    "opaque_input",
    "other_parameters",
    "packed_sequence",
    "reentrant",
    "split_failure",
    "stateful",
    "too_large",
    "uneven_outputs",
    "uneven_shapes",
    "unjoinable",
]


class CannotSplitError(ConfigError):
    """A kind of batch of which micro-batches would not compute what the full batch does; such batches are not split."""


_NO_SPLIT = "use BalancedBackend(microbatches=1), which does not split batches, or backend='ddp'"
_NO_CACHE = "train a Hugging Face language model with model.config.use_cache = False"

_COMPOSABLE_CHECKPOINT = "torch.distributed._composable.checkpoint_activation"
_UNSUPPORTED = (
    DataParallel,
    DistributedDataParallel,
    FSDPModule,
    FullyShardedDataParallel,
    nn.SyncBatchNorm,
    torch.jit.ScriptModule,
)


def check_supported(inner: Inner) -> None:
    """Check that the calls of the model's submodules can be followed.

    Raises:
        ConfigError: the model is compiled as a whole, or one of its modules is scripted or already parallel.
    """
    is_optimized = type(inner.model).__name__ == "OptimizedModule" or inner.model._compiled_call_impl is not None
    if is_optimized or not inner.is_replicable:
        raise ConfigError(
            "the model is compiled",
            why="calls of submodules inside a compiled graph cannot be followed, so it cannot be split into stages",
            fix="compile its blocks instead: for block in model.blocks: block.compile(); or use backend='ddp'",
        )
    for name, module in inner.model.named_modules():
        if isinstance(module, _UNSUPPORTED):
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__}",
                why="it has its own threads, processes or graph, which cannot be split into stages",
                fix="use the plain module in its place, or backend='ddp'",
            )
        hooks = module._forward_pre_hooks.values()
        if any(getattr(hook, "__module__", "") == _COMPOSABLE_CHECKPOINT for hook in hooks):
            raise ConfigError(
                f"torch.distributed._composable.checkpoint of {name or 'the model'}",
                why="it stores the state of one forward on the module, and micro-batches run at the same time",
                fix="use BalancedBackend(recompute=True), or call torch.utils.checkpoint.checkpoint in forward",
            )


def no_batch(dim: int) -> ConfigError:
    """Build the error for inputs without a batch dimension."""
    return ConfigError(
        f"no argument of the model has a dimension {dim}",
        why="a batch is split into micro-batches along its batch dimension",
        fix="pass tensors, alone or in containers; set their batch dimension: BalancedBackend(batch_dim=1)",
    )


def one_value_per_channel(channels: int) -> ConfigError:
    """Build the error for training batch norm on a micro-batch with one value per channel."""
    return ConfigError(
        f"batch norm over {channels} channels gets one value per channel in a micro-batch",
        why="each micro-batch is normalized separately, and one value has no variance",
        fix="use larger batches or fewer micro-batches, BalancedBackend(batch_norm='full'), or group norm",
    )


def packed_sequence() -> CannotSplitError:
    """Build the error for a PackedSequence among the inputs."""
    return CannotSplitError(
        "an input of the model is a PackedSequence",
        why="its samples are interleaved, so it cannot be split into micro-batches",
        fix="pass the padded tensor with its lengths, and in forward pack it and call pad_packed_sequence with "
        "total_length=; or use backend='ddp'",
    )


def opaque_input(name: str, kind: str) -> CannotSplitError:
    """Build the error for an input object that cannot be split."""
    return CannotSplitError(
        f"argument {name} of the model is a {kind}",
        why="it cannot be split, and micro-batches would see what others have left in it",
        fix=f"pass tensors, alone or in containers; {_NO_CACHE}; or {_NO_SPLIT}",
    )


def not_a_tensor(position: int, value: Any) -> ConfigError:
    """Build the error for using an output object that differs between micro-batches."""
    return ConfigError(
        f"output {position} of the model is a {type(value).__name__}",
        why="the objects that micro-batches return cannot be joined into one object",
        fix=f"return tensors, alone or in containers; {_NO_CACHE}; or {_NO_SPLIT}",
    )


def uneven_outputs(counts: Sequence[int]) -> ConfigError:
    """Build the error for micro-batches that return different numbers of values."""
    return ConfigError(
        f"micro-batches return {' and '.join(map(str, sorted(set(counts))))} values",
        why="outputs with different numbers of values cannot be joined",
        fix=_NO_SPLIT,
    )


def split_failure(dimensions: Mapping[str, int], error: Exception) -> CannotSplitError:
    """Build the error for a forward that fails on a part of a batch, but not on the full batch."""
    listed = ", ".join(f"{name} along dimension {dim}" for name, dim in list(dimensions.items())[:4])
    more = f" and {len(dimensions) - 4} more" if len(dimensions) > 4 else ""
    return CannotSplitError(
        f"forward fails on a part of the batch ({type(error).__name__}), but not on the full batch; split arguments: "
        f"{listed}{more}",
        why="every tensor as long as the first one is split along the batch, also inside lists; forward may need all "
        "samples of one of them",
        fix="pass a list of samples as one tensor; give tensors that are not per sample another length; set "
        f"BalancedBackend(batch_dim=...); use no constant batch size in forward; or {_NO_SPLIT}",
    )


def uneven_shapes(position: int, shapes: Sequence[tuple[int, ...]]) -> ConfigError:
    """Build the error for micro-batch outputs whose shapes differ outside of the batch dimension."""
    return ConfigError(
        f"output {position} of the model: tensors of {' and '.join(map(str, dict.fromkeys(shapes)))}",
        why="outputs of micro-batches that differ outside of the batch dimension cannot be joined",
        fix=f"pad to a fixed length, for example with pad_packed_sequence(total_length=); or {_NO_SPLIT}",
    )


def unjoinable(position: int, what: str) -> ConfigError:
    """Build the error for an output that is neither per sample nor equal in all micro-batches."""
    return ConfigError(
        f"output {position} of the model: {what}",
        why="it differs between micro-batches, and no dimension is as long as a micro-batch, so it cannot be joined",
        fix=f"return it per sample, or as a mean over samples (a scalar); or {_NO_SPLIT}",
    )


def inner_backward(names: Sequence[str]) -> ConfigError:
    """Build the error for a backward inside forward that accumulates gradients."""
    return ConfigError(
        f"forward accumulates gradients of {', '.join(names[:5])}",
        why="a backward of each micro-batch would add to them, also while the pipeline is planned",
        fix="call torch.autograd.grad in forward instead of backward; or use backend='ddp'",
    )


def other_parameters(shape: tuple[int, ...]) -> ConfigError:
    """Build the error for a recomputation that uses other parameters than forward."""
    return ConfigError(
        f"recomputation in backward uses a parameter of {shape} that forward has not used",
        why="torch.func.functional_call replaces parameters for one call, but backward runs after that call",
        fix="use BalancedBackend(recompute=False), or call backward before the parameters are restored",
    )


def captured(places: Sequence[str], hooked: Sequence[str]) -> CannotSplitError:
    """Build the error for tensors that forward leaves outside of its output; `hooked`: modules with forward hooks."""
    hooks = f"; modules with forward hooks: {', '.join(hooked[:5])}" if hooked else ""
    return CannotSplitError(
        f"tensors that {', '.join(places[:5])} computed are used outside of the output of forward{hooks}",
        why="they would have the samples of one micro-batch, and a loss on them the gradients of these",
        fix=f"return them from forward; keep numbers instead of tensors; remove the hooks; or {_NO_SPLIT}",
    )


def reentrant(names: Sequence[str]) -> CannotSplitError:
    """Build the error for hooks of parameters that a reentrant checkpoint uses."""
    return CannotSplitError(
        f"parameters with hooks, {', '.join(names[:5])}, under torch.utils.checkpoint with use_reentrant=True",
        why="a reentrant checkpoint calls them with the gradient of one micro-batch at a time",
        fix=f"use checkpoint(..., use_reentrant=False); or {_NO_SPLIT}",
    )


def stateful(names: Sequence[str]) -> CannotSplitError:
    """Build the error for a forward that stores state on the model."""
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return CannotSplitError(
        f"forward changes {listed} of the model",
        why="micro-batches run at the same time, and would read each other's values",
        fix=f"pass such values between modules as arguments and return values; or {_NO_SPLIT}",
    )


def not_sample_by_sample(what: str, difference: float) -> CannotSplitError:
    """Build the error for an output or a gradient of micro-batches that differs from that of the full batch."""
    return CannotSplitError(
        f"{what}, computed in micro-batches, differs from that of the full batch by {difference:.3g}",
        why="a sample's output depends on other samples; or an argument as long as the batch was split although it is "
        "not per sample; or the loss is not a mean over samples",
        fix=f"compute such a loss outside of the model; set BalancedBackend(batch_dim=...); or {_NO_SPLIT}",
    )


def too_large(needed_bytes: float, devices: Sequence[str], *, is_measured: bool) -> ConfigError:
    """Build the error for a model that no split fits; `is_measured`: whether the bytes include activations."""
    what = "the best split" if is_measured else "even without activations, the best split"
    return ConfigError(
        f"the model does not fit on {', '.join(devices)}",
        why=f"{what} needs {needed_bytes / 2**20:.1f} MiB ({needed_bytes:.0f} bytes) on every device",
        fix="use more or larger devices or a smaller batch, raise memory=, or save memory: "
        "BalancedBackend(recompute='auto', optimizer_state=...)",
    )


def another_model(expected: str, given: str) -> ConfigError:
    """Build the error for a plan made for another model or other devices."""
    return ConfigError(
        f"plan= is for {expected}, and this is {given}",
        why="a plan refers to submodules and devices by name",
        fix="drop plan= to profile again, then save the new plan: parallelize.plan(model).save(path)",
    )
