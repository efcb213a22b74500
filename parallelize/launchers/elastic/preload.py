"""What the fork server imports, once, before its first worker; nothing of it touches a GPU.

The caller started it with SIGINT blocked, so that Ctrl-C breaks off none of these imports. From here on it is heard
again: the fork server ignores it, and whatever else the caller starts with it finds it as it was.
"""

import torch._dynamo  # DistributedDataParallel imports it: a second per rank
import torch.distributed.elastic.multiprocessing  # noqa: F401 - whose function a worker runs first

from parallelize.worker.shutdown import hear_interrupts

__all__ = []

hear_interrupts()
