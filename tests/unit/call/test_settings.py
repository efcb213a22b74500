"""Settings of a script, applied in another process."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys  # noqa: F401 - of a line
import warnings  # noqa: F401 - of a line
from collections.abc import Callable

import numpy  # noqa: F401, ICN001 - of a line
import pytest
import torch

from parallelize.call.settings import Settings


def _in_a_fork(act: Callable[[], Settings]) -> Settings:
    """Return what a forked process captures after `act`; its settings do not affect this one."""
    reader, writer = os.pipe()
    state = random.getstate()
    child = os.fork()
    if child == 0:
        try:
            random.setstate(state)  # Python has reseeded it
            os.write(writer, pickle.dumps(act()))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        pickled = pipe.read()
    os.waitpid(child, 0)
    settings: Settings = pickle.loads(pickled)
    return settings


LINES = [
    "pass",
    "torch.set_default_dtype(torch.float64)",
    "torch.use_deterministic_algorithms(True, warn_only=True)",
    "torch.utils.deterministic.fill_uninitialized_memory = False",
    "torch.set_grad_enabled(False)",
    "torch.autograd.set_detect_anomaly(True, check_nan=False)",
    "torch.multiprocessing.set_sharing_strategy('file_system')",
    "torch.set_default_device('meta')",
    "torch.backends.cudnn.benchmark = True",
    "torch.backends.cudnn.deterministic = True",
    "torch.backends.cudnn.enabled = False",
    "torch.set_warn_always(True)",
    "torch.backends.cuda.enable_flash_sdp(False)",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "numpy.seterr(divide='raise')",
    "warnings.filterwarnings('ignore', 'a message', UserWarning, 'a_module', 7)",
    "warnings.simplefilter('error')",
    "sys.setrecursionlimit(3000)",
    "torch.set_printoptions(precision=1)",
    "numpy.set_printoptions(precision=1, formatter={'int': lambda _: 'x'})",
]
if torch.backends.cuda.is_built():  # other builds refuse to set these
    LINES += [
        "torch.backends.cuda.preferred_linalg_library('magma')",
        "torch.backends.cuda.preferred_blas_library('cublaslt')",
    ]


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_script_holds_in_another_process(line: str) -> None:
    """Every setting that torch allows to read is equal in both processes."""

    def run_line() -> Settings:
        exec(line)
        return Settings.capture()

    def apply() -> Settings:
        settings.apply()
        settings.apply_default_device()
        return Settings.capture()

    def plain(settings: Settings) -> str:
        values = {**settings.values, "device": settings.device}
        if "warnings" not in line:  # torch's own modules add filters when they are imported
            del values["filters"]
        return json.dumps(values, default=lambda it: it.tolist() if hasattr(it, "tolist") else str(it))

    settings = _in_a_fork(run_line)
    assert plain(_in_a_fork(apply)) == plain(settings)
    assert (plain(settings) != plain(Settings.capture())) == (line != "pass")


def test_the_index_of_a_default_gpu_is_dropped() -> None:
    """The caller's index is meaningless in a worker; no GPU is initialized."""
    torch.set_default_device("cuda:1")
    try:
        assert Settings.capture().device == "cuda"
    finally:
        torch.set_default_device(None)
    assert Settings.capture().device is None
