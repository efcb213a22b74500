"""Transfer: moves a model to the devices of its stages and back, and the tensors that meet on another device.

Copies between accelerators run on streams of their own: on the source's stream, a copy would wait for what is queued
for the destination. The source waits for the copy, since forward may change the tensor in place afterwards.

    source    stage 0, micro-batch 0 |        | stage 0, micro-batch 1 |        | ...
    copy                               copy 0                            copy 1
    target                                    | stage 1, micro-batch 0 |        | ...
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.backends.model_state import named_tensors
from parallelize.run.containers import leaves, replace_leaves
from parallelize.torch_patches.operations import Arguments, before_operations
from parallelize.torch_patches.step import BeforeStep, before_step

__all__ = ["Copies", "owners", "place", "restoring_placement", "tensors_in", "to_device"]

_Tensor: Any = torch.Tensor
_NEVER_MOVED = frozenset({torch.autograd.grad, torch.autograd.backward, _Tensor.backward})


class Copies:
    """Differentiable copies of tensors on the device that needs them.

    Args:
        devices: devices of the pipeline; tensors on others are not moved.

    Attributes:
        device: of the last unit.
        known: copies made of the tensors of a batch, and of parameters, which all of its micro-batches share.
    """

    def __init__(self, devices: Collection[torch.device], device: torch.device) -> None:
        self.device, self._devices = device, frozenset(devices)
        self.known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def moving_operands(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which operations between module calls get their operands on one device.

        It is that of the tensor that an operation changes in place, else that of the last unit.
        """
        return before_operations(self._on_one_device)

    def _on_one_device(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Arguments:
        devices = {each.device for each in tensors_in((args, given))} & self._devices
        if len(devices) > 1 and func not in _NEVER_MOVED:
            changed = given.get("out", args[0] if _is_in_place(func) else None)
            places = {each.device for each in tensors_in(changed)} or {self.device}
            if len(places) == 1:  # else torch refuses it
                args, given = self.moved((args, given), *places)
        return args, given

    def moved(self, values: Any, device: torch.device) -> Any:
        """Return nested containers with the pipeline's tensors on a device; the same ones if all of them are there."""
        return to_device(values, device, self._copy)

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device not in self._devices:
            return tensor
        if tensor.is_inference() or torch.is_inference_mode_enabled():  # changes in place are not counted
            return _copied(tensor, device)
        # After a change in place, a tensor is copied again. It is held so that its id stays valid.
        key = id(tensor), tensor._version, device, torch.is_grad_enabled()
        known = self.known.get(key)  # not read twice: an activation checkpoint may run in another thread
        if known is None:
            known = self.known[key] = tensor, _copied(tensor, device)
        return known[1]


@contextlib.contextmanager
def restoring_placement(model: nn.Module) -> Iterator[None]:
    """Let a model's tensors be moved between devices; on exit, move all of them to their original devices.

    Parameters stay the same objects, so optimizers created before keep working. Before each optimizer step, the
    optimizer's state is moved to the devices of its parameters.
    """
    original = [(each, each.device) for each in named_tensors(model).values()]
    optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def follow_parameters(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        optimizers.add(optimizer)
        _move_optimizer_state(optimizer)

    try:
        with before_step(BeforeStep.PLACE, follow_parameters):
            yield
    finally:
        for tensor, device in original:
            _move_tensor(tensor, device)
        for optimizer in optimizers:
            _move_optimizer_state(optimizer)


def place(model: nn.Module, unit_devices: Mapping[str, torch.device], *, otherwise: torch.device) -> None:
    """Move each parameter and buffer to the device of its unit; without units, to `otherwise`."""
    for tensor, unit in owners(model, [*unit_devices]):
        _move_tensor(tensor, unit_devices.get(unit, otherwise))
    torch.clear_autocast_cache()  # of casts on the former devices


def owners(model: nn.Module, units: Sequence[str]) -> list[tuple[torch.Tensor, str]]:
    """Return each parameter and buffer with the unit to which it belongs: the first that contains it.

    Those of a container belong to the first unit inside it, those of an uncalled module to the unit before it; "" if
    there is none.
    """
    order = {unit: index for index, unit in enumerate(units)}
    # The path of a container, "" of the model -> its first unit.
    inside = {path: unit for unit in reversed(units) for path in ["", *_paths(unit)]}
    found, last = dict[int, tuple[torch.Tensor, str]](), inside.get("", "")
    for name, each in named_tensors(model).items():
        *around, _ = ["", *_paths(name)]  # the modules that contain it, the outermost first
        last = next((path for path in reversed(around) if path in order), inside.get(around[-1], last))
        _, unit = found.get(id(each), (each, last))
        found[id(each)] = each, min(unit, last, key=lambda one: order.get(one, 0))
    return [*found.values()]


def _paths(name: str) -> list[str]:
    """Return "a", "a.b" and "a.b.c" of "a.b.c"."""
    return [*itertools.accumulate(name.split("."), "{}.{}".format)]


def to_device(
    values: Any, device: torch.device, move: Callable[[torch.Tensor, torch.device], torch.Tensor] = torch.Tensor.to
) -> Any:
    """Return nested containers with their tensors on a device; the same containers if all of them are there."""
    if all(each.device == device for each in tensors_in(values)):
        return values

    def moved(leaf: Any) -> Any:
        return move(leaf, device) if isinstance(leaf, torch.Tensor) and leaf.device != device else leaf

    return replace_leaves(moved, values)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [each for each in leaves(values) if isinstance(each, torch.Tensor)]


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on another device."""
    if "cpu" in {tensor.device.type, device.type}:
        return tensor.to(device)
    events: list[torch.Event] = []  # each is there when a gradient has arrived
    source = tensor.view_as(tensor)
    if source.requires_grad:
        # Runs in backward, where the source's device needs the gradient, and not where it is sent.
        source.register_hook(functools.partial(_receive, events))  # type: ignore[no-untyped-call]  # torch's
    copy: torch.Tensor = _move(source, device, events)
    # Forward may change the tensor in place from now on.
    torch.accelerator.current_stream(tensor.device).wait_stream(_copy_streams(tensor.device, device)[0])
    return copy


def _receive(events: list[torch.Event], gradient: torch.Tensor) -> None:
    stream = torch.accelerator.current_stream(gradient.device)
    stream.wait_event(events.pop())
    gradient.record_stream(stream)


class _Move(torch.autograd.Function):
    """Copy of a tensor on another device, and of its gradient back, which is awaited by `_receive`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device, events: list[torch.Event]) -> torch.Tensor:
        ctx.source, ctx.events, target = tensor.device, events, torch.accelerator.current_stream(device)
        copy, writing = _sent(tensor, device)
        target.wait_stream(writing)
        copy.record_stream(target)
        return copy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        copy, writing = _sent(gradients[0], ctx.source)
        ctx.events.append(writing.record_event())
        return copy, None, None


_move: Any = _Move.apply


def _sent(tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Stream]:
    """Return a copy on another device, and the stream on which it is there."""
    reading, writing = _copy_streams(tensor.device, device)
    reading.wait_stream(torch.accelerator.current_stream(tensor.device))
    with reading, writing:
        copy = tensor.to(device, non_blocking=True)
    tensor.record_stream(reading)
    return copy, writing


@functools.cache
def _copy_streams(source: torch.device, target: torch.device) -> tuple[Any, Any]:
    return torch.Stream(source), torch.Stream(target)


@functools.lru_cache(maxsize=4096)
def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or name == "__setitem__" or (name.startswith("__i") and name != "__invert__")


@torch.no_grad()
def _move_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device == device:
        return
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(device)
    tensor.grad = None if gradient is None else gradient.to(device)


def _move_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state, except step counters, to the devices of its parameters."""
    state: dict[Any, Any] = optimizer.state
    for parameter, kept in state.items():
        for name, value in kept.items() if isinstance(kept, dict) and isinstance(parameter, torch.Tensor) else ():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device:
                kept[name] = value.to(parameter.device)
