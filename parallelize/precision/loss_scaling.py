"""Loss scaling for fp16, without a GradScaler in the user's loop.

    backward    gradients from before   x scale
                torch's backward        started from the scale; gradients are averaged over the ranks
                all gradients           / scale, with one flag per model: has it inf or nan?
    step        of models without inf   unchanged
                of others               taken by a copy of the optimizer that has no parameters
    backward    begins with the update of the scale, by the flags of the steps before

`.grad` is unscaled outside of backward, so that clipping, logging and accumulation work as without a scale. To
scale gradients from before again is exact, because the scale is a power of two. Averaged gradients, and with them
the flags, are equal on all ranks; of shards, they are all-reduced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

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
from parallelize.torch_patches.step import parameters_of

__all__ = ["LossScale", "LossScaling", "not_scaled"]


def not_scaled(what: str, why: str, fix: str = "") -> ConfigError:
    """Build the error for what fp16 does not support."""
    return ConfigError(f"{what} under loss scaling", why=why, fix=f"{fix}use amp='bf16', which needs no loss scaling")


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
        state["_growth_tracker"] = 0 if has_inf else state["_growth_tracker"] + 1
        if has_inf:
            state["scale"] *= state["backoff_factor"]
        elif state["_growth_tracker"] == state["growth_interval"]:
            grown = state["scale"] * state["growth_factor"]
            state["scale"] = grown if grown < 2.0**128 else state["scale"]  # of fp32, as in GradScaler
            state["_growth_tracker"] = 0


class LossScaling:
    """Scales the losses of the models of a block, and of the blocks inside it.

    Args:
        amp: the initial scale and its rules.
        device: where flags are kept, and sent.
        has_shards: whether each rank has a shard of the gradients, so that ranks must agree on flags.

    Attributes:
        is_scaled: whether a backward pass that runs is scaled.
    """

    def __init__(self, amp: Amp, *, device: torch.device, has_shards: bool) -> None:
        self._scale = LossScale(amp)
        self.is_scaled = False
        self._device, self._has_shards = device, has_shards
        self._parameters: dict[Any, Any] = {}  # by model
        self._flags: dict[Any, Any] = {}  # by model, and None: 1 if a gradient has inf or nan
        self._on_host = HostCopy(torch.zeros(0))
        # Keys of the flags of steps since the latest update of the scale; None: no step since backward.
        self._stepped: set[Any] | None = None
        self._has_optimizer = False  # whether one has stepped in this block
        self.set_models(())

    def set_models(self, models: Sequence[nn.Module], former: Sequence[nn.Module] = ()) -> None:
        """Add models, with their present parameters; remove former ones."""
        known, seen = dict.fromkeys([*self._parameters, *models]), set[torch.Tensor]()
        self._parameters = {model: [] for model in known if model not in former}
        for model, parameters in self._parameters.items():
            parameters += [each for each in all_parameters(model) if each not in seen]  # shared ones are unscaled once
            seen.update(parameters)
        self._are_marks_complete: bool | None = None  # whether no leaf of a loss is hidden by marks
        self._set_leaves([])

    def _set_leaves(self, others: list[Any]) -> None:
        """Set the leaves that backward gives gradients to: by model, and under None those of no model."""
        self._leaves = {None: others, **self._parameters}
        self._owners = {id(leaf): key for key, leaves in self._leaves.items() for leaf in leaves}

    def around_backward(self, each: Pass, run: Run) -> None:
        """Run a backward pass, scaled if it reaches a model; a subscriber of torch_patches.backward.

        Raises:
            ConfigError: a pass that cannot be scaled.
        """
        is_reached, others = self.leaves_behind(each.roots, owner=self)
        if not is_reached:
            run(each)
            return
        # Under fsdp, the gathered parameters of a model are behind its marks.
        if not self._has_shards and not self._are_marks_complete:
            marked, (_, others) = len(others), self.leaves_behind(each.roots, owner=None)
            self._are_marks_complete = self._are_marks_complete is None and marked == len(others)
        _refuse(each)
        self._end_iteration()
        self._set_leaves(others)
        scale = self.updated_scale().state["scale"]
        for gradients in _gradients(chain.from_iterable(self._leaves.values())).values():
            torch._foreach_mul_(gradients, scale)
        self.is_scaled = True
        try:
            run(replace(each, gradients=scaled_start(each.roots, each.gradients, lambda _: scale)))
        finally:
            self.is_scaled = False
            flags = self._unscale(1 / scale)
        if self._has_shards:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        self._flags, self._on_host = dict(zip(self._leaves, flags, strict=True)), HostCopy(flags)
        self._stepped = None

    def leaves_behind(self, roots: Iterable[Root], *, owner: object) -> tuple[bool, list[torch.Tensor]]:
        """Return whether backward reaches a model, and the leaves of no model that it reaches.

        The search skips models whose outputs have marks of the owner.
        """
        is_reached, others = False, []
        for node in nodes_behind(map(node_of, roots), owner=owner):
            leaf: Any = None if node.next_functions else getattr(node, "variable", None)
            # A DTensor is the shard of a model in the block.
            is_known = self._owners.get(id(leaf)) is not None or hasattr(leaf, "full_tensor")
            if is_known or self in marks_of(node) or node.name() == "CheckpointFunctionBackward":
                is_reached = True
            elif leaf is not None:
                others.append(leaf)
        return is_reached, others

    def _unscale(self, factor: float) -> torch.Tensor:
        """Unscale the gradients of all leaves; return their flags, 1 for inf or nan."""
        flags = []
        for leaves in self._leaves.values():
            found = torch.zeros((), device=self._device)
            for (device, _), gradients in _gradients(leaves).items():
                one = torch.zeros((), device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, one, torch.full((), factor, device=device))
                found = torch.maximum(found, one.to(self._device))
            flags.append(found)
        return torch.stack(flags)

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Skip the step of an optimizer whose models have inf or nan; a hook of torch_patches.step.

        Raises:
            ConfigError: a step that needs gradients before they are unscaled.
        """
        keys = {self._owners[id(each)] for each in parameters_of(optimizer) if id(each) in self._owners}
        if not keys:
            return None
        name = f"{type(optimizer).__name__}.step"
        if is_in_backward():
            why = "gradients are unscaled, and checked for inf, when backward has ended"
            raise not_scaled(f"{name}() inside backward", why, "call it after backward(), or ")
        if any(each is not None for each in (*args[1:2], kwargs.get("closure"))):
            why = "the step uses the gradients of several passes before they can be checked for inf"
            raise not_scaled(f"{name}(closure)", why, "call backward before step(), or ")
        self._stepped, self._has_optimizer = keys | (self._stepped or set()), True
        if _reads_found_inf(optimizer):
            flags = [torch.zeros((), device=self._device), *(self._flags[key] for key in keys & self._flags.keys())]
            vars(optimizer)["found_inf"] = torch.stack(flags).amax()
        elif self._has_inf(keys):
            return (_without_parameters(optimizer), *args[1:]), kwargs
        return None

    def _has_inf(self, keys: Collection[Any]) -> bool:
        flags = zip(self._flags, self._on_host.read().tolist(), strict=True)
        return any(flag for key, flag in flags if key in keys)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Remove what `before_step` has set; a hook of torch_patches.step."""
        vars(optimizer).pop("found_inf", None)

    def updated_scale(self) -> LossScale:
        """Return the scale, updated if an optimizer has stepped since the latest update."""
        if self._stepped:
            self._scale.update(has_inf=self._has_inf(self._stepped))
            self._stepped = set()
        return self._scale

    def _end_iteration(self) -> None:
        """Find out why no optimizer has stepped after a backward pass with inf."""
        if self._stepped is None and self._has_inf(self._parameters):
            leaves = [each for each in chain.from_iterable(self._parameters.values()) if each.requires_grad]
            if not self._has_optimizer and not all(bool(each.isfinite().all()) for each in leaves):
                why = "gradients had inf or nan, and now the weights have; only steps of optimizers can be skipped"
                raise not_scaled("an update of weights without an optimizer", why, "use one of torch.optim, or ")
            if not _gradients(leaves):  # dropped, as by a loop that checks them itself
                self._scale.update(has_inf=True)


def _gradients(leaves: Iterable[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """Return the values of the gradients of this rank by device and dtype, as the kernels take them."""
    found = defaultdict[Any, list[torch.Tensor]](list)
    for leaf in leaves:
        values: Any = leaf.grad
        if values is None:
            continue
        if values.is_sparse:
            values = values._values()
        elif type(values) is not torch.Tensor and hasattr(values, "full_tensor"):
            values = values.to_local()
        found[values.device, values.dtype].append(values)
    return found


def _refuse(each: Pass) -> None:
    """Refuse a backward pass that cannot be scaled."""
    if is_capturing():
        raise not_scaled("a CUDA graph", "it would replay one decision whether to skip the step", "do not capture, or ")
    if each.options["create_graph"]:
        raise not_scaled("backward(create_graph=True)", "gradients are unscaled in place, outside of the graph")
    if not all(getattr(one, "is_leaf", False) for one in each.options["inputs"] or ()):
        raise not_scaled("backward(inputs=) of a tensor that is not a leaf", "the gradients of leaves are unscaled")


def _reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's kernels read `found_inf` on the device, as torch's fused optimizers do."""
    is_supported = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return is_supported and all(group.get("fused") for group in optimizer.param_groups)


def _without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer whose step changes nothing; schedulers count it, the state stays."""
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    copied.__dict__.update({**optimizer.__dict__, "param_groups": groups, "state": defaultdict(dict)})
    return copied
