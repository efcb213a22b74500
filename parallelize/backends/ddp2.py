"""DataParallel inside each node, DistributedDataParallel across nodes: the loss sees a node's whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from parallelize.backends.ddp_engine import Averaging, averaging_engine
from parallelize.backends.dp_engine import splitter
from parallelize.cluster.world import World
from parallelize.plugins.base import LEVELS, Engine, Inner, LocalEngine

__all__ = ["PLUGIN", "DDP2Backend"]


class _OneNode(LocalEngine):
    spreads_inputs = True


@dataclass(frozen=True, kw_only=True)
class DDP2Backend(Averaging):
    """One process per node: its devices split each batch as in "dp", and gradients are averaged over the nodes.

        node 0                          node 1
        outputs of GPUs 0..n, one loss  outputs of GPUs 0..n, one loss
                └──────── gradients averaged ────────┘

    For losses that compare the samples of a batch with each other, such as NCE, where more of them in one place train
    better: under "ddp" each GPU would compare within its own share only.
    """

    name = "ddp2"
    process_per = "node"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}

    @override
    def engine(self, inner: Inner, *, world: World, devices: tuple[torch.device, ...], **_: Any) -> Engine:
        """DistributedDataParallel around DataParallel around `inner`; each only where there is something to spread."""
        spread = splitter(inner, devices=devices)
        if world.world_size == 1:
            engine: Engine = LocalEngine(inner) if spread is inner else _OneNode(spread)
        else:
            engine = averaging_engine(self, spread, inner=inner, device=devices[0])
            engine.spreads_inputs = spread is not inner
        return engine


PLUGIN = DDP2Backend
