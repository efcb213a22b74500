"""What stands in FSDP2's objects from the entry of a block to its end: the user's own Parameters.

FSDP2 (torch's fully_shard) registers another parameter in a module whenever it gathers or shards
it. The user's code, and the optimizers, have the Parameter objects of before the block. So these
objects stand for the shards:

    forward and backward of a unit    its gathered parameters are registered in its modules
    everywhere else                   the originals are registered, which gather themselves where
                                      they are used
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from parallelize.backends.fsdp import full_tensors
from parallelize.backends.fsdp.distributions import watch_distributions
from parallelize.backends.fsdp.shards import dtensor_of
from parallelize.backends.fsdp.units import is_sharded
from parallelize.errors import SyncError
from parallelize.gradients import differentiable
from parallelize.plugins.base import Inner
from parallelize.run.sharded_tensors import ShardedTensors
from parallelize.torch_patches.backward import is_in_backward
from parallelize.torch_patches.module_tensors import all_named_parameters, without_overrides

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "__composable_api_state_key")
"""Attributes of modules that fully_shard sets begin with one of these."""


class StandInParameter:
    """The original of a parameter, which stands for the shard in FSDP2's record.

    Args:
        record: the FSDPParam.
        original: the user's Parameter. It is a ShardedParameter from `enter` to the block's end.
    """

    def __init__(self, record: Any, original: Any) -> None:
        self.record = record
        self.original = original
        self._register: Callable[[nn.Parameter], None] = record._setattr_on_modules

    def enter(self, registry: ShardedTensors, mesh: DeviceMesh, free: Callable[..., None]) -> None:
        """Make the original a ShardedParameter, and let it stand in FSDP2's record.

        Args:
            registry: the sharded tensors of the run.
            mesh: the mesh of the original's DTensor.
            free: is called with the record's own `free_unsharded_param` in place of it.
        """
        record, original = self.record, self.original
        gradient = original.grad
        original.grad = None
        sharded = record.sharded_param
        rows = dtensor_of(sharded._local_tensor, sharded, mesh)
        full_tensors.stand_in(original, rows, registry)
        if gradient is not None:
            # A gradient from before the block is of the batch of this rank alone.
            original.grad = differentiable.all_reduce(gradient, "mean")
        record.sharded_param = original.shard
        record._sharding_spec = original.shard._spec
        getattr(record, "_sharding_spec_by_dtype", {}).clear()
        record.reset_sharded_param = _do_nothing
        record.free_unsharded_param = functools.partial(free, record.free_unsharded_param)
        record._setattr_on_modules = self._register_for_fsdp
        self.register_original()

    @property
    def gathered(self) -> Any:
        """The gathered parameter; None: no forward has used the unit yet."""
        return getattr(self.record, "unsharded_param", None)

    def _register_for_fsdp(self, parameter: nn.Parameter) -> None:
        """Register the gathered parameter if FSDP2 registers it, and the original for a shard."""
        if parameter is not self.gathered:
            parameter = self.original
        self._register(parameter)

    def register_original(self) -> None:
        """Register the original in all modules that have this parameter."""
        self._register(self.original)

    def share_hooks(self) -> None:
        """Let hooks that the user has registered on the original run for the gathered parameter.

        A shard has one hook of its own, see `full_tensors.stand_in`.
        """
        hooks = self.original.shard._backward_hooks
        if len(hooks) > 1 and self.gathered is not None:
            self.gathered._backward_hooks = hooks

    @property
    def was_written(self) -> bool:
        """Whether forward has written to the gathered parameter, or given it other memory."""
        gathered = self.gathered
        if gathered is None:
            return False
        memory = self.record.all_gather_outputs[0]
        return bool(gathered._version or gathered.data_ptr() != memory.data_ptr())

    @property
    def has_unreduced_gradient(self) -> bool:
        """Whether a backward pass has left a gradient in the gathered parameter."""
        return self.gathered is not None and self.gathered.grad is not None

    def leave(self) -> None:
        """Register the original, and take the record apart: it is in cycles, which keep shards."""
        self.register_original()
        vars(self.record).clear()


class StandIn:
    """All that is replaced in FSDP2's objects, and in the model's modules, until `close`.

    ======================== ====== ============================== ================================
    replaced                 of     what torch has it for          what stands there in the block
    ======================== ====== ============================== ================================
    sharded_param            record the rows to gather; gets       the original's DTensor, whose
                                    `.grad`                        mesh has a group of its own
    _sharding_spec           record the mesh of gradients          that DTensor's
    _sharding_spec_by_dtype  record the same, for other dtypes     nothing: torch computes it anew
                                    (from torch 2.15 on)
    _setattr_on_modules      record registers the shard or the     registers the original in place
                                    gathered parameter             of the shard
    reset_sharded_param      record follows the parameter that     does nothing: the original has
                                    load_state_dict has assigned   got the values, and stays
    free_unsharded_param     record frees the gathered parameter   frees it, unless a backward with
                                                                   create_graph=True has read it
    pre_backward             group  gathers a unit for backward    gathers it, and registers what is
                                                                   gathered; raises after the block
    pre_forward,             group  the collectives of a unit      the same, after those that other
    post_forward,                                                  ranks make: see unit_order.py
    post_backward
    _root_post_backward_     state  ends a backward pass           the same, after the collectives
    final_callback                                                 that other ranks still make
    __class__                module a new class, FSDPLinear        the user's class
    hooks                    module the methods of the state       the same; in copies and pickles
                                                                   of a module they do nothing
    marks (`_is_fsdp_...`)   module tell torch.compile, and the    nothing: a copy is no unit
                                    next fully_shard, of the unit
    _module_state_mapping    torch  the state of a module: a       the same; removed at the end,
                                    second fully_shard is refused  for the next block
    ======================== ====== ============================== ================================

    Args:
        inner: the root of fully_shard, before that.
        names: parameter -> its name, for errors.
        registry: the sharded tensors of the run.

    Attributes:
        groups: module of a unit -> its FSDPParamGroup, which gathers its parameters and reduces
            their gradients. Inner units come first, the root last; units without parameters, which
            have no group, are left out.
        parameters: the parameters of all units, in the same order.
        keeps_gathered: whether gathered parameters are not freed: a backward with
            create_graph=True has run, and the next backward reads what it has saved.
    """

    def __init__(
        self, inner: Inner, names: dict[nn.Parameter, str], registry: ShardedTensors
    ) -> None:
        self.groups: dict[nn.Module, Any] = {}
        self.parameters: list[StandInParameter] = []
        self.keeps_gathered = False
        self._parameter_of: dict[nn.Parameter, StandInParameter] = {}
        self._inner = inner
        self._names = names
        self._registry = registry
        self._originals = _originals_of(inner.model)
        self._keys_before = {
            id(dictionary): set(dictionary) for dictionary in _dictionaries(inner.model)
        }
        # (dictionary of hooks, key in it)
        self._hooks_of_units: list[tuple[dict[Any, Any], int]] = []

    def shard(self, module: nn.Module, rows_mesh: DeviceMesh, options: dict[str, Any]) -> None:
        """Make a module a unit by fully_shard, and let the originals stand for its shards.

        Args:
            module: the module, whose parameters are on the device, and equal on all ranks.
            rows_mesh: the mesh of the originals' DTensors.
            options: arguments of fully_shard.
        """
        user_class: Any = type(module)
        with without_overrides(module):
            fully_shard(module, **options)
        state = _state_of(module)
        watch_distributions(state, module)
        module.__class__ = user_class
        group = state._fsdp_param_group
        if group is None:
            return
        self.groups[module] = group
        for record in group.fsdp_params:
            registered = record._module_info
            original = self._originals[registered.module, registered.param_name]
            parameter = StandInParameter(record, original)
            parameter.enter(self._registry, rows_mesh, self._free)
            self.parameters.append(parameter)
            self._parameter_of[parameter.original] = parameter
        group.pre_backward = functools.partial(_gather_for_backward, group, group.pre_backward)

    def complete(self) -> None:
        """Tell FSDP2 that all units are there; note its hooks on modules, and remove its marks.

        Without this, FSDP2 would take the first module that is called for the root, which may be a
        part of the model.
        """
        _state_of(self._inner)._lazy_init()
        for dictionary in _dictionaries(self._inner.model):
            keys_before = self._keys_before.get(id(dictionary), dictionary.keys())
            for key in dictionary.keys() - keys_before:
                is_hook = isinstance(key, int)
                if is_hook:
                    self._hooks_of_units.append((dictionary, key))
                # Beside the hooks themselves, torch has dictionaries of flags by the same ids.
                if is_hook and callable(dictionary[key]):
                    dictionary[key] = HookOfBlock(dictionary[key])
                if not is_hook and key.startswith(_MARKS):
                    del dictionary[key]

    def states(self) -> list[Any]:
        """Return the FSDPStates of all units, also of those without parameters."""
        states: list[Any] = _state_of(self._inner)._state_ctx.all_states
        return states

    def _free(self, free: Callable[[], None]) -> None:
        """Free a gathered parameter, unless the backward of a backward may read it.

        FSDP2 calls this when backward has passed a unit. Under create_graph=True, gradients are
        enabled in backward, and the graph of the gradients refers to the gathered parameter.
        """
        if is_in_backward() and torch.is_grad_enabled():
            self.keeps_gathered = True
        if not self.keeps_gathered:
            free()

    def replaced(self, *, accepts_gathered: bool) -> str | None:
        """Return the name of a parameter in whose place another one is registered; None: none.

        Args:
            accepts_gathered: whether gathered parameters may be registered, as they are in forward
                and backward.
        """
        for (module, name), original in self._originals.items():
            registered = module._parameters.get(name)
            if registered is original:
                continue
            gathered = self._parameter_of[original].gathered
            if registered is None or registered is not gathered or not accepts_gathered:
                return self._names[original]
        return None

    def added(self) -> str | None:
        """Return the name of a parameter that the model did not have at the entry; None: none."""
        expected = {parameter.gathered for parameter in self.parameters}
        expected.update(self._names)
        for name, parameter in all_named_parameters(self._inner.model):
            if parameter not in expected:
                return name
        return None

    def gather_anew(self) -> None:
        """Let the next forward gather all parameters: their values may have changed."""
        self.keeps_gathered = False
        for group in self.groups.values():
            group.reshard()
            # Which parameters are trained may have changed, too.
            group.lazy_init()

    def register_gathered(self) -> None:
        """Register the gathered parameters of all units that are gathered already.

        FSDP2 registers them only when it gathers them, so that a forward that finds them gathered
        would compute with the originals, which gather themselves once more.
        """
        for group in self.groups.values():
            if group.is_unsharded:
                register_gathered(group)

    def register_originals(self) -> None:
        """Register the originals after a forward: FSDP2 leaves the root's parameters gathered."""
        for parameter in self.parameters:
            parameter.register_original()
            parameter.share_hooks()

    def close(self) -> None:
        """Take everything back: the model's modules are as they were before the block."""
        for parameter in self.parameters:
            parameter.leave()
        for group in self.groups.values():
            group.pre_backward = _refuse_backward
        for dictionary, key in self._hooks_of_units:
            dictionary.pop(key, None)
        for module in self._inner.modules():
            _module_state_mapping.pop(module, None)


