"""Side effects of forward: detects random numbers and state stored on the model, restores RNG states and buffers."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.gradients import gradient_version

__all__ = [
    "ModelState",
    "RNGState",
    "changed_attributes",
    "changed_gradients",
    "clone_inference_tensors",
    "default_generator",
    "python_rng_state",
]


def default_generator(device: torch.device) -> torch.Generator:
    """Return the global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator


_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})
"""Attributes that torch sets on every module, such as its hooks, and the forward that a block replaces."""


class RNGState:
    """States of the global generators of the CPU and of `devices`."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._generators = [default_generator(device) for device in {torch.device("cpu"), *devices}]
        self._states = [generator.get_state() for generator in self._generators]

    def has_changed(self) -> bool:
        """Return whether random numbers were drawn since then."""
        pairs = zip(self._generators, self._states, strict=True)
        return any(not torch.equal(generator.get_state(), state) for generator, state in pairs)

    def restore(self) -> None:
        """Restore the states."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


class _Writes(TorchDispatchMode):
    """Dispatch mode that copies the storages of tensors before an operation first writes to them.

    Attributes:
        copies: id of a tensor -> its former value.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.copies: dict[int, torch.Tensor] = {}
        self._of: dict[int, list[torch.Tensor]] = {}
        for each in tensors:
            self._of.setdefault(each.untyped_storage()._cdata, []).append(each)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        del types
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable:
            named = {each.name: each for each in schema.arguments}
            given = [*zip(named.values(), args, strict=False), *((named[name], each) for name, each in kwargs.items())]
            written = [each for one, each in given if one.alias_info is not None and one.alias_info.is_write]
            for each in leaves(written):
                self._copy(each)
        return func(*args, **kwargs)

    def _copy(self, written: Any) -> None:
        if not isinstance(written, torch.Tensor):
            return
        for each in self._of.get(written.untyped_storage()._cdata, ()):
            if id(each) not in self.copies:
                self.copies[id(each)] = each.detach().clone()


class ModelState:
    """Copy of a model's buffers, its modules' modes and other numbers, its gradients, and RNG states of `devices`."""

    def __init__(self, model: nn.Module, devices: Collection[torch.device]) -> None:
        self.rng = RNGState(devices)
        self._model = model
        self._written: dict[str, tuple[nn.Module, str, Any, torch.Tensor | None]] | None = None
        self._gradients = [(each, each.grad) for each in model.parameters() if each.is_leaf]
        self._numbers = [
            (module, {name: value for name, value in vars(module).items() if type(value) in {bool, int, float}})
            for module in model.modules()
        ]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    @property
    def written(self) -> list[str]:
        """The names of the parameters that forward writes, as far as `watching` has seen it."""
        return sorted(self._written or {})

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Learn which parameters a forward writes, in the first such context: those of a momentum encoder."""
        if self._written is not None:
            yield
            return
        before = [
            (f"{prefix}.{name}".lstrip("."), module, name, each, each.data)
            for prefix, module in self._model.named_modules()
            for name, each in module._parameters.items()
            if each is not None
        ]
        writes = _Writes(each for *_, each, _ in before)
        try:
            with writes:
                yield
        finally:
            self._written = {}
            for path, module, name, each, data in before:
                is_same = module._parameters.get(name) is each
                value = data if each.data_ptr() != data.data_ptr() else writes.copies.get(id(each))
                if not is_same or value is not None:
                    self._written[path] = module, name, each, value

    def restore(self) -> None:
        """Restore buffers, written parameters, numbers, gradients that were replaced, and RNG states."""
        for module, name, parameter, written in (self._written or {}).values():
            module._parameters[name] = parameter
            if written is not None:
                parameter.data.copy_(written)
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                buffer.copy_(value)
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for module, numbers in self._numbers:
            vars(module).update(numbers)
        self.rng.restore()

    @contextlib.contextmanager
    def restored(self, *, keeps_caches: bool = False) -> Iterator[None]:
        """Restore the state on exit, also the modules' containers and the generators of Python and NumPy.

        Args:
            keeps_caches: containers, None and text are restored only if an exception is raised.
        """
        held = [
            (module, name, value, copy.copy(value))
            for module in self._model.modules()
            for name, value in vars(module).items()
            if name not in _OF_EVERY_MODULE and (value is None or type(value) in {str, list, dict, set})
        ]
        numpy: Any = sys.modules.get("numpy")
        python, drawn = random.getstate(), numpy and numpy.random.get_state()
        is_kept = False
        try:
            yield
            is_kept = keeps_caches
        finally:
            self.restore()
            random.setstate(python)
            if numpy:
                numpy.random.set_state(drawn)
            for module, name, value, content in () if is_kept else held:
                vars(module)[name] = value
                if isinstance(value, list):
                    value[:] = content
                elif isinstance(value, (dict, set)) and not _is_equal(value, content):
                    value.clear()
                    value.update(content)


def clone_inference_tensors(inputs: Any) -> Any:
    """Return the inputs, with clones of tensors made in inference mode: autograd cannot save these."""
    return map_leaves(lambda x: x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x, inputs)


def python_rng_state() -> Any:
    """Return the states of the global generators of Python's `random` and of NumPy."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), numpy and str(numpy.random.get_state())


@contextlib.contextmanager
def changed_attributes(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that on exit has the names of the attributes and buffers that changed, except batch norm's."""
    changed: list[str] = []
    before = _state(model)
    values = {name: each.detach().clone() for name, each in _tracked_buffers(model)}
    yield changed
    after = _state(model)
    found = {name for name in after if name not in before or not _is_same(before[name], after[name])}
    # `buffer.data.mul_()` does not count as a change of the buffer.
    found |= {name for name, each in _tracked_buffers(model) if name in values and _has_changed(each, values[name])}
    changed += sorted(found)


@contextlib.contextmanager
def changed_gradients(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that on exit has the names of the parameters whose gradients changed."""
    changed: list[str] = []
    before = {name: _gradient_version(each) for name, each in model.named_parameters()}
    yield changed
    changed += [name for name, each in model.named_parameters() if _gradient_version(each) != before.get(name)]


def _gradient_version(parameter: torch.Tensor) -> tuple[int, int] | None:
    # Not of a leaf: torch.func.functional_call has replaced the parameter.
    return None if not parameter.is_leaf or parameter.grad is None else gradient_version(parameter.grad)


def _tracked_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            yield from module.named_buffers(prefix=prefix, recurse=False)


def _contents(value: Any) -> Any:
    """Return the length of a container, and the numbers in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return len(value), [pair for pair in itertools.islice(items, 1000) if type(pair[1]) in {bool, int, float, str}]


def _is_equal(value: Any, content: Any) -> bool:
    """Return whether a dictionary or a set has the very same values as its former copy."""
    if isinstance(value, set):
        return bool(value == content)
    return list(value) == list(content) and all(value[key] is content[key] for key in value)


def _has_changed(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    return not torch.equal(one.nan_to_num(), other.to(one.device).nan_to_num())


def _state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, value in module.__dict__.items():
            if name not in _OF_EVERY_MODULE:
                found[dot + name] = (value, _contents(value)) if isinstance(value, (list, dict, set)) else value
        if not isinstance(module, _BatchNorm):
            named = module.named_buffers(recurse=False)
            found.update({f"{dot}{name}": (each, each._version) for name, each in named})
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] == other[1]
    return one is other or (isinstance(one, (bool, int, float, str)) and type(one) is type(other) and one == other)
