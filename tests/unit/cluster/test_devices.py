"""Detection of accelerators, and the mask of visible ones."""

from __future__ import annotations

import pytest
import torch

from parallelize.cluster.devices import Hardware, compose_visible_devices, probe
from parallelize.errors import ConfigError


def test_a_mask_with_too_few_entries_is_refused():
    """As of a device that torch sees as several."""
    with pytest.raises(ConfigError, match="names fewer devices than torch sees"):
        compose_visible_devices("MIG-GPU-8932f937/1/0", (0, 1))


def test_importing_the_package_leaves_the_order_of_devices_alone(run_script, monkeypatch):
    """cuda:0 stays the user's, and workers number the GPUs in the same order: by the variable, which they inherit."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert "CUDA_DEVICE_ORDER" not in run_script("import os, parallelize; print(*os.environ)").stdout.split()


@pytest.mark.parametrize(
    ("device_type", "count", "found"),
    [
        (None, 0, Hardware("cpu", 0)),
        ("cuda", 0, Hardware("cpu", 0)),  # a CUDA build of torch on a machine without GPUs
        ("cuda", 1, Hardware("cuda", 1)),
        ("mps", 1, Hardware("mps", 1)),
    ],
)
def test_a_torch_for_gpus_without_a_gpu_is_a_cpu(monkeypatch, device_type, count, found):
    """Accelerators are found by their number too, not only by what torch was built for."""
    accelerator = None if device_type is None else torch.device(device_type)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    assert probe() == found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_probe_leaves_the_driver_alone(run_script):
    """After a probe no CUDA context exists, and a forked process can still use the GPUs."""
    run_script("""
        import os

        import torch
        from parallelize.cluster.devices import probe

        assert probe().count > 0
        assert not torch.cuda.is_initialized()
        if os.fork() == 0:
            torch.zeros(1, device="cuda")
            os._exit(0)
        assert os.wait()[1] == 0
    """)
