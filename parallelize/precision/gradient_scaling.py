"""Automatic loss scaling, without a GradScaler: `backward` scales and unscales, and `step` is skipped on inf."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from parallelize.errors import ConfigError
from parallelize.precision.found_inf import FoundInf, SkippedSteps
from parallelize.precision.loss_scale import LossScale, non_finite_flag, scale_, unscale_
from parallelize.precision.reachable_leaves import ReachableLeaves, find_reachable_leaves, mark_forward
from parallelize.precision.unscaled_hooks import UnscaledHooks
from parallelize.runtime.autograd_graph import scaled_start
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.context import is_capturing
from parallelize.torch_patches.backward import Root, is_in_backward
from parallelize.torch_patches.step import parameters_of

__all__ = ["GradientScaling", "Roots"]

Roots = Sequence[Root]

_UNSCALED_BACKWARD = (
    "a backward pass ran without loss scaling, so small fp16 gradients may be zero and inf is not checked: it was "
    "called by a function imported before the block (from torch.autograd import backward, grad); call "
    "loss.backward() or torch.autograd.grad(...) instead"
)
_BF16 = "amp='bf16', which needs no loss scaling"


class GradientScaling:
    """Scales losses, unscales gradients and skips steps whose gradients have inf or nan.

        backward                                         step
        ├ accumulated gradients     x scale              ├ optimizer that reads `found_inf`: set it (asynchronous)
        ├ torch's backward, started from the scale       ├ inf or nan: a copy without parameters takes the step
        └ all gradients             / scale, any inf?    └ else: unchanged

    `.grad` is unscaled outside of backward, so clipping, logging and accumulation work as without a scale.
    `autograd.grad` scales and unscales inside. Backward passes add scaled gradients to each other, as under GradScaler:
    scaling the accumulated gradients again before each pass is exact, because the scale is a power of two.

    Args:
        scale: the loss scale.
        all_reduce_flag: all-reduces a 0-dim flag (0 or 1) to its maximum, in place; None: ranks have equal flags.
    """

    def __init__(self, scale: LossScale, *, all_reduce_flag: Callable[[torch.Tensor], None] | None = None) -> None:
        self._scale = scale
        self._found_inf = FoundInf(scale, all_reduce_flag=all_reduce_flag)
        self._all_reduce_flag = all_reduce_flag
        self._skipped_steps = SkippedSteps()
        self._hooks = UnscaledHooks()
        self._models: list[nn.Module] = []
        self._parameters: dict[int, nn.Parameter] = {}
        self._non_leaves: Any = WeakIdKeyDictionary()
        self._are_marks_complete: bool | None = None
        self._has_unscaled_backward = False
        self._has_warned = False

    def add_models(self, models: Sequence[nn.Module]) -> None:
        """Add models of the block, with their current parameters.

        Raises:
            ConfigError: a parameter is in fp16.
        """
        self._models += [model for model in models if not any(model is each for each in self._models)]
        self._update_parameters()

    def remove_models(self, models: Sequence[nn.Module]) -> None:
        """Remove models that `add_models` added."""
        self._models = [each for each in self._models if not any(each is model for model in models)]
        self._update_parameters()

    def _update_parameters(self) -> None:
        parameters: dict[int, nn.Parameter] = {}
        for model in self._models:
            for name, parameter in model.named_parameters():
                if parameter.dtype is torch.float16:
                    raise ConfigError(
                        f"parameter {name!r} is in {parameter.dtype} already",
                        why="its gradient has the same dtype, and unscaled gradients underflow in fp16",
                        fix="pass the model in fp32, without .half(): amp='O2' computes with weights in half, amp='O3' "
                        "stores them so",
                    )
                parameters[id(parameter)] = parameter
        removed = [each for key, each in self._parameters.items() if key not in parameters]
        self._found_inf.forget(removed)
        self._hooks.unwrap(removed)
        self._hooks.wrap_existing(parameters.values())
        self._parameters = parameters
        self._are_marks_complete = None
        for parameter in list(parameters.values())[:1]:
            self._scale.move_to(parameter.device)  # fsdp may have moved its shards to the CPU

    def unscaled_hooks(self) -> contextlib.AbstractContextManager[None]:
        """Return a context; tensor hooks that are registered inside it get unscaled gradients."""
        return self._hooks.patch_register_hook()

    def track_non_leaf(self, tensor: torch.Tensor) -> None:
        """Register a non-leaf tensor whose `.grad` backward will set, so that its gradient is unscaled too."""
        self._non_leaves[tensor] = None

    def mark_forward(self, outputs: Any, inputs: Any) -> None:
        """Store the inputs of a routed forward in the graph of its outputs."""
        mark_forward(outputs, inputs=inputs, owner=self, on_backward=self._check_backward)

    def _check_backward(self, _gradients: Any) -> None:
        """Note a backward pass that has not gone through this package's patches."""
        if self._hooks.scale is None:
            self._has_unscaled_backward = True

    def backward(self, roots: Roots, gradients: Any, run: Callable[[Any], None]) -> None:
        """Run a backward pass of the user, with loss scaling if it reaches parameters of the block.

        Args:
            roots: the tensors to differentiate.
            gradients: the gradients there, as the user has given them; None: 1.
            run: runs torch's backward pass from the initial gradients that are passed to it.

        Raises:
            ConfigError: a CUDA graph is being captured.
        """
        reachable = self._reachable_leaves(roots)
        if not reachable.has_known:
            run(gradients)
            return
        if is_capturing():
            raise ConfigError(
                "a CUDA graph is being captured under loss scaling",
                why="each iteration decides anew whether to skip the step, and a graph replays one decision",
                fix=f"capture outside of the block, or use {_BF16}",
            )
        self._skipped_steps.restore_all()
        self._found_inf.update_scale()
        leaves = [*self._parameters.values(), *reachable.others, *self._non_leaves.keys()]
        # Exact, because the scale is a power of two.
        scale_(leaves, self._scale.factor)
        try:
            with self._hooks.scaled_backward(self._scale):
                run(scaled_start(roots, gradients, self._scale.factor))
        finally:
            groups = self._found_inf.group_leaves(leaves)
            self._found_inf.record(groups, unscale_(groups, self._scale))

    def grad(self, roots: Roots, gradients: Any, run: Callable[..., Any]) -> Any:
        """Compute gradients that are not accumulated, with loss scaling if the graph leads to parameters of the block.

        No step is skipped on inf here. So gradients that overflow are computed again with a smaller scale, at last
        without one. For this the graph is kept until the outputs are freed, and the device is synchronized.

        Args:
            roots: the tensors to differentiate.
            gradients: the gradients there, as the user has given them; None: 1.
            run: runs torch.autograd.grad from the initial gradients; `is_graph_kept` asks it to keep the graph.
        """
        if is_capturing() or not self._reachable_leaves(roots).has_known:
            return run(gradients)
        retained = {each: each.grad for each in self._non_leaves if each.retains_grad}
        has_half_outputs = any(isinstance(root, torch.Tensor) and root.dtype is torch.float16 for root in roots)
        scales = self._scale.for_grad(has_half_outputs=has_half_outputs)
        try:
            for attempt, scale in enumerate(scales, start=1):
                for each in retained:
                    each.grad = None
                is_last = attempt == len(scales)
                with self._hooks.scaled_backward(scale), _name_overflow(is_repeated=attempt > 1):
                    results = run(scaled_start(roots, gradients, scale.factor), is_graph_kept=not is_last)
                unscale_({0: list(retained)}, scale)
                if is_last or not self._has_non_finite(results):
                    return map_leaves(functools.partial(_unscaled, scale), results)
        finally:
            for each, gradient in retained.items():
                each.grad = gradient if each.grad is None else each.grad if gradient is None else each.grad + gradient

    def _has_non_finite(self, results: Any) -> bool:
        """Return whether a gradient has inf or nan on any rank that computes gradients together with this one."""
        tensors = [each for each in leaves(results) if isinstance(each, torch.Tensor)]
        flag = non_finite_flag(tensors, device=self._scale.device)
        if self._all_reduce_flag is not None:
            self._all_reduce_flag(flag)
        return bool(flag.item())

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Decide whether an optimizer step is skipped; called by a step pre-hook.

        Args:
            optimizer: the optimizer that is about to step.
            args: positional arguments of `step`; the first is the optimizer.
            kwargs: keyword arguments of `step`.

        Returns:
            New (args, kwargs) for the step; None: unchanged.

        Raises:
            ConfigError: a step that loss scaling does not support.
        """
        parameters = list(parameters_of(optimizer))
        if not self._is_managed(optimizer, parameters):
            return None
        if is_in_backward():
            raise ConfigError(
                f"{type(optimizer).__name__}.step() inside backward, under loss scaling",
                why="gradients are unscaled and checked for inf only when backward has ended",
                fix=f"call step() after backward(), or use {_BF16}",
            )
        if any(each is not None for each in (*args[1:2], kwargs.get("closure"))):
            raise ConfigError(
                f"{type(optimizer).__name__}.step(closure) under loss scaling",
                why="the step calls backward several times, and uses the gradients before they can be checked for inf",
                fix=f"call backward before step(), or use {_BF16}",
            )
        if self._has_unscaled_backward and not self._has_warned:
            self._has_warned = True
            warnings.warn(_UNSCALED_BACKWARD, stacklevel=4)
        if self._skipped_steps.is_skipping:
            return (self._skipped_steps.skip(optimizer), *args[1:]), kwargs
        found_inf = self._found_inf.for_optimizer(optimizer, parameters)
        if found_inf is None:
            return None
        if _reads_found_inf(optimizer):
            optimizer.__dict__.update(grad_scale=None, found_inf=found_inf)
        elif found_inf.item():
            return (self._skipped_steps.skip(optimizer), *args[1:]), kwargs
        return None

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Undo the changes of `before_step`; called by a step post-hook."""
        self._skipped_steps.finish(optimizer)
        if _reads_found_inf(optimizer):
            optimizer.__dict__.pop("grad_scale", None)
            optimizer.__dict__.pop("found_inf", None)

    def end_iteration(self) -> None:
        """Update the scale, and restore the gradients of skipped steps that raised an exception."""
        self._skipped_steps.restore_all()
        self._found_inf.update_scale()

    def state_dict(self) -> dict[str, Any]:
        """End the iteration, and return the scale's state."""
        self.end_iteration()
        return self._scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """End the iteration, and load a state that `state_dict` has returned."""
        self.end_iteration()
        self._scale.load_state_dict(state)

    def _reachable_leaves(self, roots: Roots) -> ReachableLeaves:
        """Return the leaves that a backward reaches.

        The first search also walks the graph behind the marks of `mark_forward`, for leaves that no model registers.
        """
        marked = find_reachable_leaves(roots, known=self._parameters, owner=self)
        # Under FSDP the leaves behind a mark are temporary all-gathered copies of the model's own parameters.
        if self._all_reduce_flag is not None or self._are_marks_complete or not marked.has_known:
            return marked
        full = find_reachable_leaves(roots, known=self._parameters, owner=None)
        if self._are_marks_complete is None:
            self._are_marks_complete = len(full.others) == len(marked.others)
        return full

    def _is_managed(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether an optimizer steps parameters of the block's models."""
        unknown = [each for each in parameters if id(each) not in self._parameters]
        if not unknown:
            return True
        is_scaled = any(self._found_inf.has_checked(each) for each in unknown)
        if not is_scaled and len(unknown) == len(parameters):
            # The optimizer has no parameter of the block, and no scaled backward has reached its parameters.
            return False
        number, index = next(
            (number, index)
            for number, group in enumerate(optimizer.param_groups)
            for index, each in enumerate(group["params"])
            if each is unknown[0]
        )
        raise ConfigError(
            f"{type(optimizer).__name__} holds {len(unknown)} parameter(s) that no model of the block has: "
            f"param_groups[{number}]['params'][{index}] of shape {tuple(unknown[0].shape)}",
            why="their gradients are not averaged over the ranks, and the loss scale covers the block's models only",
            fix="pass their module to the block too: parallel_model(model, criterion); or train them by a separate "
            "loss and optimizer",
        )


def _unscaled(scale: LossScale, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient divided by the scale; differentiable if the gradient is (create_graph=True)."""
    if gradient is None:
        return None
    with torch.set_grad_enabled(gradient.requires_grad):
        return gradient * scale.on(gradient.device)[1]


def _reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's kernels read `found_inf` on the device, as torch's fused optimizers do."""
    supports_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supports_found_inf) and all(group.get("fused") for group in optimizer.param_groups)


@contextlib.contextmanager
def _name_overflow(*, is_repeated: bool) -> Iterator[None]:
    """Name the cause of an error, if a pass of torch.autograd.grad inside the context repeats one that overflowed."""
    try:
        yield
    except Exception as exc:
        if not is_repeated:
            raise
        raise ConfigError(
            "torch.autograd.grad: gradients overflow with the loss scale, and a second pass with a smaller one fails",
            why=f"the graph supports one backward pass only: {exc}",
            fix=f"differentiate a smaller loss, or use {_BF16}",
        ) from exc
