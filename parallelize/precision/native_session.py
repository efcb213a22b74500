"""One block's mixed precision by torch.amp: what a forward, a backward and a step go through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parallelize.plugins.base import Amp, Session
from parallelize.precision import refusals, torch_compile
from parallelize.precision.autocast import Window
from parallelize.precision.backward_patch import Backward, Grad, current_scaling
from parallelize.precision.gradient_scaling import Scaling
from parallelize.precision.loss_scale import LossScale
from parallelize.precision.replace_attribute import replaced
from parallelize.precision.weight_casting import HalfModels, HalfWeights, left_alone
from parallelize.runtime.containers import map_leaves

__all__ = ["NativeSession", "Policy", "mixed_precision"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What one block does, every choice made.

    Args:
        device: the first device of this process.
        autocast: the type of autocast; None: none.
        weights: the type that modules compute with their weights in (O2); None: their own.
        gathers: whether the backend casts weights as it gathers them, so that nobody else need.
        storage: the type that models are kept in (O3); None: their own.
        scaling: first loss scale and the rules of its growth; None: no scaling.
        agree: makes a flag the same on all ranks; None: it is so anyway.
        communication_dtype: the type in which gradients travel; None: their own.
    """

    device: torch.device
    autocast: torch.dtype | None = None
    weights: torch.dtype | None = None
    gathers: bool = False
    storage: torch.dtype | None = None
    scaling: Amp | None = None
    agree: Callable[[torch.Tensor], None] | None = None
    communication_dtype: torch.dtype | None = None


