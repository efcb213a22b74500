"""Transfer of tensors between devices: differentiable copies of the operands that a stage's operations do not have.

Operands of one operation on several devices of the pipeline are copied to the stage's device; those of an operation in
place, to the device of the tensor that it changes. Operations whose operands are on one device run there. A tensor and
its copies keep the same values: after an operation has changed one of them, or a view of it, the others are written.

Copies between accelerators run on streams of their own: on the source's stream, a copy would wait for what is queued
for the destination, and later kernels of the source for the copy.

    source    stage 0, micro-batch 0 | stage 0, micro-batch 1 | ...
    copy                              copy 0                  copy 1
    target                                  stage 1, micro-batch 0 | ...
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from parallelize.runtime.containers import leaves, map_leaves

__all__ = ["Copies", "DeviceTransfer", "to_device", "write_count"]

_Tensor: Any = torch.Tensor
_NEVER_MOVED = frozenset({torch.autograd.grad, torch.autograd.backward, _Tensor.backward})
_NORMS = frozenset({functional.batch_norm, functional.instance_norm})
_CONTAINERS = (list, tuple, dict)
_IN_PLACE_METHODS = frozenset({"__setitem__", "__set__"})


@dataclass(eq=False)
class _Copy:
    """A copy of a tensor, the write counts of both, and whether gradients of the copy reach the tensor."""

    source: torch.Tensor
    copy: torch.Tensor
    has_graph: bool
    counts: tuple[int, int] = (0, 0)

    def has_changed(self) -> bool:
        """Return whether one of the two was changed since `update_counts`."""
        return self.counts != (write_count(self.source), write_count(self.copy))

    def update_counts(self) -> None:
        """Count the writes of both."""
        self.counts = write_count(self.source), write_count(self.copy)


class Copies:
    """Copies of tensors on other devices."""

    def __init__(self) -> None:
        self.of_tensor: dict[tuple[int, torch.device, bool], _Copy] = {}
        self.of_storage: defaultdict[int, list[_Copy]] = defaultdict(list)


class DeviceTransfer(TorchFunctionMode):
    """Function mode of one micro-batch that moves operands to the device of its current stage.

    Args:
        devices: devices of the pipeline; tensors on other devices are not moved.
        parameter_copies: copies of parameters, which all micro-batches of a forward share.
        on_copy: called before a tensor is copied, or its copy used.

    Attributes:
        device: device of the current stage.
        devices: see above.
    """

    def __init__(
        self,
        devices: Collection[torch.device],
        parameter_copies: Copies | None = None,
        *,
        on_copy: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._on_copy = on_copy
        self.device = torch.device("cpu")
        self.devices = frozenset(devices)
        self._copies, self._parameter_copies = Copies(), parameter_copies or Copies()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation with operands on one device."""
        del types
        kwargs = kwargs or {}
        if func in _NEVER_MOVED or _is_getter(func):
            return func(*args, **kwargs)
        tensors = _operands(args, kwargs)
        changed = _changed_argument(func, args, kwargs)
        if len(tensors) > 1 and len({each.device for each in tensors} & self.devices) > 1:
            changed = _tensors(changed)
            device = changed[0].device if changed else self.device
            args, kwargs = self._moved(args, device), self._moved(kwargs, device)
            tensors, changed = _operands(args, kwargs), _changed_argument(func, args, kwargs)
        if not self._copies.of_tensor and not self._parameter_copies.of_tensor:
            return func(*args, **kwargs)
        if changed is not None:
            for device in {each.device for each in _tensors(changed)}:
                self._wait_for_copies(device)
        counts = [write_count(each) for each in tensors]
        result = func(*args, **kwargs)
        written = [each for each, count in zip(tensors, counts, strict=True) if write_count(each) != count]
        if changed is not None:
            # Inference tensors and those in lists, as of torch._foreach_add_, may not count writes.
            written += [each for each in _tensors(changed) if changed is not each or each.is_inference()]
        elif func in _NORMS:
            written += _tensors(_updated_statistics(func, *args, **kwargs))
        if written:
            self._write_copies(written)
        return result

    def move_arguments(self, args: Any) -> Any:
        """Return the arguments of a module that is about to run, with tensors moved to the stage; None: as they are."""
        is_elsewhere = any(each.device != self.device and each.device in self.devices for each in _tensors(args))
        return self._moved(args, self.device) if is_elsewhere else None

    def write_back(self, args: Any) -> None:
        """Copy arguments that a module has changed to their sources, also by what is no function: autograd.Function."""
        copies = [each for tensor in _tensors(args) for each in self._copies.of_storage.get(_storage(tensor), ())]
        self._write_copies([each.copy for each in copies if each.has_changed()])

    def _moved(self, value: Any, device: torch.device) -> Any:
        def move(leaf: Any) -> Any:
            is_elsewhere = isinstance(leaf, torch.Tensor) and leaf.device != device and leaf.device in self.devices
            return self._copy(leaf, device) if is_elsewhere else leaf

        return map_leaves(move, value)

    def _wait_for_copies(self, device: torch.device) -> None:
        """Order a change of a tensor in place after copies that still read it, on streams of their own."""
        for target in self.devices - {device}:
            if device in self.devices and "cpu" not in {device.type, target.type}:
                torch.accelerator.current_stream(device).wait_stream(_copy_streams(device, target)[0])

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self._on_copy()
        copies = self._parameter_copies if isinstance(tensor, nn.Parameter) else self._copies
        key = id(tensor), device, torch.is_grad_enabled()
        known = copies.of_tensor.get(key)
        if known is None:
            # The tensor is held so that its id and its storage stay valid.
            known = copies.of_tensor[key] = _Copy(tensor, _move(tensor, device), has_graph=key[2])
            known.update_counts()
            for each in {_storage(known.source), _storage(known.copy)}:
                copies.of_storage[each].append(known)
        elif known.has_changed():
            self._write_copies([tensor])
        return known.copy

    def _write_copies(self, changed: Iterable[torch.Tensor]) -> None:
        """Write changed tensors to those that they were copied from, and to all copies of these."""
        pending = [_storage(each) for each in changed]
        written: list[_Copy] = []
        for storage in pending:  # which grows meanwhile
            for each in (
                *self._copies.of_storage.get(storage, ()),
                *self._parameter_copies.of_storage.get(storage, ()),
            ):
                if each not in written:
                    written.append(each)
                    one, other = each.source, each.copy
                    one, other = (one, other) if _storage(one) == storage else (other, one)
                    self._write(other, one, has_graph=each.has_graph)
                    pending.append(_storage(other))
        for each in written:
            each.update_counts()

    def _write(self, target: torch.Tensor, source: torch.Tensor, *, has_graph: bool) -> None:
        self._wait_for_copies(target.device)
        is_parameter = target.is_leaf and target.requires_grad
        with torch.set_grad_enabled(torch.is_grad_enabled() and has_graph and not is_parameter):
            target.copy_(source)


