"""What torch's Python asks of `torch._C` on a CUDA build: torch.cuda itself stays torch's own code."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import torch
import torch.backends.cuda
import torch.backends.cudnn
import torch.cuda.graphs
import torch.cuda.nccl
import torch.cuda.streams
import torch.version

__all__ = ["install", "registered_bytes"]

PHYSICAL_DEVICES = int(os.environ.get("FAKE_CUDA_DEVICES", "2"))
MEMORY = 8 << 30
UUID = "GPU-00000000-0000-0000-0000-00000000000{}"


class StreamBase(torch.Stream):
    """torch._C._CudaStreamBase."""

    def __new__(cls, priority: int = 0, **identity: int) -> Self:
        if identity:
            return torch.Stream.__new__(cls, **identity)
        return torch.Stream.__new__(cls, device=torch.device("cuda", torch._C._cuda_getDevice()), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class EventBase(torch.Event):
    """torch._C._CudaEventBase."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Self:
        return torch.Event.__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    @property
    def cuda_event(self) -> int:
        return self.event_id

    def elapsed_time(self, later: EventBase) -> float:
        # torch.Event.elapsed_time refuses subclasses.
        return sys.modules["fake_cuda_library"].elapsed_ms(self.event_id, later.event_id)


def install(library: ModuleType) -> None:
    """Answer torch.cuda's calls of `torch._C`.

    Args:
        library: the extension.
    """
    _answer(**_devices(library), **_memory(library), **_streams(), **_graphs(), **_replicas())
    torch._C._has_cuda = True
    torch.cuda._is_in_bad_fork = torch._C._cuda_isInBadFork
    torch.version.cuda = "13.0"
    cuda = torch.cuda
    cuda._cudart = SimpleNamespace(
        cudaMemGetInfo=functools.partial(_free_memory, library),
        cudaHostRegister=_register,
        cudaHostUnregister=_unregister,
    )
    cuda._exchange_device = torch._C._cuda_exchangeDevice
    cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice
    cuda._raw_device_count_nvml = lambda: PHYSICAL_DEVICES
    cuda._raw_device_uuid_nvml = lambda: [UUID.format(each) for each in range(PHYSICAL_DEVICES)]
    cuda._get_device_properties = functools.partial(_properties, library)
    torch._C._CudaStreamBase, torch._C._CudaEventBase = StreamBase, EventBase
    for module in (cuda.streams, cuda.graphs):  # their classes derive from those of torch._C
        importlib.reload(module)
    cuda.Stream, cuda.Event, cuda.ExternalStream = cuda.streams.Stream, cuda.streams.Event, cuda.streams.ExternalStream
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing
    cuda.nccl.is_available = lambda tensors: False  # torch.nn.parallel asks, to add without it
    cuda.nccl.version = lambda: (2, 27, 5)  # torch's own tests ask
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    _storages(library)


# Address -> bytes of memory of the host that is page-locked for the device.
_registered: dict[int, int] = {}


def _register(address: int, size: int, _flags: int) -> int:
    _registered[address] = size
    return 0


def _unregister(address: int) -> int:
    _registered.pop(address, None)
    return 0


def registered_bytes() -> int:
    """Return the bytes of memory that this process has page-locked."""
    return sum(_registered.values())


def _answer(**answers: Any) -> None:
    for name, each in answers.items():
        setattr(torch._C, name, each)


def _devices(library: ModuleType) -> dict[str, Any]:
    forked: list[bool] = []

    def poison_fork() -> None:
        os.register_at_fork(after_in_child=lambda: forked.append(True))

    def init() -> None:
        if library.device_count() == 0:
            raise RuntimeError("No CUDA GPUs are available")
        torch.cuda.default_generators = tuple(map(library.default_generator, range(library.device_count())))
        poison_fork()

    def device_count() -> int:
        poison_fork()  # the driver is asked
        return library.device_count()

    def exchange(device: int) -> int:
        before = library.current_device()
        library.set_current_device(device)
        return before

    return {
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: bool(forked),
        "_cuda_getDeviceCount": device_count,
        "_cuda_getDevice": library.current_device,
        "_cuda_setDevice": library.set_current_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": library.maybe_exchange_device,
        "_cuda_synchronize": lambda: library.synchronize(-1),
        "_cuda_set_sync_debug_mode": library.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": library.sync_debug_mode,
        "_cuda_canDeviceAccessPeer": lambda first, second: first != second and "FAKE_CUDA_NO_PEERS" not in os.environ,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_hasPrimaryContext": library.has_context,
        "_cuda_sleep": lambda cycles: library.sleep(cycles / 1e6),  # of a clock of 1 GHz
    }