class NativeSession(Session):
    """The hooks of one block.

    Args:
        policy: what they do.
        window: autocast of this block.
        scaling: loss scaling, of this block or of the one around it.
        weights: half-precision weights of this block (O2).
    """

    def __init__(self, policy: Policy, *, window: Window, scaling: Scaling | None, weights: HalfWeights | None) -> None:
        self.communication_dtype = policy.communication_dtype
        self.weights_dtype = policy.weights
        self.fp32_modules = left_alone(policy.device.type)
        self._half = policy.autocast
        self._window = window
        self._scaling = scaling
        self._weights = weights

    def bind(self, models: Sequence[nn.Module]) -> None:
        """Learn the parameters of the models."""
        self._window.watch(models)
        if self._scaling is not None:
            self._scaling.adopt(models)
        if self._weights is not None:
            for model in models:
                self._weights.adopt(model)

    def route(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Open autocast for a forward and its loss; without gradients, for the forward alone.

        Args:
            call: the engine's module.
            *args: the user's.
            **kwargs: the user's.

        Returns:
            What `call` returns, in half precision as it comes: autocast is still on, and casts what needs it. Without
            gradients there is no backward to leave autocast at, and in a compiled function autocast cannot outlast the
            function: there it is left at once, and what is in half comes back in fp32. A loss or a metric then computes
            as precisely as it would have inside, and numpy knows the type.
        """
        if torch._C._current_graph_task_id() != -1:
            with self._window.inside_backward():
                return call(*args, **kwargs)
        if torch_compile.is_inside() or not torch.is_grad_enabled():
            with self._window.around_forward():
                outputs = call(*args, **kwargs)
                with torch_compile.paused():
                    outputs = map_leaves(self._widened, outputs)
        else:
            outputs = self._covered(call, args, kwargs)
        if self._scaling is not None and torch.is_grad_enabled():
            with torch_compile.paused():
                self._scaling.mark(outputs, args=args, kwargs=kwargs)
        return outputs

    def _covered(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Autocast from here to the backward; but not beyond a forward that fails."""
        self._window.open()
        try:
            with self._window.covering():
                return call(*args, **kwargs)
        except BaseException:
            self._window.leave()
            raise

    def forward(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward under autocast on whichever thread this is.

        Args:
            call: the user's forward.
            *args: on the replica's device.
            **kwargs: on the replica's device.
        """
        if self._weights is None:
            return self.forward_with_weights(call, *args, **kwargs)
        with self._window.covering(), self._weights.covering(getattr(call, "__self__", None)):
            return call(*args, **kwargs)

    def forward_with_weights(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward under autocast; its weights are in half precision already."""
        with self._window.covering():
            return call(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's state; {} without scaling."""
        return {} if self._scaling is None else self._scaling.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; one that was saved without scaling says nothing about it."""
        if self._scaling is not None and state:
            self._scaling.load_state_dict(state)

    def _widened(self, value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype is self._half else value


@contextlib.contextmanager
def mixed_precision(policy: Policy, *, models: Sequence[nn.Module]) -> Iterator[NativeSession]:
    """Run a block by a policy: every patch and hook is there while it lasts, and gone after.

    A block inside one that scales its losses shares the scale: a loss that goes through both is scaled once.

    Args:
        policy: what to do.
        models: the user's models; `NativeSession.bind` tells when their parameters are others.

    Raises:
        ConfigError: loss scaling with a parameter in fp16.
    """
    torch_compile.keep_out()
    window = Window(policy.device.type, policy.autocast)
    scaling, is_own = current_scaling(), False
    if scaling is None and policy.scaling is not None:
        scaling, is_own = Scaling(LossScale(policy.scaling, device=policy.device), agree=policy.agree), True
    weights = None
    if policy.weights is not None and not policy.gathers:
        weights = HalfWeights(policy.weights, exempt=left_alone(policy.device.type))
    stored = None if policy.storage is None else HalfModels(policy.storage, models=models)
    session = NativeSession(policy, window=window, scaling=scaling, weights=weights)
    with contextlib.ExitStack() as stack:
        if scaling is not None:
            stack.callback(scaling.release, models)
        if stored is not None:
            stack.enter_context(stored.at_work())
        session.bind(models)
        backward = Backward(
            torch.autograd.backward,
            window=window,
            scaling=scaling if is_own else None,
            around=contextlib.nullcontext if weights is None else weights.recomputing,
        )
        stack.enter_context(_patched(window, backward, scaling if is_own else None, stored))
        yield session


@contextlib.contextmanager
def _patched(window: Window, backward: Backward, scaling: Scaling | None, stored: HalfModels | None) -> Iterator[None]:
    """Everything of torch's that a block changes."""

    def before_step(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        with torch_compile.paused():
            window.leave()
            if stored is not None:
                stored.sees(optimizer)
            return None if scaling is None else scaling.before_step(optimizer, args, kwargs)

    def after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if scaling is not None:
            scaling.after_step(optimizer)

    with contextlib.ExitStack() as stack:
        stack.callback(window.leave)
        stack.enter_context(replaced(torch.autograd, "backward", backward))
        stack.enter_context(replaced(torch.autograd, "grad", Grad(torch.autograd.grad, window=window)))
        stack.callback(register_optimizer_step_pre_hook(before_step).remove)
        stack.callback(register_optimizer_step_post_hook(after_step).remove)
        if scaling is not None:
            stack.callback(scaling.close)
            stack.enter_context(_watched(scaling))
            stack.enter_context(scaling.hooked())
        yield


@contextlib.contextmanager
def _watched(scaling: Scaling) -> Iterator[None]:
    """What scaling has to know of, or cannot bear: gradients kept for tensors that are no leaves, another scaler."""
    retain_grad, scale = torch.Tensor.retain_grad, torch.amp.GradScaler.scale

    def retained(tensor: torch.Tensor) -> None:
        retain_grad(tensor)
        if tensor.requires_grad and not tensor.is_leaf:
            scaling.retain(tensor)

    def refused(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            raise refusals.own_scaler()
        return scale(scaler, outputs)

    with replaced(torch.Tensor, "retain_grad", retained), replaced(torch.amp.GradScaler, "scale", refused):
        yield
