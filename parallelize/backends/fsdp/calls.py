"""What runs when a torch function is called on sharded tensors: it runs on rows or full tensors.

    what a call gets      what it is
    ShardedTensor         a gradient, a copy, ...: stands for a shard, and holds this rank's rows
    ShardedParameter      the user's parameter in a block, which does so as well
    FullView              `p[0]`, `p.T`, ...: shares memory with a gathered tensor

    run(function, args, kwargs)
    ├── METHODS           what has an answer of its own, such as hooks and attributes
    ├── FUNCTIONS         the same, for calls on views as well
    ├── on rows           functions by element, of shards that are cut alike and of plain numbers
    ├── with cut operands functions by element that write a full tensor into a sharded one: its
    │                     rows are sent, as rank 0 has them, and the function runs on rows
    ├── fused             kernels of optimizers with fused=True: they run on rows
    ├── one by one        functions of lists, such as those of optimizers with foreach=True
    └── on full tensors   all others. Operands are gathered. What the function has written goes back
                          to the shards, as rank 0 has it: random numbers are rank 0's

All ranks make the same calls in one order, because most calls are collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.backends.fsdp.functions import (
    FACTS,
    FUSED,
    NORMS_OF_LIST,
    VIEWS,
    is_by_element,
    is_in_place,
    is_over_all,
)
from parallelize.backends.fsdp.shards import (
    Version,
    full_tensor,
    full_tensor_with_gradient,
    mark_changed,
    record_of,
    shard_like,
    share_version,
    storage_of,
    version_of,
)
from parallelize.errors import SyncError
from parallelize.run.containers import map_leaves, tensors_in
from parallelize.run.sharded_tensors import ShardedTensors


class CalledAsFull:
    """Base of tensors whose torch functions run as if on the full tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return run(func, args, kwargs or {})


class Sharded(CalledAsFull):
    """What ShardedTensor and ShardedParameter share: their shard, and a DTensor's own attributes.

    Attributes:
        shard: the DTensor that this tensor stands for.
        registry: the sharded tensors of its run.
    """

    shard: Any
    registry: ShardedTensors

    def __getattr__(self, name: str) -> Any:
        """Return what a DTensor has: full_tensor, to_local, placements, device_mesh."""
        # torch asks for special methods that subclasses of tensors may have.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["shard"], name)


class ShardedTensor(Sharded, torch.Tensor):
    """A result of sharded tensors, such as a gradient."""


class FullView(CalledAsFull, torch.Tensor):
    """A tensor that shares memory with a gathered one: what is written to it reaches the shard."""

    gathered: Gathered


class Gathered:
    """A full tensor that was gathered, and the versions with which it and its shard were equal.

        equal            the full tensor has the values of the shard
        out of date      the shard was written to:        `refresh` gathers again
        written to       the full tensor was written to:  `write_back` writes to the shard

    Attributes:
        shard: the shard.
        full: the full tensor.
    """

    def __init__(self, shard: Any, full: torch.Tensor) -> None:
        self.shard = shard
        self.full = full
        self._note_equal()

    def _note_equal(self) -> None:
        self._version_of_shard = version_of(self.shard)
        self._version_of_full = self.full._version

    def as_view(self, tensor: Any) -> Any:
        """Mark a tensor as a view of the gathered one, so that writes to it reach the shard."""
        tensor.__class__ = FullView
        tensor.gathered = self
        return tensor

    def refresh(self) -> None:
        """Gather again if the shard has been written to."""
        if self._version_of_shard != version_of(self.shard):
            self.full.copy_(full_tensor(self.shard))
        self._note_equal()

    def write_back(self) -> None:
        """Write what was written to the full tensor to the shards, as rank 0 has it."""
        if self._version_of_full == self.full._version:
            return
        rows = shard_like(self.full, self.shard, source=0)._local_tensor
        self.shard._local_tensor.detach().copy_(rows)
        mark_changed(self.shard)
        self._note_equal()


