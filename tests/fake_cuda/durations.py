"""How long work takes on the pretended devices: the time that events measure, as on real ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Durations"]


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Rates of the devices, about those of a large GPU.

    A kernel takes `launch_us` and the longer of two times: that of its operations, which are counted for products of
    matrices, convolutions and attention by their sizes, and that of the bytes which it reads and writes. Views of
    tensors take no time.

    Args:
        launch_us: microseconds of the smallest kernel.
        tera_flops: operations per second of a device of speed 1, in 10**12.
        memory_gb_per_s: bytes per second of its memory, in 10**9.
        host_us: microseconds in which the host issues a kernel or a copy; 0: the host is never late.
        link_gb_per_s: bytes per second between two devices, in 10**9.
        links: (source, target) -> of single pairs.
        speeds: of each device; default: 1.
    """

    launch_us: float = 3.0
    tera_flops: float = 50.0
    memory_gb_per_s: float = 1500.0
    host_us: float = 0.0
    link_gb_per_s: float = 25.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    speeds: Sequence[float] = ()

    def use(self) -> None:
        """Let work take so long from now on, in this process."""
        library: Any = sys.modules["fake_cuda_library"]
        library.set_rates(self.launch_us, self.tera_flops, self.memory_gb_per_s, self.host_us)
        count = library.device_count()
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        for source, target in pairs:
            library.set_link(source, target, self.links.get((source, target), self.link_gb_per_s))
        for device in range(count):
            library.set_speed(device, self.speeds[device] if device < len(self.speeds) else 1.0)
