"""Fixtures for tests on a GPU: skipping without one, fp32 without TF32, several ranks on one GPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from ranks import keep_sigchld_handler


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*names a GPU more than once:UserWarning"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("gpu2") is not None and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


@pytest.fixture(autouse=True, scope="session")
def sigchld_handler():
    """Install torch's SIGCHLD handler before the leak check records the handlers: DataLoader workers install it."""
    keep_sigchld_handler()


@pytest.fixture(autouse=True)
def full_fp32():
    """Compute fp32 without TF32, here and in workers, which get the caller's settings.

    The old names, because some releases of torch compile with these, and refuse a mixture of both.
    """
    owners = (torch.backends.cudnn, torch.backends.cuda.matmul)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = [owner.allow_tf32 for owner in owners]
        for owner in owners:
            owner.allow_tf32 = False
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for owner, allowed in zip(owners, before, strict=True):
            owner.allow_tf32 = allowed