def register_gathered(group: Any) -> None:
    """Register the parameters of a group that is gathered."""
    for record in group.fsdp_params:
        record._setattr_on_modules(record.unsharded_param)


def _gather_for_backward(group: Any, gather: Callable[..., None], *arguments: Any) -> None:
    """Gather a unit for backward, and register what is gathered, until backward has passed it.

    A custom Function may run modules of the unit again in its backward, and differentiate them by
    the parameters that it has saved, which are gathered ones (adjoints of differential equations).
    FSDP2 registers parameters only when it gathers them, and the root, for example, is still
    gathered from forward: there, the originals are registered since.

    Args:
        group: the group of the unit.
        gather: the group's own `pre_backward`.
        *arguments: those of `pre_backward`.
    """
    was_gathered = group.is_unsharded
    gather(*arguments)
    if was_gathered:
        register_gathered(group)


def _state_of(module: nn.Module) -> Any:
    """Return the FSDPState of a unit's module."""
    # torch sets `state` on this function, which type checkers cannot know.
    function: Any = fully_shard
    return function.state(module)


def _originals_of(model: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    """Return (module, name in it) -> parameter, for all parameters that can be cut into rows.

    A tied parameter stands in several places. Every rank holds the other parameters whole.
    """
    originals = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_sharded(parameter):
                originals[module, name] = parameter
    return originals


def _dictionaries(model: nn.Module) -> Iterator[dict[Any, Any]]:
    """Yield the attributes of a model's modules, and those of them that hold hooks."""
    for module in model.modules():
        attributes = vars(module)
        yield attributes
        for value in list(attributes.values()):
            if isinstance(value, OrderedDict):
                yield value


class HookOfBlock(functools.partial[Any]):
    """A hook on a module of the user's; that of a copy or pickle of the module does nothing."""

    def __reduce__(self) -> Any:
        """Return how to make a hook that does nothing."""
        return HookOfBlock, (_do_nothing,)


def _do_nothing(*_: Any) -> None: ...


def _refuse_backward(*_: Any) -> None:
    raise SyncError(
        "backward after the block in which the loss was computed",
        why="its gradients would not be averaged over the ranks",
        fix="call backward inside the block",
    )
