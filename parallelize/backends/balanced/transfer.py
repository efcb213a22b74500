"""Where the tensors of a divided model are: its parameters on stages, and copies of activations.

    owners                the unit to which each parameter and buffer belongs
    place                 moves them to the devices of their units
    restoring_placement   moves them back at the end of a block, and optimizer states along
    Copies                copies an activation to the device that needs it

Copies between accelerators run on streams of their own: on the source's stream, a copy would wait
for what is queued for the destination. The source waits for the copy, since forward may change the
tensor in place afterwards.

    source    stage 0, micro-batch 0 |        | stage 0, micro-batch 1 |        | ...
    copy                               copy 0                            copy 1
    target                                    | stage 1, micro-batch 0 |        | ...

Glossary:

    unit      a submodule between whose calls the model may be divided
    stage     the units that are on one device
    operand   a tensor that an operation gets
    arrive    a copy, or the gradient of a copy, arrives when its stream has written it
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.backends.model_state import named_tensors
from parallelize.run.containers import replace_leaves, tensors_in
from parallelize.torch_patches.operations import Arguments, before_operations
from parallelize.torch_patches.step import BeforeStep, before_step

_BACKWARD: frozenset[Any] = frozenset(
    {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
)
"""Functions whose arguments are nodes of a graph: a copy would be another node."""


# Activations.


class Copies:
    """Differentiable copies of tensors on the device that needs them.

    Args:
        devices: devices of the pipeline; tensors on others are not moved.
        device: of the latest unit that has been called.

    Attributes:
        device: as given, updated by the pipeline.
        meets_other_devices: whether an operation has had operands on several devices.
    """

    def __init__(self, devices: Collection[torch.device], device: torch.device) -> None:
        self.device = device
        self.meets_other_devices = False
        self._devices = frozenset(devices)
        # All micro-batches of a batch share the copies of parameters. The original is held, too, so
        # that no other tensor gets its id.
        self._copies: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self) -> None:
        """Drop the copies: the batch has ended."""
        self._copies.clear()

    def moving_operands(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which operations between module calls get operands on one device.

        It is the device of the tensor that an operation changes in place, else that of the latest
        unit.
        """
        return before_operations(self._on_one_device)

    def _on_one_device(self, function: Any, args: Any, kwargs: Any) -> Arguments:
        """Return the arguments of an operation, with all operands on one device.

        Args:
            function: the operation, a function or method of torch.
            args: its positional arguments.
            kwargs: its other arguments.
        """
        devices = {tensor.device for tensor in tensors_in((args, kwargs))} & self._devices
        if len(devices) < 2 or function in _BACKWARD:
            return args, kwargs
        self.meets_other_devices = True
        changed = kwargs.get("out")
        if changed is None and _is_in_place(function):
            changed = args[0]
        devices_of_changed = {tensor.device for tensor in tensors_in(changed)}
        if len(devices_of_changed) > 1:
            # torch refuses the operation, and copies would not be what it has to change.
            return args, kwargs
        target = next(iter(devices_of_changed), self.device)
        arguments: Arguments = self.moved((args, kwargs), target)
        return arguments

    def moved(self, values: Any, device: torch.device) -> Any:
        """Return nested containers with the pipeline's tensors on a device.

        These are the same containers if all of the tensors are there.
        """
        return to_device(values, device, self._copy)

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy of a tensor, the same one for all micro-batches as long as it is true.

        Args:
            tensor: on another device.
            device: of the copy.
        """
        if tensor.device not in self._devices:
            return tensor
        if tensor.is_inference() or torch.is_inference_mode_enabled():
            # torch counts no changes in place there, so that a copy may be out of date.
            return _copy_to(tensor, device)
        # A tensor that was changed in place, which raises its version, is copied again. So is one
        # that requires a gradient from now on.
        has_gradient = tensor.requires_grad and torch.is_grad_enabled()
        key = id(tensor), tensor._version, device, has_gradient
        # It is read once: an activation checkpoint in another thread may forget the copies.
        entry = self._copies.get(key)
        if entry is None:
            entry = tensor, _copy_to(tensor, device)
            self._copies[key] = entry
        return entry[1]


def to_device(
    values: Any,
    device: torch.device,
    move: Callable[[torch.Tensor, torch.device], torch.Tensor] = torch.Tensor.to,
) -> Any:
    """Return nested containers with their tensors on a device.

    These are the same containers if all of the tensors are there.

    Args:
        values: nested containers.
        device: where the tensors of the result are.
        move: returns a tensor on a device.
    """
    if all(tensor.device == device for tensor in tensors_in(values)):
        return values

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            return move(leaf, device)
        return leaf

    return replace_leaves(moved, values)


def _copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a differentiable copy of a tensor on another device."""
    if "cpu" in {tensor.device.type, device.type}:
        return tensor.to(device)
    arrivals: list[torch.Event] = []
    source = tensor.view_as(tensor)
    if source.requires_grad:
        # The hook runs where backward needs the gradient. The Function below would wait where it
        # sends the gradient, and the device would have nothing to do until it arrives.
        wait: Any = functools.partial(_wait_for_gradient, arrivals)
        source.register_hook(wait)  # type: ignore[no-untyped-call]  # torch's
    apply: Any = _CopyBetweenAccelerators.apply
    copied: torch.Tensor = apply(source, device, arrivals)
    # Forward may change the tensor in place from now on.
    reading, _ = _copy_streams(tensor.device, device)
    torch.accelerator.current_stream(tensor.device).wait_stream(reading)
    return copied