def let_stand(tensor: Any, shard: Any, registry: ShardedTensors, read_from: Any = None) -> None:
    """Let a tensor stand for a shard; its class is set by the caller; see `stand_for`."""
    tensor.__dict__.update(shard=shard, registry=registry)
    record = record_of(shard)
    record.standing = weakref.ref(tensor)
    if record.place is None:
        record.place = registry.next_place(read_from)
    registry.add(tensor, record.place)


def stand_for(value: Any, registry: ShardedTensors, read_from: Any = None) -> Any:
    """Return the tensor that stands for a DTensor; a plain, full one if no rows are cut.

    Args:
        value: the DTensor. Other values are returned as they are.
        registry: the sharded tensors of its run.
        read_from: the sharded tensor of which it is an attribute; None: of none.
    """
    if not isinstance(value, DTensor):
        return value
    reference = record_of(value).standing
    standing: Any = None if reference is None else reference()
    if standing is not None:
        return standing
    if not any(placement.is_shard() for placement in value.placements):
        return full_tensor_with_gradient(value)
    standing = value._local_tensor.detach()
    standing.__class__ = ShardedTensor
    let_stand(standing, value, registry, read_from)
    return standing


def _shard_of(value: Any) -> Any:
    """Return the DTensor that a tensor stands for; any other value as it is."""
    if isinstance(value, Sharded):
        return value.shard
    return value


def gradients_error(what: str) -> SyncError:
    """Return the error for gradients that backward would not leave in the parameters."""
    return SyncError(
        f"{what} sharded parameters",
        why="under fsdp, backward averages gradients over the ranks and cuts them into shards",
        fix="call backward() and read .grad, use register_hook, or use backend='ddp'",
    )


@dataclass(slots=True)
class Call:
    """A call of a torch function.

    Attributes:
        function: the function, or `__get__` or `__set__` of an attribute.
        args: its positional arguments.
        kwargs: its keyword arguments.
        name: its name.
        target: its first argument, of which it is a method; None without arguments.
    """

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    name: str
    target: Any


Handler = Callable[[Call], Any]


