"""Sharded tensors that behave as the full tensors that one process has.

    the user's Parameter   a ShardedParameter in the block: the same object, whose data are this rank's rows
        .shard             the DTensor of these rows, a leaf of autograd
    p.grad, p * 2, ...     a ShardedTensor, with a `shard` as well
    p[0], p.T, ...         a _FullView of the gathered tensor: what is written to it reaches the shard

A torch function that gets one of them runs, in this order of preference,

    on the rows            if it is element by element, of numbers and of tensors that are sharded alike;
                           the sum or norm of all elements becomes a plain number
    on full tensors        else. They are gathered, differentiably. What the function has written, as
                           rank 0 has it, goes back to the shards: random numbers are rank 0's.

Nothing is watched or replaced besides: inside forward, fully_shard registers plain parameters.
Whatever is alive when the block ends becomes a plain tensor, in place.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from parallelize.errors import SyncError
from parallelize.run.containers import leaves, map_leaves
from parallelize.run.sharded_tensors import ShardedTensors
from parallelize.torch_patches.backward import Pass, Run

__all__ = [
    "ShardedParameter",
    "ShardedTensor",
    "dtensor_of",
    "full_tensor",
    "gathered_view",
    "keeping_shards",
    "refuse_inputs",
    "registry_of",
    "shard_like",
    "stand_for",
    "stand_in",
]


class _Full:
    """What is called as a full tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _call(func, args, kwargs or {})


class _Sharded(_Full):
    """What both classes of sharded tensors have.

    Attributes:
        shard: the DTensor that this tensor stands for.
        registry: the sharded tensors of its run.
    """

    shard: Any
    registry: ShardedTensors

    def __getattr__(self, name: str) -> Any:
        """Return what a DTensor has: full_tensor, to_local, placements, device_mesh."""
        if name.startswith("__"):  # torch asks for what subclasses may have
            raise AttributeError(name)
        return getattr(self.__dict__["shard"], name)


class ShardedTensor(_Sharded, torch.Tensor):
    """A result of sharded tensors, such as a gradient."""


