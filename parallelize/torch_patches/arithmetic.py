"""Settings of torch that decide which bits its kernels compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def use_full_fp32() -> None:
    """Compute products of matrices in full fp32, for the rest of this process.

    TF32 and sums in half precision round differently in products of other sizes, so that the same
    samples in batches of another size would seem to train something else. They are not restored:
    torch refuses to read some of them where the user's code has set the newer `fp32_precision`.
    """
    torch.set_float32_matmul_precision("highest")
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False


@contextlib.contextmanager
def deterministic_kernels(threads: int) -> Iterator[None]:
    """In the context, compute the same bits each time, by deterministic kernels.

    torch warns by name of kernels that have no deterministic variant, or raises an error if the
    user's code has asked for one.

    Args:
        threads: of the CPU's kernels, which cut sums by this number; at most those of before.
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
