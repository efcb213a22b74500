"""Profiling on the first batch: units, the seconds of their forward and backward, and the bytes that autograd saves.

A unit is a submodule in which no other one is called, or which is called more than once. The forward passes of
micro-batches of two sizes are timed; a unit's lasts until the next unit begins.

    seconds   │            x        A line through both gives the time for a micro-batch of b samples:
              │     x      ╎            fixed + per_sample * b
        fixed │     ╎      ╎
              └─────┴──────┴── b
                 small   large

A backward is not timed: it takes about twice as long as its forward, since it computes the gradients of a unit's
parameters and of its input. Units before the first trained one have no backward.

On an accelerator, events on its stream measure these times, so that the host does not wait between units.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from parallelize.backends.balanced.transfer import owners, tensors_in
from parallelize.backends.measuring import elapsed_s, free_bytes, now, shortest
from parallelize.errors import ConfigError
from parallelize.torch_patches.module_tensors import all_parameters

__all__ = [
    "DeviceSpec",
    "Line",
    "Profile",
    "device_specs",
    "find_units",
    "measure_units",
    "parameter_bytes",
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
    moved: torch.Tensor
    """Bytes per sample to move if a stage begins at a unit: the arguments of its call, and of the calls around it."""
    parameters: torch.Tensor
    """Bytes of parameters and buffers."""
    trained: torch.Tensor
    """Bytes of the parameters that require grad."""
    costs: Mapping[str, Line] = field(default_factory=dict)
    """Seconds of "forward" and "backward", and bytes that autograd has "saved"."""
    samples: int = 1
    output_bytes: float = 0.0
    """Bytes per sample of outputs, and of a loss of them, on the device of the last stage."""


def find_units(model: nn.Module, run: Callable[[], object], *, samples: int) -> Profile:
    """Run a forward of some samples; return its units without costs."""
    calls = Counter[str]()  # in the order of first calls
    sizes = dict[str, int]()  # bytes of the arguments of the first call
    versions: list[tuple[str, Any, int]] = []  # of the arguments of each call

    def enter(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[name] += 1
        tensors = tensors_in((args, kwargs))
        sizes.setdefault(name, sum(map(_bytes, tensors)))
        versions.extend((name, weakref.ref(each), each._version) for each in tensors)

    modules = dict(_visible(model))
    run()  # begins again if operands meet on another device
    with _calling(modules, enter):
        outputs = tensors_in(run())  # which keep tensors alive
    changing = {name for name, ref, version in versions if ref() is not None and ref()._version != version}
    units = _units(modules, calls)
    moved = [sum(size for name, size in sizes.items() if f"{each}.".startswith(f"{name}.")) for each in units]
    parameters, trained = parameter_bytes(model, units)
    # A loss that the user computes saves as many fp32 values as cross_entropy, and has two gradients.
    values = 4 if any(each.dim() == 0 for each in outputs) else 16
    return Profile(
        units=tuple(units),
        places=tuple(index for index, each in enumerate(units) if not index or each not in changing),
        moved=_vector(moved) / samples,
        parameters=parameters,
        trained=trained,
        output_bytes=values * sum(each.numel() for each in outputs) / samples,
    )


def _units(modules: Mapping[str, nn.Module], calls: Counter[str]) -> list[str]:
    """Return the names of the units, by the number of calls of each module."""
    around = {name: [each for each in calls if name.startswith(f"{each}.")] for name in calls}
    inside = {each for names in around.values() for each in names}
    names = [
        name
        for name, count in calls.items()
        if all(calls[each] == 1 for each in around[name])
        and (name not in inside if count == 1 else [*all_parameters(modules[name])])
    ]
    units = [*names]  # named after the largest modules that begin with them
    for name in reversed(calls):
        found = [index for index, each in enumerate(names) if f"{each}.".startswith(f"{name}.")]
        if found and found[-1] - found[0] == len(found) - 1:
            units[found[0]] = name
    return units


@contextlib.contextmanager
def _calling(modules: Mapping[str, nn.Module], enter: Callable[..., None]) -> Iterator[None]:
    """Call enter(name, module, args, kwargs) before each call of a module."""
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hook = functools.partial(enter, name)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def parameter_bytes(model: nn.Module, units: Sequence[str]) -> list[torch.Tensor]:
    """Return each unit's bytes of parameters and buffers, and of those that require grad; tied ones count once."""
    held, trained = Counter[str](), Counter[str]()
    for tensor, unit in owners(model, units):
        held[unit] += _bytes(tensor)
        trained[unit] += _bytes(tensor) * tensor.requires_grad
    return [_vector([each[unit] for unit in units]) for each in (held, trained)]


def _visible(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules by their names, but not those inside of compiled ones, which are not followed."""
    hidden = {id(model)}
    for name, module in model.named_modules():
        if id(module) not in hidden:
            yield name, module
            if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
                hidden.update(map(id, module.modules()))


def _costs(
    model: nn.Module, units: Sequence[str], call: Callable[[], Any], device: torch.device
) -> dict[tuple[str, str], float]:
    """Run a forward; return the seconds of each unit's "forward", and the bytes that autograd has "saved"."""
    found = defaultdict[tuple[str, str], float](float)
    laps: list[tuple[str, Any, Any]] = []
    # Each storage counts once, those of parameters never.
    seen = {each.untyped_storage().data_ptr() for each in all_parameters(model) if each.layout is torch.strided}
    # What runs, on which device and since when. The first unit begins before it is called.
    running = units[0], device, now(device)

    def begin(name: str, _module: Any, args: Any, kwargs: Any) -> None:
        nonlocal running
        before, where, began = running
        laps.append((before, began, now(where)))
        where = next((each.device for each in tensors_in((args, kwargs))), where)
        running = name, where, now(where)

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[running[0], "saved"] += storage.nbytes()
        return tensor.detach()  # makes no reference cycle

    with (
        _calling({name: model.get_submodule(name) for name in units}, begin),
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
    ):
        output = call()  # keeps what is saved, so that no two storages have one address
    begin("", model, output, None)
    for name, began, ended in laps:
        found[name, "forward"] += elapsed_s(began, ended)
    return found


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
    runs = [[_costs(model, found.units, prepare(size), device) for _ in range(_REPEATS)] for size in sizes]

    def line(kind: str) -> Line:
        values = [_vector([min(run.get((name, kind), 0.0) for run in each) for name in found.units]) for each in runs]
        return Line.through(sizes, values)

    # The gradients of each micro-batch are added to those of the ones before it.
    block = torch.ones(2**20, device=device)
    adding = found.trained * (shortest(lambda: block.add_(block), device) / block.nbytes)
    forward, passes = line("forward"), 2.0 * (found.trained.cumsum(0) > 0)
    backward = Line(passes * forward.fixed + adding, passes * forward.per_sample)
    costs = {"forward": forward, "backward": backward, "saved": line("saved")}
    return replace(found, costs=costs)


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
            cap_bytes=min(_usable_bytes(device, model) / devices.count(device), limit or _NO_LIMIT),
            speed=seconds[kinds[0]] / seconds[kind],
        )
        for device, kind, limit in zip(devices, kinds, limits, strict=True)
    ]


def _usable_bytes(device: torch.device, model: nn.Module) -> float:
    if device.type != "cuda":
        return _NO_LIMIT
    own = sum(each.nbytes for each in all_parameters(model) if each.device == device)
    return (free_bytes(device) + own) * _USABLE


def _matmul_seconds(device: torch.device) -> float:
    matrix = torch.ones(1024, 1024, device=device)
    return shortest(lambda: matrix @ matrix, device)
