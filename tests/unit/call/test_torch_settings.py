"""What a script sets in torch travels."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import pytest
import torch

from parallelize.call.torch_settings import Settings


def _in_a_fork(act: Callable[[], Settings]) -> Settings:
    """What `act` gives in a process of its own, whose settings nobody else has."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, pickle.dumps(act()))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    found: Settings = pickle.loads(said)
    return found


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
]


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_script_holds_in_another_process(line: str) -> None:
    """Both would read the same of every setting, and of none of them what torch refuses to say."""

    def set_here() -> Settings:
        exec(line)
        return Settings.here()

    def settled() -> Settings:
        there.settle()
        there.settle_device()
        return Settings.here()

    there = _in_a_fork(set_here)
    assert _in_a_fork(settled) == there
    assert (there != Settings.here()) == (line != "pass")


def test_a_default_gpu_is_each_ranks_own() -> None:
    """The caller's number of it says nothing in a worker; no GPU is asked."""
    torch.set_default_device("cuda:1")
    try:
        assert Settings.here().device == "cuda"
    finally:
        torch.set_default_device(None)
    assert Settings.here().device is None
