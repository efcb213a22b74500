"""Full tensors that follow shards: EMA copies of a sharded model, and views of a gathered parameter.

A copy keeps its plain tensors. Once one is combined with shards, this rank's slice of it is kept instead of the whole
(adopted), and all slices are gathered into the same storage when the whole is read.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from parallelize.backends.sharded_tensors import full_tensors, shard
from parallelize.runtime import differentiable

__all__ = ["FollowedTensor", "FollowedTensors", "Semantics", "copies_of_modules", "is_engine_hook", "own_copy"]

_COPY_METHODS = ("__deepcopy__", "__reduce_ex__")
_FSDP_ATTRIBUTES = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
_MIN_BEFORE_PRUNING = 1000


@dataclass(eq=False)
class FollowedTensor:
    """A full tensor, known by its storage, and the shard that it follows.

    Args:
        storage: weak reference to the storage of the full tensor.
        shard: this rank's slice.
        shape: shape of the full tensor.
        stride: strides of the full tensor.
        group: copies with the same number are gathered together; None: a view, which is written to its shard.
        is_fresh: whether the full tensor has the values of the shards.
        is_pinned: whether others may read the storage unseen, such as autograd or numpy, so that it is never freed.
    """

    storage: Any
    shard: DTensor
    shape: torch.Size
    stride: tuple[int, ...]
    group: int | None = None
    is_fresh: bool = True
    is_pinned: bool = False

    @property
    def full(self) -> torch.Tensor | None:
        """The full tensor; None if its storage was freed by its last owner."""
        storages: Any = torch.UntypedStorage
        storage = storages._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=self.shard.dtype, device=storage.device)
        return empty.set_(storage, 0, self.shape, self.stride)

    @property
    def is_expired(self) -> bool:
        """Whether nothing on this rank uses the full tensor."""
        expired: bool = self.storage.expired()
        return expired

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, which has this storage, is all of it in its usual layout."""
        same = tensor.shape == self.shape and tensor.stride() == self.stride and tensor.dtype == self.shard.dtype
        return bool(same and tensor.storage_offset() == 0)


class FollowedTensors:
    """All tensors of this process that follow shards.

    Attributes:
        before_gather: called before the slices of copies are gathered.
    """

    def __init__(self) -> None:
        self.before_gather: Callable[[], None] = lambda: None
        self._by_storage: dict[int, FollowedTensor] = {}
        self._group = 0
        self._num_before_pruning = _MIN_BEFORE_PRUNING

    def __bool__(self) -> bool:
        return bool(self._by_storage)

    def find(self, tensor: torch.Tensor) -> FollowedTensor | None:
        """Return the entry of the tensor's storage, if any."""
        try:
            return self._by_storage.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors and functorch's wrappers have no storage
            return None

    def begin_group(self) -> None:
        """Let tensors that are adopted from now on be gathered separately from earlier ones."""
        self._group += 1

    def follow(self, tensor: torch.Tensor, sharded: DTensor, *, is_view: bool) -> FollowedTensor:
        """Let a whole tensor follow a shard: a view writes to the shard, a copy owns it."""
        storage = tensor.untyped_storage()
        if is_view:
            self._forget([each for each in self._by_storage.values() if each.group is None and each.is_expired])
        elif len(self._by_storage) >= self._num_before_pruning:
            self._forget_unused()
        entry = FollowedTensor(_weak_reference(storage), sharded, tensor.shape, tensor.stride())
        entry.group = None if is_view else self._group
        self._by_storage[storage._cdata] = entry
        return entry

    def adopt(self, tensor: torch.Tensor, *, like: DTensor) -> FollowedTensor | None:
        """Keep only this rank's slice of a full tensor, laid out `like` a shard; None if it is a part of a storage."""
        storage = tensor.untyped_storage()
        is_alone = storage.nbytes() == tensor.numel() * tensor.element_size() and storage.resizable()
        if not is_alone or not tensor.numel():
            return None
        return self.follow(tensor, own_copy(shard(tensor, like=like)), is_view=False)

    def drop(self, entry: FollowedTensor) -> None:
        """Let a tensor be an ordinary full tensor again."""
        self._forget([entry])

    def wrote_shard(self, entry: FollowedTensor) -> None:
        """Record that the shard of a copy has changed, and free its full tensor."""
        entry.is_fresh = False
        full = entry.full
        if full is not None and not entry.is_pinned:
            full.untyped_storage().resize_(0)

    def refresh(self, entry: FollowedTensor) -> None:
        """Gather the slices of a copy, and of those that were adopted with it, into their full tensors."""
        if not entry.is_fresh:
            self._refresh([each for each in self._by_storage.values() if each.group == entry.group])

    def refresh_parameters(self, module: nn.Module, _args: Any = None) -> None:
        """Gather the copies among a module's own parameters; a hook that runs before each forward."""
        for each in module._parameters.values():
            entry = self.find(each) if type(each) is nn.Parameter else None
            if entry is not None:
                self.refresh(entry)

    def close(self, *, failed: bool) -> None:
        """Make all copies full, without collectives if `failed`: those that were not gathered are then NaN."""
        entries = [each for each in self._by_storage.values() if each.group is not None]
        if failed:
            for full in [each.full for each in entries if not each.is_fresh]:
                if full is not None:
                    full.untyped_storage().resize_(full.numel() * full.element_size())
                    full.fill_(torch.nan if full.is_floating_point() or full.is_complex() else 0)
        else:
            self._refresh(entries, with_roll_call=False)
        self._by_storage.clear()

    def _refresh(self, entries: Sequence[FollowedTensor], *, with_roll_call: bool = True) -> None:
        if all(each.is_fresh for each in entries):
            return
        if with_roll_call:
            self.before_gather()
        self._forget_unused()
        remaining = set(map(id, self._by_storage.values()))
        stale = [each for each in entries if not each.is_fresh and id(each) in remaining]
        for each, values in zip(stale, full_tensors([each.shard for each in stale]), strict=True):
            full = each.full
            if full is not None:
                full.untyped_storage().resize_(full.numel() * full.element_size())
                full.copy_(values)
            each.is_fresh = True

    def _forget_unused(self) -> None:
        """Forget copies that no rank uses any more; a collective, as ranks may collect garbage at different times."""
        copies = [each for each in self._by_storage.values() if each.group is not None]
        in_use = torch.tensor([not each.is_expired for each in copies], dtype=torch.bool)
        is_used_anywhere = differentiable.all_reduce(in_use, "max").tolist()
        self._forget([each for each, is_used in zip(copies, is_used_anywhere, strict=True) if not is_used])
        self._num_before_pruning = max(_MIN_BEFORE_PRUNING, 2 * len(self._by_storage))

    def _forget(self, entries: Sequence[FollowedTensor]) -> None:
        ids = set(map(id, entries))
        self._by_storage = {key: each for key, each in self._by_storage.items() if id(each) not in ids}


