"""Executor: runs the micro-batches of a batch through the stages, in one thread or in one thread for each of them.

On an accelerator one thread issues the work of all micro-batches, which runs on the devices; autograd has one graph of
all micro-batches, and a thread per device for its backward. On the CPU, micro-batches run in threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.backward import mark_joined
from parallelize.backends.balanced.batch import Split
from parallelize.backends.balanced.batchnorm import Moments
from parallelize.backends.balanced.device_transfer import Copies, to_device
from parallelize.backends.balanced.microbatch_run import MicrobatchRun, StagedModel, active_run
from parallelize.backends.balanced.side_effects import has_same_values
from parallelize.backends.balanced.stage_threads import StageThreads
from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner

__all__ = ["Executor"]

Call = Callable[..., Any]


@dataclass(frozen=True)
class Executor:
    """Runs micro-batches of a model over its stages."""

    inner: Inner
    staged: StagedModel
    recomputed: tuple[nn.Module, ...]  # modules whose activations are recomputed in backward

    def run_whole(self, inputs: Any) -> Any:
        """Return the model's output for one batch that is not split; batch norm works as without a pipeline."""
        run = MicrobatchRun(self.staged)
        run.defers_statistics = False
        with self._recomputing(), run.active():
            output = self._forward(inputs)
        mark_joined(output)
        return to_device(output, self.staged.output_device)

    def run(
        self,
        batch: Split,
        *,
        threads: StageThreads | None = None,
        buffers: Sequence[str] = (),
        pipelines: int = 1,
        on_output: Callable[[int, Any], Any] = lambda _, output: output,
    ) -> tuple[list[Any], list[Moments]]:
        """Return the model's output for each micro-batch of a batch, and the moments that batch norms have computed.

        They run in `threads`, or one after another in this one; `buffers`, which forward changes, then have the same
        values before each. `on_output` gets the index and the output of each, and returns what is kept of it.

        Raises:
            ConfigError: micro-batches change one of `buffers` differently.
            Exception: the forward of a micro-batch has failed; if several have, the exception of the first micro-batch.
        """
        copies = Copies()
        locks = [threading.Lock() for _ in self.staged.stages] if threads is not None else None
        key, count = object(), len(batch.sizes)
        runs = [
            MicrobatchRun(
                self.staged, copies=copies, locks=locks, microbatch=(key, index, count), pipeline=index % pipelines
            )
            for index in range(count)
        ]

        def one(index: int) -> Any:
            with runs[index].active():
                output = self._forward(batch.inputs[index])
            return on_output(index, output)

        calls = [functools.partial(one, index) for index in range(count)]
        try:
            with self._recomputing():
                outputs = self._one_by_one(calls, buffers) if threads is None else threads.run(calls)
        except BaseException:
            self.staged.norms.restore()
            raise
        return outputs, [run.moments or {} for run in runs]

    def _forward(self, inputs: Any) -> Any:
        args, kwargs = inputs
        return self.inner.bind_method(self.inner.method, self.inner.model)(*args, **kwargs)

    def _one_by_one(self, calls: Sequence[Call], names: Sequence[str]) -> list[Any]:
        """Run micro-batches; those after the first change copies of buffers, since autograd may have saved values."""
        places = [(self.staged.model.get_submodule(each.rpartition(".")[0]), each.rpartition(".")[2]) for each in names]
        buffers = [getattr(*each) for each in places]
        before = [each.detach().clone() for each in buffers]
        outputs: list[Any] = []
        for call in calls:
            try:
                _set_buffers(places, [each.clone() for each in before] if outputs else buffers)
                outputs.append(call())
                found = [getattr(*each) for each in places]
            finally:
                _set_buffers(places, buffers)
            pairs = zip(names, found, buffers, strict=True)
            different = [name for name, one, other in pairs if not has_same_values(one, other)]
            if different:
                raise refusals.stateful(different)
        return outputs

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


def _set_buffers(places: Sequence[tuple[nn.Module, str]], values: Sequence[torch.Tensor]) -> None:
    for (module, name), value in zip(places, values, strict=True):
        setattr(module, name, value)


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
        with recomputing():
            yield

    contexts: Any = lambda: (contextlib.nullcontext(), _Repeated(again))  # noqa: E731  # the usual form
    return torch_checkpoint.checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _Repeated:
    """Context that may be entered again: each backward with retain_graph=True recomputes."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, list[contextlib.ExitStack]()

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(self._make())
        self._entered.append(stack)

    def __exit__(self, *_: object) -> None:
        self._entered.pop().close()
