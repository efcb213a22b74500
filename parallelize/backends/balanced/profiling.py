"""Profiling on the first batch: units, their seconds in forward and backward, and the bytes that autograd saves.

A unit is a submodule in which no other one is called, or which is called more than once. Micro-batches of two sizes
run. A unit's forward lasts until the next unit begins. Its backward begins when the gradient of the next unit's input
is computed, and ends when that of its own input is.

    seconds   │            x        A line through both gives the time for a micro-batch of b samples:
              │     x      ╎            fixed + per_sample * b
        fixed │     ╎      ╎
              └─────┴──────┴── b
                 small   large

On an accelerator, events on its stream measure these times, so that the host does not wait between units.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from parallelize.backends.balanced.transfer import owners, tensors_in
from parallelize.errors import ConfigError

__all__ = [
    "DeviceSpec",
    "Line",
    "Profile",
    "device_specs",
    "find_units",
    "measure_units",
    "parameter_bytes",
    "run_backward",
    "seconds_of",
    "trained_share",
]

_USABLE = 0.9
"""Usable fraction of a GPU's free memory; the rest is for workspaces and fragmentation."""
_NO_LIMIT = 2.0**60
"""Usable bytes of a device without a limit."""
_REPEATS = 3
"""Timed runs of each size, of which the shortest times count."""


class Line(NamedTuple):
    """Seconds or bytes of each unit in a micro-batch, by its number of samples.

    The fixed part (Python overhead, kernel launches, loading weights) does not shrink with the micro-batch.
    """

    fixed: torch.Tensor
    per_sample: torch.Tensor

    def at(self, samples: float) -> torch.Tensor:
        """Return what a micro-batch of so many samples takes."""
        return self.fixed + self.per_sample * samples

    @classmethod
    def through(cls, sizes: Sequence[int], values: Sequence[torch.Tensor]) -> Line:
        """Return the line through the values at two sizes; neither of its parts is negative."""
        (small, large), (at_small, at_large) = sizes, values
        slope = at_large / large
        if small < large:
            slope = ((at_large - at_small) / (large - small)).clamp(min=0.0).minimum(slope)
        return cls(at_large - slope * large, slope)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs of a model on its first batch; vectors have an element for each unit.

    A unit is a submodule that is not split further. Its costs are those of all of its calls, each of which lasts until
    another unit's begins.
    """

    units: tuple[str, ...]
    """Names in the order of first calls; each unit is named after the largest module that begins with it."""
    places: tuple[int, ...]
    """Units at which a stage may begin: not those that change arguments, which are read on the former device, too."""
    depth: torch.Tensor
    """Number of modules inside of which a unit begins, and whose operands are moved if a stage does."""
    moved: torch.Tensor
    """Bytes per sample to move if a stage begins at a unit."""
    parameters: torch.Tensor
    """Bytes of parameters and buffers."""
    costs: Mapping[str, Line] = field(default_factory=dict)
    """Seconds of "forward" and "backward", and bytes that autograd has "saved"."""
    samples: int = 1
    trained_share: float = 1.0
    """Fraction of the parameters that require grad."""
    least_samples: int = 1
    """Size of the smallest measured micro-batch."""
    output_bytes: float = 0.0
    """Bytes per sample of outputs, and of a loss of them, on the device of the last stage."""


def find_units(model: nn.Module, run: Callable[[], object], *, samples: int) -> Profile:
    """Run a forward of some samples; return its units without costs."""
    calls = Counter[str]()  # in the order of first calls
    sizes: dict[str, int] = {}  # bytes of the arguments of the first call
    versions: list[tuple[str, Any, int]] = []  # of the arguments of each call

    def enter(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[name] += 1
        tensors = tensors_in((args, kwargs))
        sizes.setdefault(name, sum(map(_bytes, tensors)))
        versions.extend((name, weakref.ref(each), each._version) for each in tensors)

    modules = dict(_visible(model))
    with _calling(modules, enter):
        outputs = tensors_in(run())  # which keep tensors alive
    changing = {name for name, ref, version in versions if ref() is not None and ref()._version != version}
    units, depth = _units(modules, calls)
    # A loss that the user computes saves as many fp32 values as cross_entropy, and has two gradients.
    values = 4 if any(each.dim() == 0 for each in outputs) else 16
    return Profile(
        units=tuple(units),
        places=tuple(index for index, each in enumerate(units) if not index or each not in changing),
        depth=_vector(depth),
        moved=_vector([sizes[each] / samples for each in units]),
        parameters=_vector(parameter_bytes(model, units)),
        trained_share=trained_share(model),
        output_bytes=values * sum(each.numel() for each in outputs) / samples,
    )


def _units(modules: Mapping[str, nn.Module], calls: Counter[str]) -> tuple[list[str], list[int]]:
    """Return the names of the units, by the number of calls of each module, and in how many modules each begins."""
    around = {name: [each for each in calls if name.startswith(f"{each}.")] for name in calls}
    inside = {each for names in around.values() for each in names}
    names = [
        name
        for name, count in calls.items()
        if all(calls[each] == 1 for each in around[name])
        and (name not in inside if count == 1 else [*modules[name].parameters()])
    ]
    units = [*names]  # named after the largest modules that begin with them
    for name in reversed(calls):
        found = [index for index, each in enumerate(names) if f"{each}.".startswith(f"{name}.")]
        if found and found[-1] - found[0] == len(found) - 1:
            units[found[0]] = name
    return units, [len(around[each]) for each in units]


@contextlib.contextmanager
def _calling(modules: Mapping[str, nn.Module], enter: Callable[..., None]) -> Iterator[None]:
    """Call enter(name, module, args, kwargs) before each call of a module."""
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hook = functools.partial(enter, name)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def parameter_bytes(model: nn.Module, units: Sequence[str]) -> list[int]:
    """Return the bytes of the parameters and buffers of each unit, those of other modules with a unit near them."""
    found = dict.fromkeys(units, 0)
    for tensor, unit in owners(model, units) if units else ():
        found[unit] += _bytes(tensor)  # tied ones count once
    return [*found.values()]


def _visible(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules by their names, but not those inside of compiled ones, which are not followed."""
    hidden = {id(model)}
    for name, module in model.named_modules():
        if id(module) not in hidden:
            yield name, module
            if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
                hidden.update(map(id, module.modules()))


