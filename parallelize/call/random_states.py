"""States of the global random generators: a call takes the caller's along, and gives rank 0's back.

caller ── capture ──> every rank ── begin ──> the function draws numbers
caller <── restore ── rank 0 <───── capture ───────────┘

So the caller draws the numbers that it would draw after a plain call of the function. The states
are plain values and bytes. On the way there they are a part of WorkerSetup or NodeCall, and on the
way back a part of the Outcome.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from parallelize.config.config import Config


def advances_caller(config: Config) -> bool:
    """Whether a call that returns leaves the caller's generators where rank 0's are.

    With a seed, a call depends on its arguments alone, and nothing depends on the call.
    """
    return config.seed is None and config.update_modules


@dataclass(frozen=True)
class RandomStates:
    """States of the global generators of `random`, NumPy, and torch on the CPU and some devices.

    Args:
        python: state of `random`.
        numpy: state of NumPy's legacy generator.
        torch_seed: seed of torch's generators: `torch.manual_seed` seeds those of all devices.
        torch_cpu: state of torch's generator on the CPU.
        torch_devices: states of torch's generators on the devices, in their order; None: torch
            has not created the generator, which will begin with `torch_seed`.
    """

    python: tuple[Any, ...]
    numpy: Any
    torch_seed: int
    torch_cpu: bytes
    torch_devices: tuple[bytes | None, ...]

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> RandomStates:
        """Return the states of this process; initialize no device.

        Args:
            devices: the devices of rank 0, as this process numbers them.
        """
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),
            torch_seed=torch.initial_seed(),
            torch_cpu=_bytes_of(torch.get_rng_state()),
            torch_devices=tuple(_state_on(device) for device in devices),
        )

    def begin(self, devices: Sequence[torch.device]) -> None:
        """Let a new process go on from the states; other devices begin with the seed.

        Args:
            devices: the devices of this process, each in place of one of rank 0's.
        """
        # Without an accelerator it is needless. With one that is not initialized, it formats the
        # stack, which takes 4 ms.
        if torch.accelerator.current_accelerator() is not None:
            torch.manual_seed(self.torch_seed)
        self.restore(devices)

    def restore(self, devices: Sequence[torch.device]) -> None:
        """Set the generators of this process to the states; initialize no device.

        Args:
            devices: the devices of rank 0, as this process numbers them.
        """
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(_tensor_of(self.torch_cpu))
        state_by_index = dict[int, bytes | None]()
        # The machine of the caller and those of its job may differ in their devices.
        for device, state in zip(devices, self.torch_devices, strict=False):
            if _has_generators(device):
                state_by_index[device.index or 0] = state
        if state_by_index:
            _DeviceStates(devices[0].type, self.torch_seed, state_by_index).apply()


@contextlib.contextmanager
def restoring_caller(config: Config, devices: Sequence[torch.device]) -> Iterator[None]:
    """Run a call in the caller's process, and restore the states which it may not change.

    Args:
        config: options of the call.
        devices: the devices of this process.
    """
    before = RandomStates.capture(devices)
    has_returned = False
    try:
        yield
        has_returned = True
    finally:
        if not (has_returned and advances_caller(config)):
            before.restore(devices)


@dataclass(frozen=True)
class _DeviceStates:
    """States for the generators of one type of device.

    Torch creates these generators when it initializes the devices, which the caller of a call may
    never do. Until then torch keeps the function that the latest `torch.manual_seed` has queued,
    and calls that one last. An object of this class is queued in place of such a function: so it
    counts until the user seeds again, and the next call finds it there.

    Args:
        device_type: torch's name of it, such as "cuda".
        seed: for generators without a state.
        state_by_index: index of the device -> state of its generator.
    """

    device_type: str
    seed: int
    state_by_index: Mapping[int, bytes | None]

    def apply(self) -> None:
        """Set the generators, now or when torch creates them."""
        module = _module_of(self.device_type)
        if module.is_initialized():
            for index in self.state_by_index:
                self._set(index)
        else:
            module._lazy_call(self, seed_all=True)

    def __call__(self) -> None:
        """Set all generators; called by torch as soon as they exist."""
        for index in range(len(_module_of(self.device_type).default_generators)):
            self._set(index)

    def _set(self, index: int) -> None:
        generators = _module_of(self.device_type).default_generators
        if index >= len(generators):
            return
        state = self.state_by_index.get(index)
        if state is None:
            generators[index].manual_seed(self.seed)
        else:
            generators[index].set_state(_tensor_of(state))


def _state_on(device: torch.device) -> bytes | None:
    """Return the state of the generator on a device, which may not have been created yet."""
    if not _has_generators(device):
        return None
    index = device.index or 0
    module = _module_of(device.type)
    if module.is_initialized():
        # A caller plans a job for devices that its own machine may not have.
        if index >= len(module.default_generators):
            return None
        return _bytes_of(module.default_generators[index].get_state())
    queued_calls = module._lazy_seed_tracker.get_calls()
    if not queued_calls or queued_calls[-1] is None:
        return None
    latest, _traceback = queued_calls[-1]
    if not isinstance(latest, _DeviceStates):
        return None
    return latest.state_by_index.get(index)


def _has_generators(device: torch.device) -> bool:
    """Whether torch has a global generator for each such device; on MPS there is another one."""
    return device.type != "cpu" and hasattr(_module_of(device.type), "default_generators")


def _module_of(device_type: str) -> Any:
    """Return torch's module of a type of device, such as `torch.cuda`."""
    return torch.get_device_module(device_type)


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor_of(state: bytes) -> torch.Tensor:
    # A copy, as torch warns about tensors in memory that cannot be written to.
    return torch.from_numpy(np.frombuffer(state, np.uint8).copy())
