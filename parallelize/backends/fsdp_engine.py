"""A model in parts: what fully_shard does to it for the time of a block, and the way back.

The user's model is not the root of fully_shard: `Inner` is, which calls it. So the model keeps its class, its own hooks
run as ever, and every routed method gathers parameters as forward does. Its Parameter objects are emptied, set aside,
and given the trained values at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import override

from parallelize.backends.broadcast_checks import refuse_unsendable
from parallelize.backends.ddp_engine import send
from parallelize.backends.fsdp_options import Sharding
from parallelize.backends.fsdp_units import refuse_mixtures, refuse_sparse_gradients, refuse_ties, units_of
from parallelize.backends.sharded_forward import Gate, guarded_submodules
from parallelize.backends.sharded_parameter_guard import Whereabouts, refuse_flattening
from parallelize.backends.sharded_tensors import converted, full_state_dicts, full_tensor, shard
from parallelize.cluster.world import World
from parallelize.errors import SyncError
from parallelize.plugins.base import Engine, Inner
from parallelize.plugins.traffic import Traffic
from parallelize.runtime import differentiable

__all__ = ["ShardingEngine"]


class ShardingEngine(Engine):
    """The parameters of one model in parts.

    Args:
        options: the backend.
        inner: the root of fully_shard.
        world: this process among the others.
        device: where the model computes.
        optimizers: pointed to the parts, state included, and back at the end.
        restore: whether the model is whole again at the end.
    """

    is_rebuildable = False

    def __init__(
        self,
        options: Sharding,
        inner: Inner,
        *,
        world: World,
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer],
        restore: bool,
    ) -> None:
        model = inner.model
        self._options = options
        self.refuses_copies = options.cannot_keep["copies"]
        self._inner = inner
        self._restore = restore
        self._optimizers = optimizers
        units = units_of(model, options.blocks)
        refuse_ties(model, units)
        refuse_mixtures(model, [*_apart(options, inner), *units])
        refuse_sparse_gradients(model)
        refuse_unsendable(model, takes_expanded=True)
        for optimizer in optimizers:
            refuse_flattening(optimizer)
        reshards = options.reshard_after_forward is not False
        self._gathered_again = {id(each) for unit in units for each in unit.parameters() if reshards}
        send([*model.parameters(), *model.buffers()])
        # Each place where a parameter is registered: tied ones have several.
        self._places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._keys = {module: frozenset(module.__dict__) for module in model.modules()}
        self._mesh = _mesh(options, world=world, device=device)
        _shard(options, inner, units=units, mesh=self._mesh)
        self._parts: dict[int, Any] = {id(whole): module._parameters[name] for module, name, whole in self._places}
        for optimizer in optimizers:
            self._point(optimizer, to_parts=True)
        self._set_aside()
        self._whereabouts = Whereabouts(model, root=inner, places=self._places, parts=self._parts)
        before = self._whereabouts.before_forward
        self.local = self.module = Gate(inner, roll_call_s=options.roll_call_s, world=world, before=before)
        self._taken = contextlib.ExitStack()
        self._taken.callback(register_optimizer_step_pre_hook(self._whereabouts.before_step).remove)
        self._taken.callback(register_optimizer_step_post_hook(self._whereabouts.after_step).remove)
        self._taken.enter_context(guarded_submodules(model, self.module))
        self._taken.enter_context(full_state_dicts(model, saves_whole=options.full_state_dict))

    @override
    def traffic(self) -> Traffic:
        policy, _ = _policies(self._options, self._inner)
        gathered = reduced = 0
        for key, part in self._parts.items():
            times = 2 if self._options.reshard_after_forward or key in self._gathered_again else 1
            gathered += times * part.numel() * (policy.param_dtype or part.dtype).itemsize
            if part.requires_grad:
                reduced += part.numel() * (policy.reduce_dtype or policy.param_dtype or part.dtype).itemsize
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
        self._taken.close()
        for module, name, whole in self._places:
            module._parameters[name] = self._parts[id(whole)]  # also after a forward that left whole ones in place
        self._lift_fully_shard()
        if failed or not self._restore:
            _mark_as_sharded(self._inner.model, failed=failed)
            return
        for whole in {id(whole): whole for _, _, whole in self._places}.values():
            part = self._parts[id(whole)]
            whole.data = full_tensor(part)
            whole.requires_grad_(part.requires_grad)
        for module, name, whole in self._places:
            module._parameters[name] = whole
        for optimizer in self._optimizers:
            self._point(optimizer, to_parts=False)
        self._whereabouts.part_with(self._optimizers)

    def _set_aside(self) -> None:
        """Free the values of the user's own Parameter objects: they are in the parts now."""
        wholes = list({id(whole): whole for _, _, whole in self._places}.values())
        has_gradient = torch.tensor([whole.grad is not None for whole in wholes], dtype=torch.bool)
        for whole, is_anywhere in zip(wholes, differentiable.reduce(has_gradient, "max").tolist(), strict=True):
            if is_anywhere:
                # Each rank has its own, of backwards before the block; backwards in it will add averages.
                mine = torch.zeros_like(whole) if whole.grad is None else whole.grad
                part = self._parts[id(whole)]
                part.grad = shard(differentiable.reduce(mine.detach(), "mean"), like=part)
            whole.grad = None
            whole.data = whole.data.new_empty(0)

    def _lift_fully_shard(self) -> None:
        for module, keys in self._keys.items():
            if isinstance(module, FSDPModule):
                _module_state_mapping.pop(module, None)  # else it could not be sharded again
                module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]
            for hooks in [held for held in vars(module).values() if isinstance(held, dict)]:
                for number in [number for number, hook in hooks.items() if _is_of_fsdp(hook)]:
                    _forget_hook(module, number)
            for key in [key for key in vars(module) if key not in keys and _is_fsdp_key(key)]:
                del module.__dict__[key]
        for _, _, whole in self._places:
            whole.__dict__.pop("_orig_param_uid", None)

    def _point(self, optimizer: torch.optim.Optimizer, *, to_parts: bool) -> None:
        """Make an optimizer step on the parts, or on the whole parameters again, with its state in the same form."""
        wholes = {id(whole): whole for _, _, whole in self._places}
        other: dict[int, Any] = dict(self._parts)
        if not to_parts:
            other = {id(part): wholes[key] for key, part in self._parts.items()}
        for group in optimizer.param_groups:
            group["params"] = [other.get(id(each), each) for each in group["params"]]
        for each in [each for each in optimizer.state if id(each) in other]:
            target = other[id(each)]
            state = optimizer.state.pop(each)
            optimizer.state[target] = {
                name: converted(value, of=each, like=target if to_parts else None) for name, value in state.items()
            }