def run(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function that has got a sharded tensor, or a view of a gathered one."""
    name = function.__name__
    target: Any = args[0] if args else None
    call = Call(function, args, kwargs, name, target)
    if name in METHODS and isinstance(target, Sharded):
        return METHODS[name](call)
    if name in FUNCTIONS:
        return FUNCTIONS[name](call)
    if _is_exact_on_rows(call):
        return _run_on_rows(call)
    if _takes_full_operand(call):
        return _run_with_cut_operands(call)
    if name in FUSED:
        return _run_fused(call)
    if "foreach_" in name and len(target) > 1:
        return _run_one_by_one(call)
    return run_on_full(call)


# Handlers of METHODS: the target is sharded


def _ask_shard(call: Call) -> Any:
    """Call the function on the shard, which has the shape of the full tensor, and the gradient."""
    return call.function(call.target.shard, *call.args[1:], **call.kwargs)


def _get_attribute(call: Call) -> Any:
    """Return an attribute of the shard: `grad`, which is a DTensor, as a sharded tensor."""
    getter = GETTERS.get(call.function.__self__.__name__)
    if getter is not None:
        return getter(call)
    return stand_for(call.function(call.target.shard), call.target.registry, call.target)


def _set_attribute(call: Call) -> None:
    setter = SETTERS.get(call.function.__self__.__name__)
    if setter is not None:
        setter(call)
    else:
        call.function(call.target.shard, call.args[1])


def _get_data(call: Call) -> Any:
    """Return the tensor of the same rows, whose version is that of the target."""
    shard = call.target.shard
    record = record_of(shard)
    if record.data_alias is None:
        alias = call.function(shard)
        record_of(alias).version = record.version
        record.data_alias = stand_for(alias, call.target.registry, call.target)
    return record.data_alias


def _set_data(call: Call) -> None:
    """Copy values into the rows, which fully_shard knows; see `Record.data_alias`."""
    target, value = call.args
    shard, new = target.shard, _shard_of(value)
    if (new.dtype, new.shape) != (shard.dtype, shard.shape):
        raise SyncError(
            f"data of {new.dtype} and {tuple(new.shape)} for a sharded parameter",
            why=f"it has {shard.dtype} and {tuple(shard.shape)}, which fsdp keeps in the block",
            fix="change the model before the block",
        )
    alias = record_of(shard).data_alias
    if alias is not None:
        rows = alias.shard._local_tensor.clone()
        alias.data = rows
        alias.shard._local_tensor = rows
        record_of(alias.shard).version = Version()
        record_of(shard).data_alias = None
    with torch.no_grad():
        run(torch.Tensor.copy_, (target, value), {})


def _set_gradient(call: Call) -> None:
    """Set the gradient: the shard of a full one, as rank 0 has it."""
    target, gradient = call.args
    if isinstance(gradient, Sharded):
        gradient = gradient.shard
    elif gradient is not None:
        if isinstance(gradient, FullView):
            gradient.gathered.refresh()
        gradient = shard_like(gradient, target.shard, source=0)
    call.function(target.shard, gradient)


def _set_whether_trained(call: Call) -> None:
    """Set `requires_grad`, for which fully_shard prepares its units anew."""
    mark_changed(call.target.shard)
    call.function(call.target.shard, call.args[1])


def _change_whether_trained(call: Call) -> Any:
    """Call `requires_grad_`, and return the target, as it does."""
    mark_changed(call.target.shard)
    _ask_shard(call)
    return call.target


def _register_hook(call: Call) -> Any:
    """Register a hook on the shard, which gets and returns sharded tensors in place of shards."""
    target, hook = call.args
    # torch's register_multi_grad_hook waits for the autograd nodes of these tensors, which no
    # backward reaches: the units of fully_shard have others.
    if getattr(hook, "__module__", "") == torch.autograd.graph.__name__:
        raise gradients_error("register_multi_grad_hook of")

    def hook_of_shard(gradient_or_shard: Any) -> Any:
        if gradient_or_shard is target.shard:
            return _shard_of(hook(target))
        return _shard_of(hook(stand_for(gradient_or_shard, target.registry)))

    return call.function(target.shard, hook_of_shard)


def _show(call: Call) -> Any:
    """Return the text of a tensor; that of a parameter shows no `grad_fn` of the gather."""
    shard = call.target.shard
    if not isinstance(call.target, nn.Parameter):
        return run_on_full(call)
    full = nn.Parameter(full_tensor(shard), shard.requires_grad)
    return call.function(full, *call.args[1:], **call.kwargs)


# Handlers of FUNCTIONS


def _copy(call: Call) -> Any:
    return run(torch.clone, call.args[:1], {})


def _copy_each(call: Call) -> None:
    """Copy a list of tensors into another one: DTensor knows how to copy single ones."""
    targets, sources = call.args[:2]
    for target, source in zip(targets, sources, strict=True):
        run(torch.Tensor.copy_, (target, source), {})


def _refuse_gradients(_call: Call) -> Any:
    raise gradients_error("torch.autograd.grad of")


def _read_only_array(call: Call) -> Any:
    """Return a NumPy array that cannot be written to: a write to it would not reach the shard.

    An array of another dtype is a copy, which may be written to.
    """
    array = run_on_full(call)
    array.flags.writeable = array.flags.owndata
    return array


# Calls on rows

_BYTES_OF_HALF = 2


def _is_tracked(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_plain_number(tensor: Any) -> bool:
    """Return whether a tensor is a number that is equal on all ranks, such as a norm or a step."""
    is_view = isinstance(tensor, FullView)
    return not (tensor.ndim or tensor.requires_grad or is_view)


def _is_exact_on_rows(call: Call) -> bool:
    """Return whether DTensor computes from rows what the function computes from full tensors."""
    targets = tensors_in(call.args[:1])
    if call.name == NORMS_OF_LIST:
        is_known = not _is_tracked([_shard_of(tensor) for tensor in targets])
    elif is_over_all(call.name, call.args[1:], call.kwargs):
        # In half precision, the ranks' numbers would be rounded before they are reduced.
        is_known = call.target.dtype.itemsize > _BYTES_OF_HALF
    else:
        is_known = is_by_element(call.name)
    if not is_known or not targets or "out" in call.kwargs or call.kwargs.get("inplace"):
        return False
    if not all(isinstance(tensor, Sharded) for tensor in targets):
        return False
    operands = tensors_in((call.args[1:], call.kwargs))
    return all(isinstance(tensor, Sharded) or _is_plain_number(tensor) for tensor in operands)


def _run_on_rows(call: Call) -> Any:
    """Let DTensor run the function on the rows, and note what it has written to."""
    args, kwargs = map_leaves(_shard_of, (call.args, call.kwargs))
    result = call.function(*args, **kwargs)
    if call.name == NORMS_OF_LIST:
        return _norms(result)
    targets = tensors_in(args[:1])
    if is_in_place(call.name):
        for shard in targets:
            mark_changed(shard)
    elif isinstance(result, DTensor) and result is not targets[0]:
        # `detach`, and `to` or `contiguous` that have nothing to do, return the same rows.
        share_version(result, targets[0])
    # Operands may be of several runs: of a model that an earlier run has left sharded, and of one
    # that is trained now. The result belongs to the operand that was passed last.
    registry = ShardedTensors()
    for operand in tensors_in((call.args, call.kwargs)):
        if isinstance(operand, Sharded):
            registry = operand.registry
    return map_leaves(lambda value: stand_for(value, registry), result)


def _run_fused(call: Call) -> None:
    """Run the kernel of an optimizer with fused=True on rows.

    The kernel computes each element from the same element of its operands. torch counts no version
    for it: what it had written to full tensors would not go back to the shards.
    """

    def rows_of(value: Any) -> Any:
        if isinstance(value, Sharded):
            return value.shard._local_tensor
        return value

    args, kwargs = map_leaves(rows_of, (call.args, call.kwargs))
    call.function(*args, **kwargs)
    for operand in tensors_in((call.args, call.kwargs)):
        if isinstance(operand, Sharded):
            mark_changed(operand.shard)


def _norms(partial_norms: Sequence[Any]) -> list[torch.Tensor]:
    """Return the norms of full tensors, by one collective for all of them."""
    first = partial_norms[0]
    stacked = torch.stack([norm._local_tensor for norm in partial_norms])
    norms = DTensor.from_local(stacked, first.device_mesh, first.placements, run_check=False)
    return list(norms.full_tensor())


def _takes_full_operand(call: Call) -> bool:
    """Return whether a function by element writes full, plain operands into a sharded tensor.

    Such as `p.copy_(saved)`, `p.mul_(mask)`, and the update of Muon, `p.add_(update, alpha=-lr)`.
    Rank 0's values of the operands count, as they would if all were gathered, so that it suffices
    to send the rows of these. Without a write, each rank would need its own values.
    """
    target = call.target
    if not (isinstance(target, Sharded) and is_in_place(call.name) and is_by_element(call.name)):
        return False
    operands = tensors_in((call.args[1:], call.kwargs))
    if "out" in call.kwargs or _is_tracked([target.shard, *operands]):
        return False
    return all(
        isinstance(operand, Sharded) or _is_plain_number(operand) or _has_shape(operand, target)
        for operand in operands
    )


def _has_shape(operand: torch.Tensor, target: Sharded) -> bool:
    return not isinstance(operand, FullView) and operand.shape == target.shard.shape


def _run_with_cut_operands(call: Call) -> Any:
    """Run a function with sharded tensors, of rank 0's values, in place of its plain operands."""
    target = call.target

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Sharded) or not value.ndim:
            return value
        return stand_for(shard_like(value, target.shard, source=0), target.registry)

    operands, kwargs = map_leaves(cut, (call.args[1:], call.kwargs))
    return run(call.function, (target, *operands), kwargs)


