"""Weights in half precision: for each forward (O2), or while the block lasts (O3)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from parallelize.runtime.gradients import has_sparse_gradient

__all__ = ["HalfModels", "HalfWeights", "left_alone"]

# Batch norm is fp32 by the level's definition; a parametrization computes a weight, in the precision of a weight; a
# scripted module is no Python object whose attributes could be covered. What is left out, autocast casts by itself.
_LEFT_ALONE: tuple[type[nn.Module], ...] = (_NormBase, ParametrizationList, torch.jit.ScriptModule)

# On CPUs these take weights in half only beside inputs in half, and autocast leaves their inputs as they are there.
_LEFT_ALONE_ON_CPU: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.GroupNorm)

_ABSENT = object()


def left_alone(device_type: str) -> tuple[type[nn.Module], ...]:
    """Classes of modules that keep their weights in fp32 under O2, on a kind of device."""
    return _LEFT_ALONE + (_LEFT_ALONE_ON_CPU if device_type == "cpu" else ())


class HalfWeights:
    """O2: parameters stay fp32, and modules compute with half-precision casts of them.

    The parameters are the master weights, so that the optimizer needs no word. While a forward of the model lasts, an
    entry in each instance's dictionary covers the parameter. An activation checkpoint runs parts of the forward again
    in backward, of which nobody tells; there a parameter is cast when it is read.

    No hooks: they would go along with copies and pickles of the model, and torch.compile could not do with global ones.

    Args:
        dtype: the half-precision type.
        exempt: classes of modules whose weights stay as they are.
    """

    def __init__(self, dtype: torch.dtype, *, exempt: tuple[type[nn.Module], ...]) -> None:
        self._dtype = dtype
        self._exempt = exempt
        self._models: weakref.WeakKeyDictionary[nn.Module, list[nn.Module]] = weakref.WeakKeyDictionary()
        self._owned: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()

    def adopt(self, model: nn.Module) -> None:
        """Cast for a model from now on, by the parameters it has now."""
        owners = {module: _fp32_names(module) for module in model.modules() if not isinstance(module, self._exempt)}
        self._owned.update({module: names for module, names in owners.items() if names})
        self._models[model] = [module for module, names in owners.items() if names]

    @contextlib.contextmanager
    def covering(self, model: nn.Module | None) -> Iterator[None]:
        """Cover the parameters of a model; of all, if it is none that was adopted."""
        if getattr(model, "_is_replica", False):
            # It lives for this forward and the backward of it, and there is nothing to uncover for anyone.
            self._cover_replica(model)
            yield
            return
        known = self._models.get(model) if model is not None else None
        modules = [each for several in self._models.values() for each in several] if known is None else known
        with contextlib.ExitStack() as stack:
            for module in modules:
                stack.enter_context(_covered(module, self._owned[module], self._dtype))
            yield

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Cast what is read of a parameter while gradients are recorded: in a backward, that is a recomputation."""
        found = [(module, module._parameters) for module in self._owned]
        for module, parameters in found:
            casts = _CastWhenRead(parameters, names=self._owned[module], dtype=self._dtype)
            module.__dict__["_parameters"] = casts
        try:
            yield
        finally:
            for module, parameters in found:
                module.__dict__["_parameters"] = parameters

    def _cover_replica(self, replica: Any) -> None:
        for module in replica.modules():
            if not isinstance(module, self._exempt):
                names = _fp32_names(module)
                module.__dict__.update({name: getattr(module, name).to(self._dtype) for name in names})


def _fp32_names(module: nn.Module) -> tuple[str, ...]:
    if has_sparse_gradient(module):
        return ()  # a sparse gradient cannot go back through torch's cast
    # In a replica, parameters are plain attributes: results of a copy, with a history.
    own: dict[str, Any] = module.__dict__.get("_former_parameters") or module._parameters
    return tuple(name for name, each in own.items() if each is not None and each.dtype is torch.float32)


class _CastWhenRead(dict[str, Any]):
    """A module's parameters, of which reading one as an attribute gives a cast; listing them gives themselves."""

    def __init__(self, parameters: Mapping[str, Any], *, names: Container[str], dtype: torch.dtype) -> None:
        super().__init__(parameters)
        self._names = names
        self._dtype = dtype

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        # Hooks of the user's run in backward too, without recording: they are to find the parameter and its gradient.
        return value.to(self._dtype) if name in self._names and torch.is_grad_enabled() else value


@contextlib.contextmanager
def _covered(module: nn.Module, names: tuple[str, ...], dtype: torch.dtype) -> Iterator[None]:
    under = {name: module.__dict__.get(name, _ABSENT) for name in names}
    module.__dict__.update({name: getattr(module, name).to(dtype) for name in names})
    try:
        yield
    finally:
        for name, value in under.items():
            if value is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value


class HalfModels:
    """O3: parameters and buffers are in half precision, and back in their former types at the end.

    Parameters stay the objects they are. State of optimizers that fits a parameter goes along: when one steps for the
    first time, and back at the end.

    Args:
        dtype: the half-precision type.
        models: what is cast.
    """

    def __init__(self, dtype: torch.dtype, *, models: Sequence[nn.Module]) -> None:
        self._dtype = dtype
        self._models = tuple(models)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Cast now; cast back at the end."""
        former = [{name: each.dtype for name, each in _floats(model)} for model in self._models]
        self._cast(lambda _model, _name: self._dtype)
        try:
            yield
        finally:
            self._cast(lambda model, name: former[model].get(name, self._dtype))
            for optimizer in self._optimizers:
                _cast_state(optimizer)

    def sees(self, optimizer: torch.optim.Optimizer) -> None:
        """Cast the state that an optimizer has brought along, once."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            _cast_state(optimizer)

    @torch.no_grad()
    def _cast(self, dtype_of: Callable[[int, str], torch.dtype]) -> None:
        for number, model in enumerate(self._models):
            for name, each in _floats(model):
                gradient, each.grad = each.grad, None
                each.data = each.data.to(dtype_of(number, name))
                each.grad = None if gradient is None else gradient.to(each.dtype)


def _floats(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if each.is_floating_point():
            yield name, each


def _cast_state(optimizer: torch.optim.Optimizer) -> None:
    """Give what an optimizer keeps for each parameter the type of that parameter; counters keep theirs."""
    state: dict[Any, Any] = optimizer.state
    for parameter, kept in state.items():
        if isinstance(parameter, torch.Tensor) and isinstance(kept, dict):
            kept.update({key: value.to(parameter.dtype) for key, value in kept.items() if _fits(key, value, parameter)})


def _fits(key: str, value: Any, parameter: torch.Tensor) -> bool:
    return (
        key != "step"
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.shape == parameter.shape
    )
