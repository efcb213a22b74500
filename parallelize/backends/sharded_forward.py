"""The way into a model whose parameters are in parts: together, and through the model itself."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.cluster.world import World
from parallelize.errors import SyncError
from parallelize.plugins.base import Inner
from parallelize.runtime.gradients import is_in_backward

__all__ = ["Gate", "guarded_submodules"]

# Roll calls of one process group are told apart by number: every rank makes its engines in the same order.
_numbers = itertools.count()


class Gate(nn.Module):
    """The way into a model in parts: it knows whether a forward of the model is under way.

    Args:
        inner: the root of fully_shard; no child of this module.
        roll_call_s: how long a forward without gradients waits for the others; 0: without end.
        world: this process among the others.
        before: called before each forward of the model.
    """

    def __init__(self, inner: Inner, *, roll_call_s: float, world: World, before: Callable[[], None]) -> None:
        super().__init__()
        self._before = before
        self.__dict__["inner"] = inner
        self._roll_call_s = roll_call_s
        self._world = world
        self._number = next(_numbers)
        self._calls = itertools.count()
        self._has_trained = True
        self.depth = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, together with all other ranks."""
        self._before()
        if torch.is_grad_enabled():
            self._has_trained = True
        elif self._has_trained:
            self._call_roll()
            self._has_trained = False
        self.depth += 1
        try:
            with _ordinary_tensors():
                return self.__dict__["inner"](*args, **kwargs)
        finally:
            self.depth -= 1

    def _call_roll(self) -> None:
        """Make sure that all ranks begin to evaluate: alone, the first gathering of parameters would wait for ever."""
        if not self._roll_call_s:
            return
        store = dist.distributed_c10d._get_default_store()
        key = f"parallelize/roll/{self._number}/{next(self._calls)}"
        if store.add(key, 1) == self._world.world_size:
            store.set(f"{key}/complete", "yes")
        try:
            store.wait([f"{key}/complete"], dt.timedelta(seconds=self._roll_call_s))
        except dist.DistStoreError as exc:
            present = store.add(key, 0)
            raise SyncError(
                f"{present} of {self._world.world_size} ranks run a forward without gradients",
                why="under fsdp every forward gathers parameters from all ranks",
                fix="evaluate on all ranks, without `if rank == 0`, or after the block",
            ) from exc


@contextlib.contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Inference mode as no_grad: the first gathering makes what all later ones fill, and backward has to keep it."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False), torch.no_grad():
            yield
    else:
        yield


@contextlib.contextmanager
def guarded_submodules(model: nn.Module, gate: Gate) -> Iterator[None]:
    """Refuse to run a submodule outside of a forward of the model: its parameters are in parts."""

    def guard(name: str) -> Any:
        def refuse(_module: nn.Module, _args: Any) -> None:
            # A checkpoint computes again inside backward.
            if gate.depth == 0 and not is_in_backward():
                raise SyncError(
                    f"{name} of {type(model).__name__} was called past the model",
                    why="its parameters are in parts, which only a call of the model puts together",
                    fix="call the model itself, or name the method: parallel_model(model, methods=['encode'])",
                )

        return refuse

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if module is not model:
                stack.callback(module.register_forward_pre_hook(guard(name), prepend=True).remove)
        yield
