"""Application of fully_shard to a model at the entry of a block, and its removal at the end.

The root of fully_shard is `Inner`, which calls the user's model. So the model keeps its class, its own hooks run as
usual, and every routed method all-gathers parameters as forward does. The model's Parameter objects (the originals) are
emptied in the block, and get the trained values at its end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from typing_extensions import override

from parallelize.backends.broadcast import RegisteredBuffers, broadcast_from_rank_0, refuse_unbroadcastable
from parallelize.backends.forward_writes import keep_writes
from parallelize.backends.fsdp_options import FSDPOptions
from parallelize.backends.fsdp_units import (
    find_units,
    refuse_mixed_dtypes,
    refuse_sparse_gradients,
    refuse_tied_parameters,
)
from parallelize.backends.replicated_scalars import averaged_gradients, scalar_parameters
from parallelize.backends.sharded_arithmetic import semantics
from parallelize.backends.sharded_copies import copies_of_modules, is_engine_hook
from parallelize.backends.sharded_forward import ShardedForward, refuse_submodule_calls
from parallelize.backends.sharded_optimizers import ShardedOptimizers
from parallelize.backends.sharded_parameter_guard import ShardedParameterGuard
from parallelize.backends.sharded_tensors import full_state_dicts, full_tensor, shard
from parallelize.cluster.world import World
from parallelize.errors import SyncError
from parallelize.plugins.base import Engine, Inner
from parallelize.plugins.traffic import Traffic
from parallelize.runtime import differentiable
from parallelize.torch_patches import step
from parallelize.torch_patches.private import unsupported

__all__ = ["FSDPEngine"]

_FSDP = ("torch.distributed.fsdp",)
_FSDP_ATTRIBUTES = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


class FSDPEngine(Engine):
    """Engine of a model to which fully_shard is applied.

    Args:
        options: options of the backend.
        inner: the root of fully_shard.
        world: ranks and sizes of this process.
        device: device on which the model computes.
        optimizers: optimizers of the model, in addition to those that are found.
        restore: whether full parameters are restored at the end.
    """

    keeps_parameters = False

    def __init__(
        self,
        options: FSDPOptions,
        inner: Inner,
        *,
        world: World,
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer],
        restore: bool,
    ) -> None:
        model = inner.model
        self._options = options
        self._inner = inner
        self._restore = restore
        units = find_units(model, options.blocks)
        refuse_tied_parameters(model, units)
        refuse_mixed_dtypes(model, [*_fp32_modules(options, inner), *units])
        refuse_sparse_gradients(model)
        refuse_unbroadcastable(model, accepts_expanded=True)
        reshards = options.reshard_after_forward is not False
        self._ids_gathered_twice = {id(each) for unit in units for each in unit.parameters() if reshards}
        broadcast_from_rank_0([*model.parameters(), *model.buffers()])
        # One entry per name of a parameter: tied parameters have several.
        self._registrations = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.ndim
        ]
        self._originals = {id(original): original for _, _, original in self._registrations}
        self._attributes_before = {module: frozenset(module.__dict__) for module in model.modules()}
        self._mesh = _mesh(options, world=world, device=device)
        with _require_known_traces(inner):
            _fully_shard(options, inner, units=units, mesh=self._mesh)
        self._shards: dict[int, Any] = {
            id(original): module._parameters[name] for module, name, original in self._registrations
        }
        self._optimizers = ShardedOptimizers(self._originals, self._shards, given=optimizers)
        self._free_originals()
        self._buffers = RegisteredBuffers(model)
        self._guard = ShardedParameterGuard(model, root=inner, registrations=self._registrations, shards=self._shards)
        forward = ShardedForward(
            inner,
            fsdp_params=self._guard.fsdp_params,
            roll_call_s=options.roll_call_s,
            world=world,
            before=self._before_forward,
        )
        self.local = self.module = forward
        self._exit_stack = contextlib.ExitStack()
        self._enter_contexts(model, forward, device=device)

    def _enter_contexts(self, model: nn.Module, forward: ShardedForward, *, device: torch.device) -> None:
        before_step, after_step = semantics.without(self._before_step), semantics.without(self._guard.after_step)
        self._exit_stack.callback(step.before_step(before_step).remove)
        self._exit_stack.callback(step.after_step(after_step).remove)
        self._exit_stack.enter_context(keep_writes(self._inner))
        self._exit_stack.enter_context(averaged_gradients(scalar_parameters(model)))
        self._exit_stack.enter_context(self._optimizers.convert_new_groups())
        self._exit_stack.enter_context(refuse_submodule_calls(model, forward))
        self._exit_stack.enter_context(full_state_dicts(model, saves_full=self._options.full_state_dict))
        self._exit_stack.enter_context(copies_of_modules(model, semantics=semantics, device=device))
        self._exit_stack.enter_context(
            semantics.active(
                self._originals.values(),
                shards=self._shards,
                wait=forward.wait_to_read_copies,
                keep_gathered=forward.keep_gathered,
            )
        )

    @override
    def traffic(self) -> Traffic:
        policy, _ = _policies(self._options, self._inner)
        gathered = reduced = 0
        for key, sharded in self._shards.items():
            num_gathers = 2 if self._options.reshard_after_forward or key in self._ids_gathered_twice else 1
            gathered += num_gathers * sharded.numel() * (policy.param_dtype or sharded.dtype).itemsize
            if sharded.requires_grad:
                reduced += sharded.numel() * (policy.reduce_dtype or policy.param_dtype or sharded.dtype).itemsize
        how = "reduce-scattered" if self._mesh.ndim == 1 else "reduce-scattered and all-reduced"
        return Traffic(reduced, how, gathered_bytes=gathered)

    @override
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        root: Any = self._inner
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    @override
    def close(self, *, failed: bool) -> None:
        semantics.close_copies(failed=failed)
        self._exit_stack.close()
        self._guard.apply_requires_grad()
        for module, name, original in self._registrations:
            # The last forward may have left unsharded parameters registered.
            module._parameters[name] = self._shards[id(original)]
        self._remove_fully_shard()
        if failed or not self._restore:
            self._optimizers.close(restored=False)
            _mark_as_sharded(self._inner.model, failed=failed)
            return
        if self._options.broadcast_buffers:
            self._buffers.broadcast()
        for original in self._originals.values():
            sharded = self._shards[id(original)]
            original.data = full_tensor(sharded)
            original.requires_grad_(sharded.requires_grad)
        for module, name, original in self._registrations:
            module._parameters[name] = original
        self._optimizers.close(restored=True)
        self._guard.close()

    def _before_forward(self) -> None:
        self._guard.before_forward()
        if self._options.broadcast_buffers and torch.is_grad_enabled() and self._inner.model.training:
            self._buffers.broadcast()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        semantics.num_writes += 1
        self._optimizers.before_step(optimizer)
        self._guard.before_step(optimizer, args, kwargs)

    def _free_originals(self) -> None:
        """Move the originals' gradients to the shards, and free the memory of the originals."""
        has_gradient = torch.tensor([each.grad is not None for each in self._originals.values()], dtype=torch.bool)
        is_on_any_rank = differentiable.all_reduce(has_gradient, "max").tolist()
        for original, has_any_gradient in zip(self._originals.values(), is_on_any_rank, strict=True):
            if has_any_gradient:
                # Gradients from before the block are local; backward passes in the block will add averaged ones.
                local = torch.zeros_like(original) if original.grad is None else original.grad
                sharded = self._shards[id(original)]
                sharded.grad = shard(differentiable.all_reduce(local.detach(), "mean"), like=sharded)
            original.grad = None
            original.data = original.data.new_empty(0)

    def _remove_fully_shard(self) -> None:
        for module, attributes_before in self._attributes_before.items():
            if isinstance(module, FSDPModule):
                _module_state_mapping.pop(module, None)  # else fully_shard could not be applied again
                module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]
            hook_dicts = [each for each in vars(module).values() if isinstance(each, dict)]
            # The id of a hook that was registered with_kwargs is also a key of a second dictionary.
            hooks_of_fsdp = functools.partial(is_engine_hook, packages=_FSDP)
            for hook_id in [key for hooks in hook_dicts for key, hook in hooks.items() if hooks_of_fsdp(hook)]:
                for hooks in hook_dicts:
                    hooks.pop(hook_id, None)
            for key in [each for each in vars(module) if each.startswith(_FSDP_ATTRIBUTES)]:
                if key not in attributes_before:
                    del module.__dict__[key]
        for original in self._originals.values():
            original.__dict__.pop("_orig_param_uid", None)