class _Clock:
    """Records which unit runs when: in forward by hooks before calls, in backward by hooks of their arguments."""

    def __init__(self, model: nn.Module, profile: Profile, device: torch.device) -> None:
        self._model, self._profile = model, profile
        self._calls: list[tuple[str, torch.device]] = []
        self._last = 0  # index of the call whose backward runs
        self._device = device
        self._laps: list[tuple[tuple[str, str], Any, Any]] = []
        self._saved = Counter[str]()
        self._seen = {each.untyped_storage().data_ptr() for each in model.parameters() if each.layout is torch.strided}

    def run(self, call: Callable[[], Any]) -> dict[tuple[str, str], float]:
        """Run forward and backward; return the seconds of each unit in both, and the bytes that it has "saved"."""
        # What runs: a unit and a phase, the device and since when. The first unit begins before it is called.
        self._running = (self._profile.units[0], "forward"), self._device, _now(self._device)
        with (
            _calling({name: self._model.get_submodule(name) for name in self._profile.units}, self._begin),
            torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor),
        ):
            output = call()
        self._last = len(self._calls)
        self._end_backward(self._last)
        run_backward(self._model, output)
        self._end_backward(0)
        _synchronize({device for _, device in self._calls})
        costs = {(name, "saved"): float(size) for name, size in self._saved.items()}
        for key, began, ended in self._laps:
            costs[key] = costs.get(key, 0.0) + _seconds(began, ended)
        return costs

    def _begin(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = tensors_in((args, kwargs))
        device = tensors[0].device if tensors else self._running[1]
        self._switch((name, "forward"), device)
        end = functools.partial(self._end_backward, len(self._calls))
        self._calls.append((name, device))
        for each in tensors:
            if each.requires_grad and not each.is_leaf:
                each.register_hook(end)  # type: ignore[no-untyped-call]  # torch's

    def _end_backward(self, index: int, _: Any = None) -> None:
        """End the backward of a call; those of later calls that no gradient has ended are a part of it."""
        if index > self._last:
            return
        if index < self._last:
            self._running = (self._calls[index][0], "backward"), *self._running[1:]
        self._last = max(0, index - 1)
        name, device = self._calls[self._last]
        self._switch((name, "backward"), device)

    def _switch(self, key: tuple[str, str], device: torch.device) -> None:
        """End what has run until now, and begin another."""
        before, where, began = self._running
        self._laps.append((before, began, _now(where)))
        self._running = key, device, _now(device)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves: each storage once, those of parameters never."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self._saved[self._running[0][0]] += storage.nbytes()
        return tensor.detach()  # makes no reference cycle


def measure_units(
    model: nn.Module,
    found: Profile,
    prepare: Callable[[int], Callable[[], Any]],
    *,
    sizes: Sequence[int],
    device: torch.device,
) -> Profile:
    """Measure the units of a model at two micro-batch sizes.

    Args:
        model: the user's model.
        found: the result of `find_units`.
        prepare: returns a function that runs a forward of so many samples, and returns its output.
        sizes: numbers of samples of the smaller and of the larger micro-batch.
        device: that of the inputs.
    """
    runs = [[_Clock(model, found, device).run(prepare(size)) for _ in range(_REPEATS)] for size in sizes]

    def line(kind: str) -> Line:
        values = [_vector([min(run.get((name, kind), 0.0) for run in each) for name in found.units]) for each in runs]
        return Line.through(sizes, values)

    # The gradients of each micro-batch are added to those of the ones before it.
    block = torch.ones(2**20, device=device)
    seconds = _shortest(lambda: block.add_(block), device) / block.nbytes
    fixed, per_sample = line("backward")
    backward = Line(fixed + seconds * found.trained_share * found.parameters, per_sample)
    costs = {"forward": line("forward"), "backward": backward, "saved": line("saved")}
    return replace(found, costs=costs, least_samples=sizes[0])


def run_backward(model: nn.Module, output: Any) -> None:
    """Compute and discard the gradients of a model's parameters, where this can be done."""
    wanted = [each for each in model.parameters() if each.requires_grad]
    sums = [each.sum().real for each in tensors_in(output) if each.grad_fn is not None]
    if not sums or not wanted:
        return
    try:
        torch.autograd.grad(sums, wanted, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):  # torch's message: such a checkpoint stores gradients
            raise


def trained_share(model: nn.Module) -> float:
    """Return the fraction of a model's parameters that require grad."""
    total = sum(each.numel() for each in model.parameters())
    return sum(each.numel() for each in model.parameters() if each.requires_grad) / max(1, total)


def seconds_of(call: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """Return the seconds from the begin of a call to the end of its work on all devices."""
    _synchronize(devices)
    accelerators = [each for each in devices if each.type != "cpu"]
    first = [*accelerators, torch.device("cpu")][0]
    began = _now(first)
    call()
    for other in accelerators:
        torch.accelerator.current_stream(first).wait_event(_now(other))
    ended = _now(first)
    _synchronize(devices)
    return _seconds(began, ended)


def _synchronize(devices: Collection[torch.device]) -> None:
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _now(device: torch.device) -> Any:
    """Return a point in a device's work: the time of the CPU, or an event on the current stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _seconds(began: Any, ended: Any) -> float:
    seconds: float = ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000
    return seconds


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # sparse ones have no nbytes


def _vector(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """Memory limit and speed of one device."""

    device: str
    cap_bytes: float = _NO_LIMIT
    speed: float = 1.0
    """Relative to the first device."""


def device_specs(
    devices: Sequence[torch.device], *, memory: int | Sequence[int] | None, model: nn.Module
) -> list[DeviceSpec]:
    """Measure the memory and speed of each device.

    Args:
        devices: in the user's order.
        memory: usable bytes of each device, or one number for all; None: free memory of a GPU, unlimited on the CPU.
        model: its parameters count as free memory, since they are about to be moved to stages.

    Raises:
        ConfigError: `memory` is a sequence of another length than `devices`.
    """
    limits = [*memory] if isinstance(memory, Sequence) else [memory] * len(devices)
    if len(limits) != len(devices):
        raise ConfigError(
            f"memory={limits} for {len(devices)} devices",
            why="each device has one limit",
            fix="pass one number of bytes per device, or one for all",
        )
    kinds = [torch.cuda.get_device_name(each) if each.type == "cuda" else each.type for each in devices]
    # Devices of one kind are equally fast: a measured difference would be noise.
    seconds = {
        kind: _matmul_seconds(each) if len({*kinds}) > 1 else 1.0 for kind, each in zip(kinds, devices, strict=True)
    }
    return [
        DeviceSpec(
            device=str(device),
            cap_bytes=min(_free_bytes(device, model) / devices.count(device), limit or _NO_LIMIT),
            speed=seconds[kinds[0]] / seconds[kind],
        )
        for device, kind, limit in zip(devices, kinds, limits, strict=True)
    ]


def _free_bytes(device: torch.device, model: nn.Module) -> float:
    if device.type != "cuda":
        return _NO_LIMIT
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    free = min(free, int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved)
    own = sum(each.nbytes for each in model.parameters() if each.device == device)
    return (free + reserved - torch.cuda.memory_allocated(device) + own) * _USABLE


def _matmul_seconds(device: torch.device) -> float:
    matrix = torch.ones(1024, 1024, device=device)
    return _shortest(lambda: matrix @ matrix, device)


def _shortest(call: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of three durations of a call, after one that warms up."""
    return min([seconds_of(call, [device]) for _ in range(4)][1:])
