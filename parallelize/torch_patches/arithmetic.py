"""Settings of torch that decide how its kernels round, so that two runs can be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def use_full_fp32() -> None:
    """Compute products of matrices in full fp32, for the rest of this process.

    `train.compare` calls this. TF32, and sums in half precision, round differently in products of
    other sizes. Runs with the same samples in batches of another size would then seem to differ.

    The settings are not restored, because torch raises an error when some of them are read after
    the user's code has set the newer `fp32_precision`.
    """
    torch.set_float32_matmul_precision("highest")
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False


@contextlib.contextmanager
def deterministic_kernels(threads: int) -> Iterator[None]:
    """In the context, let the same operations compute the same bits each time, for `logical=`.

    If a kernel has no deterministic variant, torch warns with its name. torch raises an error
    instead if the user's code has turned on deterministic algorithms with errors.

    Args:
        threads: the greatest number of threads of the CPU's kernels. A kernel adds up one part of a
            sum in each thread, so that this number decides how sums are rounded.
    """
    memory: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    is_warning_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills_memory = memory.fill_uninitialized_memory
    measures_kernels = cudnn.benchmark
    threads_before = torch.get_num_threads()
    torch.use_deterministic_algorithms(mode=True, warn_only=not is_deterministic or is_warning_only)
    memory.fill_uninitialized_memory = False
    cudnn.benchmark = False
    torch.set_num_threads(min(threads_before, threads))
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        memory.fill_uninitialized_memory = fills_memory
        cudnn.benchmark = measures_kernels
        torch.use_deterministic_algorithms(is_deterministic, warn_only=is_warning_only)
