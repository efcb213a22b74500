"""Settings that a program makes by calls, copied to workers: of torch, NumPy, warnings, random numbers, logging."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
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
from torch import overrides
from torch.utils._device import DeviceContext

__all__ = ["LogSettings", "Settings", "handle_records", "without_log_files"]

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
class Settings:
    """Settings that a script makes at its top level; workers need a copy because they do not run the script.

    Args:
        values: torch setting -> value; settings that torch refuses to read are left out.
        device: type of the default device, such as "cuda", without the index, which differs by rank; None: not set.
        filters: filters of warnings: action, message, module and name of the category, module, line.
        numpy_errors: what NumPy does on floating-point errors.
        generators: states of the global generators of random, NumPy and torch, and torch's seed.
    """

    values: Mapping[str, Any]
    device: str | None
    filters: tuple[tuple[Any, ...], ...]
    numpy_errors: Mapping[str, Any]
    generators: tuple[Any, ...]

    @classmethod
    def capture(cls) -> Settings:
        """Return the settings of this process, and of this thread for settings that torch keeps per thread."""
        stack: Any = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch has no type for it
        device = next((mode.device.type for mode in stack if isinstance(mode, DeviceContext)), None)  # at most one
        given: Any = warnings.filters
        filters = tuple(
            (action, _text(message), kind.__module__, kind.__qualname__, _text(module), line)
            for action, message, kind, module, line in given
        )
        with _ignoring_warnings():
            values = {name: value for name in _SETTINGS if (value := _get(name)) is not None}
        state = torch.get_rng_state().tolist()  # a tensor would be sent in shared memory
        numpy: Any = np.random.get_state()
        kind, keys, *rest = numpy
        generators = random.getstate(), (kind, keys.tolist(), *rest), torch.initial_seed(), state
        return cls(values, device, filters, np.geterr(), generators)

    def apply(self) -> None:
        """Apply all settings except the default device to this new process."""
        with _ignoring_warnings():
            for name, value in self.values.items():
                if _get(name) != value:
                    _SETTINGS[name][1](value)
        np.seterr(**self.numpy_errors)
        self.apply_generators()
        warnings.resetwarnings()
        for action, message, home, name, module, line in self.filters:
            kind = getattr(sys.modules.get(home), name, None)  # one that nobody has imported warns of nothing
            if kind is not None:
                warnings.filterwarnings(action, message, kind, module, line, append=True)

    def apply_default_device(self) -> None:
        """Set the default device; to be called when this rank's GPU is the current device."""
        if self.device is not None:
            torch.set_default_device(self.device)

    def apply_generators(self) -> None:
        """Let all ranks draw the random numbers that one process would draw, until a block makes ranks differ."""
        python, numpy, seed, state = self.generators
        random.setstate(python)
        np.random.set_state(numpy)
        torch.manual_seed(seed)  # accelerators' generators, too
        torch.set_rng_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))


def _text(pattern: Any) -> str:
    """Return the regular expression of a filter's message or module."""
    return getattr(pattern, "pattern", pattern) or ""


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


# Logging


@dataclass(frozen=True)
class LogSettings:
    """The loggers of a process.

    Args:
        loggers: name -> level, whether it propagates, whether it is disabled, whether it has handlers; "": the root.
        formatter: of the root's first handler.
    """

    loggers: Mapping[str, tuple[int, bool, bool, bool]]
    formatter: logging.Formatter | None

    @classmethod
    def capture(cls) -> LogSettings:
        """Return the logging settings of this process."""
        loggers = {
            name: (
                each.level,
                each.propagate,
                each.disabled,
                not all(type(h) is logging.NullHandler for h in each.handlers),
            )
            for name, each in _loggers().items()
        }
        formatters = (each.formatter for each in logging.root.handlers)
        # A formatter of another class may not be picklable.
        return cls(loggers, next((each for each in formatters if type(each) is logging.Formatter), None))

    def apply(self) -> None:
        """Let this process of a cluster's job show on stderr what the caller's handlers would get."""
        self._apply_levels()
        handler = logging.StreamHandler()
        handler.setFormatter(self.formatter)
        if self.loggers[""][3]:
            logging.root.addHandler(handler)

    def apply_in_worker(self, path: Path) -> None:
        """Send the records that the caller's handlers would get to the caller, by a file.

        Handlers of modules that this process has imported are removed: the caller has them, too. Those that the
        function adds are this process's own.
        """
        for each in _loggers().values():
            each.handlers.clear()
        self._apply_levels()
        forwarder = _Forwarder(path)
        for name, (*_, has_handlers) in self.loggers.items():
            if has_handlers:
                logging.getLogger(name).addHandler(forwarder)

    def _apply_levels(self) -> None:
        for name, (level, propagates, is_disabled, _) in self.loggers.items():
            logger = logging.getLogger(name)
            logger.setLevel(level)
            logger.propagate, logger.disabled = propagates, is_disabled


def _loggers() -> dict[str, logging.Logger]:
    """Return all loggers but torch's, which it sets up itself in every process."""
    named = {name: each for name, each in logging.root.manager.loggerDict.items() if isinstance(each, logging.Logger)}
    return {"": logging.root} | {name: each for name, each in named.items() if name.partition(".")[0] != "torch"}


class _Forwarder(logging.Handler):
    """Appends records to a file, one JSON object per line, with those attributes that are text or numbers."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._last: logging.LogRecord | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record is self._last:  # it came from another logger, too
            return
        self._last = record
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        plain = {name: value for name, value in vars(record).items() if type(value) in (str, int, float)}
        with contextlib.suppress(OSError), self._path.open("a") as file:  # a full disk loses records, not the training
            file.write(json.dumps({**plain, "msg": record.getMessage()}) + "\n")


def handle_records(text: str, *, prefix: str, at_least: int) -> None:
    """Let this process's loggers handle the records in the lines of a worker's file.

    Args:
        text: complete lines.
        prefix: put before each message.
        at_least: lowest level of the records that are handled.
    """
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # a line that a killed worker has not completed
            record = logging.makeLogRecord(json.loads(line))
            if record.levelno >= at_least:
                record.msg = prefix + record.msg
                logging.getLogger(record.name).handle(record)


@contextlib.contextmanager
def without_log_files() -> Iterator[None]:
    """Let file handlers open nothing: those of modules that a worker imports are open in the caller, too."""
    handler: Any = logging.FileHandler
    before = handler._open
    handler._open = lambda _: open(os.devnull, "w")  # noqa: PTH123, SIM115 - the handler closes it
    try:
        yield
    finally:
        handler._open = before
