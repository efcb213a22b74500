"""Application of fully_shard to a model at the entry of a block, unit by unit, and its removal at the end.

The root of fully_shard is `Inner`, which calls the user's model. So the model keeps its class, its own hooks run as
usual, and every routed method all-gathers parameters as forward does. The model's Parameter objects (the originals)
stand for the shards in the block, and get full values at its end.

    forward and backward of a unit      fully_shard registers plain, gathered parameters in its modules
    everywhere else                     the originals are registered, which gather themselves where they are used
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from typing_extensions import override

from parallelize.agreement.fingerprint import differences, digest, fingerprint
from parallelize.backends.broadcast import (
    RegisteredBuffers,
    broadcast_from_rank_0,
    place,
    refuse_unbroadcastable,
)
from parallelize.backends.fsdp import full_tensors
from parallelize.backends.fsdp.meshes import meshes_of
from parallelize.backends.fsdp.optimizers import Steps
from parallelize.backends.fsdp.restore import make_plain, restore
from parallelize.backends.fsdp.units import refuse_gradients, units_of
from parallelize.cluster.world import World
from parallelize.errors import ConfigError, SyncError
from parallelize.gradients import differentiable
from parallelize.plugins.base import Engine, Inner, Reduction
from parallelize.run.containers import leaves, map_leaves
from parallelize.run.context import current
from parallelize.torch_patches.backward import Order, is_in_backward, subscribed
from parallelize.torch_patches.foreach import allow_in_lists
from parallelize.torch_patches.module_tensors import (
    all_buffers,
    all_named_parameters,
    all_parameters,
    without_overrides,
)
from parallelize.torch_patches.transforms import is_differentiating_forward, is_in_transform

if TYPE_CHECKING:
    from parallelize.backends.fsdp.plugin import FSDPBackend

__all__ = ["FSDPEngine"]

_NO_TANGENTS = "A custom Function's forward is returning a view"
_WHY_NOT_TRANSFORMED = (
    "fsdp reduces gradients by hooks on what blocks take and return, which a transform (vmap, grad, jvp, ...) or a "
    "tangent does not pass on"
)
_INSTEAD_OF_TRANSFORMS = (
    "compute the derivative with torch.autograd.grad(..., create_graph=True), or use backend='ddp'"
)


class FSDPEngine(Engine):
    """Engine of a model to which fully_shard is applied.

    Args:
        options: options of the backend.
        inner: the root of fully_shard.
        world: ranks and sizes of this process.
        device: device on which the model computes.
        restore: whether full parameters are restored at the end.
    """

    keeps_parameters = False

    def __init__(
        self,
        options: FSDPBackend,
        inner: Inner,
        *,
        world: World,
        device: torch.device,
        restore: bool,
    ) -> None:
        model = inner.model
        self._options, self._inner, self._restore = options, inner, restore
        units = units_of(model, options.blocks)
        refuse_gradients(model, units)
        refuse_unbroadcastable(model, accepts_expanded=True)
        first = next(all_parameters(model))
        self._home = (
            device if first.is_meta else first.device
        )  # where full parameters go at the end
        # One entry per name of a parameter: tied parameters have several.
        self._registrations = [
            (module, name, each)
            for module in model.modules()
            for name, each in module._parameters.items()
            if each is not None and each.ndim
        ]
        self._names = {each: name for name, each in all_named_parameters(model)}
        known = {id(each): set(each) for each in _dictionaries(model)}
        self._originals: dict[Any, Any] = {}  # fully_shard's record of a parameter -> the original
        self._groups: list[Any] = []  # of records, the root's last
        self._mesh, rows_mesh = meshes_of(options, world, device)
        self._registry = current().sharded_tensors
        self._registry.open_engines += 1
        allow_in_lists(full_tensors.ShardedTensor, full_tensors.ShardedParameter)
        self._shard([*units, inner], rows_mesh, device)
        self._hooks_of_units: list[Any] = []  # (dictionary, key)
        for each in _dictionaries(model):
            for key in each.keys() - known.get(id(each), each.keys()):
                if isinstance(key, int):
                    self._hooks_of_units.append((each, key))
                    each[key] = (
                        _UnitHook(each[key]) if callable(each[key]) else True
                    )  # a flag of a hook
                elif key.startswith("_"):  # a mark for torch's compiler
                    del each[key]
        self.local = self.module = self._run
        self._how = (
            inner.buffer_source if options.broadcast_buffers and [*all_buffers(model)] else None
        )
        self._buffers, self._output = RegisteredBuffers(model), None
        inner.register_forward_hook(self._flatten, prepend=True)
        self._writes, self._has_trained, self._is_kept = -1, True, False
        self._has_transformed = (
            False  # whether a forward since the latest step was one of torch.func's
        )
        self._steps = Steps(self._refuse_lost_gradients)
        self._hooks = contextlib.ExitStack()
        self._hooks.enter_context(subscribed(Order.BEGIN, full_tensors.refuse_inputs))
        if options.full_state_dict:
            gather = functools.partial(_gather, self._home)
            self._hooks.callback(model.register_state_dict_post_hook(gather).remove)  # type: ignore[no-untyped-call]  # torch's
        scalars = {
            name.replace(".", "_"): each for each, name in self._names.items() if not each.ndim
        }
        if scalars:
            self.reduction, self.replicas = Reduction(), nn.ParameterDict(scalars)

    def _shard(
        self, modules: Sequence[nn.Module], rows_mesh: DeviceMesh, device: torch.device
    ) -> None:
        """Move each unit to the device, with rank 0's values, and keep this rank's shards of it."""
        options, inner = self._options, self._inner
        policy, fp32_policy = _policies(options, inner)
        fp32 = [
            each
            for each in inner.modules()
            if fp32_policy and isinstance(each, inner.session.fp32_modules)
        ]
        offload = (
            CPUOffloadPolicy(pin_memory=device.type != "cpu")
            if options.cpu_offload
            else OffloadPolicy()
        )
        done = set[torch.Tensor]()
        for module in dict.fromkeys([*fp32, *modules]):
            place(module, device)
            own = [
                each for each in (*all_parameters(module), *all_buffers(module)) if each not in done
            ]
            # fully_shard refuses parameters that are not contiguous: transposed ones, those in channels_last.
            for parameter in own:
                if isinstance(parameter, nn.Parameter) and not parameter.is_contiguous():
                    parameter.data = parameter.data.contiguous()
            broadcast_from_rank_0(own)
            kind: Any = type(module)
            with without_overrides(module):
                fully_shard(
                    module,
                    mesh=self._mesh,
                    reshard_after_forward=options.reshard_after_forward,
                    mp_policy=fp32_policy if module in fp32 else policy,
                    offload_policy=offload,
                    # A parameter of another unit gathers itself where this one uses it.
                    ignored_params={
                        each for each in all_parameters(module) if each in done or not each.ndim
                    },
                )
            state = fully_shard.state(module)  # type: ignore[attr-defined]  # see torch's comment on fully_shard
            module.__class__ = kind
            done.update(own)
            group = state._fsdp_param_group
            if group is not None:
                self._groups.append(group)
                originals = {
                    each._parameters[name]: original for each, name, original in self._registrations
                }
                for each in group.fsdp_params:
                    self._stand_in(each, originals[each.sharded_param], rows_mesh)
            if module is inner:
                state._lazy_init()

    def _stand_in(self, record: Any, original: Any, mesh: DeviceMesh) -> None:
        """Let the user's parameter, which stands for the shard, be registered in place of the shard."""
        self._originals[record] = original
        gradient, original.grad = original.grad, None
        sharded, register = record.sharded_param, record._setattr_on_modules
        rows = full_tensors.dtensor_of(sharded._local_tensor, sharded, mesh)
        full_tensors.stand_in(original, rows, self._registry)
        if gradient is not None:  # of this rank's batch, from before the block
            original.grad = differentiable.all_reduce(gradient, "mean")
        record.sharded_param, record._sharding_spec = original.shard, original.shard._spec
        getattr(record, "_sharding_spec_by_dtype", {}).clear()  # of torch 2.15
        record.reset_sharded_param = lambda: None
        record.free_unsharded_param = functools.partial(self._free, record.free_unsharded_param)
        record._setattr_on_modules = lambda each: register(
            each if each is getattr(record, "unsharded_param", None) else original
        )
        register(original)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, which all-gathers parameters from all ranks."""
        is_trained = torch.is_grad_enabled()
        how = self._how if is_trained and self._inner.model.training else None
        if how == "rank0":
            self._buffers.broadcast()
        self._prepare(is_trained=is_trained)
        self._has_transformed |= is_in_transform() or is_differentiating_forward()
        try:
            # Not in inference mode: fully_shard reuses its buffers in training, where autograd saves them.
            with (
                torch.inference_mode(mode=False),
                torch.set_grad_enabled(is_trained),
                _naming_forward_ad(),
            ):
                hooked = iter(self._inner(*args, **kwargs))
            for record, original in self._originals.items():
                gathered = getattr(
                    record, "unsharded_param", None
                )  # None: of a unit that no forward has used
                if gathered is None:
                    continue
                # `.data =` gives it other memory
                if (
                    gathered._version
                    or gathered.data_ptr() != record.all_gather_outputs[0].data_ptr()
                ):
                    raise SyncError(
                        f"forward has written to {self._names[original]}",
                        why="under fsdp it computes with gathered copies, which are freed",
                        fix="update parameters, such as those of a momentum encoder, outside of forward, or use ddp",
                    )
        finally:
            for (
                record,
                original,
            ) in self._originals.items():  # the root has left gathered ones registered
                record._setattr_on_modules(original)
                hooks = original.shard._backward_hooks
                if len(hooks) > 1 and hasattr(record, "unsharded_param"):  # hooks of the user's
                    record.unsharded_param._backward_hooks = hooks
        if how == "mean":
            self._buffers.average()
        output, self._output = self._output, None
        return map_leaves(lambda each: _cast(each, next(hooked)), output)

    def _flatten(self, _module: nn.Module, _args: Any, output: Any) -> list[Any]:
        """Give fully_shard, which hooks outputs, a list (before torch 2.13 it finds no tensors in dataclasses).

        A hook of a view would be lost when the user changes the view in place, such as `logits /= temperature`.
        """
        self._output = output
        return [
            each if getattr(each, "_base", None) is None else each._base for each in leaves(output)
        ]

    def _free(self, free: Callable[[], None]) -> None:
        """Free a gathered parameter, unless a backward had create_graph=True: its own backward reads it."""
        self._is_kept |= is_in_backward() and torch.is_grad_enabled()
        if not self._is_kept:
            free()

    def _prepare(self, *, is_trained: bool) -> None:
        for module, name, original in self._registrations:
            if module._parameters.get(name) is not original:
                raise SyncError(
                    f"{self._names[original]} was replaced in the block, by a functional call, or by a failed backward",
                    why="fsdp computes with the parameters that it sharded at the entry of the block",
                    fix="copy into the parameter (no assign=True of load_state_dict), or use backend='ddp'",
                )
        if is_trained:
            self._has_trained = True
        elif self._has_trained:  # a rank that evaluates alone waits here, in a group of its own
            self._has_trained = any(differences([digest("a forward without gradients")]))
        is_stale, self._writes = self._writes != self._registry.writes, self._registry.writes
        for group in self._groups:
            if is_stale:
                self._is_kept = False
                group.reshard()
                group.lazy_init()  # which parameters are trained may have changed
            for each in group.fsdp_params if group.is_unsharded and not is_trained else ():
                each._setattr_on_modules(each.unsharded_param)

    def _refuse_lost_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        lost = [
            getattr(getattr(each, "unsharded_param", None), "grad", None)
            for each in self._originals
        ]
        if any(each is not None for each in lost) and self._has_transformed:
            what = f"torch.func or forward AD: gradients are not in the parameters of {type(optimizer).__name__}"
            raise SyncError(what, why=_WHY_NOT_TRANSFORMED, fix=_INSTEAD_OF_TRANSFORMS)
        self._has_transformed = False
        if any(each is not None for each in lost):
            raise SyncError(
                f"gradients of a loss are not in the parameters of {type(optimizer).__name__}",
                why="under fsdp, backward has to go through the output of the model",
                fix="return that loss, or what it is computed from, from forward: as tensors, or in lists, dicts or "
                "dataclasses, whose tensors are found; or use backend='ddp'",
            )

    @override
    def close(self, *, failed: bool) -> None:
        self._registry.open_engines -= 1
        self._steps.end()
        for record, original in self._originals.items():
            record._setattr_on_modules(original)
            vars(record).clear()  # of cycles, in which shards would stay alive
        for group in self._groups:
            group.pre_backward = _refuse_backward
        for each, key in self._hooks_of_units:
            each.pop(key, None)
        for module in self._inner.modules():
            _module_state_mapping.pop(module, None)  # else fully_shard could not be applied again
        if failed:
            return
        if not self._restore:
            self._registry.leave_sharded()
            return
        self._steps.close()
        self._hooks.close()
        originals = list(self._originals.values())
        for each in originals:
            make_plain(each, self._home)
        restore(self._registry, self._home)
        if self._options.broadcast_buffers:
            self._buffers.broadcast()
        if self._mesh.ndim > 1 and any(differences([fingerprint(originals)])):
            raise SyncError(
                f"copies of {type(self._inner.model).__name__} differ between their ranks",
                why="code that only some ranks run has changed this rank's rows of parameters, or their gradients",
                fix="make the same changes on every rank",
            )


@contextlib.contextmanager
def _naming_forward_ad() -> Iterator[None]:
    """Name forward AD in errors of fully_shard's own function in front of a unit, which has no tangents."""
    try:
        yield
    except RuntimeError as error:
        if not is_differentiating_forward() or _NO_TANGENTS not in str(error):
            raise
        what = "torch.func or forward AD, with inputs of a block that need gradients, under fsdp"
        raise ConfigError(what, why=_WHY_NOT_TRANSFORMED, fix=_INSTEAD_OF_TRANSFORMS) from error


