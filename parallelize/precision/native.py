"""Mixed precision by torch.amp, the native engine: its session, patches and optimizer hooks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from parallelize.cluster.world import World
from parallelize.errors import ConfigError
from parallelize.plugins.base import Amp, Precision, Session
from parallelize.precision.autocast import HeldAutocast
from parallelize.precision.autocast_filter import without_filter
from parallelize.precision.backward_patch import PatchedGrad, ScaledBackward, active_scaling
from parallelize.precision.gradient_scaling import GradientScaling
from parallelize.precision.levels import TABLE, describe, resolve
from parallelize.precision.loss_scale import LossScale
from parallelize.precision.weight_casting import HalfStorage, HalfWeightsInForward, exempt_modules
from parallelize.runtime import torch_compile
from parallelize.runtime.containers import map_leaves
from parallelize.torch_patches import step
from parallelize.torch_patches.backward import is_in_backward, require_patchable_backward
from parallelize.torch_patches.private import replace_attribute

__all__ = ["PLUGIN", "NativePrecision", "NativeSession", "Policy", "mixed_precision"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The resolved precision settings of one block.

    Args:
        device: the first device of this process.
        autocast_dtype: the dtype of autocast; None: no autocast.
        weights_dtype: the dtype that modules compute with their weights in (O2); None: unchanged.
        backend_casts_weights: whether the backend casts weights when it all-gathers them.
        storage_dtype: the dtype that models are stored in (O3); None: unchanged.
        loss_scaling: the initial loss scale and its options; None: no loss scaling.
        all_reduce_flag: all-reduces a 0-dim flag to its maximum, in place; None: ranks have equal flags.
        communication_dtype: the dtype in which gradients are all-reduced; None: unchanged.
    """

    device: torch.device
    autocast_dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = None
    backend_casts_weights: bool = False
    storage_dtype: torch.dtype | None = None
    loss_scaling: Amp | None = None
    all_reduce_flag: Callable[[torch.Tensor], None] | None = None
    communication_dtype: torch.dtype | None = None


