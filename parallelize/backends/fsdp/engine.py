"""The engine of fsdp: it runs forwards of a model whose parameters are sharded, by FSDP2.

FSDP2 is torch's fully_shard. Its root is `Inner`, which calls the user's model. So the model keeps
its class, its own hooks run as usual, and every routed method gathers parameters as forward does.

    entry of the block      sharding.py applies fully_shard, unit by unit; stand_in.py lets the
                            user's Parameters stand for the shards
    model(x)                FSDPEngine._run; each unit is gathered before its forward
    loss.backward()         each unit is gathered before its backward; after it, its gradients are
                            averaged and cut into shards. unit_order.py and unit_backward.py: all
                            ranks gather the same units, whichever of them a rank uses
    optimizer.step()        optimizers.py
    anything else           full_tensors.py: tensors that gather themselves where they are used
    end of the block        FSDPEngine.close; restore.py makes sharded tensors plain

Glossary:

    unit        a module whose parameters are gathered together
    root        the unit of the parameters in no other unit
    original    the user's Parameter, which stands for a shard in the block
    gathered    of a parameter: full and plain; FSDP2 computes with it, and calls it "unsharded"
    rows        this rank's part of a tensor, along its first dimension
    shard       a DTensor of these rows
    record, group, state
                FSDP2's objects: for a parameter, and for a unit's parameters and hooks
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from parallelize.agreement.fingerprint import differences, digest, fingerprint
from parallelize.backends.broadcast import RegisteredBuffers, place, refuse_unbroadcastable
from parallelize.backends.fsdp import full_tensors
from parallelize.backends.fsdp.calls import ShardedTensor
from parallelize.backends.fsdp.meshes import meshes_of
from parallelize.backends.fsdp.optimizers import Steps
from parallelize.backends.fsdp.restore import Restoration
from parallelize.backends.fsdp.sharding import shard
from parallelize.backends.fsdp.shards import changes_of
from parallelize.backends.fsdp.stand_in import HookOfBlock, StandIn
from parallelize.backends.fsdp.unit_backward import BackwardOrder
from parallelize.backends.fsdp.unit_order import ForwardMode, ForwardOrder, units_in_order
from parallelize.backends.fsdp.units import (
    is_sharded,
    refuse_gradients,
    refuse_one_byte_floats,
    units_of,
)
from parallelize.cluster.world import World
from parallelize.errors import ConfigError, SyncError
from parallelize.plugins.base import Engine, Inner, Reduction
from parallelize.run.containers import leaves, map_leaves
from parallelize.run.context import current
from parallelize.torch_patches.backward import Order, is_in_backward, subscribed
from parallelize.torch_patches.foreach import allow_in_lists
from parallelize.torch_patches.module_tensors import (
    all_buffers,
    all_named_parameters,
    all_parameters,
)
from parallelize.torch_patches.step import BeforeStep, before_step
from parallelize.torch_patches.transforms import is_differentiating_forward, is_in_transform

if TYPE_CHECKING:
    from parallelize.backends.fsdp.plugin import FSDPBackend

_NO_TANGENTS = "A custom Function's forward is returning a view"
_WHY_NOT_TRANSFORMED = (
    "fsdp reduces gradients by hooks on what blocks take and return, which a transform (vmap, "
    "grad, jvp, ...) or a tangent does not pass on"
)
_INSTEAD_OF_TRANSFORMS = (
    "compute the derivative with torch.autograd.grad(..., create_graph=True), or use backend='ddp'"
)


class FSDPEngine(Engine):
    """Engine of a model to which fully_shard is applied. Its entry and its end are collectives.

    Args:
        options: options of the backend.
        inner: the root of fully_shard.
        world: ranks and sizes of this process.
        device: device on which the model computes.
        restore: whether full parameters are restored at the end.

    Raises:
        ConfigError: the options do not fit the model or the world, or the model has parameters
            that cannot be broadcast or sharded, or gradients that cannot be reduced.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    keeps_parameters = False
    holds_buffers = True

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
        units = units_of(model, options.blocks)
        refuse_gradients(model, units)
        refuse_unbroadcastable(model)
        refuse_one_byte_floats(model, device)
        self._options = options
        self._inner = inner
        self._restore = restore
        self._home = _device_after(model)
        self._names = {parameter: name for name, parameter in all_named_parameters(model)}
        self._meshes = meshes_of(options, world, device)
        self._registry = current().sharded_tensors
        self._registry.open_engines += 1
        allow_in_lists(ShardedTensor, full_tensors.ShardedParameter)
        self._stand_in = StandIn(inner, self._names, self._registry)
        self._registry.begin_stretch()
        shard(self._stand_in, inner, units, options=options, meshes=self._meshes, device=device)
        self._registry.begin_stretch()
        self._end = Restoration(
            self._registry, self._home, rank=world.rank, ranks_of_node=world.local_world_size
        )
        if restore:
            self._end.announce(parameter.original for parameter in self._stand_in.parameters)
        self.module = self._run
        self.local = self._run
        self._begin_order()
        self._begin_forwards()
        self._begin_hooks()
        self._replicate_whole_parameters()

    def _begin_order(self) -> None:
        """Let all ranks gather and reduce the same units, whichever of them a rank uses."""
        units, root = units_in_order(self._inner, self._stand_in.groups)
        self._backward_order = BackwardOrder(units, root, self._stand_in.states())
        self._forward_order = ForwardOrder(
            units,
            recomputed=self._backward_order.gather_for_recomputation,
            hook=self._backward_order.hook_tensors,
        )

    def _begin_forwards(self) -> None:
        """Set what changes from forward to forward."""
        self._buffers = RegisteredBuffers(self._inner.model)
        has_buffers = next(all_buffers(self._inner.model), None) is not None
        # Whose buffers all ranks get in training; None: each rank keeps its own.
        self._buffer_source: str | None = None
        if has_buffers and self._options.broadcast_buffers:
            self._buffer_source = self._inner.buffer_source
        # The output of a forward, from the hook `_flatten` to the end of `_run`.
        self._output: Any = None
        # The number of changes of all shards at the latest forward.
        self._changes = -1
        # Whether some rank has trained since the ranks have last agreed that none has.
        self._has_trained = True
        # Whether a forward since the latest step was one of torch.func's, or had a tangent.
        self._has_transformed = False

    def _begin_hooks(self) -> None:
        """Hook the model's forward and state dict, backward passes, and optimizer steps."""
        self._inner.register_forward_hook(self._flatten, prepend=True)
        # Until the end of the block, also if it fails.
        self._checks = contextlib.ExitStack()
        self._checks.enter_context(before_step(BeforeStep.PLACE, self._before_step))
        model: Any = self._inner.model
        check = model.register_state_dict_pre_hook(HookOfBlock(self._before_state_dict))
        self._checks.callback(check.remove)
        self._steps = Steps(self._refuse_lost_gradients)
        # Until the end of the block. If the block fails, they stay, as do the sharded parameters.
        self._hooks = contextlib.ExitStack()
        self._hooks.enter_context(subscribed(Order.BEGIN, full_tensors.refuse_inputs))
        self._hooks.enter_context(subscribed(Order.REDUCE, self._backward_order.around_pass))
        if self._options.full_state_dict:
            gather = functools.partial(_gather, self._home)
            handle = model.register_state_dict_post_hook(gather)
            self._hooks.callback(handle.remove)

    def _replicate_whole_parameters(self) -> None:
        """Let the block average the gradients of parameters that every rank holds whole."""
        whole_parameters = nn.Module()
        for parameter, name in self._names.items():
            if not is_sharded(parameter):
                # `register_parameter` refuses names with dots, which errors are to show.
                whole_parameters._parameters[name] = parameter
        if whole_parameters._parameters:
            self.reduction = Reduction()
            self.replicas = whole_parameters

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, which gathers parameters from all ranks; a collective.

        Raises:
            SyncError: a parameter was replaced, or forward has written to one.
            ConfigError: forward AD, which FSDP2 does not support.
        """
        self._registry.begin_stretch()
        is_training = torch.is_grad_enabled()
        source = None
        if is_training and self._inner.model.training:
            source = self._buffer_source
        if source == "rank0":
            self._buffers.broadcast()
        self._prepare(is_training=is_training)
        try:
            hooked_leaves = self._forward(args, kwargs, is_training=is_training)
            self._refuse_writes()
        finally:
            self._stand_in.register_originals()
        if source == "mean":
            self._buffers.average()
        output = self._output
        self._output = None
        hooked_in_order = iter(hooked_leaves)
        return map_leaves(lambda leaf: _in_dtype_of(next(hooked_in_order), leaf), output)

    def _prepare(self, *, is_training: bool) -> None:
        """Prepare the gathered parameters for a forward with or without gradients."""
        self._refuse_replaced(accepts_gathered=False)
        self._backward_order.settle()
        if is_training:
            self._has_trained = True
        elif self._has_trained:
            # A rank that evaluates alone would wait in the first gather. Here it waits in a group
            # of its own, so that hang detection can name its line.
            self._has_trained = bool(differences([digest("a forward without gradients")]))
        shards = [parameter.original.shard for parameter in self._stand_in.parameters]
        changes = changes_of(shards)
        if changes != self._changes:
            self._changes = changes
            self._stand_in.gather_anew()
        self._stand_in.register_gathered()
        if is_in_transform() or is_differentiating_forward():
            self._has_transformed = True

    def _forward(self, args: Any, kwargs: Any, *, is_training: bool) -> list[Any]:
        """Run FSDP2's root, and return the leaves of its output, with FSDP2's hooks.

        FSDP2 reuses its buffers in training, where autograd saves them: so inference mode is left.
        """
        with (
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(is_training),
            _naming_forward_ad(),
            self._forward_order.running(ForwardMode(self._inner.method, is_training)),
        ):
            hooked_leaves: list[Any] = self._inner(*args, **kwargs)
        return hooked_leaves

    def _flatten(self, _module: nn.Module, _args: Any, output: Any) -> list[Any]:
        """Give FSDP2, which hooks outputs, a list; a forward hook on the root, before FSDP2's.

        Before torch 2.13, FSDP2 finds no tensors in dataclasses. A hook of a view would be lost
        when the user changes the view in place, such as `logits /= temperature`.
        """
        self._output = output
        bases = []
        for leaf in leaves(output):
            base = getattr(leaf, "_base", None)
            bases.append(leaf if base is None else base)
        forward = self._forward_order.forward
        if forward is not None and torch.is_grad_enabled():
            self._backward_order.hook_tensors(forward, bases)
        return bases

    def _before_step(self, *_: Any) -> None:
        """Refuse replaced parameters before a step of any optimizer: it may train the new ones."""
        self._refuse_replaced(accepts_gathered=True)

    def _before_state_dict(self, *_: Any) -> None:
        """Refuse replaced and added parameters before the model's state is read or saved."""
        self._refuse_replaced(accepts_gathered=True)
        self._refuse_added()

    def _refuse_replaced(self, *, accepts_gathered: bool) -> None:
        """Refuse parameters that were replaced since the entry of the block.

        Args:
            accepts_gathered: whether gathered parameters may be registered. Before a forward, they
                are left of a backward that has failed, so that FSDP2's state is no longer right.
        """
        name = self._stand_in.replaced(accepts_gathered=accepts_gathered)
        if name is not None:
            raise SyncError(
                f"{name} was replaced in the block, by a functional call, or by a failed backward",
                why="fsdp computes with the parameters that it sharded at the entry of the block",
                fix="copy into the parameter (no assign=True of load_state_dict), or use "
                "backend='ddp'",
            )

    def _refuse_added(self) -> None:
        """Refuse parameters that were added since the entry of the block, as of new submodules.

        Forward has its own check, which is faster: the block notes what is registered in the model.
        """
        name = self._stand_in.added()
        if name is not None:
            raise SyncError(
                f"{name} was added in the block",
                why="fsdp shards parameters at the entry of the block, so that each rank would "
                "train this one for itself",
                fix="change the model before the block, or use backend='ddp'",
            )

    def _refuse_writes(self) -> None:
        """Refuse what forward has written to parameters."""
        for parameter in self._stand_in.parameters:
            if parameter.was_written:
                raise SyncError(
                    f"forward has written to {self._names[parameter.original]}",
                    why="under fsdp it computes with gathered copies, which are freed",
                    fix="update parameters, such as those of a momentum encoder, outside of "
                    "forward, or use ddp",
                )

    def _refuse_lost_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step if a backward has left gradients in gathered parameters.

        FSDP2 reduces them in hooks on the output of the model. A loss that reaches the parameters
        on another way does not pass these hooks.
        """
        self._backward_order.settle()
        has_lost = any(parameter.has_unreduced_gradient for parameter in self._stand_in.parameters)
        optimizer_class = type(optimizer).__name__
        if has_lost and is_in_backward():
            raise SyncError(
                f"{optimizer_class}.step() inside backward, under fsdp",
                why="the gradients of some units are reduced only when backward ends",
                fix="call step() after backward(), not from a hook in it",
            )
        if has_lost and self._has_transformed:
            raise SyncError(
                "torch.func or forward AD: gradients are not in the parameters of "
                f"{optimizer_class}",
                why=_WHY_NOT_TRANSFORMED,
                fix=_INSTEAD_OF_TRANSFORMS,
            )
        self._has_transformed = False
        if has_lost:
            raise SyncError(
                f"gradients of a loss are not in the parameters of {optimizer_class}",
                why="under fsdp, backward has to go through the output of the model",
                fix="return that loss, or what it is computed from, from forward: as tensors, or "
                "in lists, dicts, dataclasses or distributions, whose tensors are found; or use "
                "backend='ddp'",
            )

    @override
    def close(self, *, failed: bool) -> None:
        self._checks.close()
        try:
            self._backward_order.close(failed=failed)
            if not failed:
                self._before_state_dict()
        finally:
            self._registry.open_engines -= 1
            self._steps.end()
            self._stand_in.close()
        if failed:
            return
        originals = [parameter.original for parameter in self._stand_in.parameters]
        if not self._restore or not self._end.restore_parameters(originals):
            self._registry.leave_sharded()
            return
        self._steps.close()
        self._hooks.close()
        self._end.restore_others()
        if self._options.broadcast_buffers:
            self._buffers.broadcast()
        # Buffers and whole parameters were on the device of the rank.
        place(self._inner.model, self._home)
        if self._meshes.has_copies and differences([fingerprint(originals)]):
            raise SyncError(
                f"copies of {type(self._inner.model).__name__} differ between their ranks",
                why="code that only some ranks run has changed this rank's rows of parameters, or "
                "their gradients",
                fix="make the same changes on every rank",
            )


def _device_after(model: nn.Module) -> torch.device:
    """Return where full parameters go at the end: where they came from.

    A model comes from "meta" if it is too large for the device: its parameters go to the CPU.
    """
    first = next(all_parameters(model))
    if first.is_meta:
        return torch.device("cpu")
    return first.device


@contextlib.contextmanager
def _naming_forward_ad() -> Iterator[None]:
    """Name forward AD in an error of FSDP2's Function in front of a unit, which has no tangents."""
    try:
        yield
    except RuntimeError as error:
        if not is_differentiating_forward() or _NO_TANGENTS not in str(error):
            raise
        raise ConfigError(
            "torch.func or forward AD, with inputs of a block that need gradients, under fsdp",
            why=_WHY_NOT_TRANSFORMED,
            fix=_INSTEAD_OF_TRANSFORMS,
        ) from error


def _in_dtype_of(hooked_leaf: Any, leaf: Any) -> Any:
    """Return a leaf of an output in the dtype that a precision policy has given it."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(hooked_leaf.dtype)
    return leaf


def _gather(
    home: torch.device,
    _module: nn.Module,
    state_dict: dict[str, Any],
    _prefix: str,
    _metadata: Any,
) -> None:
    """Replace the shards in a state dict by full tensors; a hook on `state_dict` of the model."""
    for name, value in state_dict.items():
        is_sharded = isinstance(value, ShardedTensor)
        if is_sharded and not value.registry.keeps_shards:
            state_dict[name] = full_tensors.gathered_view(value, home)