def to_device(values: Any, device: torch.device) -> Any:
    """Return nested containers with their tensors on a device; the same containers if all of them are there."""
    if all(each.device == device for each in leaves(values) if isinstance(each, torch.Tensor)):
        return values
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, values)


def write_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which do not count this."""
    return 0 if tensor.is_inference() else tensor._version


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors in the arguments of a function; most have a few tensors and plain values."""
    if any(isinstance(each, _CONTAINERS) for each in args) or kwargs:
        return _tensors((args, kwargs))
    return [each for each in args if isinstance(each, torch.Tensor)]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in leaves(values) if isinstance(each, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    """Return what is equal for a tensor and its views."""
    try:
        found: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # of a sparse tensor, or inside vmap
        found = id(tensor)
    return found


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a differentiable copy of a tensor on another device, ordered with the current streams of both devices."""
    if torch.is_inference_mode_enabled():  # a copy that counts writes
        with torch.inference_mode(mode=False), torch.no_grad():
            return _move(tensor, device)
    if "cpu" in {tensor.device.type, device.type}:
        return tensor.to(device)
    reading, writing = _copy_streams(tensor.device, device)
    module: Any = torch.get_device_module(device)
    source_stream, target_stream = (torch.accelerator.current_stream(each) for each in (tensor.device, device))
    reading.wait_stream(source_stream)
    with module.stream(reading), module.stream(writing):
        copy = tensor.to(device, non_blocking=True)
    tensor.record_stream(reading)
    target_stream.wait_stream(writing)
    copy.record_stream(target_stream)
    return copy


@functools.cache
def _copy_streams(source: torch.device, target: torch.device) -> tuple[Any, Any]:
    return torch.Stream(source), torch.Stream(target)


def _changed_argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument that a function changes, by its name and its options; None: it may still change some."""
    changes_first = _is_in_place(func) or (kwargs and kwargs.get("inplace"))
    first = args[0] if args and changes_first else None
    return kwargs.get("out", first) if kwargs else first


@functools.lru_cache(maxsize=4096)
def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or name in _IN_PLACE_METHODS or (name.startswith("__i") and name.endswith("__"))


@functools.lru_cache(maxsize=4096)
def _is_getter(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__"


def _updated_statistics(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the running statistics that a norm updates, which count no write."""
    given = dict(enumerate(args)) | kwargs
    is_updating = given.get(5, given.get("training", given.get("use_input_stats", func is functional.instance_norm)))
    return [given.get(1, given.get("running_mean")), given.get(2, given.get("running_var"))] if is_updating else None
