"""Process-wide torch settings (default dtype, TF32, determinism, SDP kernels): copied from the caller to workers."""

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

__all__ = ["TorchSettings"]

_CUDA = torch.backends.cuda


def _attribute(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    owner, _, own_name = name.rpartition(".")
    return lambda: attrgetter(name)(torch), lambda value: setattr(attrgetter(owner)(torch), own_name, value)


# Attributes of `torch`. float32 precision has an old API (allow_tf32, set_float32_matmul_precision) and a new one
# (fp32_precision). Setting an old name changes new names, and torch may reject the old API once the new one was used:
# the old names are applied first, then the new names whose values still differ.
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
    "backends.opt_einsum.enabled",
    "backends.opt_einsum.strategy",
    "utils.deterministic.fill_uninitialized_memory",
)
# name -> (getter, setter); none of these functions initializes a GPU.
_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "anomalies": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.autograd.set_detect_anomaly(*modes),
    ),
    "warn_always": (torch.is_warn_always_enabled, torch.set_warn_always),
    "sharing": (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    "flash_sdp": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "mem_efficient_sdp": (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "math_sdp": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    "cudnn_sdp": (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    "math_sdp_reduction": (_CUDA.fp16_bf16_reduction_math_sdp_allowed, _CUDA.allow_fp16_bf16_reduction_math_sdp),
    "blas": (_CUDA.preferred_blas_library, _CUDA.preferred_blas_library),
    "linalg": (_CUDA.preferred_linalg_library, _CUDA.preferred_linalg_library),
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{name: _attribute(name) for name in _ATTRIBUTES},
}


@dataclass(frozen=True)
class TorchSettings:
    """torch settings that a script makes at its top level; workers need a copy because they do not run the script.

    Args:
        values: setting name -> value; settings that torch refuses to read are left out.
        device: type of the default device, such as "cuda", without the index, which differs by rank; None: not set.
    """

    values: Mapping[str, Any]
    device: str | None

    @classmethod
    def capture(cls) -> TorchSettings:
        """Return the settings of this process, and of this thread for settings that torch keeps per thread."""
        stack: Any = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch has no type for it
        device = next((mode.device.type for mode in stack if isinstance(mode, DeviceContext)), None)  # at most one
        with _ignoring_warnings():
            values = {name: _get(name) for name in _SETTINGS}
        return cls({name: value for name, value in values.items() if value is not None}, device)

    def apply(self) -> None:
        """Apply all settings except the default device to this new process."""
        with _ignoring_warnings():
            for name, value in self.values.items():
                if _get(name) != value:
                    _SETTINGS[name][1](value)

    def apply_default_device(self) -> None:
        """Set the default device; to be called when this rank's GPU is the current device."""
        if self.device is not None:
            torch.set_default_device(self.device)


def _get(name: str) -> Any:
    """Return the value of a setting; None: this build of torch lacks the setting or refuses to read it."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return _SETTINGS[name][0]()
    return None


@contextlib.contextmanager
def _ignoring_warnings() -> Iterator[None]:
    """Suppress warnings: torch also warns about deprecated settings that the user's code does not use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
