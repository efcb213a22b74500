"""The process groups of a block: each has the backend that its tensors need, and no other one."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import outputs_of_ranks

pytestmark = pytest.mark.slow

DEFAULT, TRAINING, COMPARISONS, SAVES = "gloo and pretended", "gloo", "gloo", "gloo"


@pytest.mark.parametrize(
    ("backend", "world_size", "made"),
    [
        ("ddp", 2, [DEFAULT, TRAINING, COMPARISONS]),
        ("fsdp", 2, [DEFAULT, TRAINING, COMPARISONS, SAVES]),
        ("fsdp", 4, [DEFAULT, TRAINING, TRAINING, COMPARISONS, SAVES]),
    ],
    ids=["ddp", "fsdp", "copies"],
)
def test_groups_of_a_bound_default_group(backend: str, world_size: int, made: list[str], tmp_path: Path) -> None:
    """A program trains and saves, also in the background, on a default group that is bound to a device.

    Its other groups have gloo alone, here for tensors on the CPU: another backend of the device, or another mesh of
    gloo beside it, would connect the ranks for nothing.
    """
    script = Path(__file__).with_name("bound_group.py")
    outputs = outputs_of_ranks(script, backend, 2, tmp_path / "saved", world_size=world_size, per_node=world_size)
    assert str(made) in outputs[0].splitlines(), outputs
