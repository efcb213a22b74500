"""DataParallel: one process drives several devices of its node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from parallelize.backends.dp_engine import splitter
from parallelize.cluster.world import World
from parallelize.plugins.base import LEVELS, Backend, Engine, Inner, LocalEngine

__all__ = ["PLUGIN", "DPBackend"]


class _Engine(LocalEngine):
    spreads_inputs = True


@dataclass(frozen=True, kw_only=True)
class DPBackend(Backend):
    """One process, a thread per device: each batch is split over the GPUs, and the outputs come to the first.

    A batch of 32 on 2 GPUs is 16 on each. Nothing needs to be started, so it works wherever Python does; threads share
    one interpreter and the replicas are made anew for every forward: "ddp" is much faster.
    """

    name = "dp"
    process_per = "node"
    max_nodes = 1
    single_node_of = "ddp"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}

    @override
    def engine(self, inner: Inner, *, world: World, devices: tuple[torch.device, ...], **_: Any) -> Engine:
        """DataParallel around `inner`; on one device, `inner` itself."""
        return LocalEngine(inner) if len(devices) == 1 else _Engine(splitter(inner, devices=devices))


PLUGIN = DPBackend