def _wait_for_gradient(arrivals: list[torch.Event], gradient: torch.Tensor) -> None:
    """Let the stream that is about to use a gradient wait until it has arrived.

    Args:
        arrivals: of the gradients that have been sent, of which this one is the latest.
        gradient: of the original of a copy.
    """
    stream = torch.accelerator.current_stream(gradient.device)
    stream.wait_event(arrivals.pop())
    gradient.record_stream(stream)


class _CopyBetweenAccelerators(torch.autograd.Function):
    """Copies a tensor to another device, and its gradient back, for which a hook waits."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, device: torch.device, arrivals: list[torch.Event]
    ) -> torch.Tensor:
        ctx.source = tensor.device
        ctx.arrivals = arrivals
        copied, writing = _start_copy(tensor, device)
        target = torch.accelerator.current_stream(device)
        target.wait_stream(writing)
        copied.record_stream(target)
        return copied

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        copied, writing = _start_copy(gradients[0], ctx.source)
        ctx.arrivals.append(writing.record_event())
        return copied, None, None


def _start_copy(tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Stream]:
    """Return a copy on another accelerator, and the stream on which it will arrive.

    Memory of a tensor is used again when the stream that has allocated it is done. `record_stream`
    lets it wait for another stream that uses the tensor, here and above.

    Args:
        tensor: on an accelerator.
        device: another accelerator.
    """
    reading, writing = _copy_streams(tensor.device, device)
    reading.wait_stream(torch.accelerator.current_stream(tensor.device))
    with reading, writing:
        copied = tensor.to(device, non_blocking=True)
    tensor.record_stream(reading)
    return copied, writing


@functools.cache
def _copy_streams(source: torch.device, target: torch.device) -> tuple[Any, Any]:
    """Return the streams, one on each device, on which copies between two devices run."""
    return torch.Stream(source), torch.Stream(target)


@functools.lru_cache(maxsize=4096)
def _is_in_place(function: Any) -> bool:
    """Whether an operation changes its first argument, by its name: `add_`, `__iadd__`, ..."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_") and not name.endswith("__")


# Parameters and buffers.


@contextlib.contextmanager
def restoring_placement(model: nn.Module) -> Iterator[None]:
    """Let a model's tensors be moved in the context; on exit, move them to their former devices.

    Parameters stay the same objects, so that optimizers created before keep working. Before each
    optimizer step, the optimizer's state is moved to the devices of its parameters.
    """
    former_devices = [(tensor, tensor.device) for tensor in named_tensors(model).values()]
    optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def follow_parameters(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        optimizers.add(optimizer)
        _move_optimizer_state(optimizer)

    try:
        with before_step(BeforeStep.PLACE, follow_parameters):
            yield
    finally:
        for tensor, device in former_devices:
            _move_tensor(tensor, device)
        for optimizer in optimizers:
            _move_optimizer_state(optimizer)


def place(
    model: nn.Module, unit_devices: Mapping[str, torch.device], *, otherwise: torch.device
) -> None:
    """Move each parameter and buffer to the device of its unit.

    Args:
        model: keeps its tensors, with other data.
        unit_devices: name of a unit -> its device.
        otherwise: device of tensors that belong to no unit, as if there are none.
    """
    for tensor, unit in owners(model, list(unit_devices)):
        _move_tensor(tensor, unit_devices.get(unit, otherwise))
    # Autocast has casts of the parameters on their former devices.
    torch.clear_autocast_cache()


def owners(model: nn.Module, units: Sequence[str]) -> list[tuple[torch.Tensor, str]]:
    """Return each parameter and buffer with the unit to which it belongs.

    With the units "layers.0.a" and "layers.0.b":

        embedding.weight    of a module that is in no unit    the unit before, here the first one
        layers.0.gain       of a module that contains units   the first of them
        layers.0.a.weight   of a unit                         this unit
        layers.0.b.c.bias   of a module in a unit             this unit, or an inner one

    A tensor with several names belongs to the first of its units. The unit is "" if there is none.

    Args:
        model: has the tensors.
        units: names of submodules, in the order of their calls.
    """
    positions = {unit: position for position, unit in enumerate(units)}
    first_unit_inside: dict[str, str] = {}
    for unit in units:
        for module in _modules_around(unit):
            first_unit_inside.setdefault(module, unit)
    unit = first_unit_inside.get("", "")
    owner_of_id: dict[int, tuple[torch.Tensor, str]] = {}
    for name, tensor in named_tensors(model).items():
        modules = _modules_around(name)
        unit = first_unit_inside.get(modules[-1], unit)
        for module in modules:
            if module in positions:
                # The innermost unit is the last one.
                unit = module
        former = owner_of_id.get(id(tensor))
        if former is None or positions.get(unit, 0) < positions.get(former[1], 0):
            owner_of_id[id(tensor)] = tensor, unit
    return list(owner_of_id.values())


def _modules_around(name: str) -> list[str]:
    """Return the names of the modules around a tensor or module: "", "a" and "a.b" of "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


@torch.no_grad()
def _move_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a tensor with its gradient; it stays the same object."""
    if tensor.device == device:
        return
    gradient = tensor.grad
    # torch refuses data on another device than the gradient.
    tensor.grad = None
    tensor.data = tensor.data.to(device)
    if gradient is not None:
        tensor.grad = gradient.to(device)


def _move_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state, except step counters, to the devices of its parameters."""
    state: dict[Any, Any] = optimizer.state
    for parameter, values in state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(values, dict):
            continue
        for name, value in values.items():
            values[name] = to_device(value, parameter.device, _moved_state)


def _moved_state(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of an optimizer's state on a device; a step counter of the host stays."""
    if tensor.dim() == 0 and tensor.device.type == "cpu":
        return tensor
    return tensor.to(device)
