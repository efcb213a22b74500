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
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.runtime.containers import leaves, map_leaves
from parallelize.torch_patches import step

__all__ = ["Copies", "Placement", "named_tensors", "owners", "tensors_in", "to_device"]

_Tensor: Any = torch.Tensor
_NEVER_MOVED = frozenset({torch.autograd.grad, torch.autograd.backward, _Tensor.backward})


class Copies(TorchFunctionMode):
    """Differentiable copies of tensors on the device that needs them.

    As a function mode, it brings the operands of operations between module calls to one device: that of the tensor that
    an operation changes in place, else that of the last unit.

    Args:
        devices: devices of the pipeline; tensors on others are not moved.

    Attributes:
        device: of the last unit.
    """

    def __init__(self, devices: Collection[torch.device], device: torch.device) -> None:
        super().__init__()
        self.device, self._devices = device, frozenset(devices)
        self._known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation with operands on one device."""
        given = kwargs or {}
        if len(args) > 1 or given or (args and isinstance(args[0], (list, tuple))):
            devices = {each.device for each in tensors_in((args, given))} & self._devices
            if len(devices) > 1 and func not in _NEVER_MOVED:
                changed = given.get("out", args[0] if _is_in_place(func) or given.get("inplace") else None)
                places = {each.device for each in tensors_in(changed)} or {self.device}
                if len(places) == 1:  # else torch refuses it
                    args, given = self.moved((args, given), *places)
        return func(*args, **given)

    def moved(self, values: Any, device: torch.device) -> Any:
        """Return nested containers with the pipeline's tensors on a device; the same ones if all of them are there."""

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.device == device or leaf.device not in self._devices:
                return leaf
            if leaf.is_inference() or torch.is_inference_mode_enabled():  # changes in place are not counted
                return self._copy(leaf, device)
            # After a change in place, a tensor is copied again. It is held so that its id stays valid.
            key = id(leaf), leaf._version, device, torch.is_grad_enabled()
            known = self._known.get(key)  # not read twice: an activation checkpoint may run in another thread
            if known is None:
                known = self._known[key] = leaf, self._copy(leaf, device)
            return known[1]

        return values if all(each.device == device for each in tensors_in(values)) else map_leaves(move, values)

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if "cpu" in {tensor.device.type, device.type}:
            return tensor.to(device)
        events: list[torch.Event] = []
        copy: torch.Tensor = _move(_arrive(tensor, events), device, events)
        # Forward may change the tensor in place from now on.
        torch.accelerator.current_stream(tensor.device).wait_stream(_copy_streams(tensor.device, device)[0])
        return copy

    def forget(self, *, parameters: bool) -> None:
        """Forget the copies, except those of parameters, which all micro-batches of a batch share."""
        kept = () if parameters else (item for item in self._known.items() if isinstance(item[1][0], nn.Parameter))
        self._known = dict(kept)


class Placement:
    """Moves a model's tensors between devices during a block, and back at its end.

    Parameters stay the same objects, so optimizers created before the block keep working. Before each optimizer step,
    the optimizer's state is moved to the devices of its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._original = [(each, each.device) for each in named_tensors(model).values()]

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Keep optimizer state on its parameters' devices; on exit, move all tensors to their original devices."""
        optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

        def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            optimizers.add(optimizer)
            _move_optimizer_state(optimizer)

        handle = step.before_step(before_step)
        try:
            yield
        finally:
            handle.remove()
            for tensor, device in self._original:
                _move_tensor(tensor, device)
            for optimizer in optimizers:
                _move_optimizer_state(optimizer)

    def move(self, unit_devices: Mapping[str, torch.device], *, otherwise: torch.device) -> None:
        """Move each parameter and buffer to the device of its unit; without units, to `otherwise`."""
        tensors = named_tensors(self._model)
        for name, unit in owners(self._model, [*unit_devices]).items():
            _move_tensor(tensors[name], unit_devices.get(unit, otherwise))
        torch.clear_autocast_cache()  # of casts on the former devices


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model, whose class may override `parameters`."""
    return {
        f"{path}.{name}".lstrip("."): each
        for path, module in model.named_modules()
        for name, each in (*module._parameters.items(), *module._buffers.items())
        if each is not None
    }


def owners(model: nn.Module, units: Sequence[str]) -> dict[str, str]:
    """Return, by the name of each parameter and buffer, the unit to which it belongs: the first that contains it.

    Those of a container belong to the first unit inside it, those of an uncalled module to the unit before it; "" if
    there is none.
    """
    order = {unit: index for index, unit in enumerate(units)}
    inside = dict[str, str]()  # path of a container -> its first unit
    for unit in units:
        for path in _prefixes(unit):
            inside.setdefault(path, unit)
    found, last = dict[int, tuple[str, str]](), next(iter(units), "")
    for name, each in named_tensors(model).items():
        around = _prefixes(name.rpartition(".")[0])
        last = next((path for path in around if path in order), inside.get(around[0], last))
        first, unit = found.get(id(each), (name, last))
        found[id(each)] = first, min(unit, last, key=lambda one: order.get(one, 0))
    return dict(found.values())


def to_device(values: Any, device: torch.device) -> Any:
    """Return nested containers with their tensors on a device; the same containers if all of them are there."""
    if all(each.device == device for each in tensors_in(values)):
        return values
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, values)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [each for each in leaves(values) if isinstance(each, torch.Tensor)]


def _prefixes(path: str) -> list[str]:
    """Return the path of a module and those of the modules around it, up to the model's."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)] + [""]


class _Move(torch.autograd.Function):
    """Copy of a tensor on another device, and of its gradient back, for which `_Arrive` waits."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device, events: list[torch.Event]) -> torch.Tensor:
        ctx.source, ctx.events, target = tensor.device, events, torch.accelerator.current_stream(device)
        copy, writing = _copied(tensor, device)
        target.wait_stream(writing)
        copy.record_stream(target)
        return copy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        copy, writing = _copied(gradients[0], ctx.source)
        ctx.events.append(writing.record_event())
        return copy, None, None


class _Arrive(torch.autograd.Function):
    """Tensor before its copy; in backward, the thread of its device waits for the gradient when it needs it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, events: list[torch.Event]) -> torch.Tensor:
        ctx.events = events
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        stream = torch.accelerator.current_stream(gradients[0].device)
        stream.wait_event(ctx.events.pop())
        gradients[0].record_stream(stream)
        return gradients[0], None


_move: Any = _Move.apply
_arrive: Any = _Arrive.apply


def _copied(tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Stream]:
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
