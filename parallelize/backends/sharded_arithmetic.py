"""Function mode in which shards of parameters behave like the full tensors, in the user's code of an fsdp block.

Element-wise work runs on this rank's shards and sends nothing. Reductions to one number send that number. Any other
operation, such as a matrix product, gathers the full tensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from parallelize.backends.alike_shards import run_on_alike
from parallelize.backends.function_kinds import KINDS, Kind, is_in_place, kind_of
from parallelize.backends.sharded_calls import PLAIN, ShardedCall, map_tensors
from parallelize.backends.sharded_copies import FollowedTensors, is_engine_hook, own_copy
from parallelize.backends.sharded_tensors import full_tensor, shard
from parallelize.errors import SyncError
from parallelize.runtime.function_modes import function_modes, replace_function_modes
from parallelize.runtime.rank_comparison import differences

__all__ = ["FullTensorSemantics", "semantics"]

_NESTED = (torch.Tensor, list, tuple)
_VIEW_ATTRIBUTES = KINDS[Kind.VIEW_ATTRIBUTE]
_ATTRIBUTES_TO_FOLLOW = {*_VIEW_ATTRIBUTES, "data"}
_LOCAL_KINDS = (Kind.GET, Kind.ELEMENTWISE, Kind.METADATA)
_NONE: Mapping[str, Any] = {}


class FullTensorSemantics(TorchFunctionMode):
    """Gives shards, and the objects that stand for them, the semantics of full tensors.

    Attributes:
        forms: id of a parameter that stands for a shard, as those from before the block -> (itself, the shard).
        followed: full tensors that follow shards.
        num_writes: counts operations that may have changed shards.
    """

    def __init__(self) -> None:
        self.forms: dict[int, tuple[Any, Any]] = {}
        self._gathered: dict[int, tuple[torch.Tensor | None, ...]] = {}  # id of a shard -> what stands for it
        self._data: dict[int, list[weakref.ref[Any]]] = {}  # id of a shard -> its `p.data` that are in use
        self._keep_gathered: dict[int, Callable[[], None]] = {}
        self.followed = FollowedTensors()
        self.num_writes = 0
        self._originals: dict[int, Any] = {}  # id of a shard -> the user's parameter from before the block

    def shard_of(self, value: Any) -> Any:
        """Return the shard that a parameter stands for, the shard itself, or None."""
        if type(value) is DTensor and id(value) not in self.forms:
            return value
        return self.forms.get(id(value), (None, None))[1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or _NONE
        kind = kind_of(func)
        result = self._run_on_alike(func, kind, args, kwargs) if kind in _LOCAL_KINDS and args else NotImplemented
        if result is not NotImplemented:
            return result
        if kind is Kind.GRADIENT and kwargs.get("create_graph"):
            for keep_gathered in self._keep_gathered.values():
                keep_gathered()
        if torch.compiler.is_compiling() or not (
            self._concerns(args) or (kwargs is not _NONE and self._concerns(kwargs.values()))
        ):
            return func(*args, **kwargs)
        if kind is Kind.GET:
            return self._get(func, args[0])
        if kind is Kind.SET:
            return self._set(func, *args)
        if kind is Kind.GRADIENT:
            return self._differentiate(func, args, dict(kwargs))
        args, kwargs = map_tensors(self._without_form, args), map_tensors(self._without_form, kwargs)
        if kind is Kind.NEW:
            return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
        if func.__name__ == "register_hook":  # of the leaf of the graph, after a forward
            leaf = self._gathered.get(id(args[0]), (None,))[0]
            args = (args[0] if leaf is None else leaf, *args[1:])
        if kind is Kind.METADATA:
            return func(*args, **kwargs)
        result = ShardedCall(self, func, args, kwargs).run(kind)
        is_snapshot = func.__name__ == "clone" and type(result) is DTensor and not result.requires_grad
        return self._snapshot(result) if is_snapshot and not _is_in_step() else result

    def _snapshot(self, sharded: Any) -> torch.Tensor:
        """Return a plain tensor that follows a shard, for a clone that may be used after the block."""
        with self.suspended():
            full = torch.empty(sharded.shape, dtype=sharded.dtype, device=sharded.device)
            self.followed.wrote_shard(self.followed.follow(full, sharded.detach(), is_view=False))
            return full

    def _run_on_alike(self, func: Any, kind: Kind, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call in which all tensors are shards that are alike, which most calls of an optimizer's step are."""
        first = args[0]
        if type(first) is list and first and kind is Kind.ELEMENTWISE:
            first = first[0]
        if type(first) is not DTensor or id(first) in self.forms or func.__name__ == "clone":
            return NotImplemented
        if kind is Kind.GET:
            return NotImplemented if func.__self__.__name__ in _ATTRIBUTES_TO_FOLLOW else func(first)
        if kind is Kind.METADATA:
            return func(first) if len(args) == 1 and not kwargs else NotImplemented
        result = run_on_alike(func, args, kwargs, forms=self.forms, takes_scalars=not self.followed)
        if result is not NotImplemented and is_in_place(func):
            self.num_writes += 1
        return result

    def _concerns(self, values: Any) -> bool:
        for each in values:
            kind = type(each)
            if kind is DTensor:
                return True
            if kind in PLAIN:
                if id(each) in self.forms or (self.followed and self.followed.find(each) is not None):
                    return True
            elif (kind is list or kind is tuple) and each and isinstance(each[0], _NESTED) and self._concerns(each):
                return True
        return False

    def _without_form(self, value: Any) -> Any:
        return self.forms[id(value)][1] if id(value) in self.forms else value

    def _get(self, func: Any, target: Any) -> Any:
        sharded = self.shard_of(target)
        name = func.__self__.__name__
        if name in _VIEW_ATTRIBUTES:
            return ShardedCall(self, func, (target if sharded is None else sharded,), _NONE).run(Kind.OTHER)
        value = func(target if sharded is None else sharded)
        if name == "data" and sharded is not None:
            known = [each for each in self._data.get(id(sharded), ()) if each() is not None]
            self._data[id(sharded)] = [*known, weakref.ref(value)]
        return value

    def _set(self, func: Any, target: Any, value: Any) -> None:
        name = func.__self__.__name__
        sharded, source = self.shard_of(target), self.shard_of(value)
        if name == "data" and sharded is not None:
            self._set_data(sharded, value if source is None else source)
        elif name == "data" and source is not None:
            self._follow_data(func, target, source)
        elif name == "grad" and sharded is not None and value is None:
            func(target, None)
            func(sharded, None)
        elif name == "grad" and sharded is not None and source is None and not any(differences([value])):
            func(sharded, shard(value, like=sharded))
        elif name == "grad" and sharded is not None and source is None:
            func(target, value)  # refused at the next step
        elif name == "grad" and source is not None and sharded is None:
            func(target, full_tensor(source).to(target.device))
        else:
            func(target if sharded is None else sharded, value if source is None else source)

    def _set_data(self, sharded: Any, value: torch.Tensor) -> None:
        if value.shape != sharded.shape or value.dtype != sharded.dtype:
            raise SyncError(
                f"`p.data = new` inside an fsdp block, from {tuple(sharded.shape)} {sharded.dtype} to "
                f"{tuple(value.shape)} {value.dtype}",
                why="the parameter's shards have the shape and dtype that it had at the entry of the block",
                fix="change shapes and dtypes before the block, and use amp= to compute in half precision",
            )
        for each in self._data.pop(id(sharded), ()):
            former: Any = each()
            if former is not None and former is not value:  # `old = p.data` keeps its values
                former._local_tensor = former._local_tensor.clone()
        with torch.no_grad():
            ShardedCall(self, torch.Tensor.copy_, (sharded.detach(), value), _NONE).run(Kind.ELEMENTWISE)

    def _follow_data(self, func: Any, target: Any, source: Any) -> None:
        """Set the data of a plain tensor to a sharded result: the tensor keeps only this rank's slice."""
        entry = self.followed.find(target)
        if entry is None or not entry.is_whole(target) or source.shape != target.shape or entry.group is None:
            full = torch.empty(source.shape, dtype=source.dtype, device=target.device)
            func(target, full)
            entry = self.followed.follow(full, own_copy(source), is_view=False)
        else:
            entry.shard.copy_(source.detach())
        self.followed.wrote_shard(entry)

    def _differentiate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call autograd.grad or backward with the gathered parameters, which the graph of a forward has as leaves."""

        def leaf_of(value: Any) -> Any:
            sharded = self._without_form(value)
            leaf = self._gathered.get(id(sharded), (None,))[0]
            return sharded if leaf is None else leaf

        return func(*map_tensors(leaf_of, args), **map_tensors(leaf_of, kwargs))

    @contextlib.contextmanager
    def active(
        self,
        originals: Iterable[torch.Tensor],
        *,
        shards: Mapping[int, Any],
        wait: Callable[[], None],
        keep_gathered: Callable[[], None],
    ) -> Iterator[None]:
        """Give the shards of one model full-tensor semantics inside the context.

        Args:
            originals: the parameters from before the block.
            shards: id of an original -> its shard.
            wait: returns when all ranks have called it; called before copies are gathered.
            keep_gathered: called before a backward whose own graph will have a backward.
        """
        forms = {id(each): (each, shards[id(each)]) for each in originals}
        self._originals.update({id(sharded): each for each, sharded in forms.values()})
        for each, sharded in forms.values():
            for hook in tuple((each._post_accumulate_grad_hooks or {}).values()):
                sharded.register_post_accumulate_grad_hook(hook)  # fully_shard calls it with the averaged gradient
        if not self.forms:
            self._install()
            self.followed.before_gather = wait
        self.forms.update(forms)
        self._keep_gathered[id(shards)] = keep_gathered
        try:
            yield
        finally:
            del self._keep_gathered[id(shards)]
            self._data.clear()
            is_of_model = set(map(id, shards.values()))
            self.forms = {key: each for key, each in self.forms.items() if id(each[1]) not in is_of_model}
            self._gathered = {key: each for key, each in self._gathered.items() if key not in is_of_model}
            self._originals = {key: each for key, each in self._originals.items() if key not in is_of_model}
            if not self.forms:
                self._remove()

    def register_gathered(self, sharded: Any, gathered: tuple[torch.Tensor | None, ...]) -> None:
        """Let parameters that fully_shard registers in place of a shard stand for it; the first is the graph's leaf."""
        former = self._gathered.get(id(sharded), ())
        if len(former) == len(gathered) and all(map(operator.is_, former, gathered)):
            return
        for each in former:
            self.forms.pop(id(each), None)
        self.forms.update({id(each): (each, sharded) for each in gathered if each is not None})
        self._gathered[id(sharded)] = gathered
        leaf: Any = gathered[0]
        if leaf is not None and leaf.requires_grad and all(leaf is not each for each in former):
            for each in (self._originals.get(id(sharded)), sharded):
                _copy_hooks(each, to=leaf)

    def close_copies(self, *, failed: bool) -> None:
        """Make all copies full at the end of a block; see `FollowedTensors.close`."""
        with self.suspended():
            self.followed.close(failed=failed)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Remove this mode from the thread's stack inside the context."""
        is_installed = any(each is self for each in function_modes())
        if is_installed:
            self._remove()
        try:
            yield
        finally:
            if is_installed:
                self._install()

    @contextlib.contextmanager
    def suspended_for_forward(self) -> Iterator[None]:
        """Suspend this mode for a model's forward; copies that the model calls in it are gathered before."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.suspended())
            if self.followed:
                self.followed.begin_group()
                stack.callback(register_module_forward_pre_hook(self.followed.refresh_parameters).remove)
            yield

    def without(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, called with this mode removed."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.suspended():
                return function(*args, **kwargs)

        return call

    def _install(self) -> None:
        """Push this mode below the user's modes, which exit by popping the top, and above the default device."""
        modes = function_modes()
        index = 1 if modes and hasattr(modes[0], "old_device") else 0
        replace_function_modes([*modes[:index], self, *modes[index:]])

    def _remove(self) -> None:
        replace_function_modes([each for each in function_modes() if each is not self])


def _copy_hooks(parameter: Any, *, to: Any) -> None:
    """Copy the user's gradient hooks of a parameter to the gathered one, with this rank's gradient."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        if not is_engine_hook(hook):
            to.register_hook(hook)


def _is_in_step() -> bool:
    """Whether an optimizer is stepping: its state stays sharded."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


semantics = FullTensorSemantics()
"""The mode of this process; one for all engines, whose shards may meet in one operation."""
