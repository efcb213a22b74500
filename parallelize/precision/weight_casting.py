"""Weights in half precision: cast for each forward (O2), or stored in half precision inside the block (O3)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from parallelize.runtime.autograd_graph import has_sparse_gradient

__all__ = ["HalfStorage", "HalfWeightsInForward", "exempt_modules", "floating_point_tensors"]

# Batch norm is fp32 in O2 by definition, parametrizations compute weights in fp32, and attributes of scripted modules
# cannot be replaced. Autocast casts the weights of these modules where an operation needs it.
_EXEMPT: tuple[type[nn.Module], ...] = (_NormBase, ParametrizationList, torch.jit.ScriptModule)

# On CPUs, these need weights and inputs of the same dtype, but autocast does not cast their inputs.
_EXEMPT_ON_CPU: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.GroupNorm)


def exempt_modules(device_type: str) -> tuple[type[nn.Module], ...]:
    """Return the module classes that keep their weights in fp32 under O2 on a device type."""
    return _EXEMPT + (_EXEMPT_ON_CPU if device_type == "cpu" else ())


# Autograd runs the ready node with the largest number first. Casts are made before all other nodes: with their own
# numbers they would run last, and no gradient would be all-reduced while backward runs.
_FIRST = 2**62


class HalfWeightsInForward:
    """O2: parameters stay fp32, and modules compute with half-precision casts of them.

    The parameters are the master weights, so the optimizer is unchanged. During a forward of the model, an entry in
    the `__dict__` of each module hides the parameter behind its cast. An activation checkpoint reruns parts of the
    forward in backward, where these entries no longer exist; there a parameter is cast when it is accessed.

    Module hooks would not do: copies of the model would have them, and torch.compile does not support global hooks.

    Args:
        dtype: the half-precision type.
        exempt: classes of modules whose weights are not cast.
    """

    def __init__(self, dtype: torch.dtype, *, exempt: tuple[type[nn.Module], ...]) -> None:
        self._dtype = dtype
        self._cast: Any = torch.Tensor.half if dtype is torch.float16 else torch.Tensor.bfloat16  # faster than `to`
        self._exempt = exempt
        self._weights: dict[Any, list[_Weight]] = {}  # by model
        self.recomputation = _Recomputation(dtype)

    def add_model(self, model: nn.Module) -> None:
        """Add a model, whose current fp32 parameters are cast in later forwards."""
        weights = self._weights[model] = []
        for module in model.modules():
            names = () if isinstance(module, self._exempt) else _fp32_names(module, module._parameters)
            weights += [(module.__dict__, module._parameters, name) for name in names]
        self.recomputation.set_weights(chain.from_iterable(self._weights.values()))

    def forward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of a model with casts in place of parameters; of all added models if it is not added."""
        model = getattr(call, "__self__", None)
        if "_is_replica" in getattr(model, "__dict__", ()):
            # A DataParallel replica exists for this forward and its backward only: nothing to restore.
            self._cast_replica(model)
            return call(*args, **kwargs)
        is_added = model in self._weights
        weights = self._weights[model] if is_added else list(chain.from_iterable(self._weights.values()))
        is_compiling, previous = torch.compiler.is_compiling(), []  # the casts of an outer forward
        try:
            for attributes, parameters, name in weights:
                if (weight := parameters.get(name)) is None:  # removed inside the block, as by pruning
                    continue
                previous.append((attributes, name, attributes.get(name)))
                attributes[name] = cast = self._cast(weight)
                if not is_compiling and (node := cast.grad_fn) is not None:
                    node._set_sequence_nr(_FIRST)
            return call(*args, **kwargs)
        finally:
            for attributes, name, value in previous:
                if value is None:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value

    def _cast_replica(self, replica: Any) -> None:
        for module in replica.modules():
            if not isinstance(module, self._exempt):
                # Parameters of a replica are plain attributes: copies with a grad_fn.
                names = _fp32_names(module, module._former_parameters)
                module.__dict__.update({name: getattr(module, name).to(self._dtype) for name in names})


_Weight = tuple[dict[str, Any], Any, str]
"""`__dict__` and `_parameters` of a module, and the name of a parameter."""


def _fp32_names(module: nn.Module, parameters: Mapping[str, Any]) -> tuple[str, ...]:
    if has_sparse_gradient(module):
        return ()  # the backward of torch's cast does not support sparse gradients
    return tuple(name for name, each in parameters.items() if each is not None and each.dtype is torch.float32)