def _cast(value: Any, hooked: Any) -> Any:
    """Return an output in the dtype that a policy has given it."""
    return value.to(hooked.dtype) if isinstance(value, torch.Tensor) else value


class _UnitHook(functools.partial[Any]):
    """A hook of fully_shard on a unit; that of a copy or pickle of the unit does nothing."""

    def __reduce__(self) -> Any:
        return _UnitHook, (_do_nothing,)


def _do_nothing(*_: Any) -> None: ...


def _refuse_backward(*_: Any) -> None:
    raise SyncError(
        "backward after the block in which the loss was computed",
        why="its gradients would not be averaged over the ranks",
        fix="call backward inside the block",
    )


def _gather(
    home: torch.device, _module: nn.Module, values: dict[str, Any], _prefix: str, _metadata: Any
) -> None:
    """Replace the shards in a state dict by full tensors."""
    for key, value in values.items():
        if isinstance(value, full_tensors.ShardedTensor) and not value.registry.keeps_shards:
            values[key] = full_tensors.gathered_view(value, home)


def _dictionaries(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the attributes of a model's modules, and those of them that hold hooks."""
    attributes = [vars(each) for each in model.modules()]
    return [
        *attributes,
        *(each for owner in attributes for each in owner.values() if isinstance(each, OrderedDict)),
    ]


def _policies(options: FSDPBackend, inner: Inner) -> tuple[Any, Any]:
    """Return the mixed precision policy, and the policy of modules that stay in fp32 (None: no such modules)."""
    session = inner.session
    if options.mixed_precision is not None or session.weights_dtype is None:
        return options.mixed_precision or MixedPrecisionPolicy(
            reduce_dtype=session.communication_dtype
        ), None
    # Autocast casts inputs per operation. fully_shard would cast all inputs, even integers stored as floats.
    reduce_dtype = session.communication_dtype or torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=session.weights_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    return policy, MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
