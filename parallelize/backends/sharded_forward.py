"""Forward of a sharded model, with checks that all ranks run it and that no submodule is called directly."""

from __future__ import annotations

import contextlib
import datetime as dt
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.torch_version import TorchVersion

from parallelize.backends.sharded_arithmetic import semantics
from parallelize.cluster.world import World
from parallelize.errors import SyncError
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.process_group import default_store
from parallelize.torch_patches.backward import is_in_backward

__all__ = ["ShardedForward", "refuse_submodule_calls"]

# Part of the keys in the store; equal on all ranks, because every rank builds its engines in the same order.
_instance_ids = itertools.count()


class ShardedForward(nn.Module):
    """Module that runs the forward of a sharded model, and checks that all ranks run it.

    Args:
        inner: the root of fully_shard; not registered as a submodule.
        fsdp_params: fully_shard's records of the parameters.
        roll_call_s: timeout in seconds for all ranks to begin a forward without gradients; 0: no timeout.
        world: ranks and sizes of this process.
        before: called before each forward of the model.
    """

    def __init__(
        self,
        inner: Inner,
        *,
        fsdp_params: Sequence[Any],
        roll_call_s: float,
        world: World,
        before: Callable[[], None],
    ) -> None:
        super().__init__()
        self._before_forward = before
        self.__dict__["inner"] = inner
        self._roll_call_s = roll_call_s
        self._world = world
        self._instance_id = next(_instance_ids)
        self._roll_calls = itertools.count()
        self._has_trained = self._reshards_after_backward = True
        self._writes: list[int] = []
        self._fsdp_params = fsdp_params
        self._depth = 0  # number of the model's forwards that are running, nested ones included
        self._outside_hook: Callable[[nn.Module, Any], None] | None = None
        self._handles = contextlib.ExitStack()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, which all-gathers parameters from all ranks."""
        if torch.is_grad_enabled() and _is_in_functional_call(self.__dict__["inner"].model):
            raise SyncError(
                f"torch.func.functional_call of {type(self.__dict__['inner'].model).__name__} under fsdp",
                why="the model computes with its own shards, and would ignore the given tensors",
                fix="use backend='ddp'",
            )
        with semantics.suspended_for_forward():
            self._before_forward()
            if torch.is_grad_enabled():
                self._has_trained = True
            elif self._has_trained:
                self._wait_for_all_ranks(
                    "run a forward without gradients",
                    why="under fsdp every forward gathers parameters from all ranks",
                    fix="evaluate on all ranks, without `if rank == 0`, or after the block",
                )
                self._has_trained = False
            self._free_outdated()
            with self._without_outside_hook(), _no_grad_for_inference_mode():
                try:
                    return self._call_inner(*args, **kwargs)
                finally:
                    self._register_gathered()

    def hook_outside_forwards(self, hook: Callable[[nn.Module, Any], None] | None) -> None:
        """Call `hook` before each module call outside of this model's forwards; None: no longer."""
        self._handles.close()
        self._outside_hook = hook
        if hook is not None:
            self._handles.callback(register_module_forward_pre_hook(hook).remove)

    @contextlib.contextmanager
    def _without_outside_hook(self) -> Iterator[None]:
        """Remove the hook for a forward, which torch.compile would otherwise split at each module."""
        hook = self._outside_hook
        self._depth += 1
        self.hook_outside_forwards(None)
        try:
            yield
        finally:
            self._depth -= 1
            self.hook_outside_forwards(hook)

    def _call_inner(self, *args: Any, **kwargs: Any) -> Any:
        """Call the root of fully_shard, which finds no tensors in dataclasses before torch 2.13: it gets a list."""
        inner: nn.Module = self.__dict__["inner"]
        if TorchVersion(torch.__version__) >= "2.13":
            return inner(*args, **kwargs)
        outputs: list[Any] = []

        def flatten(_module: nn.Module, _args: Any, output: Any) -> list[Any]:
            outputs.append(output)
            return list(leaves(output))

        handle = inner.register_forward_hook(flatten, prepend=True)
        try:
            hooked = iter(inner(*args, **kwargs))
        finally:
            handle.remove()
        return map_leaves(lambda _: next(hooked), outputs[-1])

    def _free_outdated(self) -> None:
        """Free parameters that are still gathered from before their shards were changed, frozen or unfrozen."""
        shards = [each.sharded_param for each in self._fsdp_params]
        versions = ((each._local_tensor._version, each.requires_grad) for each in shards)
        writes = [semantics.num_writes, *itertools.chain.from_iterable(versions)]
        if self._depth == 0 and self._writes != writes:
            self._writes = writes
            self._set_reshard_after_backward(to=True)
            for module in self.__dict__["inner"].modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def keep_gathered(self) -> None:
        """Keep parameters gathered after backward, until the next forward after a step."""
        self._set_reshard_after_backward(to=False)

    def _set_reshard_after_backward(self, *, to: bool) -> None:
        if to is not self._reshards_after_backward:
            self._reshards_after_backward = to
            self.__dict__["inner"].set_reshard_after_backward(to)

    def _register_gathered(self) -> None:
        for fsdp_param in self._fsdp_params:
            forms = ("_unsharded_param", "_sharded_post_forward_param")
            gathered = tuple(getattr(fsdp_param, each, None) for each in forms)
            semantics.register_gathered(fsdp_param.sharded_param, gathered)

    def wait_to_read_copies(self) -> None:
        """Wait until all ranks read copies of the model, whose slices are gathered then."""
        self._wait_for_all_ranks(
            "read or save parameters of the model, or use a copy of it",
            why="under fsdp each rank holds a slice of them, and all slices are gathered when they are read",
            fix="do it on all ranks, without `if rank == 0`, or after the block; save with parallelize.save, or call "
            "state_dict() on all ranks with FSDPBackend(full_state_dict=True)",
        )

    def wait_to_call_submodules(self) -> None:
        """Wait until all ranks call a submodule, whose parameters are gathered for each operation."""
        if self._has_trained:
            self._wait_for_all_ranks(
                "call a submodule without gradients",
                why="under fsdp every use of parameters gathers them from all ranks",
                fix="evaluate on all ranks, without `if rank == 0`, or after the block",
            )
            self._has_trained = False

    def _wait_for_all_ranks(self, action: str, *, why: str, fix: str) -> None:
        """Wait until all ranks do the same: one rank alone would block forever in its first all-gather."""
        if not self._roll_call_s:
            return
        store = default_store()
        key = f"parallelize/roll/{self._instance_id}/{next(self._roll_calls)}"
        if store.add(key, 1) == self._world.world_size:
            store.set(f"{key}/complete", "yes")
        try:
            store.wait([f"{key}/complete"], dt.timedelta(seconds=self._roll_call_s))
        except dist.DistStoreError as exc:
            present = store.add(key, 0)
            raise SyncError(f"{present} of {self._world.world_size} ranks {action}", why=why, fix=fix) from exc


