"""The "dp" backend: DataParallel in one process, which drives several devices of its node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from parallelize.backends.dp_engine import DPEngine, data_parallel
from parallelize.cluster.world import World
from parallelize.plugins.base import LEVELS, Backend, Engine, Inner, LocalEngine


@dataclass(frozen=True, kw_only=True)
class DPBackend(Backend):
    """One process, a thread per device: outputs of all GPUs are gathered on the first.

    A batch of 32 on 2 GPUs is 16 on each. No process is started. "ddp" is much faster: under "dp"
    all threads share one interpreter, and every forward replicates the model again.
    """

    name = "dp"
    process_per = "node"
    max_nodes = 1
    multi_node_fallback = "ddp"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}

    @override
    def engine(
        self,
        inner: Inner,
        *,
        world: World,
        devices: tuple[torch.device, ...],
        **_: Any,
    ) -> Engine:
        """Wrap `inner` in DataParallel, unless there is only one device."""
        if len(devices) == 1:
            return LocalEngine(inner)
        return DPEngine(data_parallel(inner, devices=devices))
