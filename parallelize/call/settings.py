"""Settings that a program makes by calls, copied to workers: of torch, NumPy, warnings, logging."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from logging.handlers import QueueHandler
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
import torch.utils._device

__all__ = ["LogSettings", "Settings", "append_line", "handle_records", "without_log_files"]

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
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed": ("backends.cuda.allow_fp16_bf16_reduction_math_sdp"),
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
    """Return the value of a setting; None: this torch lacks the setting or refuses to read it."""
    with contextlib.suppress(AttributeError, RuntimeError):
        found = attrgetter(path)(torch)
        return found() if path in _FUNCTIONS else found
    return None


def _set(path: str, value: Any) -> None:
    if path in _FUNCTIONS:
        attrgetter(_FUNCTIONS[path])(torch)(value)
    else:
        owner, _, name = path.rpartition(".")
        setattr(attrgetter(owner)(torch), name, value)


@contextlib.contextmanager
def _ignoring_warnings() -> Iterator[None]:
    """Suppress warnings: torch warns about deprecated settings that the user's code does not use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _filters() -> list[tuple[Any, ...]]:
    """Return the filters of warnings, with regular expressions and categories as text."""
    filters: Any = warnings.filters
    return [
        (action, _text(message), kind.__module__, kind.__qualname__, _text(module), line)
        for action, message, kind, module, line in filters
    ]


def _text(pattern: Any) -> str:
    return getattr(pattern, "pattern", pattern) or ""


def _set_filters(filters: list[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, message, home, name, module, line in filters:
        kind = getattr(sys.modules.get(home), name, None)  # one not imported warns of nothing
        if kind is not None:
            warnings.filterwarnings(action, message, kind, module, line, append=True)


_Table = Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]]
_OTHERS: _Table = {
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
    "prints": (
        lambda: vars(torch._tensor_str.PRINT_OPTS),
        lambda options: torch.set_printoptions(**options),  # type: ignore[no-untyped-call]  # torch's
    ),
    "numpy_prints": (
        lambda: {key: value for key, value in np.get_printoptions().items() if type(value) in (int, str, bool)},
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
        device: type of the default device, such as "cuda", without the index, which differs by rank;
            None: not set.
    """

    values: Mapping[str, Any]
    device: str | None

    @classmethod
    def capture(cls) -> Settings:
        """Return the settings of this process, and of this thread for those that torch keeps so."""
        # torch.get_default_device would initialize a GPU.
        device = torch.utils._device.CURRENT_DEVICE
        values = {name: read() for name, (read, _) in _OTHERS.items()}
        with _ignoring_warnings():
            values |= {path: _get(path) for path in _PATHS}
        known = {name: value for name, value in values.items() if value is not None}
        return cls(known, None if device is None else device.type)

    def apply(self) -> None:
        """Apply all settings except the default device to this new process."""
        with _ignoring_warnings():
            for path in _PATHS:
                if self.values.get(path) not in (None, _get(path)):
                    _set(path, self.values[path])
        for name, (_, write) in _OTHERS.items():
            write(self.values[name])

    def apply_default_device(self) -> None:
        """Set the default device; to be called when this rank's GPU is the current device."""
        if self.device is not None:
            torch.set_default_device(self.device)


# Logging


@dataclass(frozen=True)
class LogSettings:
    """The loggers of a process.

    Args:
        loggers: name -> level, whether it propagates, whether it is disabled, whether it has
            handlers; "": the root.
        formatter: of the root's first handler.
    """

    loggers: Mapping[str, tuple[int, bool, bool, bool]]
    formatter: logging.Formatter | None

    @classmethod
    def capture(cls) -> LogSettings:
        """Return the logging settings of this process."""
        loggers = {}
        for name, each in _loggers().items():
            has_handlers = any(type(h) is not logging.NullHandler for h in each.handlers)
            loggers[name] = each.level, each.propagate, each.disabled, has_handlers
        formatters = (each.formatter for each in logging.root.handlers)
        # One of another class, or with a converter of its own, may not be picklable.
        plain = (each for each in formatters if type(each) is logging.Formatter and "converter" not in vars(each))
        return cls(loggers, next(plain, None))

    def apply(self, send: Callable[[str], object] | None = None) -> None:
        """Send the records that the caller's handlers would get to the caller.

        Handlers of modules that this process has imported are removed: the caller has them, too.
        Those that the function adds are this process's own.

        Args:
            send: sends a line for `handle_records`; None: this process of a cluster's job shows the records on stderr.
        """
        for each in _loggers().values() if send else ():
            each.handlers.clear()
        handler = _Forwarder(send) if send else logging.StreamHandler()  # type: ignore[arg-type]  # its queue sends
        handler.setFormatter(None if send else self.formatter)
        for name, (level, propagates, is_disabled, has_handlers) in self.loggers.items():
            logger = logging.getLogger(name)
            logger.setLevel(level)
            logger.propagate, logger.disabled = propagates, is_disabled
            if has_handlers and (send or logger is logging.root):
                logger.addHandler(handler)


def _loggers() -> dict[str, logging.Logger]:
    """Return all loggers but torch's, which it sets up itself in every process."""
    names = ["", *logging.root.manager.loggerDict]
    return {name: logging.getLogger(name) for name in names if name.partition(".")[0] != "torch"}


class _Forwarder(QueueHandler):
    """Sends records, an object of JSON per line; attributes that JSON does not have are sent as text."""

    queue: Any  # a function
    last: logging.LogRecord | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record is not self.last:  # it may come from another logger, too
            self.last = record
            super().emit(record)

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue(json.dumps(vars(record), default=str, skipkeys=True) + "\n")


def append_line(path: Path, line: str) -> None:
    """Append a line to a file; a full disk loses it."""
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(line)


def handle_records(text: str, *, prefix: str, at_least: int) -> None:
    """Let this process's loggers handle the records in the lines of a worker's file.

    Args:
        text: complete lines.
        prefix: put before each message.
        at_least: lowest level of the records that are handled.
    """
    for line in text.splitlines():
        try:
            record = logging.makeLogRecord(json.loads(line))
        except ValueError:  # a line that a killed worker has not completed
            continue
        if record.levelno >= at_least and record.levelno > logging.root.manager.disable:
            record.msg, record.levelname = prefix + record.msg, logging.getLevelName(record.levelno)
            try:
                logging.getLogger(record.name).handle(record)
            except Exception:  # noqa: BLE001 - of the user's filter or handler: the call goes on, and keeps its value
                traceback.print_exc()


@contextlib.contextmanager
def without_log_files() -> Iterator[None]:
    """Let file handlers open nothing: those of imported modules are open in the caller, too."""
    handler: Any = logging.FileHandler
    before = handler._open
    handler._open = lambda _: open(os.devnull, "w")  # noqa: PTH123, SIM115 - the handler closes it
    try:
        yield
    finally:
        handler._open = before
