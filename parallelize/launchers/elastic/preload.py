"""Modules that the fork server imports once, before it forks the first worker; none of them initializes a GPU.

The fork server is started with SIGINT blocked, so that Ctrl-C does not interrupt these imports. This module unblocks it
at the end: the fork server ignores SIGINT, but the processes that it starts must not inherit the blocked signal.
"""

import torch._dynamo  # DistributedDataParallel imports it, which takes a second per rank
import torch.distributed.elastic.multiprocessing  # noqa: F401 - every worker starts in a function of torch's module

from parallelize.worker.shutdown import unblock_sigint

__all__ = []

unblock_sigint()
