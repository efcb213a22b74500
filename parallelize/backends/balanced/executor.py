"""Executor: runs the micro-batches of a batch through the stages, in one thread or in one thread for each of them.

On an accelerator one thread issues the work of all micro-batches, which runs on the devices; autograd has one graph of
all micro-batches, and a thread per device for its backward. On the CPU, micro-batches run in threads.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.batchnorm import BatchNorms, Moments
from parallelize.backends.balanced.device_transfer import DeviceTransfer
from parallelize.backends.balanced.microbatch_run import MicrobatchRun, active_run
from parallelize.backends.balanced.microbatch_split_join import SplitBatch
from parallelize.backends.balanced.stage_threads import Stage, StageThreads, ThreadLocalState
from parallelize.errors import ConfigError

__all__ = ["Executor"]

Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Runs micro-batches of a model over stages, inside `ModuleHooks` with the same stages and routes.

    Args:
        stages: the stages, in pipeline order.
        routes: id of a module -> the stages of its first, second, ... call; further calls use the last entry.
        norms: the model's batch norms.
        model: the user's model.
        recomputed: modules whose activations are recomputed in backward.
        output_device: device of the inputs and outputs.
        threads: threads for stages on the CPU; None: there are other stages.
    """

    stages: tuple[Stage, ...]
    routes: Mapping[int, Sequence[int]]
    norms: BatchNorms
    model: nn.Module
    recomputed: tuple[nn.Module, ...]
    output_device: torch.device
    threads: StageThreads | None

    def run_whole(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output for one batch that is not split; batch norm works as without a pipeline."""
        run = MicrobatchRun(self.stages, self.routes, transfer=self._transfer())
        run.defers_statistics = False
        with self._recomputing():
            return run.call(functools.partial(call, *args, **kwargs))

    def run(
        self, call: Call, batch: SplitBatch, *, is_threaded: bool, buffers: Sequence[str] = ()
    ) -> tuple[list[Any], list[Moments]]:
        """Return the model's output for each micro-batch of a batch, and the moments that batch norms have computed.

        Args:
            call: calls the model's forward.
            batch: the micro-batches.
            is_threaded: whether they run in threads.
            buffers: names of buffers that forward changes; all micro-batches begin with the same values.

        Raises:
            ConfigError: micro-batches change one of `buffers` differently.
            Exception: the forward of a micro-batch has failed; if several have, the exception of the first micro-batch.
        """
        copies: dict[Any, Any] = {}
        key = object()
        locks = [threading.Lock() for _ in self.stages] if is_threaded else None
        runs = [
            MicrobatchRun(
                self.stages,
                self.routes,
                transfer=self._transfer(copies),
                locks=locks,
                microbatch=(key, index, len(batch.sizes)),
            )
            for index in range(len(batch.sizes))
        ]
        calls = [functools.partial(run.call, _bound(call, batch, index)) for index, run in enumerate(runs)]
        try:
            with self._recomputing():
                outputs = self._in_threads(calls) if is_threaded else self._one_by_one(calls, buffers)
        except BaseException:
            self.norms.restore()
            raise
        return outputs, [run.moments for run in runs]

    def _transfer(self, copies: dict[Any, Any] | None = None) -> DeviceTransfer | None:
        devices = {self.output_device, *(stage.device for stage in self.stages)}
        return DeviceTransfer(devices, copies) if len(devices) > 1 else None

    def _one_by_one(self, calls: Sequence[Call], buffers: Sequence[str]) -> list[Any]:
        named = [(name, self.model.get_buffer(name)) for name in buffers]
        before = [buffer.clone() for _, buffer in named]
        after: list[torch.Tensor] = []
        outputs = []
        for call in calls:
            for (_, buffer), value in zip(named, before, strict=True):
                with torch.no_grad():
                    buffer.copy_(value)
            outputs.append(call())
            found = [buffer.clone() for _, buffer in named]
            different = [n for (n, _), a, b in zip(named, after, found, strict=False) if not torch.equal(a, b)]
            if different:
                for (_, buffer), value in zip(named, before, strict=True):
                    buffer.copy_(value)
                raise refusals.stateful(different)
            after = found
        return outputs

    def _in_threads(self, calls: Sequence[Call]) -> list[Any]:
        assert self.threads is not None  # the stages are on the CPU
        state = ThreadLocalState()
        futures = [self.threads.forward(state.run, call) for call in calls]
        try:
            concurrent.futures.wait(futures)
        except BaseException:  # for example Ctrl-C: end the threads before the caller uses the model again
            for each in futures:
                each.cancel()
            concurrent.futures.wait(futures)
            raise
        return [each.result() for each in futures]

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Checkpoint modules while micro-batches run: only the modules' inputs are saved for backward."""
        instance_forwards = [(module, module.__dict__.get("forward")) for module in self.recomputed]
        for module in self.recomputed:
            # Not setattr, which the module's class may override.
            module.__dict__["forward"] = functools.partial(_checkpointed, module, module.forward)
        try:
            yield
        finally:
            for module, forward in instance_forwards:
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward


def _bound(call: Call, batch: SplitBatch, index: int) -> Callable[[], Any]:
    args, kwargs = batch.inputs(index)
    return functools.partial(call, *args, **kwargs)


def _checkpointed(module: nn.Module, forward: Call, *args: Any, **kwargs: Any) -> Any:
    run = active_run()
    if run is None or run.is_in_checkpoint or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    recomputing, used = run.recomputing(), list(module.parameters())

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        # torch.func.functional_call replaces parameters until forward returns.
        for parameter, now in zip(used, module.parameters(), strict=True):
            if parameter is not now:
                raise ConfigError(
                    f"recomputation in backward uses a parameter of {tuple(now.shape)} that forward has not used",
                    why="torch.func.functional_call replaces parameters for one call, but backward runs later",
                    fix="use BalancedBackend(recompute=False), or call backward before the parameters are restored",
                )
        with recomputing:
            yield

    contexts: Any = lambda: (contextlib.nullcontext(), again())  # noqa: E731  # the usual form
    return torch_checkpoint.checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
