"""Weights in half precision: cast for each forward (O2), or stored in half in the block (O3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from parallelize.gradients.autograd_graph import has_sparse_gradient
from parallelize.run.live_optimizers import live_optimizers
from parallelize.torch_patches.backward import at_end_of_backward, is_in_backward
from parallelize.torch_patches.module_tensors import all_named_buffers, all_named_parameters

# Autograd runs the ready node with the largest number first. Casts are made before all other nodes:
# with their own numbers they would run last, and no gradient would be all-reduced while backward
# runs.
_RUNS_FIRST = 2**62


def exempt_modules(device_type: str) -> tuple[type[nn.Module], ...]:
    """Return the module classes that keep their weights in fp32 under O2 on a device type.

    Batch norm is fp32 in O2 by definition, parametrizations compute weights in fp32, and attributes
    of scripted modules cannot be replaced. Autocast casts the weights of these modules where an
    operation needs it.
    """
    exempt: tuple[type[nn.Module], ...] = (_NormBase, ParametrizationList, torch.jit.ScriptModule)
    if device_type == "cpu":
        # On CPUs, these need weights and inputs of the same dtype, but autocast does not cast their
        # inputs.
        exempt += (nn.LayerNorm, nn.GroupNorm)
    return exempt


class _Weight(NamedTuple):
    """Where a module has a parameter.

    Args:
        attributes: `__dict__` of the module; an entry in it hides the parameter.
        parameters: `_parameters` of the module.
        name: of the parameter there.
    """

    attributes: dict[str, Any]
    parameters: dict[str, Any]
    name: str


class HalfWeights:
    """O2: parameters stay fp32, and modules compute with half-precision casts of them.

        forward              an entry in the `__dict__` of each module hides the parameter behind
                             its cast; the entry is removed when the forward ends
        backward             an activation checkpoint runs parts of the forward again, without these
                             entries; there a parameter is cast when the module looks it up
        end of backward      modules have their own `_parameters` again

    The parameters are the master weights, so the optimizer is unchanged.

    Module hooks would not do: copies of the model would have them, and torch.compile does not
    support global hooks.

    Args:
        dtype: the half-precision type.
        exempt: classes of modules whose weights are not cast.
    """

    def __init__(self, dtype: torch.dtype, *, exempt: tuple[type[nn.Module], ...]) -> None:
        self._dtype = dtype
        self._exempt = exempt
        self._weights: dict[nn.Module, list[_Weight]] = {}
        # The weights whose modules look up casts at present, by `_CastOnAccess`.
        self._replaced: list[_Weight] = []

    def set_models(self, models: Sequence[nn.Module]) -> None:
        """Set the models, whose present fp32 parameters are cast in later forwards."""
        self._end_backward()
        self._weights = {model: self._weights_of(model) for model in models}

    def _weights_of(self, model: nn.Module) -> list[_Weight]:
        weights = []
        for module in filter(self._is_cast, model.modules()):
            for name, parameter in module._parameters.items():
                if _is_fp32(parameter):
                    weights.append(_Weight(module.__dict__, module._parameters, name))
        return weights

    def _is_cast(self, module: nn.Module) -> bool:
        # The backward of torch's cast does not support sparse gradients.
        return not isinstance(module, self._exempt) and not has_sparse_gradient(module)

    def forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a method of a model with casts in place of parameters.

        Args:
            call: the method. If its model is none of the block's, the parameters of all models of
                the block are cast.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        model: Any = getattr(call, "__self__", None)
        if "_is_replica" in getattr(model, "__dict__", ()):
            self._cast_replica(model)
            return call(*args, **kwargs)
        if not is_in_backward():
            # A backward pass that has raised did not end.
            self._end_backward()
        weights = self._weights.get(model)
        if not weights:
            weights = list(chain.from_iterable(self._weights.values()))
        hiding: list[_Weight] = []
        try:
            # This is no function of one weight, which would be called once per parameter. If a cast
            # runs out of memory, the list has the weights before it.
            for weight in weights:
                attributes, parameters, name = weight
                parameter = parameters.get(name)
                # None: it was removed inside the block, as by pruning. In `__dict__`: an outer
                # forward has cast it.
                if parameter is None or name in attributes:
                    continue
                attributes[name] = cast = parameter.to(self._dtype)
                hiding.append(weight)
                if cast.grad_fn is not None:
                    cast.grad_fn._set_sequence_nr(_RUNS_FIRST)
            return call(*args, **kwargs)
        finally:
            for attributes, _, name in hiding:
                attributes.pop(name, None)

    def _cast_replica(self, replica: Any) -> None:
        """Cast the parameters of a replica of DataParallel.

        The replica exists for this forward and its backward only, and its parameters are
        attributes.
        """
        for module in filter(self._is_cast, replica.modules()):
            for name, parameter in module._former_parameters.items():
                if _is_fp32(parameter):
                    module.__dict__[name] = getattr(module, name).to(self._dtype)

    def recompute(self) -> None:
        """Cast parameters when they are looked up, until the running backward pass ends."""
        if self._replaced:
            return
        for weight in chain.from_iterable(self._weights.values()):
            # Only once for each module, which may have several weights.
            if weight.attributes["_parameters"] is weight.parameters:
                self._replaced.append(weight)
                replacement = _CastOnAccess(weight.parameters)
                replacement.dtype = self._dtype
                weight.attributes["_parameters"] = replacement
        at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        for weight in self._replaced:
            weight.attributes["_parameters"] = weight.parameters
        self._replaced = []


def _is_fp32(parameter: Any) -> bool:
    return parameter is not None and parameter.dtype is torch.float32


class _CastOnAccess(dict[str, Any]):
    """Replacement for a module's `_parameters`.

    Looking up a name returns a cast, iterating yields the originals.

    Attributes:
        dtype: of the casts.
    """

    dtype: torch.dtype

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        # Hooks of the user run in backward with grad mode off; they get the parameter itself, with
        # its gradient.
        is_recomputed = is_in_backward() and torch.is_grad_enabled()
        if is_recomputed and _is_fp32(parameter):
            return parameter.to(self.dtype)
        return parameter


@contextlib.contextmanager
def stored_in_half(
    models: Sequence[nn.Module], dtype: torch.dtype, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """O3: store parameters, buffers and the state of optimizers in half; the objects stay."""
    with dtypes_kept(models, optimizers):
        for tensor in _floating_point_tensors(models).values():
            _cast_in_place(tensor, dtype)
        cast_states(models, optimizers)
        yield


@contextlib.contextmanager
def dtypes_kept(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Give parameters, buffers and the state of optimizers their dtypes back at the end."""
    dtypes = {}
    for key, tensor in _floating_point_tensors(models).items():
        dtypes[key] = tensor.dtype
    try:
        yield
    finally:
        for key, tensor in _floating_point_tensors(models).items():
            # A tensor that was added in the context keeps its dtype.
            if key in dtypes:
                _cast_in_place(tensor, dtypes[key])
        cast_states(models, optimizers)