class ShardedParameter(_Sharded, nn.Parameter):
    """A parameter of a sharded model, or of a copy of one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a parameter with a copy of the shard."""
        rows = self.shard._local_tensor.clone()
        copied = memo[id(self)] = nn.Parameter(rows, self.shard.requires_grad)
        copied.__dict__.update(self.__dict__)
        stand_in(copied, dtensor_of(rows, self.shard), self.registry)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the full parameter, as a plain one."""
        full: Any = nn.Parameter(full_tensor(self.shard), self.requires_grad)
        return full.__reduce_ex__(protocol)


class _FullView(_Full, torch.Tensor):
    """A view of a gathered tensor."""

    gathered: _Gathered


def stand_in(parameter: Any, shard: Any, registry: ShardedTensors) -> None:
    """Let a parameter stand for a leaf of autograd with these rows, which become its data."""
    leaf: Any = nn.Parameter(shard)
    # DTensor would keep a gradient as the operation has produced it, e.g. replicated.
    leaf.register_hook(functools.partial(_redistributed, leaf.placements))
    hooks = list((parameter._backward_hooks or {}).values())
    late_hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    parameter.data = leaf._local_tensor
    parameter.__dict__.update(shard=leaf, registry=registry)
    leaf.__dict__["stands_for_it"] = weakref.ref(parameter)
    is_trained, parameter.__class__ = parameter.requires_grad, ShardedParameter
    for each in hooks:
        parameter.register_hook(each)
    for each in late_hooks:
        parameter.register_post_accumulate_grad_hook(each)
    leaf.requires_grad_(is_trained)
    registry.add(parameter)


def _redistributed(placements: Any, gradient: Any) -> Any:
    if not isinstance(gradient, DTensor):  # the unit's, whose hooks these are as well
        return gradient
    if gradient.device.type != "cpu":
        torch.accelerator.synchronize()  # fully_shard adds to gradients on another stream
    return gradient.redistribute(placements=placements)


def dtensor_of(rows: torch.Tensor, like: Any, mesh: Any = None) -> Any:
    """Return the DTensor of this rank's rows of a tensor like another one."""
    mesh = mesh or like.device_mesh
    moved = DTensor.from_local(
        rows, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    # Offloaded rows are on another device than the mesh.
    return DTensor(rows, moved._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch's


def stand_for(result: Any, registry: ShardedTensors) -> Any:
    """Return the tensor that stands for a DTensor; a plain one if it is not sharded."""
    if not isinstance(result, DTensor):
        return result
    if not any(each.is_shard() for each in result.placements):
        return _gathered(result)
    known = result.__dict__.get("stands_for_it", lambda: None)()
    if known is None:
        known = result._local_tensor.detach()
        known.__class__ = ShardedTensor
        known.__dict__.update(shard=result, registry=registry)
        result.__dict__["stands_for_it"] = weakref.ref(known)
        registry.add(known)
    return known


def _shard_of(value: Any) -> Any:
    """Return the DTensor that a tensor stands for; any other value as it is."""
    return value.shard if isinstance(value, _Sharded) else value


def registry_of(tensor: Any) -> ShardedTensors:
    """Return the sharded tensors of the run that a tensor is of; those of no run for a DTensor of the user's own."""
    return tensor.registry if isinstance(tensor, _Sharded) else ShardedTensors()


@contextlib.contextmanager
def keeping_shards(model: nn.Module) -> Iterator[None]:
    """Let state dicts of a model have its shards in the context, in place of full tensors."""
    registries = {
        parameter.registry for parameter in model.parameters() if isinstance(parameter, _Sharded)
    }
    for registry in registries:
        registry.keeps_shards = True
    try:
        yield
    finally:
        for registry in registries:
            registry.keeps_shards = False


class _Gathered:
    """A gathered tensor, the shard that it was gathered from, and what was written until then."""

    def __init__(self, shard: Any, full: torch.Tensor, registry: ShardedTensors) -> None:
        self.shard = shard
        self.full = full
        self._registry = registry
        self.writes = registry.writes
        self.version = full._version

    def view(self, value: Any) -> Any:
        """Let a tensor that shares memory with the gathered one be known as its view."""
        value.__class__, value.gathered = _FullView, self
        return value

    def refresh(self) -> None:
        """Gather again what has been written to shards since."""
        if self.writes != self._registry.writes:
            self.full.copy_(full_tensor(self.shard))
            self.writes = self._registry.writes
        self.version = self.full._version

    def write_back(self) -> None:
        """Write what has changed to the shards of all ranks, as rank 0 has it."""
        if self.full._version == self.version:
            return
        rows = shard_like(self.full, self.shard, source=0)
        self.shard._local_tensor.detach().copy_(rows._local_tensor)
        self._registry.writes += 1
        self.writes, self.version = self._registry.writes, self.full._version


def gathered_view(tensor: Any, home: torch.device) -> Any:
    """Return the full tensor of a sharded one on a device: what is written to it reaches the shard."""
    full = full_tensor(tensor.shard).to(home)
    return _Gathered(tensor.shard, full, tensor.registry).view(full.detach())


def full_tensor(shard: Any) -> torch.Tensor:
    """All-gather a DTensor, and return the full tensor on the device of the mesh."""
    # Offloaded shards are on another device than the mesh.
    full: torch.Tensor = shard.detach().to(shard.device_mesh.device_type).full_tensor()
    return full


def shard_like(full: torch.Tensor, like: Any, *, source: int | None = None) -> Any:
    """Return the shards of a full tensor; `source`: the rank whose values count; None: all have the same."""
    mesh = like.device_mesh
    rows: Any = distribute_tensor(
        full.detach().to(mesh.device_type), mesh, like.placements, src_data_rank=source
    )
    return rows.to(like.device)


def _gathered(shard: Any) -> torch.Tensor:
    """Gather a shard, or a partial sum, differentiably: backward averages the gradients of the ranks."""
    mesh = shard.device_mesh
    full: torch.Tensor = shard.to(mesh.device_type).full_tensor(
        grad_placements=[Partial()] * mesh.ndim
    )
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())  # type: ignore[no-untyped-call]  # torch does not say
    return full


# Functions that are asked of a shard, and those that keep elements apart although torch does not call them pointwise.
_FACTS = re.compile(
    "size|dim|ndimension|numel|nelement|stride|element_size|is_contiguous|is_floating_point|is_complex|is_signed|"
    "retain_grad|get_device|storage_offset|__len__"
)
_BY_ELEMENT = re.compile(
    "clone|copy_|zero_|fill_|zeros_like|ones_like|empty_like|full_like|detach|detach_|to|float|half|double|bfloat16|type|"
    "cpu|cuda|contiguous|_foreach_copy_|_foreach_zero_|_foreach_norm|_amp_foreach_non_finite_check_and_unscale_"
)
_VIEWS = frozenset(["T", "mT", "H", "mH", "real", "imag"])  # attributes
_OF_ALL = {
    "sum": ((),),
    "norm": ((), (2,)),
    "linalg_vector_norm": ((), (2,)),
}  # name -> other arguments


def _call(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    name, target = func.__name__, args[0] if args else None
    if isinstance(target, _Sharded):
        shard, registry = target.shard, target.registry
        if name == "__get__" and func.__self__.__name__ not in _VIEWS:
            value = stand_for(func(shard), registry)
            return (
                shard.__dict__.setdefault("alias", value)
                if func.__self__.__name__ == "data"
                else value
            )
        if name == "__set__":
            return _set(func, target, args[1])
        if _FACTS.fullmatch(name):
            return func(shard, *args[1:], **kwargs)
        if name == "requires_grad_":
            registry.writes += 1
            shard.requires_grad_(*args[1:], **kwargs)
            return target
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            hook = args[1]
            if (
                getattr(hook, "__module__", "") == torch.autograd.graph.__name__
            ):  # it waits for nodes of these tensors
                raise _gradients_error("register_multi_grad_hook of")
            return func(
                shard,
                lambda each: _shard_of(
                    hook(target if each is shard else stand_for(each, registry))
                ),
            )
    if name == "__deepcopy__":
        return _call(torch.clone, args[:1], {})
    if func is torch.autograd.grad:
        raise _gradients_error("torch.autograd.grad of")
    result = _on_shards(func, name, args, kwargs)
    if result is not NotImplemented:
        return result
    if "foreach_" in name and len(args[0]) > 1:
        return _one_by_one(func, args, kwargs)
    return _on_full(func, name, args, kwargs)


def refuse_inputs(each: Pass, run: Run) -> None:
    """Refuse a pass for some sharded parameters: it would give them no gradients. A subscriber."""
    if any(isinstance(root, _Sharded) for root in each.options["inputs"] or ()):
        raise _gradients_error("backward(inputs=...) with")
    run(each)


def _gradients_error(what: str) -> SyncError:
    return SyncError(
        f"{what} sharded parameters",
        why="under fsdp, backward averages gradients over the ranks and cuts them into shards",
        fix="call backward() and read .grad, use register_hook, or use backend='ddp'",
    )


def _set(func: Any, target: Any, value: Any) -> None:
    shard, name = target.shard, func.__self__.__name__
    if name == "data":
        given = _shard_of(value)
        if (given.dtype, given.shape) != (shard.dtype, shard.shape):
            raise SyncError(
                f"data of {given.dtype} and {tuple(given.shape)} for a sharded parameter",
                why=f"it has {shard.dtype} and {tuple(shard.shape)}, which fsdp keeps in the block",
                fix="change the model before the block",
            )
        alias = shard.__dict__.pop("alias", None)
        if alias is not None:  # which keeps what it holds, as the parameter gets other memory
            alias.data = alias.shard._local_tensor = alias.shard._local_tensor.clone()
        with torch.no_grad():
            _call(torch.Tensor.copy_, (target, value), {})
        return
    if name == "grad" and isinstance(value, torch.Tensor):
        value = value.shard if isinstance(value, _Sharded) else shard_like(value, shard, source=0)
    if name == "requires_grad":
        target.registry.writes += 1
    func(shard, value)


@functools.cache
def _is_by_element(name: str) -> bool:
    """Whether the operator that a function of this name runs keeps elements apart, and draws no random numbers."""
    base = re.sub("^__[ri]?(true)?|__$|.*foreach_|^(max|min|where)$", "", name)  # __rtruediv__: div
    packet = getattr(torch.ops.aten, base, None)
    tags = {
        tag for each in (packet.overloads() if packet else ()) for tag in getattr(packet, each).tags
    }
    return bool(_BY_ELEMENT.fullmatch(name)) or (
        torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    )


def _tensors(value: Any) -> list[Any]:
    return [each for each in leaves(value) if isinstance(each, torch.Tensor)]


def _is_tracked(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)


def _on_shards(func: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
    """Return what DTensor computes, where that is exact; NotImplemented if it needs full tensors."""
    given = map_leaves(_shard_of, (tuple(args), kwargs))
    tensors, firsts = _tensors(given), _tensors(given[0][:1])
    plain = [each for each in tensors if not isinstance(each, DTensor)]
    # Plain numbers are equal on all ranks, or rank 0's count, in full tensors.
    is_mixed = any(each.ndim or each.requires_grad or isinstance(each, _FullView) for each in plain)
    is_known = _is_by_element(name) or (tuple(args[1:]) in _OF_ALL.get(name, ()) and not kwargs)
    if (
        not is_known
        or is_mixed
        or "out" in kwargs
        or not firsts
        or not all(isinstance(each, DTensor) for each in firsts)
    ):
        return NotImplemented
    if name == "_foreach_norm" and _is_tracked(firsts):
        return NotImplemented
    result = func(*given[0], **given[1])
    if name == "_foreach_norm":
        return _norms(result)
    # Operands may be of several runs: of a model that an earlier one has left sharded, and of one that is trained now.
    registries = {
        each.registry: None for each in leaves((args, kwargs)) if isinstance(each, _Sharded)
    }
    if result is None or result is given[0][0]:
        for registry in registries:
            registry.writes += 1
    newest = [*registries][-1]
    return map_leaves(lambda each: stand_for(each, newest), result)


def _norms(norms: Sequence[Any]) -> list[torch.Tensor]:
    """Return the norms of full tensors from partial ones, by one collective."""
    local, like = torch.stack([each._local_tensor for each in norms]), norms[0]
    return list(
        DTensor.from_local(local, like.device_mesh, like.placements, run_check=False).full_tensor()
    )


def _one_by_one(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Run a function of lists for each of their members."""
    found: list[Any] = []
    for index in range(len(args[0])):
        one = [
            each[index : index + 1] if isinstance(each, (list, tuple)) else each for each in args
        ]
        found += _call(func, one, kwargs) or ()
    return found or None


def _on_full(func: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
    """Run a function on full tensors, and write what it has changed back to the shards."""
    found: dict[int, _Gathered] = {}

    def full(value: Any) -> Any:
        if isinstance(value, _FullView):
            found[id(value.gathered.full)] = value.gathered
            value.gathered.refresh()
            return value.as_subclass(torch.Tensor)
        shard = _shard_of(value)
        if shard is value:
            return value
        if id(shard) not in found:
            gather = _gathered if _is_tracked([shard]) else full_tensor
            found[id(shard)] = _Gathered(shard, gather(shard), value.registry)
        whole = found[id(shard)].full
        if name == "__repr__" and isinstance(value, nn.Parameter):
            return nn.Parameter(whole, shard.requires_grad)
        return whole

    given = (tuple(args), kwargs)
    mapped = map_leaves(full, given)
    result = func(*mapped[0], **mapped[1])
    for each in found.values():
        each.write_back()
    if name == "numpy":
        result.flags.writeable = False
    origins = {each.full.untyped_storage()._cdata: each for each in found.values()}
    same = {id(one): other for one, other in zip(_tensors(mapped), _tensors(given), strict=True)}

    def back(value: Any) -> Any:
        if id(value) in same:
            return same[id(value)]
        is_view = isinstance(value, torch.Tensor) and not value.requires_grad
        gathered = origins.get(value.untyped_storage()._cdata) if is_view else None
        return value if gathered is None else gathered.view(value)

    return map_leaves(back, result)
