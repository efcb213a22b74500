"""Weights in half precision: cast for each forward (O2), or stored in half precision inside the block (O3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from parallelize.gradients.autograd_graph import has_sparse_gradient
from parallelize.run.live_optimizers import live_optimizers
from parallelize.torch_patches.backward import at_end_of_backward, is_in_backward
from parallelize.torch_patches.module_tensors import all_named_buffers, all_named_parameters

__all__ = ["HalfWeights", "cast_states", "dtypes_kept", "exempt_modules", "stored_in_half"]

# Autograd runs the ready node with the largest number first. Casts are made before all other nodes: with their own
# numbers they would run last, and no gradient would be all-reduced while backward runs.
_FIRST = 2**62


def exempt_modules(device_type: str) -> tuple[type[nn.Module], ...]:
    """Return the module classes that keep their weights in fp32 under O2 on a device type.

    Batch norm is fp32 in O2 by definition, parametrizations compute weights in fp32, and attributes of scripted modules
    cannot be replaced. Autocast casts the weights of these modules where an operation needs it.
    """
    # On CPUs, these need weights and inputs of the same dtype, but autocast does not cast their inputs.
    norms = (nn.LayerNorm, nn.GroupNorm) if device_type == "cpu" else ()
    return (_NormBase, ParametrizationList, torch.jit.ScriptModule, *norms)


class HalfWeights:
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
        self._dtype, self._exempt = dtype, exempt
        self._weights: dict[Any, list[Any]] = {}  # by model: `__dict__` and `_parameters` of a module, and a name there
        self._replaced: list[Any] = []  # `__dict__` and `_parameters` of modules

    def set_models(self, models: Sequence[nn.Module]) -> None:
        """Set the models, whose present fp32 parameters are cast in later forwards."""
        self._end_backward()
        self._weights = {
            model: [
                (module.__dict__, module._parameters, name)
                for module in filter(self._is_cast, model.modules())
                for name, each in module._parameters.items()
                if _is_fp32(each)
            ]
            for model in models
        }

    def _is_cast(self, module: nn.Module) -> bool:
        # The backward of torch's cast does not support sparse gradients.
        return not isinstance(module, self._exempt) and not has_sparse_gradient(module)

    def forward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of a model with casts in place of parameters; of all models if it is of none of them."""
        model: Any = getattr(call, "__self__", None)
        if "_is_replica" in getattr(model, "__dict__", ()):
            # A replica exists for this forward and its backward only; its parameters are attributes.
            for module in filter(self._is_cast, model.modules()):
                for name in [name for name, each in module._former_parameters.items() if _is_fp32(each)]:
                    module.__dict__[name] = getattr(module, name).to(self._dtype)
            return call(*args, **kwargs)
        if not is_in_backward():
            self._end_backward()  # of one that has raised
        weights = self._weights.get(model) or chain.from_iterable(self._weights.values())
        added = []
        try:
            for attributes, parameters, name in weights:
                # None: removed inside the block, as by pruning; else cast by an outer forward
                if (weight := parameters.get(name)) is None or name in attributes:
                    continue
                attributes[name] = cast = weight.to(self._dtype)
                added.append((attributes, name))
                if (node := cast.grad_fn) is not None:
                    node._set_sequence_nr(_FIRST)
            return call(*args, **kwargs)
        finally:
            for attributes, name in added:
                attributes.pop(name, None)

    def recompute(self) -> None:
        """Cast parameters on access until the running backward pass ends."""
        if self._replaced:
            return
        for attributes, parameters, _ in chain.from_iterable(self._weights.values()):
            if attributes["_parameters"] is parameters:
                self._replaced.append((attributes, parameters))
                attributes["_parameters"] = replacement = _CastOnAccess(parameters)
                replacement.dtype = self._dtype
        at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        for attributes, parameters in self._replaced:
            attributes["_parameters"] = parameters
        self._replaced = []


def _is_fp32(parameter: Any) -> bool:
    return parameter is not None and parameter.dtype is torch.float32


class _CastOnAccess(dict[str, Any]):
    """Replacement for a module's `_parameters`: looking up a name returns a cast, iterating yields the originals."""

    dtype: torch.dtype

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        # Hooks of the user run in backward with grad mode off; they get the parameter itself, with its gradient.
        is_recomputed = is_in_backward() and torch.is_grad_enabled()
        return value.to(self.dtype) if is_recomputed and _is_fp32(value) else value


@contextlib.contextmanager
def stored_in_half(
    models: Sequence[nn.Module], dtype: torch.dtype, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """O3: store parameters, buffers and the state of optimizers in half precision; the objects stay the same."""
    with dtypes_kept(models, optimizers):
        for each in _floating_point_tensors(models).values():
            _cast(each, dtype)
        cast_states(models, optimizers)
        yield


@contextlib.contextmanager
def dtypes_kept(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Give the parameters, buffers and the state of optimizers their dtypes back when the context ends."""
    dtypes = {name: each.dtype for name, each in _floating_point_tensors(models).items()}
    try:
        yield
    finally:
        for name, each in _floating_point_tensors(models).items():
            _cast(each, dtypes.get(name, each.dtype))
        cast_states(models, optimizers)


@torch.no_grad()
def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is dtype or hasattr(tensor, "full_tensor"):  # sharded: a block has ended with an exception
        return
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(dtype)
    tensor.grad = None if gradient is None else gradient.to(dtype)


def _floating_point_tensors(models: Sequence[nn.Module]) -> dict[tuple[int, str], torch.Tensor]:
    """Return the floating-point parameters and buffers of models, by number of the model and name."""
    return {
        (number, name): each
        for number, model in enumerate(models)
        for name, each in (*all_named_parameters(model), *all_named_buffers(model))
        if each.is_floating_point()
    }


def cast_states(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Cast the state per parameter to the dtype of the parameter; step counters stay."""
    parameters = chain.from_iterable(map(nn.Module.parameters, models))
    states = [each.state.items() for each in live_optimizers(parameters, also=optimizers)]
    for parameter, values in chain.from_iterable(states):
        for key, value in values.items() if isinstance(values, dict) else ():
            is_alike = isinstance(value, torch.Tensor) and value.shape == getattr(parameter, "shape", None)
            if is_alike and value.is_floating_point() and key != "step":
                values[key] = value.to(parameter.dtype)