def _run_one_by_one(call: Call) -> list[Any] | None:
    """Run a function of lists for the members of each place; None: it returns nothing."""
    results: list[Any] = []
    for place in range(len(call.target)):
        args: list[Any] = []
        for argument in call.args:
            is_list = isinstance(argument, (list, tuple))
            args.append(argument[place : place + 1] if is_list else argument)
        results += run(call.function, args, call.kwargs) or ()
    return results or None


# Calls on full tensors


class _FullOperands:
    """The full tensors that a function gets in place of its operands, and whose they are.

    Args:
        operands: the operands. A view among them saves the gather of its shard, which may be
            another operand, as in `x @ x.T`.
    """

    def __init__(self, operands: Sequence[Any]) -> None:
        self._all_gathered: list[Gathered] = []
        self._gathered_by_shard: dict[int, Gathered] = {}  # by the id of the shard
        self._operand_by_id: dict[int, Any] = {}  # by the id of what the function has got
        for operand in operands:
            if isinstance(operand, FullView):
                operand.gathered.refresh()
                self._add(operand.gathered)

    def _add(self, gathered: Gathered) -> None:
        self._all_gathered.append(gathered)
        self._gathered_by_shard[id(gathered.shard)] = gathered

    def full(self, operand: Any) -> Any:
        """Return what the function gets in place of an operand."""
        if not isinstance(operand, torch.Tensor):
            return operand
        full: Any = operand
        if isinstance(operand, FullView):
            full = operand.as_subclass(torch.Tensor)
        elif isinstance(operand, Sharded):
            full = self._gather(operand.shard).full
        self._operand_by_id[id(full)] = operand
        return full

    def _gather(self, shard: Any) -> Gathered:
        gathered = self._gathered_by_shard.get(id(shard))
        is_tracked = _is_tracked([shard])
        # A view of a tracked shard was gathered without a gradient.
        if gathered is None or gathered.full.requires_grad is not is_tracked:
            gather = full_tensor_with_gradient if is_tracked else full_tensor
            gathered = Gathered(shard, gather(shard))
            self._add(gathered)
        return gathered

    def write_back(self) -> None:
        """Write what the function has written to the shards."""
        for gathered in self._all_gathered:
            gathered.write_back()

    def result(self, value: Any) -> Any:
        """Return what the user gets in place of a result: an operand, a view, or the result."""
        if id(value) in self._operand_by_id:
            return self._operand_by_id[id(value)]
        if not isinstance(value, torch.Tensor) or value.requires_grad:
            return value
        # Sparse tensors, for one, have no storage, and are no views.
        if value.layout is torch.strided:
            for gathered in self._all_gathered:
                if storage_of(gathered.full) == storage_of(value):
                    return gathered.as_view(value)
        return value


