"""Weights in half precision: cast for each forward (O2), or stored in half precision inside the block (O3)."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from parallelize.runtime.gradients import has_sparse_gradient

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
        self._models: dict[nn.Module, list[_ModuleCasts]] = {}

    def add_model(self, model: nn.Module) -> None:
        """Add a model, whose current fp32 parameters are cast in later forwards."""
        modules = [module for module in model.modules() if not isinstance(module, self._exempt)]
        names = {module: _fp32_names(module, module._parameters) for module in modules}
        self._models[model] = [_ModuleCasts(module, each, self._dtype) for module, each in names.items() if each]

    @contextlib.contextmanager
    def cast_for_forward(self, model: nn.Module | None) -> Iterator[None]:
        """Replace parameters by casts inside the context: of `model`, or of all added models if it is not added."""
        if getattr(model, "_is_replica", False):
            # A DataParallel replica exists for this forward and its backward only: nothing to restore.
            self._cast_replica(model)
            yield
            return
        casts = self._all_casts() if model not in self._models else self._models[model]
        weights = [(each.attributes, each.parameters, name) for each in casts for name in each.names]
        is_compiling = torch.compiler.is_compiling()
        previous = [attributes.get(name) for attributes, _, name in weights]  # the casts of an outer forward
        try:
            for attributes, parameters, name in weights:
                attributes[name] = cast = self._cast(parameters[name])
                if not is_compiling and (node := cast.grad_fn) is not None:
                    node._set_sequence_nr(_FIRST)
            yield
        finally:
            for (attributes, _, name), value in zip(weights, previous, strict=True):
                if value is None:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value

    @contextlib.contextmanager
    def cast_in_backward(self) -> Iterator[None]:
        """Cast parameters on access if grad mode is on: in backward, that means a recomputed forward."""
        casts = self._all_casts()
        for each in casts:
            each.attributes["_parameters"] = each.on_access()
        try:
            yield
        finally:
            for each in casts:
                each.attributes["_parameters"] = each.parameters

    def _all_casts(self) -> list[_ModuleCasts]:
        return list(itertools.chain.from_iterable(self._models.values()))

    def _cast_replica(self, replica: Any) -> None:
        for module in replica.modules():
            if not isinstance(module, self._exempt):
                # Parameters of a replica are plain attributes: copies with a grad_fn.
                names = _fp32_names(module, module._former_parameters)
                module.__dict__.update({name: getattr(module, name).to(self._dtype) for name in names})


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


class _ModuleCasts:
    """The parameters of one module that are cast.

    Attributes:
        attributes: the module's `__dict__`.
        parameters: its `_parameters`.
        names: the names of those that are cast.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...], dtype: torch.dtype) -> None:
        self.attributes = module.__dict__
        self.parameters: Any = module._parameters
        self.names = names
        self._dtype = dtype
        self._on_access = _CastOnAccess(self.parameters, names=names, dtype=dtype)

    def on_access(self) -> _CastOnAccess:
        """Return the replacement for `parameters`; another one after a parameter was replaced or added."""
        is_same_size = len(self._on_access) == len(self.parameters)
        if not (is_same_size and all(map(is_, self._on_access.values(), self.parameters.values()))):
            self._on_access = _CastOnAccess(self.parameters, names=self.names, dtype=self._dtype)
        return self._on_access


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
