"""Profiling on the first batch: the units of a model, the seconds of each, and what autograd saves.

A few forwards of one micro-batch are measured. A unit lasts until the next unit begins:

    forward       unit 0 ──────── unit 1 ── unit 2 ───────────────── end of forward
    clock      │                │         │                        │

On an accelerator, the clock is an event on its stream, so that the host does not wait between
units. A backward is not timed. It computes gradients of a unit's inputs and of its parameters, and
each of the two takes about as long as its forward. Units with frozen parameters compute the first
alone, and units before the first trained one compute nothing.
Then the gradients of parameters are added to those of the micro-batches before, which takes as long
as any addition of so many bytes: with small micro-batches, that is much of a step.

Glossary:

    unit       a submodule that is not divided further; what is called inside it belongs to it
    chain      the units of a model in the order of their first calls
    place      a unit at which a stage may begin
    moved      the tensors that have to be on the device of the stage that begins at a place
    trained    a parameter that requires gradients
    lap        a unit runs without another one in between; several laps if it is called again
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced.transfer import owners
from parallelize.backends.measuring import elapsed_s, free_bytes, now, shortest
from parallelize.backends.saved_tensors import StorageKey, watch_saved
from parallelize.errors import ConfigError
from parallelize.run.containers import tensors_in
from parallelize.torch_patches.module_tensors import all_parameters

_USABLE = 0.9
"""Usable fraction of a GPU's free memory; the rest is for workspaces and fragmentation."""
_NO_LIMIT = 2.0**60
"""Usable bytes of a device without a limit."""
_BYTES_PER_OUTPUT = 16
"""Of a loss that the user computes: cross_entropy saves as many fp32 values as the outputs have,
which have a gradient, and so has what is saved. The joined outputs are the fourth."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The units of a model in the order of their first calls; vectors have an element per unit.

    Bytes of tensors are those of all samples of the batch.

    Args:
        units: their names; a unit is named after the largest module that begins with it.
        places: the units at which a stage may begin, by their positions. A unit that changes its
            arguments in place is none: they are read on the former device, too.
        moved: bytes to move if a stage begins at a unit: the arguments of its call, and of the
            calls around it.
        parameters: bytes of parameters and buffers.
        trained: bytes of trained parameters.
        output_bytes: bytes of the outputs.
        loss_bytes: bytes of the joined outputs and of a loss of them.
    """

    units: tuple[str, ...]
    places: tuple[int, ...]
    moved: torch.Tensor
    parameters: torch.Tensor
    trained: torch.Tensor
    output_bytes: float = 0.0
    loss_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs of a model on its first batch; vectors have an element per unit.

    Args:
        chain: the units.
        samples: number of samples of the batch.
        microbatches: number of micro-batches of the batch.
        forward_s: seconds of a micro-batch's forward.
        backward_s: seconds of a micro-batch's backward.
        saved: bytes that autograd saves of the batch.
        host_share: of the seconds of a forward, the fraction in which the host is busy.
    """

    chain: Chain
    samples: int
    microbatches: int
    forward_s: torch.Tensor
    backward_s: torch.Tensor
    saved: torch.Tensor
    host_share: float = 0.0


def units_of(modules: Mapping[str, nn.Module], calls: Sequence[str]) -> list[str]:
    """Return the units: the leaves, each by the name of the largest submodule that begins with it.

        blocks.0            called once; begins with a leaf, whose unit has this name
          blocks.0.norm     called once, calls nothing: a leaf
          blocks.0.linear   a leaf, too, and a unit
        recurrent           called twice: a leaf, whose calls are in one stage, and a unit
          recurrent.cell    inside a leaf
        act                 called twice, without parameters: it computes where it is called

    Args:
        modules: the submodules by their names; `a.b` is called inside `a`.
        calls: their names, in the order of the calls.
    """
    counts = Counter(calls)
    leaves = _leaves(modules, counts)
    callers_of_leaves: set[str] = set()
    for leaf in leaves:
        callers_of_leaves.update(_callers(leaf, counts))
    unit_of_leaf: dict[str, str] = {}
    # The largest submodule that has begun since the latest leaf.
    largest = ""
    for name in calls:
        if name in callers_of_leaves:
            # A submodule may call another one that is not inside it, and begins elsewhere.
            if not largest or not name.startswith(f"{largest}."):
                largest = name
        elif name in leaves:
            begins = name.startswith(f"{largest}.") and counts[name] == 1
            unit_of_leaf.setdefault(name, largest if begins else name)
            largest = ""
    return list(unit_of_leaf.values())


def _leaves(modules: Mapping[str, nn.Module], counts: Counter[str]) -> set[str]:
    """Return the submodules that are not divided further.

    Args:
        modules: the submodules by their names.
        counts: numbers of their calls.
    """
    callers: set[str] = set()
    for name in counts:
        callers.update(_callers(name, counts))
    leaves: set[str] = set()
    for name in counts:
        if any(counts[caller] > 1 for caller in _callers(name, counts)):
            continue
        is_leaf = name not in callers
        if counts[name] > 1:
            is_leaf = next(all_parameters(modules[name]), None) is not None
        if is_leaf:
            leaves.add(name)
    return leaves


def _callers(name: str, called: Container[str]) -> list[str]:
    """Return the called submodules around a submodule, the outermost one first."""
    *outer_paths, _ = itertools.accumulate(name.split("."), "{}.{}".format)
    return [path for path in outer_paths if path in called]


class _CallRecorder:
    """Notes the calls of submodules, and the tensors that are their arguments.

    torch counts the changes of a tensor in place, in its `_version`: what has another version after
    the forward than at a call was changed in this call, or after it.

    Attributes:
        calls: names of the submodules, in the order of the calls.
        argument_bytes: name of a submodule -> bytes of the arguments of its first call.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.argument_bytes: dict[str, int] = {}
        # Name of a submodule, an argument of a call, and its version at this time.
        self._versions: list[tuple[str, weakref.ref[torch.Tensor], int]] = []

    def enter(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a call that begins."""
        arguments = tensors_in((args, kwargs))
        self.calls.append(name)
        self.argument_bytes.setdefault(name, sum(map(_bytes, arguments)))
        for tensor in arguments:
            self._versions.append((name, weakref.ref(tensor), tensor._version))

    def changing(self) -> set[str]:
        """Return the submodules whose arguments were changed in place since their calls."""
        names: set[str] = set()
        for name, reference, version in self._versions:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                names.add(name)
        return names


def find_chain(model: nn.Module, forward: Callable[[], object], *, forwards: float) -> Chain:
    """Return the units of a model.

    Args:
        model: the user's model.
        forward: runs a forward, and returns its output.
        forwards: number of such forwards that have the samples of the batch.
    """
    modules = _visible_submodules(model)
    recorder = _CallRecorder()
    # A forward may begin again when operands meet on two devices, but not at the second time.
    forward()
    with _before_calls(modules, recorder.enter):
        # The outputs must stay alive: what autograd has saved for them keeps the arguments alive.
        outputs = tensors_in(forward())
    changing = recorder.changing()
    units = units_of(modules, recorder.calls)
    places: list[int] = []
    moved: list[float] = []
    for position, unit in enumerate(units):
        if position == 0 or unit not in changing:
            places.append(position)
        names = (*_callers(unit, recorder.argument_bytes), unit)
        moved.append(sum(recorder.argument_bytes[name] for name in names) * forwards)
    parameters, trained = parameter_bytes(model, units)
    # If the loss is among the outputs, nothing is computed from the others.
    has_loss = any(output.dim() == 0 for output in outputs)
    bytes_per_output = 4 if has_loss else _BYTES_PER_OUTPUT
    return Chain(
        units=tuple(units),
        places=tuple(places),
        moved=_vector(moved),
        parameters=parameters,
        trained=trained,
        output_bytes=sum(map(_bytes, outputs)) * forwards,
        loss_bytes=bytes_per_output * sum(output.numel() for output in outputs) * forwards,
    )


@contextlib.contextmanager
def _before_calls(modules: Mapping[str, nn.Module], enter: Callable[..., None]) -> Iterator[None]:
    """In the context, call enter(name, module, args, kwargs) before each call of a module."""
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hook = functools.partial(enter, name)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def parameter_bytes(model: nn.Module, units: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each unit's bytes of parameters and buffers, and of trained parameters.

    A parameter of several units counts for the one that holds it.
    """
    held = Counter[str]()
    trained = Counter[str]()
    for tensor, unit in owners(model, units):
        held[unit] += _bytes(tensor)
        if tensor.requires_grad:
            trained[unit] += _bytes(tensor)
    # A unit without parameters has 0.
    return _vector([held[unit] for unit in units]), _vector([trained[unit] for unit in units])


def _visible_submodules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules by their names, but none inside a compiled one: it is not followed."""
    visible: dict[str, nn.Module] = {}
    hidden = {id(model)}
    for name, module in model.named_modules():
        if id(module) not in hidden:
            visible[name] = module
            if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
                hidden.update(map(id, module.modules()))
    return visible


@dataclass
class Measurement:
    """What one forward of a micro-batch has taken.

    Attributes:
        seconds: unit -> seconds of its calls.
        saved: unit -> bytes that autograd has saved in its calls, and not in earlier forwards.
        host_s: seconds in which the host was busy.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    saved: Counter[str] = field(default_factory=Counter)
    host_s: float = 0.0


@dataclass
class _Lap:
    """A unit runs, from one point of its device's work to another."""

    unit: str
    device: torch.device
    began: Any
    ended: Any = None


class UnitMeter:
    """Measures forwards of a model, unit by unit.

    Args:
        model: the user's model.
        units: of `find_chain`.
        device: that of the inputs.
    """

    def __init__(self, model: nn.Module, units: Sequence[str], device: torch.device) -> None:
        self._model = model
        self._units = {unit: model.get_submodule(unit) for unit in units}
        self._device = device
        self._measurement = Measurement()
        self._laps: list[_Lap] = []

    def measure(self, forwards: Iterable[Callable[[], object]]) -> list[Measurement]:
        """Run forwards of micro-batches of one batch, and return what each of them has taken."""
        # Parameters are held anyway.
        saving = watch_saved(self._save, uncounted=all_parameters(self._model), keeps=True)
        with _before_calls(self._units, self._enter), saving:
            return [self._measure_one(forward) for forward in forwards]

    def _measure_one(self, forward: Callable[[], object]) -> Measurement:
        self._measurement = measurement = Measurement()
        # The first unit begins before it is called: what comes before its call belongs to it.
        # A model that calls no submodules has no units.
        first_unit = next(iter(self._units), "")
        self._laps = [_Lap(first_unit, self._device, now(self._device))]
        began = time.perf_counter()
        forward()
        measurement.host_s = time.perf_counter() - began
        self._laps[-1].ended = now(self._laps[-1].device)
        # On an accelerator, this waits for the end of the forward.
        for lap in self._laps:
            measurement.seconds[lap.unit] += elapsed_s(lap.began, lap.ended)
        return measurement

    def _enter(self, unit: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """End the lap of the unit that was running, and begin another one."""
        running = self._laps[-1]
        running.ended = now(running.device)
        arguments = tensors_in((args, kwargs))
        device = arguments[0].device if arguments else running.device
        self._laps.append(_Lap(unit, device, now(device)))

    def _save(self, _key: StorageKey, size: int) -> None:
        self._measurement.saved[self._laps[-1].unit] += size


def profile_of(
    chain: Chain,
    measurements: Sequence[Measurement],
    *,
    forwards: float,
    samples: int,
    microbatches: int,
    adding_s: float,
) -> Profile:
    """Return the costs of a chain.

    Args:
        chain: the units.
        measurements: of forwards, the first of which has warmed up.
        forwards: number of such forwards that have the samples of the batch: of its micro-batches,
            or, where these do not fit, of smaller ones.
        samples: number of samples of the batch.
        microbatches: number of micro-batches of the batch.
        adding_s: seconds to add a byte to another one.
    """
    first, *repeats = measurements
    seconds: list[float] = []
    saved: list[float] = []
    for unit in chain.units:
        seconds.append(statistics.median(repeat.seconds[unit] for repeat in repeats))
        saved_again = repeats[-1].saved[unit]
        # Once for all micro-batches, such as the parameters that mixed precision has cast.
        saved_once = max(0, first.saved[unit] - saved_again)
        saved.append(saved_once + saved_again * forwards)
    host_s = statistics.median(repeat.host_s for repeat in repeats)
    forward_s = _vector(seconds) * (forwards / microbatches)
    is_trained = chain.trained > 0
    has_gradient = is_trained.cumsum(0) > 0
    # A unit with frozen parameters computes gradients of its inputs alone. One without parameters
    # takes two passes, too: its backward reads what it has saved, beside a gradient.
    is_frozen = (chain.parameters > 0) & ~is_trained
    passes = has_gradient * (2.0 - is_frozen.double())
    return Profile(
        chain=chain,
        samples=samples,
        microbatches=microbatches,
        forward_s=forward_s,
        backward_s=forward_s * passes + chain.trained * adding_s,
        saved=_vector(saved),
        host_share=min(1.0, host_s / max(sum(seconds), 1e-12)),
    )


def seconds_of_adding_a_byte(device: torch.device) -> float:
    """Return the seconds to add a byte of a large tensor to one of another tensor."""
    block = torch.ones(2**20, device=device)
    return shortest(lambda: block.add_(block), device) / block.nbytes


def _bytes(tensor: torch.Tensor) -> int:
    # A sparse tensor has no nbytes.
    return tensor.numel() * tensor.element_size()


def _vector(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """Memory limit and speed of one device.

    Args:
        device: its name.
        cap_bytes: usable bytes.
        speed: relative to the first device.
    """

    device: str
    cap_bytes: float = _NO_LIMIT
    speed: float = 1.0


def device_specs(
    devices: Sequence[torch.device], *, memory: int | Sequence[int] | None, model: nn.Module
) -> list[DeviceSpec]:
    """Measure the memory and speed of each device.

    Args:
        devices: in the user's order.
        memory: usable bytes of each device, or one number for all; None: free memory of a GPU,
            unlimited on the CPU.
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
    specs: list[DeviceSpec] = []
    speeds = _speeds(devices)
    for device, speed, limit in zip(devices, speeds, limits, strict=True):
        usable = _usable_bytes(device, model) / devices.count(device)
        cap = min(usable, limit or _NO_LIMIT)
        specs.append(DeviceSpec(device=str(device), cap_bytes=cap, speed=speed))
    return specs


def _speeds(devices: Sequence[torch.device]) -> list[float]:
    """Return the speeds of devices relative to the first one.

    Devices of one type are equally fast: a measured difference would be noise.
    """
    device_of_type: dict[str, torch.device] = {}
    types: list[str] = []
    for device in devices:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        types.append(name)
        device_of_type[name] = device
    if len(device_of_type) == 1:
        return [1.0] * len(devices)
    seconds = {name: _matmul_seconds(device) for name, device in device_of_type.items()}
    return [seconds[types[0]] / seconds[name] for name in types]


def _usable_bytes(device: torch.device, model: nn.Module) -> float:
    if device.type != "cuda":
        return _NO_LIMIT
    bytes_of_model = 0
    for parameter in all_parameters(model):
        if parameter.device == device:
            bytes_of_model += _bytes(parameter)
    return (free_bytes(device) + bytes_of_model) * _USABLE


def _matmul_seconds(device: torch.device) -> float:
    matrix = torch.ones(1024, 1024, device=device)
    return shortest(lambda: matrix @ matrix, device)