@contextlib.contextmanager
def _no_grad_for_inference_mode() -> Iterator[None]:
    """Replace inference mode by no_grad: fully_shard reuses its buffers in training, where autograd saves them."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False), torch.no_grad():
            yield
    else:
        yield


def _is_in_functional_call(model: nn.Module) -> bool:
    """Whether torch.func.functional_call, with tensors for parameters of `model`, calls the caller."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is torch.func.functional_call.__code__:
            called, given = frame.f_locals["module"], frame.f_locals["parameter_and_buffer_dicts"]
            return bool(given) and any(part is model for part in called.modules())
        frame = frame.f_back
    return False


def _running_method(model: nn.Module) -> str | None:
    """Return the name of the model's method that is running, the outermost one; None if there is none."""
    found = None
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        is_method = code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is model
        if is_method and callable(getattr(type(model), code.co_name, None)):
            found = code.co_name
        frame = frame.f_back
    return found


@contextlib.contextmanager
def refuse_submodule_calls(model: nn.Module, sharded_forward: ShardedForward) -> Iterator[None]:
    """Refuse calls of submodules outside of forwards of the model, inside the context, except without gradients."""
    names = {id(module): name for name, module in model.named_modules() if module is not model}

    def refuse(module: nn.Module, _args: Any) -> None:
        name = names.get(id(module))
        # Activation checkpointing recomputes submodules inside backward.
        if name is None or is_in_backward():
            return
        if not torch.is_grad_enabled() and not any(isinstance(each, FSDPModule) for each in module.modules()):
            with semantics.suspended():
                sharded_forward.wait_to_call_submodules()
            return
        method = _running_method(model)
        by = "directly, not through the model" if method is None else f"by {method}, which is not in methods="
        way = "" if method is None else f", or name the method: parallel_model(model, methods=[{method!r}])"
        raise SyncError(
            f"{name} of {type(model).__name__} was called {by}",
            why="its parameters are sharded, and only a call of the model gathers them",
            fix=f"call the model itself{way}",
        )

    sharded_forward.hook_outside_forwards(refuse)
    try:
        yield
    finally:
        sharded_forward.hook_outside_forwards(None)
