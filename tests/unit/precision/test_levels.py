"""The table of levels, and which row a request selects."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallelize import distributed
from parallelize.cluster.world import World
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Amp
from parallelize.precision import levels
from parallelize.precision.levels import TABLE
from parallelize.precision.native import NativePrecision

CPU = torch.device("cpu")


def test_every_level_has_a_row() -> None:
    """The table has the levels that amp= accepts."""
    assert tuple(TABLE) == LEVELS
    assert all(row.level == level for level, row in TABLE.items())


def test_rows_are_apex_definitions() -> None:
    """Weights, batch norm, master weights and loss scaling are as in Apex's opt_levels."""
    found = {
        level: (row.half_weights, row.half_batch_norm, row.master_weights, row.scales_loss)
        for level, row in TABLE.items()
    }
    assert found == {
        "O0": (False, False, True, False),
        "O1": (False, False, True, True),
        "O2": (True, False, True, True),
        "O3": (True, True, False, False),
    }


@given(level=st.sampled_from([None, *LEVELS]), dtype=st.sampled_from([None, torch.bfloat16]))
def test_resolving_sets_level_and_dtype(level: str | None, dtype: torch.dtype | None) -> None:
    """Level and dtype are set, the values of the request are kept, and resolving again changes nothing."""
    request = Amp(level=level, dtype=dtype)
    found = NativePrecision().resolve(request, device=CPU, world=World())
    assert found.level == (level or "O1")
    assert found.dtype is torch.bfloat16
    assert NativePrecision().resolve(found, device=CPU, world=World()) == found


@pytest.mark.parametrize(("device_type", "dtype"), [("cuda", torch.float16), ("cpu", torch.bfloat16)])
def test_a_gpu_without_bf16_computes_in_fp16(
    device_type: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU computes in bf16 beside such a GPU."""
    monkeypatch.setattr(levels, "_supports_bf16", lambda: False)
    assert levels._preferred_dtype(frozenset({torch.bfloat16, torch.float16}), device_type) is dtype


def test_an_engine_without_bf16_computes_in_fp16() -> None:
    """A device that supports bf16 makes no difference."""
    assert levels._preferred_dtype(frozenset({torch.float16}), "cpu") is torch.float16


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


@pytest.mark.parametrize("engine", registry.names("precision"))
def test_an_engine_default_has_a_row(engine: str) -> None:
    """amp=True selects a level of the table under every engine."""
    precision = registry.find("precision", engine)
    assert precision().row_of(Amp()).level == precision.default_level


def test_a_description_is_the_row() -> None:
    """One line, with level, dtype, engine and the cells of the row."""
    text = NativePrecision().describe(Amp(level="O2", dtype=torch.float16), device_type="cuda")
    assert text.startswith("O2 in fp16 (native): ")
    assert "loss scaling: dynamic" in text
    assert "\n" not in text
    assert "loss scaling: none" in NativePrecision().describe(Amp(), device_type="cpu")
    assert NativePrecision().describe(Amp(level="O0"), device_type="cpu").startswith("O0 (native): ")


def test_explain_shows_the_row() -> None:
    """A decorated function's explain() has the row, a line for each cell."""
    text = distributed(processes=2, amp="O2")(print).explain()
    lines = [line.strip() for line in text.splitlines()]
    assert "precision    O2 in bf16 (native)" in lines
    assert {"weights in forward: bf16", "weights updated: fp32", "loss scaling: none"} <= set(lines)