def _properties(library: ModuleType, device: int) -> SimpleNamespace:
    physical, speed = library.physical_device(device), library.speed(device)
    return SimpleNamespace(
        name="Pretended CUDA" if speed == 1.0 else f"Pretended CUDA of speed {speed:g}",
        uuid=UUID.format(physical)[len("GPU-") :],
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=1,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        regs_per_multiprocessor=1 << 16,
        L2_cache_size=1 << 20,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )


def _free_memory(library: ModuleType, device: int) -> tuple[int, int]:
    return MEMORY - library.statistics(device)[0], MEMORY


def _memory(library: ModuleType) -> dict[str, Any]:
    def statistics(device: int) -> dict[str, Any]:
        current, peak, allocations = library.statistics(device)
        held = {"all": {"current": current, "peak": peak, "allocated": current, "freed": 0}}
        return {
            "allocated_bytes": held,
            "reserved_bytes": held,
            "allocation": {"all": {"current": 0, "peak": 0, "allocated": allocations, "freed": 0}},
            "num_ooms": 0,
            "num_alloc_retries": 0,
        }

    return {
        "_cuda_memoryStats": statistics,
        "_cuda_resetPeakMemoryStats": library.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_emptyCache": library.release_cached,
        "_cuda_setMemoryFraction": lambda fraction, device: library.set_memory_fraction(device, fraction),
        "_cuda_getMemoryFraction": library.memory_fraction,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getAllocatorBackend": lambda: "native",
    }


def _streams() -> dict[str, Any]:
    def identity(stream: torch.Stream) -> tuple[int, int, int]:
        return stream.stream_id, stream.device_index, stream.device_type

    def current(device: int) -> tuple[int, int, int]:
        return identity(torch.accelerator.current_stream(torch.device("cuda", device)))

    cuda = 1  # DeviceType::CUDA
    return {
        "_cuda_getCurrentStream": current,
        "_cuda_getCurrentRawStream": lambda device: current(device)[0],
        "_cuda_getDefaultStream": lambda device: (0, device, cuda),
        "_cuda_setStream": lambda **identity: torch.accelerator.set_stream(torch.Stream(**identity)),
    }


def _graphs() -> dict[str, Any]:
    return {"_cuda_isCurrentStreamCapturing": lambda: False}


def _replicas() -> dict[str, Any]:
    """Answer nn.DataParallel's copies between devices, which are kernels of NCCL or copies on side streams."""

    def send(tensor: torch.Tensor, device: int) -> torch.Tensor:
        return tensor.to(torch.device("cuda", device), non_blocking=True)

    def broadcast(tensors: list[torch.Tensor], devices: list[int], _: int) -> list[list[torch.Tensor]]:
        return [[send(each, device) for each in tensors] for device in devices]

    def scatter(tensor: torch.Tensor, devices: list[int], sizes: Any, dim: int, streams: Any) -> list[torch.Tensor]:
        parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(sizes, dim)
        found = []
        for part, device, stream in zip(parts, devices, streams or [None] * len(devices), strict=False):
            with torch.cuda.stream(stream):
                found.append(send(part, device))
        return found

    def gather(tensors: list[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
        index = torch.cuda.current_device() if destination is None else destination
        to = torch.device("cpu") if index == -1 else torch.device("cuda", index)
        return torch.cat([each.to(to, non_blocking=to.type == "cuda") for each in tensors], dim)

    return {"_broadcast_coalesced": broadcast, "_scatter": scatter, "_gather": gather}


def _storages(library: ModuleType) -> None:
    """Let storages be made, copied and resized on the device: torch compiles these calls on CUDA builds only."""
    storage = torch.UntypedStorage
    make, resize = storage.__new__, storage.resize_

    def bytes_in(memory: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)

    @functools.wraps(make)
    def new(cls: Any, *args: Any, device: Any = None, **options: Any) -> torch.UntypedStorage:
        if device is None or torch.device(device).type != "cuda" or cls is not storage:
            return make(cls, *args, device=device, **options)
        (length,) = args or (0,)
        return torch.empty(length, dtype=torch.uint8, device=device).untyped_storage()

    @functools.wraps(resize)
    def resize_(self: torch.UntypedStorage, length: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, length)
        library.resize_storage(bytes_in(self), length)
        return self

    storage.__new__, storage.resize_ = staticmethod(new), resize_