# Of each process group, those of several dimensions, whose own groups end with it.
_meshes: WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], DeviceMesh]] = WeakKeyDictionary()


def _mesh(options: Sharding, *, world: World, device: torch.device) -> DeviceMesh:
    if options.shard_size is None or options.shard_size == world.world_size:
        return init_device_mesh(device.type, (world.world_size,), mesh_dim_names=("shard",))
    shape = (world.world_size // options.shard_size, options.shard_size)
    known = _meshes.setdefault(dist.group.WORLD, {})
    # Once: DTensor remembers what it did on an equal mesh, and would go on with the groups of that one.
    if (device.type, shape) not in known:
        known[device.type, shape] = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return known[device.type, shape]


def _shard(options: Sharding, inner: Inner, *, units: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    policy, own_types = _policies(options, inner)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if options.cpu_offload else OffloadPolicy()
    apart = _apart(options, inner)
    for module in (*apart, *(each for each in units if each not in apart), inner):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=own_types if own_types is not None and module in apart else policy,
            offload_policy=offload,
        )


def _apart(options: Sharding, inner: Inner) -> list[nn.Module]:
    """The modules that the precision exempts, each a group of its own."""
    _, own_types = _policies(options, inner)
    return [each for each in inner.modules() if own_types is not None and isinstance(each, inner.session.fp32_modules)]


def _policies(options: Sharding, inner: Inner) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy | None]:
    """How parameters are gathered and gradients reduced; and for modules that the precision exempts, if it does."""
    session = inner.session
    if options.mixed_precision is not None or session.weights_dtype is None:
        return options.mixed_precision or MixedPrecisionPolicy(reduce_dtype=session.communication_dtype), None
    # Autocast casts what an operation needs. fully_shard would cast whatever is passed, integers kept as floats too.
    reduce_dtype = session.communication_dtype or torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=session.weights_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    return policy, MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def _mark_as_sharded(model: nn.Module, *, failed: bool) -> None:
    why = "the block ended by an exception" if failed else "the block had restore=False"

    def forward(*_: Any, **__: Any) -> Any:
        raise SyncError(
            f"{type(model).__name__} is in parts, one on each rank",
            why=f"{why}, and putting them together takes all ranks",
            fix="make the model anew and load a checkpoint; its state_dict() still holds this rank's parts",
        )

    model.__dict__["forward"] = forward


def _is_of_fsdp(hook: Any) -> bool:
    if isinstance(hook, (nn.Module, torch.Tensor)):  # children, whose classes fully_shard has made
        return False
    origin = getattr(getattr(hook, "hook", hook), "__module__", None)
    return isinstance(origin, str) and origin.startswith("torch.distributed.fsdp")


def _is_fsdp_key(key: str) -> bool:
    return key.startswith(("__composable_api_state_key", "_is_fsdp_managed", "_fsdp_"))


def _forget_hook(module: nn.Module, number: Any) -> None:
    for hooks in vars(module).values():
        if isinstance(hooks, dict):
            hooks.pop(number, None)
