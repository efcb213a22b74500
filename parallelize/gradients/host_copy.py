"""Values of a device that the host reads later, when they are there."""

from __future__ import annotations

import torch

__all__ = ["HostCopy"]


class HostCopy:
    """A copy of a tensor on the host; only reading it waits, for what the device had to do until the copy."""

    def __init__(self, value: torch.Tensor) -> None:
        is_remote = value.device.type != "cpu"
        self._copy = torch.empty_like(value, device="cpu", pin_memory=is_remote).copy_(value, non_blocking=True)
        self._event = torch.Event(device=value.device) if is_remote else None
        if self._event is not None:
            self._event.record()

    def read(self) -> torch.Tensor:
        """Return the copy."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._copy
