"""Settings that a program makes by calls, copied to workers: of torch, NumPy and warnings."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
import torch.utils._device


def absolute_search_path() -> list[str]:
    """Return the folders of `sys.path` as absolute paths, for a process in another folder.

    Entries that are no paths stay as they are: import hooks of editable installs.
    """
    folders = []
    for entry in sys.path:
        is_path = os.path.exists(entry or ".")  # noqa: PTH110 - Path.exists raises for some strings
        folders.append(str(Path(entry).absolute()) if is_path else entry)
    return folders


# Paths below `torch`: function that returns a setting -> function that sets it. None of them
# initializes a GPU.
_FUNCTIONS = {
    "get_default_dtype": "set_default_dtype",
    "is_grad_enabled": "set_grad_enabled",
    "get_deterministic_debug_mode": "set_deterministic_debug_mode",
    "is_warn_always_enabled": "set_warn_always",
    "multiprocessing.get_sharing_strategy": "multiprocessing.set_sharing_strategy",
    "backends.cuda.flash_sdp_enabled": "backends.cuda.enable_flash_sdp",
    "backends.cuda.mem_efficient_sdp_enabled": "backends.cuda.enable_mem_efficient_sdp",
    "backends.cuda.math_sdp_enabled": "backends.cuda.enable_math_sdp",
    "backends.cuda.cudnn_sdp_enabled": "backends.cuda.enable_cudnn_sdp",
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed": (
        "backends.cuda.allow_fp16_bf16_reduction_math_sdp"
    ),
    "backends.cuda.preferred_blas_library": "backends.cuda.preferred_blas_library",
    "backends.cuda.preferred_linalg_library": "backends.cuda.preferred_linalg_library",
    "get_float32_matmul_precision": "set_float32_matmul_precision",
}
# Attributes. float32 precision has an old API (allow_tf32, set_float32_matmul_precision) and a new
# one (fp32_precision). Setting an old name changes new names, and torch may reject the old API once
# the new one was used: the old names are applied first, then the new names that still differ.
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
_PATHS = (*_FUNCTIONS, *_ATTRIBUTES)


def _get(path: str) -> Any:
    """Return the value of a setting by its path below `torch`.

    None: this torch lacks the setting, or refuses to read it.
    """
    with contextlib.suppress(AttributeError, RuntimeError):
        value = attrgetter(path)(torch)
        if path in _FUNCTIONS:
            value = value()
        return value
    return None


def _set(path: str, value: Any) -> None:
    if path in _FUNCTIONS:
        attrgetter(_FUNCTIONS[path])(torch)(value)
    else:
        owner, _, name = path.rpartition(".")
        setattr(attrgetter(owner)(torch), name, value)


@contextlib.contextmanager
def _ignoring_warnings() -> Iterator[None]:
    """Suppress warnings: torch warns of deprecated settings that the user's code does not use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _filters() -> list[tuple[Any, ...]]:
    """Return the filters of warnings, with regular expressions and categories as text."""
    filters: Any = warnings.filters
    return [
        (action, _text(message), category.__module__, category.__qualname__, _text(module), line)
        for action, message, category, module, line in filters
    ]


def _text(pattern: Any) -> str:
    return getattr(pattern, "pattern", pattern) or ""


def _set_filters(filters: list[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, message, home, name, module, line in filters:
        # A module that is not imported here warns of nothing.
        category = getattr(sys.modules.get(home), name, None)
        if category is not None:
            warnings.filterwarnings(action, message, category, module, line, append=True)


# Name of a setting -> the function that returns it, and the one that sets it to such a value.
_PAIRS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
    "prints": (
        lambda: vars(torch._tensor_str.PRINT_OPTS),
        lambda options: torch.set_printoptions(**options),  # type: ignore[no-untyped-call]  # torch's
    ),
    "numpy_prints": (
        lambda: {
            key: value
            for key, value in np.get_printoptions().items()
            if type(value) in (int, str, bool)
        },
        lambda options: np.set_printoptions(**options),
    ),
    "anomalies": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.autograd.set_detect_anomaly(*modes),
    ),
    "numpy_errors": (np.geterr, lambda errors: np.seterr(**errors)),
    "filters": (_filters, _set_filters),
}


@dataclass(frozen=True)
class Settings:
    """Settings that a script makes at its top level; workers need a copy, since they run no script.

    Args:
        values: setting -> value; settings that torch refuses to read are left out.
        device: type of the default device, such as "cuda", without the index, which differs by
            rank; None: not set.
    """

    values: Mapping[str, Any]
    device: str | None

    @classmethod
    def capture(cls) -> Settings:
        """Return the settings of this process, and of this thread for those that torch keeps so."""
        # torch.get_default_device would initialize a GPU.
        device = torch.utils._device.CURRENT_DEVICE
        values = {name: read() for name, (read, _) in _PAIRS.items()}
        with _ignoring_warnings():
            values |= {path: _get(path) for path in _PATHS}
        readable = {name: value for name, value in values.items() if value is not None}
        return cls(readable, None if device is None else device.type)

    def apply(self) -> None:
        """Apply all settings except the default device to this new process."""
        with _ignoring_warnings():
            for path in _PATHS:
                if self.values.get(path) not in (None, _get(path)):
                    _set(path, self.values[path])
        for name, (_, write) in _PAIRS.items():
            write(self.values[name])

    def apply_default_device(self) -> None:
        """Set the default device; to be called when this rank's GPU is the current device."""
        if self.device is not None:
            torch.set_default_device(self.device)
