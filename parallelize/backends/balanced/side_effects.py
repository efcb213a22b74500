"""Side effects of forward: finds what it changes in the model, its gradients and random generators, and restores it.

Captured tensors are what a forward computes and leaves outside of its output: on the model, in a list, by a hook.
Micro-batches would leave the tensors of one of them there. A function mode holds a weak reference to each tensor that
the forward computes; after the output is gone, those that are still alive were captured.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize.backends.balanced.device_transfer import write_count
from parallelize.errors import ConfigError
from parallelize.runtime.autograd_graph import gradient_version
from parallelize.runtime.containers import leaves
from parallelize.runtime.rng_state import RNGState

__all__ = ["CapturedTensors", "ModelState", "check_writes", "has_same_values", "replaceable_buffers", "write_counts"]

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"} - {"training"})
"""Attributes that torch sets on every module, such as its hooks, and the forward that a block replaces; no mode."""
_Tensor: Any = torch.Tensor
_GETTERS = (_Tensor.grad.__get__, _Tensor._base.__get__)


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
        if schema.is_mutable and schema.name != "aten::record_stream":  # which changes no value
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
    """Copy of a model's buffers, its modules' attributes, its gradients, and RNG states of Python and `devices`."""

    def __init__(self, model: nn.Module, devices: Collection[torch.device]) -> None:
        self.rng, self.python_rng = RNGState(devices), RNGState(None, has_python=True)
        self._model = model
        # The parameters that forward writes, by name, with their former values; None: `watching` has not seen it yet.
        self.written: dict[str, tuple[nn.Module, str, Any, torch.Tensor | None]] | None = None
        named = model.named_parameters()
        self._gradients = [(name, each, each.grad if each.is_leaf else None, _version(each)) for name, each in named]
        self._attributes = {
            path: (module, name, each, _contents(each), copy.copy(each) if type(each) in {list, dict, set} else None)
            for path, module, name, each in _attributes(model)
        }
        self._buffers = {
            path: (module, name, each, write_count(each), each.detach().clone())
            for path, module, name, each in _buffers(model)
        }

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Learn which parameters a forward writes, in the first such context: those of a momentum encoder."""
        if self.written is not None:
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
            self.written = {}
            for path, module, name, each, data in before:
                is_same = module._parameters.get(name) is each
                value = data if each.data_ptr() != data.data_ptr() else writes.copies.get(id(each))
                if not is_same or value is not None:
                    self.written[path] = module, name, each, value

    def changed_gradients(self) -> list[str]:
        """Return the names of the parameters whose gradients have changed."""
        return [name for name, each, _, version in self._gradients if _version(each) != version]

    def changed(self) -> list[str]:
        """Return the names of the attributes and buffers that have changed, except batch norm's."""
        before: Any = self._attributes
        found = {
            path
            for path, _, name, value in _attributes(self._model)
            if name != "training" and (path not in before or not _is_same(value, *before[path][2:4]))
        }
        for path, module, _, each in _buffers(self._model):
            _, _, buffer, version, value = self._buffers.get(path, (None, "", None, 0, each))
            is_same = buffer is each and version == write_count(each)
            # `buffer.data.mul_()` does not count as a change of the buffer.
            is_same = is_same and has_same_values(each, value)
            if not is_same and not isinstance(module, _BatchNorm):
                found.add(path)
        return sorted(found)

    def restore(self) -> None:
        """Restore buffers, written parameters, numbers, gradients that were replaced, and torch's RNG states."""
        for module, name, parameter, written in (self.written or {}).values():
            module._parameters[name] = parameter
            if written is not None:
                parameter.data.copy_(written)
        with torch.no_grad():
            for module, name, buffer, _, value in self._buffers.values():
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                buffer.copy_(value)
        for _, parameter, gradient, _ in self._gradients:
            if parameter.is_leaf and parameter.grad is not gradient:
                parameter.grad = gradient
        for module, name, value, *_ in self._attributes.values():
            if type(value) in {bool, int, float}:
                vars(module)[name] = value
        self.rng.restore()

    @contextlib.contextmanager
    def restored(self, *, keeps_caches: bool = False) -> Iterator[None]:
        """Restore the state on exit, also the modules' containers and the generators of Python and NumPy.

        Args:
            keeps_caches: containers, None and text are restored only if an exception is raised.
        """
        is_kept = False
        try:
            yield
            is_kept = keeps_caches
        finally:
            self.restore()
            self.python_rng.restore()
            if not is_kept:
                self._restore_caches()

    def _restore_caches(self) -> None:
        for module, name, value, _, content in self._attributes.values():
            if content is not None or value is None or type(value) is str:
                vars(module)[name] = value
            if isinstance(content, list):
                value[:] = content
            elif content is not None:
                value.clear()
                value.update(content)


