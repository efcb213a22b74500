"""The process groups of a block: each has the backend that its tensors need, and no other one."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import outputs_of_ranks

pytestmark = pytest.mark.slow

DEFAULT = OFFLOADED = "gloo and pretended"
TRAINING = COMPARISONS = SAVES = "gloo"


@pytest.mark.parametrize(
    ("backend", "world_size", "made"),
    [
        ("ddp", 2, [DEFAULT, COMPARISONS, TRAINING]),
        ("fsdp", 2, [DEFAULT, COMPARISONS, TRAINING, SAVES]),
        ("fsdp", 4, [DEFAULT, COMPARISONS, TRAINING, TRAINING, SAVES]),
        ("offloaded", 2, [DEFAULT, COMPARISONS, OFFLOADED, SAVES]),
    ],
    ids=["ddp", "fsdp", "copies", "offloaded"],
)
def test_groups_of_a_bound_default_group(backend: str, world_size: int, made: list[str], tmp_path: Path) -> None:
    """A program trains and saves, also in the background, on a default group that is bound to a device.

    Its other groups have gloo alone, here for tensors on the CPU: a second backend would connect the ranks for nothing.
    Only offloaded rows are on the CPU and on the device.
    """
    script = Path(__file__).with_name("bound_group.py")
    outputs = outputs_of_ranks(script, backend, 2, tmp_path / "saved", world_size=world_size, per_node=world_size)
    assert str(made) in outputs[0].splitlines(), outputs