class NativeSession(Session):
    """Mixed precision of one block by torch.amp.

    Args:
        policy: precision settings of the block.
        autocast: autocast of this block.
        scaling: loss scaling of this block or of an enclosing one; None: no loss scaling.
        weights: casts of this block's weights (O2); None: no casts.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        autocast: HeldAutocast,
        scaling: GradientScaling | None,
        weights: HalfWeightsInForward | None,
    ) -> None:
        self.communication_dtype = policy.communication_dtype
        self.weights_dtype = policy.weights_dtype
        self.fp32_modules = exempt_modules(policy.device.type)
        self._half_dtype = policy.autocast_dtype
        self._autocast = autocast
        self._scaling = scaling
        self._weights = weights

    def bind(self, models: Sequence[nn.Module]) -> None:
        """Register the parameters of the models."""
        self._autocast.set_models(models)
        if self._scaling is not None:
            self._scaling.add_models(models)
        if self._weights is not None:
            for model in models:
                self._weights.add_model(model)

    def release(self) -> None:
        """Hold no model: torch's table of functions may keep those that the block replaces."""
        self._autocast.set_models(())
        if self._weights is not None:
            self._weights.recomputation.set_weights(())

    def route(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward, and leave autocast on for the loss; with grad mode off, enter it for the forward only.

        Args:
            call: the engine's module.
            *args: the user's arguments.
            **kwargs: the user's arguments.

        Returns:
            The outputs of `call`, unchanged if autocast stays on. With grad mode off no backward follows that could
            exit autocast, and inside a compiled function autocast cannot be held beyond the function. In both cases
            half-precision outputs are cast to fp32, because the loss or metric is computed without autocast, and numpy
            has no bf16.
        """
        if is_in_backward():
            with without_filter(), self._autocast.for_recomputation():
                return call(*args, **kwargs)
        if torch_compile.is_inside_compiled() or not torch.is_grad_enabled():
            with without_filter(), self._autocast.forward_only():
                outputs = call(*args, **kwargs)
                with torch_compile.compilation_disabled():
                    outputs = map_leaves(self._to_fp32, outputs)
        else:
            outputs = self._run_and_hold_autocast(call, args, kwargs)
        if self._scaling is not None and torch.is_grad_enabled():
            with torch_compile.compilation_disabled():
                self._scaling.mark_forward(outputs, (args, kwargs))
        return outputs

    def _run_and_hold_autocast(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward, and leave autocast on until backward; exit it at once if the forward raises."""
        filters = self._autocast.enter()
        try:
            outputs = call(*args, **kwargs)
        except BaseException:
            for each in filters:
                each.install()
            self._autocast.exit()
            raise
        for each in filters:
            each.install()
        return outputs

    def forward(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward under autocast, on any thread."""
        with self._autocast.ensure_enabled():
            return call(*args, **kwargs) if self._weights is None else self._weights.forward(call, args, kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale; {} without loss scaling."""
        return {} if self._scaling is None else self._scaling.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the loss scale; an empty state, saved without loss scaling, changes nothing."""
        if self._scaling is not None and state:
            self._scaling.load_state_dict(state)

    def _to_fp32(self, value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype is self._half_dtype else value


@contextlib.contextmanager
def mixed_precision(policy: Policy, *, models: Sequence[nn.Module]) -> Iterator[NativeSession]:
    """Run a block with mixed precision; its patches and hooks are removed when the context ends.

    A block inside another one that scales losses uses the outer block's scale, so that a loss through models of both
    is scaled only once.

    Args:
        policy: the settings of the block.
        models: the user's models; `NativeSession.bind` updates them when their parameters change.
    """
    require_patchable_backward()
    autocast = HeldAutocast(policy.device.type, policy.autocast_dtype)
    scaling, own_scaling = active_scaling(), None
    if scaling is None and policy.loss_scaling is not None:
        scale = LossScale(policy.loss_scaling, device=policy.device)
        scaling = own_scaling = GradientScaling(scale, all_reduce_flag=policy.all_reduce_flag)
    weights = None
    if policy.weights_dtype is not None and not policy.backend_casts_weights:
        weights = HalfWeightsInForward(policy.weights_dtype, exempt=exempt_modules(policy.device.type))
    storage = None if policy.storage_dtype is None else HalfStorage(policy.storage_dtype, models=models)
    session = NativeSession(policy, autocast=autocast, scaling=scaling, weights=weights)
    with contextlib.ExitStack() as stack:
        if scaling is not None:
            stack.callback(scaling.remove_models, models)
        if storage is not None:
            stack.enter_context(storage.cast_models())
        session.bind(models)
        stack.callback(session.release)
        recomputation = contextlib.nullcontext() if weights is None else weights.recomputation
        options: dict[str, Any] = {"autocast": autocast, "scaling": own_scaling, "recomputation": recomputation}
        stack.enter_context(ScaledBackward(**options).active())
        stack.enter_context(replace_attribute(torch.autograd, "grad", PatchedGrad(torch.autograd.grad, **options)))
        stack.enter_context(_patches(autocast, own_scaling, storage))
        yield session


@contextlib.contextmanager
def _patches(autocast: HeldAutocast, scaling: GradientScaling | None, storage: HalfStorage | None) -> Iterator[None]:
    """Patch torch and register the optimizer hooks of a block."""

    def before_step(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        autocast.exit()
        if storage is None and scaling is None:
            return None
        with torch_compile.compilation_disabled():
            if storage is not None:
                storage.cast_state_once(optimizer)
            return None if scaling is None else scaling.before_step(optimizer, args, kwargs)

    def tensor_backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # Before torch takes the autocast filter off its stack of function modes, for the time of the call.
        if not is_in_backward():
            autocast.exit()
        original_backward(tensor, *args, **kwargs)

    original_backward: Any = torch.Tensor.backward
    functools.update_wrapper(tensor_backward, original_backward)
    with contextlib.ExitStack() as stack:
        stack.callback(autocast.exit)
        stack.enter_context(replace_attribute(torch.Tensor, "backward", tensor_backward))
        stack.enter_context(step.before_step(before_step))
        if scaling is not None:
            stack.enter_context(step.after_step(scaling.after_step))
            stack.callback(scaling.end_iteration)
            stack.enter_context(_scaling_patches(scaling))
            stack.enter_context(scaling.unscaled_hooks())
        yield


@contextlib.contextmanager
def _scaling_patches(scaling: GradientScaling) -> Iterator[None]:
    """Patch `Tensor.retain_grad` so that its gradients are unscaled too, and make `GradScaler.scale` raise an error."""
    retain_grad, scale = torch.Tensor.retain_grad, torch.amp.GradScaler.scale

    def patched_retain_grad(tensor: torch.Tensor) -> None:
        retain_grad(tensor)
        if tensor.requires_grad and not tensor.is_leaf:
            scaling.track_non_leaf(tensor)

    def patched_scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            raise ConfigError(
                "a torch.amp.GradScaler of your own with amp='fp16'",
                why="backward scales the loss already: it would be scaled twice",
                fix="delete the scaler: call loss.backward() and optimizer.step(); or drop amp= and keep your own "
                "autocast",
            )
        return scale(scaler, outputs)

    with (
        replace_attribute(torch.Tensor, "retain_grad", patched_retain_grad),
        replace_attribute(torch.amp.GradScaler, "scale", patched_scale),
    ):
        yield


def _max_over_ranks(flag: torch.Tensor, *, device: torch.device) -> None:
    """All-reduce a flag to its maximum, in place, on the device on which the ranks communicate."""
    sent = flag.to(device, non_blocking=True)
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)
    if sent is not flag:
        flag.copy_(sent)


class NativePrecision(Precision):
    """Autocast of torch.amp, with loss scaling by the rules of torch.amp.GradScaler."""

    name = "native"
    dtypes: ClassVar[Mapping[str, frozenset[torch.dtype]]] = {
        "cpu": frozenset({torch.bfloat16}),
        "cuda": frozenset({torch.bfloat16, torch.float16}),
    }
    default_level = "O1"

    @override
    def describe(self, amp: Amp, *, device_type: str) -> str:
        return describe(amp, self, device_type=device_type)

    @override
    def open(
        self,
        *,
        amp: Amp,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        device: torch.device,
        world: World,
        sharded: bool = False,
    ) -> contextlib.AbstractContextManager[Session]:
        """Return the context of mixed precision for a block, with the settings of the level's row in `TABLE`.

        Raises:
            ConfigError: a parameter is in fp16 under loss scaling.
        """
        del optimizers  # a global step hook is called for every optimizer
        amp = resolve(amp, self, device=device, world=world)
        row = TABLE[amp.level or self.default_level]
        if not row.autocast:
            return contextlib.nullcontext(Session())
        policy = Policy(
            device=device,
            autocast_dtype=amp.dtype,
            weights_dtype=amp.dtype if row.half_weights and row.master_weights else None,
            backend_casts_weights=sharded and world.world_size > 1,
            storage_dtype=None if row.master_weights else amp.dtype,
            loss_scaling=amp if row.scales_loss and amp.dtype is torch.float16 else None,
            all_reduce_flag=functools.partial(_max_over_ranks, device=device) if sharded else None,
            communication_dtype=amp.communication_dtype,
        )
        return mixed_precision(policy, models=models)


PLUGIN = NativePrecision
