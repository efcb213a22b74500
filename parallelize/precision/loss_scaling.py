"""Loss scaling for fp16, without a GradScaler in the user's loop.

    backward    gradients of earlier passes     x scale
                torch's backward                starts from the scale; gradients are averaged over
                                                the ranks
                all gradients                   / scale, with a flag per model: has it inf or nan?
    step        of models without inf           unchanged
                of models with inf              taken by a copy of the optimizer that has no
                                                parameters
    backward    begins with the update of the scale, by the flags of the steps before

`.grad` is unscaled outside of backward, so that clipping, logging and accumulation work as without
a scale. To scale gradients of earlier passes again is exact, because the scale is a power of two.
It costs two reads and writes of all gradients for each pass that accumulates. To leave them scaled
until somebody reads them would be wrong without a word: the program may hold a gradient, or the
flat buffer of which it is a view, from before the pass, and code in C++ reads gradients without
Python. To set them aside during the pass would need memory for all gradients twice.

Averaged gradients, and with them the flags, are equal on all ranks; flags of shards are
all-reduced.

A flag is counted in the scale once, when an optimizer has stepped by it:

    ┌─> fresh          a pass has ended: the flags are new
    │     │ step       the models of the optimizer become uncounted
    │     v
    │   uncounted      some steps were made, or skipped, that the scale does not count yet
    │     │            updated_scale, before the next pass or a checkpoint
    │     v
    └── counted        the scale has grown or shrunk; the next pass makes new flags
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from parallelize.errors import ConfigError
from parallelize.gradients.autograd_graph import marks_of, node_of, nodes_behind, scaled_start
from parallelize.gradients.host_copy import HostCopy
from parallelize.plugins.base import Amp
from parallelize.run.context import is_capturing
from parallelize.torch_patches.backward import Pass, Root, Run, is_in_backward
from parallelize.torch_patches.module_tensors import all_parameters
from parallelize.torch_patches.step import StepArguments, parameters_of

_Owner = nn.Module | None
"""The model of a leaf; None: the leaf is a parameter of none of the models."""

# A scale of this size would be inf in fp32; GradScaler has the same limit.
_MAX_SCALE = 2.0**128


def not_scaled(what: str, why: str, fix: str = "") -> ConfigError:
    """Build the error for what fp16 does not support.

    Args:
        what: the user's call, or a property of the model.
        why: why it cannot be scaled.
        fix: what else to do than to use bf16; it ends with "or ".
    """
    return ConfigError(
        f"{what} under loss scaling",
        why=why,
        fix=f"{fix}use amp='bf16', which needs no loss scaling",
    )


class LossScale:
    """The factor of the losses, by the rules of torch.amp.GradScaler.

    Attributes:
        state: the scale and its rules, under the keys of GradScaler's `state_dict`.
    """

    def __init__(self, amp: Amp) -> None:
        self.state: dict[str, Any] = {
            "scale": amp.init_scale,
            "growth_factor": amp.growth_factor,
            "backoff_factor": amp.backoff_factor,
            "growth_interval": amp.growth_interval,
            "_growth_tracker": 0,
        }

    def update(self, *, has_inf: bool) -> None:
        """Shrink the scale after inf or nan; grow it after `growth_interval` updates without."""
        state = self.state
        if has_inf:
            state["scale"] *= state["backoff_factor"]
            state["_growth_tracker"] = 0
            return
        state["_growth_tracker"] += 1
        if state["_growth_tracker"] == state["growth_interval"]:
            state["_growth_tracker"] = 0
            grown = state["scale"] * state["growth_factor"]
            if grown < _MAX_SCALE:
                state["scale"] = grown


class _Flags:
    """Whether gradients have inf or nan, for each owner of leaves.

    Args:
        owners: the models; None for the leaves of no model.
        values: 1 or 0 for each of them, on the device.
    """

    def __init__(self, owners: Iterable[_Owner], values: torch.Tensor) -> None:
        self._value_by_owner = dict(zip(owners, values, strict=True))
        self._on_host = HostCopy(values)

    def have_inf(self, owners: Collection[_Owner]) -> bool:
        """Return whether a gradient of one of the owners has inf or nan.

        This waits until the device has computed the flags.
        """
        values = self._on_host.read().tolist()
        for owner, value in zip(self._value_by_owner, values, strict=True):
            if value and owner in owners:
                return True
        return False

    def on_device(self, owners: Collection[_Owner], device: torch.device) -> torch.Tensor:
        """Return whether a gradient of one of the owners has inf or nan, without a wait.

        Args:
            owners: any of the models, or None.
            device: the device of the values.

        Returns:
            A tensor with 1 or 0.
        """
        present = self._value_by_owner.keys() & set(owners)
        values = [self._value_by_owner[owner] for owner in present]
        return torch.stack([torch.zeros((), device=device), *values]).amax()


class _Marks(enum.Enum):
    """Whether a search that skips models, at their marks, finds all leaves of no model.

    A forward may use such a leaf, as a parameter of another object. Then no search skips models.
    """

    UNCHECKED = enum.auto()
    COMPLETE = enum.auto()
    INCOMPLETE = enum.auto()


class _Reach(NamedTuple):
    """What a backward pass reaches.

    Args:
        has_model: whether it reaches a model.
        leaves_of_no_model: the other leaves that get gradients.
    """

    has_model: bool
    leaves_of_no_model: list[torch.Tensor]


class LossScaling:
    """Scales the losses of the models of a block, and of the blocks inside it.

    Args:
        amp: the initial scale and its rules.
        device: where flags are kept, and sent.
        has_shards: whether each rank has a shard of the gradients, so that ranks must agree on
            flags.

    Attributes:
        is_scaled: whether a backward pass that runs is scaled.
    """

    def __init__(self, amp: Amp, *, device: torch.device, has_shards: bool) -> None:
        self.is_scaled = False
        self._scale = LossScale(amp)
        self._device = device
        self._has_shards = has_shards
        self._parameters: dict[nn.Module, list[torch.Tensor]] = {}
        self._flags = _Flags([], torch.zeros(0))
        # Whether an optimizer has stepped since the latest pass, and in the whole block.
        self._has_stepped = False
        self._has_optimizer = False
        self._uncounted: set[_Owner] = set()
        self.set_models(())

    def set_models(self, models: Sequence[nn.Module], former: Sequence[nn.Module] = ()) -> None:
        """Add models, with their present parameters, and remove former models."""
        remaining = [model for model in (*self._parameters, *models) if model not in former]
        self._parameters = {}
        # Parameters that models share are unscaled once.
        seen_ids: set[int] = set()
        for model in dict.fromkeys(remaining):
            self._parameters[model] = []
            for parameter in all_parameters(model):
                if id(parameter) not in seen_ids:
                    seen_ids.add(id(parameter))
                    self._parameters[model].append(parameter)
        self._marks = _Marks.UNCHECKED
        self._set_leaves([])

    def _set_leaves(self, leaves_of_no_model: list[torch.Tensor]) -> None:
        """Set the leaves that backward gives gradients to.

        Args:
            leaves_of_no_model: those besides the parameters of the models.
        """
        self._leaves: dict[_Owner, list[torch.Tensor]] = {None: leaves_of_no_model}
        for model, parameters in self._parameters.items():
            self._leaves[model] = parameters
        self._owner_by_id: dict[int, _Owner] = {}
        for owner, leaves in self._leaves.items():
            for leaf in leaves:
                self._owner_by_id[id(leaf)] = owner

    def around_backward(self, backward_pass: Pass, run: Run) -> None:
        """Run a backward pass, scaled if it reaches a model; a subscriber of backward passes.

        Raises:
            ConfigError: the pass cannot be scaled.
        """
        has_model, leaves_of_no_model = self._reach_of(backward_pass.roots)
        if not has_model:
            run(backward_pass)
            return
        _refuse(backward_pass)
        self._judge_missing_step()
        self._set_leaves(leaves_of_no_model)
        scale = self.updated_scale().state["scale"]
        for gradients in _gradients(chain.from_iterable(self._leaves.values())).values():
            torch._foreach_mul_(gradients, scale)
        self.is_scaled = True
        try:
            start = scaled_start(backward_pass.roots, backward_pass.gradients, lambda _: scale)
            run(replace(backward_pass, gradients=start))
        finally:
            # Also after an error, since the user may catch it.
            self.is_scaled = False
            flags = self._unscale(1 / scale)
        if self._has_shards:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        self._flags = _Flags(self._leaves, flags)
        self._has_stepped = False
        self._uncounted = set()

    def _reach_of(self, roots: Sequence[Root]) -> _Reach:
        """Return what a pass reaches, by a search that skips models if it finds all leaves."""
        reach = self.leaves_behind(roots, owner=self)
        # Under fsdp, the gathered parameters of a model are behind its marks.
        if not reach.has_model or self._has_shards or self._marks is _Marks.COMPLETE:
            return reach
        whole_reach = self.leaves_behind(roots, owner=None)
        if self._marks is _Marks.UNCHECKED:
            self._marks = _Marks.INCOMPLETE
            if len(reach.leaves_of_no_model) == len(whole_reach.leaves_of_no_model):
                self._marks = _Marks.COMPLETE
        return _Reach(has_model=True, leaves_of_no_model=whole_reach.leaves_of_no_model)

    def leaves_behind(self, roots: Iterable[Root], *, owner: object) -> _Reach:
        """Return what a backward pass from some roots reaches.

        Args:
            roots: where the pass starts.
            owner: the search skips models whose outputs have marks of it; None: no model.
        """
        has_model = False
        leaves_of_no_model: list[torch.Tensor] = []
        for node in nodes_behind(map(node_of, roots), owner=owner):
            leaf: Any = None
            if not node.next_functions:
                leaf = getattr(node, "variable", None)
            # A reentrant checkpoint hides the graph of its function.
            hides_graph = node.name() == "CheckpointFunctionBackward"
            if self._is_of_model(leaf) or self in marks_of(node) or hides_graph:
                has_model = True
            elif leaf is not None:
                leaves_of_no_model.append(leaf)
        return _Reach(has_model, leaves_of_no_model)

    def _is_of_model(self, leaf: Any) -> bool:
        # A DTensor is the shard of a model in the block.
        return self._owner_by_id.get(id(leaf)) is not None or hasattr(leaf, "full_tensor")

    def _unscale(self, factor: float) -> torch.Tensor:
        """Multiply the gradients of all leaves by a factor.

        Args:
            factor: 1 divided by the scale.

        Returns:
            The flag of each owner in `_leaves`, in that order: shape (owners,), on `_device`.
        """
        flags = []
        for leaves in self._leaves.values():
            flag = torch.zeros((), device=self._device)
            for (device, _), gradients in _gradients(leaves).items():
                flag_there = torch.zeros((), device=device)
                factor_there = torch.full((), factor, device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(
                    gradients, flag_there, factor_there
                )
                flag = torch.maximum(flag, flag_there.to(self._device))
            flags.append(flag)
        return torch.stack(flags)

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        """Skip the step of an optimizer whose models have inf or nan; a hook before steps.

        A fused optimizer skips the step itself, by a tensor on the device, so that nothing waits.

        Returns:
            Arguments of a step that changes nothing; None: the step is made as it is.

        Raises:
            ConfigError: the step needs gradients before they are unscaled.
        """
        owners = set()
        for parameter in parameters_of(optimizer):
            if id(parameter) in self._owner_by_id:
                owners.add(self._owner_by_id[id(parameter)])
        if not owners:
            return None
        _refuse_step(f"{type(optimizer).__name__}.step", args, kwargs)
        self._has_stepped = True
        self._has_optimizer = True
        self._uncounted |= owners
        if _reads_found_inf(optimizer):
            vars(optimizer)["found_inf"] = self._flags.on_device(owners, self._device)
            return None
        if self._flags.have_inf(owners):
            return (_without_parameters(optimizer), *args[1:]), kwargs
        return None

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Remove what `before_step` has set; a hook after steps."""
        vars(optimizer).pop("found_inf", None)

    def updated_scale(self) -> LossScale:
        """Return the scale, updated if an optimizer has stepped since the latest update."""
        if self._uncounted:
            self._scale.update(has_inf=self._flags.have_inf(self._uncounted))
            self._uncounted = set()
        return self._scale

    def _judge_missing_step(self) -> None:
        """Before a pass, find out why no optimizer has stepped since a pass with inf.

            the weights have inf now          the user has updated them without an optimizer
            the gradients are dropped         the user's loop has found the inf, and skips the step
                                              itself: the scale shrinks, as after a skipped step
            the gradients are still there     the loop accumulates: the step is to come

        Raises:
            ConfigError: the weights have been updated without an optimizer.
        """
        if self._has_stepped or not self._flags.have_inf(self._parameters):
            return
        parameters = chain.from_iterable(self._parameters.values())
        leaves = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._has_optimizer and not all(map(_is_finite, leaves)):
            raise not_scaled(
                "an update of weights without an optimizer",
                "gradients had inf or nan, and now the weights have; "
                "only steps of optimizers can be skipped",
                "use one of torch.optim, or ",
            )
        if not _gradients(leaves):
            self._scale.update(has_inf=True)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _gradients(leaves: Iterable[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """Return the values of this rank's gradients by (device, dtype).

    torch's `_foreach` functions and the kernel that unscales need lists of one device and dtype.
    """
    gradients: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for leaf in leaves:
        values: Any = leaf.grad
        if values is None:
            continue
        if values.is_sparse:
            values = values._values()
        elif type(values) is not torch.Tensor and hasattr(values, "full_tensor"):
            values = values.to_local()
        gradients[values.device, values.dtype].append(values)
    return gradients


def _refuse(backward_pass: Pass) -> None:
    """Refuse a backward pass that cannot be scaled.

    Raises:
        ConfigError: it is captured, makes a graph of its own, or has inputs that are no leaves.
    """
    if is_capturing():
        raise not_scaled(
            "a CUDA graph",
            "it would replay one decision whether to skip the step",
            "do not capture, or ",
        )
    if backward_pass.options["create_graph"]:
        raise not_scaled(
            "backward(create_graph=True)",
            "gradients are unscaled in place, outside of the graph",
        )
    for tensor in backward_pass.options["inputs"] or ():
        if not getattr(tensor, "is_leaf", False):
            raise not_scaled(
                "backward(inputs=) of a tensor that is not a leaf",
                "the gradients of leaves are unscaled",
            )


def _refuse_step(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a step that needs gradients before they are unscaled.

    Args:
        name: of the optimizer's method.
        args: arguments of the step, the optimizer among them.
        kwargs: keyword arguments of the step.

    Raises:
        ConfigError: it is called inside backward, or has a closure.
    """
    if is_in_backward():
        raise not_scaled(
            f"{name}() inside backward",
            "gradients are unscaled, and checked for inf, when backward has ended",
            "call it after backward(), or ",
        )
    positional = args[1] if len(args) > 1 else None
    if positional is not None or kwargs.get("closure") is not None:
        raise not_scaled(
            f"{name}(closure)",
            "the step uses the gradients of several passes before they can be checked for inf",
            "call backward before step(), or ",
        )


def _reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's kernels read `found_inf` on the device, as torch's fused ones do."""
    is_supported = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return is_supported and all(group.get("fused") for group in optimizer.param_groups)


def _without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer whose step changes nothing.

    Schedulers count its step, and the state of the optimizer stays as it is.
    """
    empty: torch.optim.Optimizer = object.__new__(type(optimizer))
    attributes = vars(empty)
    attributes.update(vars(optimizer))
    attributes["param_groups"] = [{**group, "params": []} for group in optimizer.param_groups]
    attributes["state"] = defaultdict(dict)
    return empty