def has_same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same values, also nan; of those that torch does not compare, return True."""
    return not _is_plain(one) or torch.equal(one.nan_to_num(), other.to(one.device).nan_to_num())


def replaceable_buffers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of buffers that micro-batches can have copies of: those of one module, except batch norm's."""
    every = [(path, each) for path, module, _, each in _buffers(model) if not isinstance(module, _BatchNorm)]
    uses = Counter(id(each) for *_, each in _buffers(model))
    return tuple(path for path, each in every if uses[id(each)] == 1 and _is_plain(each))


def write_counts(modules: Iterable[nn.Module]) -> list[tuple[torch.Tensor, int]]:
    """Return the parameters and buffers of modules, and how often each was changed in place."""
    tensors = (each for module in modules for each in (*module._parameters.values(), *module._buffers.values()))
    return [(each, write_count(each)) for each in tensors if each is not None]


def check_writes(model: nn.Module, before: Iterable[tuple[torch.Tensor, int]], *, known: Collection[str]) -> None:
    """Check that micro-batches have changed no parameter or buffer in place, except the buffers `known`.

    Raises:
        ConfigError: they have, each of them.
    """
    changed = {id(each) for each, count in before if write_count(each) != count}
    named = [*model.named_parameters(), *model.named_buffers()] if changed else ()
    names = [name for name, each in named if id(each) in changed and name not in known]
    if names:
        raise ConfigError(
            f"forward changes {', '.join(names[:5])} of the model, which it did not for an earlier batch like this one",
            why="each micro-batch has changed it, and the full batch would have done so once",
            fix="change it outside of forward; or use BalancedBackend(microbatches=1), which does not split batches",
        )


class CapturedTensors(TorchFunctionMode):
    """Function mode of one forward; `names` then tells which modules computed tensors that are still alive.

    Saved tensors are copied, so that autograd does not keep them alive.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record the tensors that are computed in this context."""
        before = register_module_forward_pre_hook(lambda module, _: self._running.append(self._name(module)))
        after = register_module_forward_hook(self._after, always_call=True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor), self:
                yield
        finally:
            before.remove()
            after.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record its results."""
        del types
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling() and func not in _GETTERS:
            self._record(result, (args, kwargs), self._running[-1] if self._running else "the model")
        return result

    def names(self) -> list[str]:
        """Return where tensors that are still alive were computed; call it when the output is gone."""
        if any(ref() is not None for ref, _ in self._found.values()):
            gc.collect()  # of reference cycles
        return list(dict.fromkeys(name for ref, name in self._found.values() if ref() is not None))

    def _name(self, module: nn.Module) -> str:
        return self._names.get(id(module)) or "the model"

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._running.pop()
            self._record(output, args, self._name(module))  # also that of a compiled module, or an autograd function

    def _record(self, result: Any, operands: Any, name: str) -> None:
        given = {id(each) for each in _tensors(operands)}  # an operation in place returns one of them
        for each in _tensors(result):
            known = self._found.get(id(each))
            if id(each) not in given and (known is None or known[0]() is not each):
                self._found[id(each)] = weakref.ref(each), name


def _attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield the path, module, name and value of each attribute that torch does not set on every module."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                yield f"{prefix}.{name}".lstrip("."), module, name, value


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, each in module.named_buffers(recurse=False):
            yield f"{prefix}.{name}".lstrip("."), module, name, each


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether torch compares the values of a tensor: not of sparse ones, and of some small types."""
    is_small = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.layout is torch.strided and not tensor.is_quantized and not is_small


def _version(parameter: torch.Tensor) -> tuple[int, int] | None:
    # Not of a leaf: torch.func.functional_call has replaced the parameter.
    return None if not parameter.is_leaf or parameter.grad is None else gradient_version(parameter.grad)


def _contents(value: Any) -> Any:
    """Return the length of a container, and the numbers in it; None for other values."""
    if not isinstance(value, (list, dict, set)):
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return len(value), [pair for pair in itertools.islice(items, 1000) if type(pair[1]) in {bool, int, float, str}]


def _is_same(value: Any, before: Any, contents: Any) -> bool:
    if value is before:
        return bool(_contents(value) == contents)
    return isinstance(value, (bool, int, float, str)) and type(value) is type(before) and bool(value == before)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return [each for each in leaves(value) if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter)]