# Default process group -> its 2D meshes, whose subgroups are destroyed with it.
_meshes: WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], DeviceMesh]] = WeakKeyDictionary()


def _mesh(options: FSDPOptions, *, world: World, device: torch.device) -> DeviceMesh:
    size = options.ranks_per_copy(world)
    if size == world.world_size:
        return init_device_mesh(device.type, (world.world_size,), mesh_dim_names=("shard",))
    shape = (world.world_size // size, size)
    meshes = _meshes.setdefault(dist.group.WORLD, {})
    # Cached: DTensor's caches treat equal meshes as one, and would use the process groups of an earlier mesh.
    if (device.type, shape) not in meshes:
        meshes[device.type, shape] = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return meshes[device.type, shape]


def _fully_shard(options: FSDPOptions, inner: Inner, *, units: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    policy, fp32_policy = _policies(options, inner)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if options.cpu_offload else OffloadPolicy()
    fp32_modules = _fp32_modules(options, inner)
    scalars = set(scalar_parameters(inner))
    for module in (*fp32_modules, *(each for each in units if each not in fp32_modules), inner):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=fp32_policy if fp32_policy is not None and module in fp32_modules else policy,
            offload_policy=offload,
            ignored_params=scalars,
        )


def _fp32_modules(options: FSDPOptions, inner: Inner) -> list[nn.Module]:
    """Return the modules that mixed precision keeps in fp32; each is a separate group of fully_shard."""
    _, fp32_policy = _policies(options, inner)
    classes = () if fp32_policy is None else inner.session.fp32_modules
    return [each for each in inner.modules() if isinstance(each, classes)]


def _policies(options: FSDPOptions, inner: Inner) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy | None]:
    """Return the mixed precision policy, and the policy of modules that stay in fp32 (None: no such modules)."""
    session = inner.session
    if options.mixed_precision is not None or session.weights_dtype is None:
        return options.mixed_precision or MixedPrecisionPolicy(reduce_dtype=session.communication_dtype), None
    # Autocast casts inputs per operation. fully_shard would cast all inputs, even integers stored as floats.
    reduce_dtype = session.communication_dtype or torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=session.weights_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    return policy, MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def _mark_as_sharded(model: nn.Module, *, failed: bool) -> None:
    why = "the block ended by an exception" if failed else "the block had restore=False"

    def forward(*_: Any, **__: Any) -> Any:
        raise SyncError(
            f"{type(model).__name__} is sharded over the ranks",
            why=f"{why}, and only all ranks together can gather the full parameters",
            fix="construct the model again and load a checkpoint; its state_dict() still holds this rank's shards",
        )

    model.__dict__["forward"] = forward


@contextlib.contextmanager
def _require_known_traces(root: nn.Module) -> Iterator[None]:
    """Require that the end of the block recognizes all that fully_shard adds to modules inside the context."""
    before = {module: (frozenset(vars(module)), {id(each) for each in _hooks_of(module)}) for module in root.modules()}
    yield
    for module, (attributes, hooks) in before.items():
        names = [each for each in vars(module) if each not in attributes and not each.startswith(_FSDP_ATTRIBUTES)]
        if names or any(
            id(each) not in hooks and not is_engine_hook(each, packages=_FSDP) for each in _hooks_of(module)
        ):
            raise unsupported("backend='fsdp'", instead="use backend='ddp'")


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for values in [each.values() for each in vars(module).values() if isinstance(each, dict)]:
        yield from (each for each in values if callable(each) and not isinstance(each, (nn.Module, torch.Tensor)))
