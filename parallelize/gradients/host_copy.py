"""A tensor of a device that the host reads later, so that it need not wait for the device."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of a tensor on the host.

    Making the copy does not wait for the device. `read` waits until the device has copied the
    values. A caller that reads them a step later, as the loss scaling does, hardly ever waits.
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
        """Return the copy, and wait for it if the device has not made it yet."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._copy
