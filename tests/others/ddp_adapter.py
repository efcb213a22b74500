"""DistributedDataParallel's interface over a `parallel_model` block, for the cases that torch tests DDP with.

    DistributedDataParallel(module)     opens a block of the module, which is on its device already
    model(x), model.module, no_sync()   the module itself runs: a block keeps the user's object
    torch.save, torch.load              the module is pickled, and the loaded module gets a block of its own
    a second wrapper of a module        ends the block of the first one, which has hooks on the same parameters
    a wrapper of a wrapper              has the block of the inner one
    register_comm_hook                  torch's default hook, and those that `DDPBackend(comm_hook=)` names

What the product has not, such as `join` and hooks that read buckets, raises a NotImplementedError here. What a case
looks for in DDP's insides is an AttributeError. `ddp_cases.py` says which cases meet which of them.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from parallelize import DDPBackend, no_sync, parallel_model

COMM_HOOKS: dict[object, Any] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: "fp16",
    default_hooks.bf16_compress_hook: "bf16",
}
"""Hook of torch -> the value of `DDPBackend(comm_hook=)`."""

NEEDLESS = {"check_reduction", "dim", "find_unused_parameters", "gradient_as_bucket_view", "output_device"} | {
    "static_graph",
    "batched_grad_copy",
    "skip_all_reduce_unused_params",
}
"""Options of DDP that change no value, and that the product does without."""


def unsupported(what: str) -> NoReturn:
    raise NotImplementedError(f"parallel_model has no {what}")


class DistributedDataParallel(nn.Module):
    """A module in a block, with the names that users of DDP write.

    Args:
        module: on one device.
        device_ids: None, or the device of this rank.
        process_group: None, or a group of all ranks.
        device_mesh: None, or a mesh of all ranks.
        broadcast_buffers: the former name of `forward_sync_buffers`.
        forward_sync_buffers: whether each forward begins with rank 0's buffers.
        bucket_cap_mb: size of a bucket.
        options: others of DDP, which have to be needless.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        *,
        process_group: Any = None,
        device_mesh: Any = None,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if device_mesh is not None:
            if process_group is not None:
                raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
            if device_mesh.ndim != 1:
                raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
            process_group = device_mesh.get_group(mesh_dim=0)
        self.device_mesh = device_mesh
        self.process_group = process_group or dist.group.WORLD
        if self.process_group.size() != dist.get_world_size():
            unsupported("groups of some ranks")
        for name in options.keys() - NEEDLESS:
            unsupported(f"{name}=")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise RuntimeError("no parameter requires a gradient")
        self.module = module
        self.device_ids = device_ids
        self.forward_sync_buffers = True
        for given in (broadcast_buffers, forward_sync_buffers):
            if given is not None:
                self.forward_sync_buffers = given
        self.bucket_cap_mb = bucket_cap_mb
        self.comm_hook: Any = None
        self.open_block()

    def open_block(self) -> None:
        """Open a block of the module; a collective."""
        if isinstance(self.module, DistributedDataParallel):
            return  # the gradients of its parameters are averaged already
        earlier = BLOCKS.pop(id(self.module), None)
        if earlier is not None:
            earlier.stop()
        backend = DDPBackend(
            broadcast_buffers=self.forward_sync_buffers,
            bucket_cap_mb=self.bucket_cap_mb,
            comm_hook=self.comm_hook,
        )
        options: dict[str, Any] = {}
        if next(self.module.parameters()).device.type == "cpu":
            options["gpus"] = 0
        # The cases draw equal numbers on all ranks, as DDP leaves the generators alone.
        context = parallel_model(self.module, backend=backend, split_rng=False, **options)
        context.start()
        BLOCKS[id(self.module)] = context

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return no_sync(self.module)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if hook not in COMM_HOOKS:
            unsupported("hooks that read buckets")
        self.comm_hook = COMM_HOOKS[hook]
        self.open_block()

    def join(self, *, enable: bool = True, **_: Any) -> contextlib.AbstractContextManager[None]:
        if enable:
            unsupported("join")
        self._join_config = types.SimpleNamespace(enable=enable)
        return contextlib.nullcontext()

    def _set_static_graph(self) -> None:
        """Do nothing, as for `static_graph=True`."""

    def _remove_autograd_hooks(self) -> None:
        BLOCKS.pop(id(self.module)).stop()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["process_group"]  # cannot be pickled, as in DDP
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = dist.group.WORLD
        self.open_block()


BLOCKS: dict[int, Any] = {}
"""id of a module -> the context of its open block, which keeps the module alive."""
