"""What a script sets in torch for its whole process, to be in force alike in another one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.multiprocessing
from torch import overrides
from torch.utils._device import DeviceContext

__all__ = ["Settings"]

_CUDA = torch.backends.cuda


def _attribute(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    owner, _, own_name = name.rpartition(".")
    return lambda: attrgetter(name)(torch), lambda value: setattr(attrgetter(owner)(torch), own_name, value)


# Attributes of torch. The precision of float32 has old names (of functions too) and new ones: setting an old one sets
# new ones, and a process that has used new ones may be refused the old. So old ones come first, then what differs yet.
_ATTRIBUTES = (
    "backends.cudnn.allow_tf32",
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.deterministic",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
    "utils.deterministic.fill_uninitialized_memory",
)
# name -> how to read it, how to set it; none of them touches a GPU.
_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "anomalies": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.autograd.set_detect_anomaly(*modes),
    ),
    "sharing": (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    "flash_sdp": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "mem_efficient_sdp": (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "math_sdp": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    "cudnn_sdp": (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    "math_sdp_reduction": (_CUDA.fp16_bf16_reduction_math_sdp_allowed, _CUDA.allow_fp16_bf16_reduction_math_sdp),
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{name: _attribute(name) for name in _ATTRIBUTES},
}


@dataclass(frozen=True)
class Settings:
    """Torch's settings that a script makes once, at its top; a worker does not run these lines again.

    Args:
        values: by name, as far as this process can read them.
        device: type of the default device, such as "cuda", whose index is each rank's own; None: none was chosen.
    """

    values: Mapping[str, Any]
    device: str | None

    @classmethod
    def here(cls) -> Settings:
        """Those of this process, and of this thread where torch keeps them by thread."""
        stack: Any = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch has no type for it
        chosen = next((mode.device.type for mode in stack if isinstance(mode, DeviceContext)), None)  # at most one
        with _unwarned():
            read = {name: _read(name) for name in _SETTINGS}
        values = {name: value for name, value in read.items() if value is not None}
        return cls(values, chosen)

    def settle(self) -> None:
        """Make all of them but the device this process's, which has just started."""
        with _unwarned():
            for name, value in self.values.items():
                if _read(name) != value:
                    _SETTINGS[name][1](value)

    def settle_device(self) -> None:
        """Make the default device this process's: once its GPU is the current one."""
        if self.device is not None:
            torch.set_default_device(self.device)


def _read(name: str) -> Any:
    """Its value here; None: this build of torch does not have it, or refuses to say."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return _SETTINGS[name][0]()
    return None


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """The user has not written the names that torch would rather not see."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
