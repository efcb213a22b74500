"""Values of a device that the host reads later, when they are there."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of a tensor on the host.

    Making it does not wait for the device. Only reading it does, for what the device had to do
    until the copy; a step later this is done, and nothing is waited for.
    """

    def __init__(self, value: torch.Tensor) -> None:
        is_remote = value.device.type != "cpu"
        # The copy is asynchronous only into pinned memory.
        self._copy = torch.empty_like(value, device="cpu", pin_memory=is_remote)
        self._copy.copy_(value, non_blocking=True)
        self._event: torch.Event | None = None
        if is_remote:
            self._event = torch.Event(device=value.device)
            self._event.record()

    def read(self) -> torch.Tensor:
        """Return the copy."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._copy
