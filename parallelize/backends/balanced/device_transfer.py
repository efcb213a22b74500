"""Transfer of tensors between devices: differentiable copies of the operands that a stage's operations do not have.

Operands of one operation on several devices of the pipeline are copied to the stage's device; those of an operation in
place, to the device of the tensor that it changes. Operations whose operands are on one device run there.

Copies between accelerators run on streams of their own: on the source's stream, a copy would wait for what is queued
for the destination, and later kernels of the source for the copy.

    source    stage 0, micro-batch 0 | stage 0, micro-batch 1 | ...
    copy                              copy 0                  copy 1
    target                                  stage 1, micro-batch 0 | ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.runtime.containers import leaves, map_leaves

__all__ = ["DeviceTransfer", "to_device", "write_count"]

_Tensor: Any = torch.Tensor
_NEVER_MOVED = frozenset({torch.autograd.grad, torch.autograd.backward, _Tensor.backward})
_IN_PLACE_METHODS = frozenset({"__setitem__", "__set__"})


class DeviceTransfer(TorchFunctionMode):
    """Function mode of one micro-batch that moves operands to the device of its current stage.

    Args:
        devices: devices of the pipeline; tensors on other devices are not moved.
        copies: copies of parameters, which all micro-batches of a forward share.
        on_copy: called before a tensor is copied, or its copy used.

    Attributes:
        device: device of the current stage.
        devices: see above.
    """

    def __init__(
        self,
        devices: Collection[torch.device],
        copies: dict[Any, Any] | None = None,
        *,
        on_copy: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._on_copy = on_copy
        self.device = torch.device("cpu")
        self.devices = frozenset(devices)
        self._parameter_copies: dict[Any, Any] = {} if copies is None else copies
        self._copies: dict[Any, Any] = {}
        # For each call of a module that is running: the module, and (source, copy, version of the copy) of arguments.
        self._arguments: list[tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor, int]]]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation with operands on one device."""
        del types
        kwargs = kwargs or {}
        first = args[0] if args else None
        if self._copies and isinstance(first, torch.Tensor) and (_is_in_place(func) or kwargs.get("inplace")):
            self._wait_for_copies(first.device)
        found = {each.device for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)} & self.devices
        if len(found) < 2 or func in _NEVER_MOVED:
            return func(*args, **kwargs)
        changed = kwargs.get("out", args[0] if _is_in_place(func) else None)
        device = changed.device if isinstance(changed, torch.Tensor) else self.device
        return func(*self._moved(args, device), **self._moved(kwargs, device))

    def move_arguments(self, module: nn.Module, args: Any) -> Any:
        """Return the arguments of a module that is about to run, with tensors moved to the stage; None: as they are."""
        moved: list[tuple[torch.Tensor, torch.Tensor, int]] = []

        def move(leaf: Any) -> Any:
            copy = self._moved(leaf, self.device)
            if copy is not leaf:
                moved.append((leaf, copy, write_count(copy)))
            return copy

        result = map_leaves(move, args)
        self._arguments.append((module, moved))
        return result if moved else None

    def write_back(self, module: nn.Module) -> None:
        """Copy arguments that a module has changed in place to the tensors that they were copied from."""
        if not self._arguments or self._arguments[-1][0] is not module:
            return
        for source, copy, version in self._arguments.pop()[1]:
            if write_count(copy) != version:
                source.copy_(copy)

    def _moved(self, value: Any, device: torch.device) -> Any:
        def move(leaf: Any) -> Any:
            is_elsewhere = isinstance(leaf, torch.Tensor) and leaf.device != device and leaf.device in self.devices
            return self._copy(leaf, device) if is_elsewhere else leaf

        return map_leaves(move, value)

    def _wait_for_copies(self, device: torch.device) -> None:
        """Order a change of a tensor in place after copies that still read it, on streams of their own."""
        for target in self.devices - {device}:
            if "cpu" not in {device.type, target.type}:
                torch.accelerator.current_stream(device).wait_stream(_copy_streams(device, target)[0])

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self._on_copy()
        copies = self._parameter_copies if isinstance(tensor, nn.Parameter) else self._copies
        key = id(tensor), device, torch.is_grad_enabled()
        known = copies.get(key)
        if known is not None and known[1] == write_count(tensor) and known[3] == write_count(known[2]):
            copy: torch.Tensor = known[2]
            return copy
        copy = _move(tensor, device)
        # The tensor is held so that its id stays valid.
        copies[key] = tensor, write_count(tensor), copy, write_count(copy)
        return copy


def to_device(values: Any, device: torch.device) -> Any:
    """Return nested containers with their tensors on a device; the same containers if all of them are there."""
    if all(each.device == device for each in leaves(values) if isinstance(each, torch.Tensor)):
        return values
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, values)


def write_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which do not count this."""
    return 0 if tensor.is_inference() else tensor._version


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a differentiable copy of a tensor on another device, ordered with the current streams of both devices."""
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


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or name in _IN_PLACE_METHODS or (name.startswith("__i") and name.endswith("__"))
