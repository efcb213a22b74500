"""The native engine of mixed precision: torch.autocast in forward, loss scaling for fp16.

model(x)        route: autocast is entered
                └── the engine, which may call several replicas in threads of their own
                      └── forward: autocast is entered in this thread, weights are cast (O2)
                route: autocast is left, and outputs are cast to fp32
the loss        is computed in fp32, or under an autocast of the user's own
backward        begins at the marked outputs: weights are cast again for checkpoints (O2), and
                a pass without loss scaling is refused (fp16)
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
from parallelize.precision.levels import LeveledPrecision, LevelRow
from parallelize.precision.loss_scaling import LossScaling, not_scaled
from parallelize.precision.unused_autocast import UnusedAutocast
from parallelize.precision.weight_casting import HalfWeights, exempt_modules, stored_in_half
from parallelize.run.containers import map_leaves, tensors_in
from parallelize.torch_patches.backward import Order, is_in_backward, subscribed
from parallelize.torch_patches.forward import route_of, routed_models
from parallelize.torch_patches.module_tensors import all_named_parameters
from parallelize.torch_patches.scaled_gradients import before_grad_scaler, refusing_tensor_hooks
from parallelize.torch_patches.step import AfterStep, BeforeStep, after_step, before_step

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
        amp = self.resolve(request.amp, device=request.device, world=request.world)
        row = self.row_of(amp)
        if not row.autocast:
            yield Session()
            return
        # At O3, the weights are in half precision whoever uses them.
        is_main = request.world.rank == 0
        unused = UnusedAutocast(request.models, warns=is_main and row.master_weights)
        session = NativeSession(amp, request.device, unused)
        has_shards = request.shards_gradients and request.world.world_size > 1
        with contextlib.ExitStack() as stack:
            if not row.master_weights:
                stack.enter_context(
                    stored_in_half(request.models, session.dtype, request.optimizers)
                )
            else:
                session.cast_weights(row, is_cast_by_engine=has_shards)
            if row.scales_loss and amp.dtype is torch.float16:
                stack.enter_context(_scaling_losses(session, amp, request, has_shards=has_shards))
            stack.callback(session.bind, ())
            session.bind(request.models)
            stack.enter_context(unused.active())
            yield session


@contextlib.contextmanager
def _scaling_losses(
    session: NativeSession, amp: Amp, request: PrecisionRequest, *, has_shards: bool
) -> Iterator[None]:
    """Scale the losses of a block, by the scaling of a block around it if that scales, too.

    So a loss of models of two blocks is scaled once.
    """
    _refuse_parameters(request.models)
    with contextlib.ExitStack() as stack:
        scaling = _scaling_of_outer_block()
        if scaling is None:
            scaling = LossScaling(amp, device=request.device, has_shards=has_shards)
            stack.enter_context(_scaled(scaling))
        stack.callback(scaling.set_models, (), former=request.models)
        session.scaling = scaling
        yield


def _scaling_of_outer_block() -> LossScaling | None:
    """Return the loss scaling of a block that has begun; None: there is none."""
    for model in routed_models():
        route = route_of(model)
        if route is None or not isinstance(route.owner.session, NativeSession):
            continue
        scaling = route.owner.session.scaling
        if scaling is not None:
            return scaling
    return None


class NativeSession(Session):
    """Mixed precision of one block by torch.amp.

    Args:
        amp: the request, with its dtype.
        device: the first device of this process.
        unused_autocast: is told of the first forward with gradients.

    Attributes:
        dtype: the half-precision dtype.
        weights: casts weights in forward (O2); None: no casts.
        scaling: loss scaling of this block, or of the block around it; None: no loss scaling.
    """

    def __init__(self, amp: Amp, device: torch.device, unused_autocast: UnusedAutocast) -> None:
        self.communication_dtype = amp.communication_dtype
        self.fp32_modules = exempt_modules(device.type)
        self.dtype: Any = amp.dtype
        self.weights: HalfWeights | None = None
        self.scaling: LossScaling | None = None
        self._device_type = device.type
        self._outputs = amp.outputs
        self._unused_autocast = unused_autocast

    def cast_weights(self, row: LevelRow, *, is_cast_by_engine: bool) -> None:
        """Compute with half-precision casts of the weights, if the level does.

        Args:
            row: of the level.
            is_cast_by_engine: whether the engine casts the shards that it gathers.
        """
        if not row.half_weights:
            return
        self.weights_dtype = self.dtype
        if not is_cast_by_engine:
            self.weights = HalfWeights(self.dtype, exempt=self.fp32_modules)

    @override
    def bind(self, models: Sequence[nn.Module]) -> None:
        if self.scaling is not None:
            self.scaling.set_models(models)
        if self.weights is not None:
            self.weights.set_models(models)

    @override
    def route(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward under autocast, and return what it computes in fp32."""
        if torch.is_grad_enabled():
            self._unused_autocast.is_over = True
        if self._is_autocast_of_caller():
            return call(*args, **kwargs)
        with torch.autocast(self._device_type, self.dtype):
            outputs = call(*args, **kwargs)
        return self._in_fp32(outputs)

    @property
    @override
    def mark_owner(self) -> object | None:
        """What searches for outputs: loss scaling, of several blocks; else a session that casts."""
        if self.scaling is not None:
            return self.scaling
        return None if self.weights is None else self

    @override
    def watch_outputs(self, nodes: Sequence[Any]) -> None:
        owner = self.mark_owner
        for node in nodes:
            # The node of an input that forward has returned has no mark.
            if owner in marks_of(node):
                node.register_prehook(self._before_backward)

    @override
    def forward(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward under autocast, on any thread."""
        autocast: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if not self._is_autocast_of_caller():
            # On the thread of a replica: the autocast that `route` has entered is of another one.
            autocast = torch.autocast(self._device_type, self.dtype)
        with autocast:
            if self.weights is None:
                return call(*args, **kwargs)
            return self.weights.forward(call, args, kwargs)

    def _is_autocast_of_caller(self) -> bool:
        """Whether the caller has decided about autocast, which then stays as it is.

        The caller has it on with this dtype, as `route` has around `forward`, or has disabled it
        around the call.
        """
        if torch.is_autocast_enabled(self._device_type):
            return torch.get_autocast_dtype(self._device_type) is self.dtype
        # torch counts the autocast contexts that are open, also those with enabled=False. Only the
        # function that opens a context returns the number.
        nesting = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        # In backward, torch's checkpoint has disabled autocast, as it was around the call.
        return nesting > 1 and not is_in_backward()

    def _in_fp32(self, outputs: Any) -> Any:
        """Cast outputs in half precision to fp32, but not those beside a loss computed from them.

        These are often the largest tensors of all, such as the logits of a language model that gets
        `labels=`, and the user hardly reads them.
        """
        tensors = tensors_in(outputs)
        half = [tensor for tensor in tensors if tensor.dtype is self.dtype]
        kept_nodes = self._nodes_to_keep(tensors, half)
        ids_to_cast = set()
        for tensor in half:
            if tensor.ndim == 0 or tensor.grad_fn not in kept_nodes:
                ids_to_cast.add(id(tensor))
        if not ids_to_cast:
            return outputs

        def cast(leaf: Any) -> Any:
            return leaf.float() if id(leaf) in ids_to_cast else leaf

        return map_leaves(cast, outputs)

    def _nodes_to_keep(self, tensors: list[torch.Tensor], half: list[torch.Tensor]) -> set[Any]:
        """Return nodes whose values stay in half precision.

        Args:
            tensors: outputs of a forward.
            half: those in half precision.
        """
        candidates = set()
        for tensor in half:
            if tensor.ndim and tensor.grad_fn is not None:
                candidates.add(tensor.grad_fn)
        if not candidates or self._outputs != "fp32":
            return candidates
        # With "fp32", only those in the graph of a loss. There is no mark to search for: the block
        # marks what this function returns. torch numbers nodes as they are made.
        first_number = min(node._sequence_nr() for node in candidates)
        losses = [tensor.grad_fn for tensor in tensors if tensor.ndim == 0]
        return set(nodes_behind(losses, is_end=lambda node: node._sequence_nr() <= first_number))

    def _before_backward(self, _gradients: Any) -> None:
        """Prepare a backward pass from outputs, however it was called.

        Raises:
            ConfigError: loss scaling has not seen the pass.
        """
        if self.weights is not None:
            self.weights.recompute()
        if self.scaling is not None and not self.scaling.is_scaled:
            raise not_scaled(
                "a backward pass that is not scaled",
                "torch.autograd.grad, a backward() imported before the block, and one after it "
                "may underflow",
                "call loss.backward() in the block, or ",
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale; {} without loss scaling."""
        if self.scaling is None:
            return {}
        return dict(self.scaling.updated_scale().state)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the loss scale; an empty state, of no loss scaling, changes nothing."""
        if self.scaling is not None and state:
            self.scaling.updated_scale().state.update(state)


@contextlib.contextmanager
def _scaled(scaling: LossScaling) -> Iterator[None]:
    """Scale the losses of backward passes, and refuse what would see the scale.

    If a GradScaler of the user's own scales a loss of the models, this ends: the user's loop then
    does what loss scaling needs.
    """
    patches = contextlib.ExitStack()

    def leave_it_to(scaler: torch.amp.GradScaler, outputs: Any) -> None:
        roots = tensors_in(outputs)
        if scaler.is_enabled() and scaling.leaves_behind(roots, owner=scaling).has_model:
            patches.close()
            scaling.is_scaled = True

    with before_grad_scaler(leave_it_to), patches:
        patches.enter_context(subscribed(Order.SCALE, scaling.around_backward))
        patches.enter_context(before_step(BeforeStep.SCALE, scaling.before_step))
        patches.enter_context(after_step(AfterStep.SCALE, scaling.after_step))
        patches.enter_context(refusing_tensor_hooks(lambda method: not_scaled(method, _IS_SCALED)))
        yield


def _refuse_parameters(models: Sequence[nn.Module]) -> None:
    """Refuse models whose gradients would underflow, or be seen scaled."""
    for model in models:
        for name, parameter in all_named_parameters(model):
            if parameter.dtype is torch.float16:
                raise not_scaled(
                    f"parameter {name!r} in {parameter.dtype}",
                    "its gradient has the same dtype, and unscaled gradients underflow in fp16",
                    "pass the model in fp32, without .half(), or ",
                )
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise not_scaled(f"a hook on parameter {name!r}", _IS_SCALED)
