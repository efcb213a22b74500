"""The "auto" backend: the first engine that fits, chosen at the first forward with gradients.

entry of the block      the model fits with its gradients: it runs as under "ddp"
                        else: the choice, by what is known without a forward
model.eval()(x)         under torch.no_grad() the model runs as under "ddp"
model(x)                the measured forward, and the choice
from then on            the chosen engine runs the model, from this very batch on
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from parallelize.agreement.gather import gather_objects
from parallelize.backends.auto.choice import (
    DDP,
    Candidate,
    choose,
    needed_bytes,
    reason,
    rule,
)
from parallelize.backends.auto.measured_forward import measure_forward
from parallelize.backends.auto.model_bytes import ModelBytes, count_bytes, of_all_ranks
from parallelize.cluster.world import World
from parallelize.plugins.base import Arguments, Backend, Engine, Inner
from parallelize.plugins.options import Parse, bytes_of_device
from parallelize.plugins.registry import find
from parallelize.torch_patches.compile import run_uncompiled
from parallelize.torch_patches.transforms import refuse_transform

_log = logging.getLogger("parallelize")


@dataclass(frozen=True, kw_only=True)
class AutoBackend(Backend):
    """The first engine that fits, in the order of what the engines send: "ddp", then "fsdp".

    Until the first forward with gradients the model runs as under "ddp". Then one forward on the
    batch counts what it saves for backward, and leaves nothing behind. The first of these engines
    that leaves a tenth of the memory free on every rank goes on, as if it had been named:

        1   "ddp"
        2   "fsdp" with reshard_after_forward=False
        3   "fsdp" with shard_over="node", on several nodes with equally many ranks
        4   "fsdp"

    Nothing is timed, so that every run chooses alike. A model whose parameters and gradients do not
    fit on a device, or that lies on "meta", is sharded at the entry of the block.

    Rank 0 logs the choice in one line, with the bytes that each engine needs. `print(f.explain())`
    shows the rule.

    Args:
        memory: usable bytes of each device; None: what is free, on the CPU for one process of the
            node, within the limits of `ulimit -v` and `ulimit -d`.
    """

    name = "auto"
    process_per = "device"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset({"O0", "O1", "O3"})}
    places_model = True
    shards_gradients = True
    option_parsers: ClassVar[Mapping[str, Parse]] = {"memory": bytes_of_device}
    memory: int | None = None

    @property
    @override
    def note(self) -> str:
        return rule()

    @override
    def engine(
        self,
        inner: Inner,
        *,
        world: World,
        devices: tuple[torch.device, ...],
        restore: bool = True,
    ) -> Engine:
        """Return an engine that runs the model as "ddp" does until the choice is made."""
        return _AutoEngine(self, inner, world=world, devices=devices, restore=restore)


class _AutoEngine(Engine):
    """Runs a model by another engine, which the choice may replace.

    Args:
        options: options of the backend.
        inner: calls the user's forward.
        world: ranks and sizes.
        devices: devices of this process.
        restore: whether the block ends with full parameters.

    Raises:
        ConfigError: the model is too large for each engine.
    """

    is_chosen = False

    def __init__(
        self,
        options: AutoBackend,
        inner: Inner,
        *,
        world: World,
        devices: tuple[torch.device, ...],
        restore: bool,
    ) -> None:
        self._options = options
        self._inner = inner
        self._world = world
        self._devices = devices
        self._restore = restore
        counted = of_all_ranks(self._count(), world)
        if counted.is_measurable:
            inner.model.to(devices[0])
            self._run_by(self._build(DDP))
        else:
            self._choose_by(counted)

    @override
    def choose(self, inputs: Arguments) -> None:
        refuse_transform(
            "backend='auto' measures the model on the first batch, and a transform hides its "
            "values",
            fix="call the model once with a plain batch before, or use backend='ddp'",
        )
        # Under ddp, a gradient is copied to the message in which it is sent to other ranks.
        copies = min(2, self._world.world_size)
        forward = run_uncompiled(
            lambda: measure_forward(
                self._inner, inputs, devices=self._devices, gradient_copies=copies
            )
        )
        # Memory that the libraries have taken for their first operations is no longer free.
        counted = dataclasses.replace(self._count(), saved=forward.saved, backward=forward.backward)
        self._choose_by(of_all_ranks(counted, self._world))

    def _count(self) -> ModelBytes:
        return count_bytes(
            self._inner.model,
            world=self._world,
            device=self._devices[0],
            memory=self._options.memory,
            restore=self._restore,
        )

    def _choose_by(self, counted: ModelBytes) -> None:
        """Choose an engine, tell the user why, and go on with it; a collective."""
        name = type(self._inner.model).__name__
        ranks_of_node = self._ranks_of_each_node()
        needed = needed_bytes(counted, ranks=self._world.world_size, ranks_of_node=ranks_of_node)
        chosen = choose(name, counted, needed)
        if self._world.is_main:
            _log.info("%s", reason(name, counted, needed, chosen))
        # Only a model that was measured is left to ddp, and ddp has run it until now.
        if chosen is not DDP:
            self._run_by(self._build(chosen))
        self.why = f"backend='auto' has chosen {chosen}"
        self.is_chosen = True

    def _ranks_of_each_node(self) -> int:
        """Return how many ranks each node has; 1: not all have equally many; a collective."""
        if self._world.world_size == 1:
            return 1
        counts = set(gather_objects(self._world.local_world_size))
        return counts.pop() if len(counts) == 1 else 1

    def _build(self, candidate: Candidate) -> Engine:
        backend: Backend = find("backends", candidate.engine)(**candidate.options)
        return backend.engine(
            self._inner, world=self._world, devices=self._devices, restore=self._restore
        )

    def _run_by(self, engine: Engine) -> None:
        """Let an engine run the model; what an Engine declares has its values from now on."""
        self._engine = engine
        self.module = engine.module
        self.local = engine.local
        self.moves_inputs = engine.moves_inputs
        self.reduction = engine.reduction
        self.replicas = engine.replicas
        self.keeps_parameters = engine.keeps_parameters

    @property
    @override
    def is_replica(self) -> bool:
        return self._engine.is_replica

    @property
    @override
    def holds_buffers(self) -> bool:
        return self._engine.holds_buffers

    @override
    def refresh(self) -> None:
        self._engine.refresh()

    @override
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._engine.no_sync()

    @override
    def close(self, *, failed: bool) -> None:
        self._engine.close(failed=failed)