def own_copy(sharded: DTensor) -> DTensor:
    """Copy a shard, whose local tensor may be a view of a full tensor."""
    copied: Any = sharded.detach().clone()
    return cast("DTensor", copied)


_weak_reference: Any = StorageWeakRef


class Semantics(Protocol):
    """What a copy needs of `FullTensorSemantics`."""

    followed: FollowedTensors

    def shard_of(self, value: Any) -> Any:
        """Return the shard that a parameter stands for, the shard itself, or None."""

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which tensors are used as they are."""


@contextlib.contextmanager
def copies_of_modules(model: nn.Module, *, semantics: Semantics, device: torch.device) -> Iterator[None]:
    """Let deepcopy and pickle of a sharded model, or of a submodule, return plain modules inside the context."""
    followed = semantics.followed

    def placeholder(sharded: DTensor) -> nn.Parameter:
        with semantics.suspended():
            full = torch.empty(sharded.shape, dtype=sharded.dtype, device=device)
            followed.wrote_shard(followed.follow(full, own_copy(sharded), is_view=False))
            return nn.Parameter(full, requires_grad=sharded.requires_grad)

    def deepcopy(module: nn.Module, memo: dict[Any, Any]) -> Any:
        kind: Any = _plain_class(module)
        is_outermost = "parallelize" not in memo
        if is_outermost:
            followed.begin_group()
            memo["parallelize"] = None
        for parameter in module.parameters():
            sharded = semantics.shard_of(parameter)
            if sharded is not None and id(parameter) not in memo:
                copied = memo.get(id(sharded))
                memo[id(parameter)] = memo[id(sharded)] = placeholder(sharded) if copied is None else copied
        memo[id(module)] = other = kind.__new__(kind)
        other.__setstate__(copy.deepcopy(_plain_state(module), memo))
        if is_outermost:
            followed.begin_group()
        return other

    def install(module: nn.Module) -> None:
        def reduce(protocol: Any) -> Any:
            return copy.deepcopy(module).__reduce_ex__(protocol)

        module.__dict__["__deepcopy__"] = functools.partial(deepcopy, module)
        module.__dict__["__reduce_ex__"] = reduce

    modules = list(model.modules())
    for module in modules:
        install(module)
    try:
        yield
    finally:
        for module in modules:
            for name in _COPY_METHODS:
                module.__dict__.pop(name, None)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return type(module).__mro__[FSDPModule._orig_cls_mro_index] if isinstance(module, FSDPModule) else type(module)


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """Return the state of a module without what the engine has set on it."""
    attributes: Any = module
    state = {
        name: value
        for name, value in attributes.__getstate__().items()
        if name not in _COPY_METHODS and not name.startswith(_FSDP_ATTRIBUTES)
    }
    hook_dicts = {name: each for name, each in state.items() if isinstance(each, dict)}
    engine_hooks = {key for hooks in hook_dicts.values() for key, hook in hooks.items() if is_engine_hook(hook)}
    for name, hooks in hook_dicts.items():
        if engine_hooks & hooks.keys():
            state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in engine_hooks)
    return state


def is_engine_hook(hook: Any, *, packages: tuple[str, ...] = ("torch.distributed.fsdp", "parallelize.")) -> bool:
    """Whether a value in a module's dictionary is a hook of one of these packages."""
    if isinstance(hook, (nn.Module, torch.Tensor)):  # submodules, whose classes fully_shard created
        return False
    origin = getattr(getattr(hook, "hook", hook), "__module__", None)
    return isinstance(origin, str) and origin.startswith(packages)
