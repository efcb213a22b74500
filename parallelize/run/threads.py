"""Threads of this package in the process of a run, and the device that is current in them.

A new thread has no current device of its own: device 0 is current in it, whatever the main thread
has set. What it does there without naming a device, such as taking the current stream or querying
an event, makes a CUDA context on device 0. That is half a gigabyte of GPU 0 for each rank of the
node.

    parallelize-watch        queries events of NCCL's recorder            begins on the run's device
    parallelize-checkpoint   runs torch's writer, which takes a stream    begins on the run's device
    parallelize-abort        NCCL aborts a communicator on its device     torch sets the device
    parallelize-stop         starts the threads above                     touches no device
    all others               belong to a caller or a launcher             touch no device
"""

from __future__ import annotations

import torch


def begin_on(device: torch.device) -> None:
    """Make the run's device the current one of this thread, which has just begun.

    Under a run on the CPU this does nothing.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