class _CastOnAccess(dict[str, Any]):
    """Replacement for a module's `_parameters`: looking up a name returns a cast, iterating yields the originals."""

    def __init__(self, parameters: Mapping[str, Any], *, names: Container[str], dtype: torch.dtype) -> None:
        super().__init__(parameters)
        self._names = names
        self._dtype = dtype

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        # Hooks of the user run in backward with grad mode off; they get the parameter itself, with its gradient.
        return value.to(self._dtype) if name in self._names and torch.is_grad_enabled() else value


class _Recomputation:
    """Context of backward passes: parameters are cast on access if grad mode is on, so in recomputed forwards.

    Args:
        dtype: the half-precision type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._modules: list[tuple[dict[str, Any], Any, list[str]]] = []  # `__dict__`, `_parameters`, names to cast
        self._replacements: list[_CastOnAccess] = []

    def set_weights(self, weights: Iterable[_Weight]) -> None:
        """Set the weights of all models."""
        modules: dict[int, tuple[dict[str, Any], Any, list[str]]] = {}
        for attributes, parameters, name in weights:
            modules.setdefault(id(parameters), (attributes, parameters, []))[2].append(name)
        self._modules, self._replacements = list(modules.values()), []

    def __enter__(self) -> None:
        copied = list(chain.from_iterable(map(dict.values, self._replacements)))
        current = list(chain.from_iterable(map(dict.values, map(itemgetter(1), self._modules))))
        if len(copied) != len(current) or not all(map(is_, copied, current)):  # a parameter was replaced or added
            options = [(parameters, names) for _, parameters, names in self._modules]
            self._replacements = [_CastOnAccess(each, names=names, dtype=self._dtype) for each, names in options]
        for (attributes, _, _), replacement in zip(self._modules, self._replacements, strict=True):
            attributes["_parameters"] = replacement

    def __exit__(self, *error: object) -> None:
        for attributes, parameters, _ in self._modules:
            attributes["_parameters"] = parameters


class HalfStorage:
    """O3: parameters and buffers are stored in half precision, and cast back to their original dtypes at the end.

    Parameters stay the same objects. Optimizer state with the shape of its parameter is cast too: before the first
    step in the block, and back at the end.

    Args:
        dtype: the half-precision type.
        models: the models to cast.
    """

    def __init__(self, dtype: torch.dtype, *, models: Sequence[nn.Module]) -> None:
        self._dtype = dtype
        self._models = tuple(models)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @contextlib.contextmanager
    def cast_models(self) -> Iterator[None]:
        """Cast the models to half precision inside the context."""
        dtypes = [{name: each.dtype for name, each in floating_point_tensors(model)} for model in self._models]
        self._cast(lambda _model, _name: self._dtype)
        try:
            yield
        finally:
            self._cast(lambda model, name: dtypes[model].get(name, self._dtype))
            for optimizer in self._optimizers:
                _cast_state(optimizer)

    def cast_state_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Cast the state that an optimizer has from before the block; no-op after the optimizer's first step."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            _cast_state(optimizer)

    @torch.no_grad()
    def _cast(self, dtype_of: Callable[[int, str], torch.dtype]) -> None:
        for index, model in enumerate(self._models):
            for name, each in floating_point_tensors(model):
                gradient, each.grad = each.grad, None
                each.data = each.data.to(dtype_of(index, name))
                each.grad = None if gradient is None else gradient.to(each.dtype)


def floating_point_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the names and values of the floating-point parameters and buffers of a model."""
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if each.is_floating_point():
            yield name, each


def _cast_state(optimizer: torch.optim.Optimizer) -> None:
    """Cast the per-parameter state of an optimizer to the dtype of each parameter; step counters stay."""
    state: dict[Any, Any] = optimizer.state
    for parameter, values in state.items():
        if isinstance(parameter, torch.Tensor) and isinstance(values, dict):
            like_parameter = {key: value for key, value in values.items() if _is_like_parameter(key, value, parameter)}
            values.update({key: value.to(parameter.dtype) for key, value in like_parameter.items()})


def _is_like_parameter(key: str, value: Any, parameter: torch.Tensor) -> bool:
    is_floating_point = isinstance(value, torch.Tensor) and value.is_floating_point()
    return key != "step" and is_floating_point and value.shape == parameter.shape