def run_on_full(call: Call) -> Any:
    """Run a function on full tensors, and write what it has changed back to the shards."""
    operands = _FullOperands(tensors_in((call.args, call.kwargs)))
    # The operands are known by their ids, so that these have to live until the results are known.
    args, kwargs = map_leaves(operands.full, (call.args, call.kwargs))
    result = call.function(*args, **kwargs)
    operands.write_back()
    return map_leaves(operands.result, result)


METHODS: Mapping[str, Handler] = {
    **dict.fromkeys(FACTS, _ask_shard),
    "__get__": _get_attribute,
    "__set__": _set_attribute,
    "__delete__": _ask_shard,
    "__repr__": _show,
    "requires_grad_": _change_whether_trained,
    "register_hook": _register_hook,
    "register_post_accumulate_grad_hook": _register_hook,
}
"""Name of a function whose first argument is sharded -> what runs in its place."""

GETTERS: Mapping[str, Handler] = {"data": _get_data, **dict.fromkeys(VIEWS, run_on_full)}
"""Name of an attribute of a sharded tensor -> what runs when it is read."""

SETTERS: Mapping[str, Handler] = {
    "data": _set_data,
    "grad": _set_gradient,
    "requires_grad": _set_whether_trained,
}
"""Name of an attribute of a sharded tensor -> what runs when it is set."""

FUNCTIONS: Mapping[str, Handler] = {
    "__deepcopy__": _copy,
    "_foreach_copy_": _copy_each,
    "grad": _refuse_gradients,
    "__array__": _read_only_array,
    "numpy": _read_only_array,
}
"""Name of a function that gets a sharded tensor or a view anywhere -> what runs in its place."""