@torch.no_grad()
def _cast_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Give a tensor another dtype, and its gradient, too."""
    # A tensor that is still sharded belongs to a block that has ended with an exception.
    if tensor.dtype is dtype or hasattr(tensor, "full_tensor"):
        return
    # torch refuses data of another dtype than that of the gradient.
    gradient = tensor.grad
    tensor.grad = None
    tensor.data = tensor.data.to(dtype)
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


def _floating_point_tensors(models: Sequence[nn.Module]) -> dict[tuple[int, str], torch.Tensor]:
    """Return (number of the model, name) -> parameter or buffer, of floating-point numbers."""
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    for number, model in enumerate(models):
        for name, tensor in chain(all_named_parameters(model), all_named_buffers(model)):
            if tensor.is_floating_point():
                tensors[number, name] = tensor
    return tensors


def cast_states(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Cast the state per parameter to the dtype of the parameter; step counters stay."""
    parameters = chain.from_iterable(map(nn.Module.parameters, models))
    for optimizer in live_optimizers(parameters, also=optimizers):
        for parameter, values in optimizer.state.items():
            if isinstance(values, dict):
                _cast_values(values, parameter)


def _cast_values(values: dict[str, Any], parameter: Any) -> None:
    """Cast the tensors in an optimizer's state of one parameter to the dtype of the parameter."""
    shape = getattr(parameter, "shape", None)
    for name, value in values.items():
        if name == "step" or not isinstance(value, torch.Tensor):
            continue
        if value.shape == shape and value.is_floating_point():
            values[name] = value.to(parameter.dtype)
