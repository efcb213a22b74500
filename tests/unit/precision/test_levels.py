"""The table of levels, and which row a request selects."""

from __future__ import annotations

import pytest
import torch

from parallelize import distributed
from parallelize.cluster.world import World
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Amp
from parallelize.precision import levels
from parallelize.precision.native import NativePrecision


@pytest.mark.parametrize(
    ("has_gpu", "has_bf16", "dtype"), [(False, False, "bf16"), (True, False, "fp16"), (True, True, "bf16")]
)
def test_a_request_for_gpus_is_described(
    has_gpu: bool, has_bf16: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a GPU, as if the GPUs supported bf16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert NativePrecision().describe(Amp(), device_type="cuda").startswith(f"O1 in {dtype} (native): ")


@pytest.mark.parametrize(
    ("device", "world_size", "requested", "expected"),
    [
        ("cuda", 2, None, torch.float16),
        ("cuda", 2, torch.bfloat16, torch.bfloat16),
        ("cuda", 1, None, torch.bfloat16),
        ("cpu", 2, None, torch.bfloat16),
    ],
)
def test_ranks_with_gpus_choose_a_dtype_together(
    device: str, world_size: int, requested: torch.dtype, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's own device supports bf16 here, and that of another rank does not; a single process asks nobody."""
    monkeypatch.setattr(levels, "_supports_bf16", lambda: True)
    monkeypatch.setattr(levels, "_all_ranks_support_bf16", lambda _: False)
    world = World(world_size=world_size, local_world_size=world_size)
    found = NativePrecision().resolve(Amp(dtype=requested), device=torch.device(device), world=world)
    assert found.dtype is expected


@pytest.mark.parametrize(
    ("amp", "title", "cells"),
    [
        ("O0", "O0", {"weights in forward: fp32"}),
        ("O1", "O1 in bf16", {"weights in forward: fp32", "weights updated: fp32"}),
        ("O2", "O2 in bf16", {"weights in forward: bf16", "batch norm's weights: fp32", "weights updated: fp32"}),
        ("O3", "O3 in bf16", {"weights in forward: bf16", "batch norm's weights: bf16", "weights updated: bf16"}),
    ],
)
def test_explain_shows_the_level(amp: object, title: str, cells: set[str]) -> None:
    """A line for each of its properties, which are those of Apex's opt_levels; without fp16 no loss is scaled."""
    lines = [line.strip() for line in distributed(processes=2, amp=amp)(print).explain().splitlines()]
    assert f"precision    {title} (native)" in lines
    assert cells | {"loss scaling: none"} <= set(lines)


@pytest.mark.parametrize("engine", registry.names("precision"))
def test_engines_describe_a_request_for_fp16(engine: str) -> None:
    """In one line; on GPUs, where O1 and O2 scale the loss."""
    for level in LEVELS:
        text = registry.find("precision", engine)().describe(Amp(level, dtype=torch.float16), device_type="cuda")
        assert text.startswith(f"{level} ({engine}): " if level == "O0" else f"{level} in fp16 ({engine}): ")
        assert ("loss scaling: dynamic" in text) == (level in ("O1", "O2"))
        assert "\n" not in text
