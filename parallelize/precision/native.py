"""The native engine of mixed precision: torch.autocast in the forward of the models, loss scaling for fp16.

model(x)    autocast is entered, the user's forward runs, autocast is left; outputs are cast to fp32
the loss    is computed in fp32, or under an autocast of the user's own
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from parallelize.gradients.autograd_graph import marks_of, nodes_behind
from parallelize.plugins.base import Amp, PrecisionRequest, Session
from parallelize.precision.levels import LeveledPrecision
from parallelize.precision.loss_scaling import LossScaling, not_scaled
from parallelize.precision.weight_casting import HalfWeights, exempt_modules, stored_in_half
from parallelize.run.containers import leaves, map_leaves
from parallelize.torch_patches.backward import Order, is_in_backward, subscribed
from parallelize.torch_patches.forward import route_of, routed_models
from parallelize.torch_patches.module_tensors import all_named_parameters
from parallelize.torch_patches.scaled_gradients import before_grad_scaler, refusing_tensor_hooks
from parallelize.torch_patches.step import AfterStep, BeforeStep, after_step, before_step

__all__ = ["NativePrecision", "NativeSession"]

_UNCHANGED = contextlib.nullcontext()
_IS_SCALED = "in backward, gradients are multiplied by the loss scale"


class NativePrecision(LeveledPrecision):
    """Autocast of torch.amp, with loss scaling by the rules of torch.amp.GradScaler."""

    name = "native"
    dtypes: ClassVar[Mapping[str, frozenset[torch.dtype]]] = {
        "cpu": frozenset({torch.bfloat16}),
        "cuda": frozenset({torch.bfloat16, torch.float16}),
    }
    default_level = "O1"

    @override
    @contextlib.contextmanager
    def open(self, request: PrecisionRequest) -> Iterator[Session]:
        """Run a block in mixed precision, with the settings of the level's row in `TABLE`.

        Raises:
            ConfigError: loss scaling does not support the options, or a parameter.
        """
        device, models = request.device, request.models
        amp = self.resolve(request.amp, device=device, world=request.world)
        row, has_shards = self.row_of(amp), request.shards_gradients and request.world.world_size > 1
        if not row.autocast:
            yield Session()
            return
        session = NativeSession(amp, device)
        with contextlib.ExitStack() as stack:
            if not row.master_weights:
                stack.enter_context(stored_in_half(models, session.dtype, request.optimizers))
            elif row.half_weights:
                session.weights_dtype = session.dtype
                session.weights = None if has_shards else HalfWeights(session.dtype, exempt=session.fp32_modules)
            if row.scales_loss and amp.dtype is torch.float16:
                _refuse_parameters(models)
                session.scaling = _scaling_of_outer_block()  # a loss through models of two blocks is scaled once
                if session.scaling is None:
                    session.scaling = LossScaling(amp, device=device, has_shards=has_shards)
                    stack.enter_context(_scaled(session.scaling))
                stack.callback(session.scaling.set_models, (), former=models)
            stack.callback(session.bind, ())
            session.bind(models)
            yield session


def _scaling_of_outer_block() -> LossScaling | None:
    """Return the loss scaling of a block that has begun; None: there is none."""
    for model in routed_models():
        route = route_of(model)
        if route is not None and isinstance(route.owner.session, NativeSession):
            scaling = route.owner.session.scaling
            if scaling is not None:
                return scaling
    return None


class NativeSession(Session):
    """Mixed precision of one block by torch.amp.

    Args:
        amp: the request, with its dtype.
        device: the first device of this process.

    Attributes:
        weights: casts weights in forward (O2); None: no casts.
        scaling: loss scaling of this block, or of the block around it; None: no loss scaling.
    """

    weights: HalfWeights | None = None
    scaling: LossScaling | None = None

    def __init__(self, amp: Amp, device: torch.device) -> None:
        self.communication_dtype, self.fp32_modules = amp.communication_dtype, exempt_modules(device.type)
        self.dtype: Any = amp.dtype
        self._kind, self._outputs = device.type, amp.outputs

    @override
    def bind(self, models: Sequence[nn.Module]) -> None:
        if self.scaling is not None:
            self.scaling.set_models(models)
        if self.weights is not None:
            self.weights.set_models(models)

    @override
    def route(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward under autocast, and return what it computes in fp32."""
        autocast = self._autocast()
        with autocast:
            outputs = call(*args, **kwargs)
        if autocast is not _UNCHANGED:
            outputs = self._in_fp32(outputs)
        return outputs

    @property
    @override
    def mark_owner(self) -> object | None:
        """What searches for outputs: loss scaling, of several blocks; else the session, if it casts weights."""
        if self.scaling is not None:
            return self.scaling
        return None if self.weights is None else self

    @override
    def watch_outputs(self, nodes: Sequence[Any]) -> None:
        owner = self.mark_owner
        for node in nodes:
            # That of an input, which forward has returned, has no mark.
            if owner in marks_of(node):
                node.register_prehook(self._before_backward)

    @override
    def forward(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward under autocast, on any thread."""
        with self._autocast():
            return call(*args, **kwargs) if self.weights is None else self.weights.forward(call, args, kwargs)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return autocast, unless it is on, or the user has disabled it around the call."""
        if torch.is_autocast_enabled(self._kind):
            is_unchanged = torch.get_autocast_dtype(self._kind) is self.dtype
        else:  # in backward, torch's checkpoint has disabled it, as it was around the call
            is_unchanged = torch.autocast_increment_nesting() > 1 and not is_in_backward()
            torch.autocast_decrement_nesting()
        return _UNCHANGED if is_unchanged else torch.autocast(self._kind, self.dtype)

    def _in_fp32(self, outputs: Any) -> Any:
        """Cast half-precision outputs, but not those in the graph from which a loss beside them was computed."""
        found = [each for each in leaves(outputs) if isinstance(each, torch.Tensor)]
        half = [each for each in found if each.dtype is self.dtype]
        kept = [node for each in half if each.ndim and (node := each.grad_fn)]
        if kept and self._outputs == "fp32":
            # There is no mark to search for: the block marks what this function returns.
            first = min(node._sequence_nr() for node in kept)  # nodes are numbered as they are made
            losses = [each.grad_fn for each in found if not each.ndim]
            kept = list(nodes_behind(losses, is_end=lambda node: node._sequence_nr() <= first))
        cast = {id(each) for each in half if not each.ndim or each.grad_fn not in kept}
        return map_leaves(lambda each: each.float() if id(each) in cast else each, outputs) if cast else outputs

    def _before_backward(self, _gradients: Any) -> None:
        """Prepare a backward pass from outputs, however it was called."""
        if self.weights is not None:
            self.weights.recompute()
        if self.scaling is not None and not self.scaling.is_scaled:
            why = "torch.autograd.grad, a backward() imported before the block, and one after it may underflow"
            raise not_scaled("a backward pass that is not scaled", why, "call loss.backward() in the block, or ")

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale; {} without loss scaling."""
        return {} if self.scaling is None else dict(self.scaling.updated_scale().state)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the loss scale; an empty state, saved without loss scaling, changes nothing."""
        if self.scaling is not None and state:
            self.scaling.updated_scale().state.update(state)


@contextlib.contextmanager
def _scaled(scaling: LossScaling) -> Iterator[None]:
    """Scale the losses of backward passes, and refuse what would see it; until a GradScaler of the user's own does."""
    patches = contextlib.ExitStack()

    def see(scaler: torch.amp.GradScaler, outputs: Any) -> None:
        roots = [each for each in leaves(outputs) if isinstance(each, torch.Tensor)]
        if scaler.is_enabled() and scaling.leaves_behind(roots, owner=scaling)[0]:
            patches.close()
            scaling.is_scaled = True

    with before_grad_scaler(see), patches:
        for patch in (
            subscribed(Order.SCALE, scaling.around_backward),
            before_step(BeforeStep.SCALE, scaling.before_step),
            after_step(AfterStep.SCALE, scaling.after_step),
            refusing_tensor_hooks(lambda method: not_scaled(method, _IS_SCALED)),
        ):
            patches.enter_context(patch)
        yield


def _refuse_parameters(models: Sequence[nn.Module]) -> None:
    for model in models:
        for name, each in all_named_parameters(model):
            if each.dtype is torch.float16:
                why = "its gradient has the same dtype, and unscaled gradients underflow in fp16"
                fix = "pass the model in fp32, without .half(), or "
                raise not_scaled(f"parameter {name!r} in {each.dtype}", why, fix)
            if each._backward_hooks or each._post_accumulate_grad_hooks:
                raise not_scaled(f"a hook on parameter {name!r}", _IS_SCALED)
