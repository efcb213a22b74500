"""Activation checkpointing of micro-batches: the user's `torch.utils.checkpoint` regions and the plan's modules.

    segment A          segment B
    [ a ── b ── ]──>[ ( c ── d ) ── e ]       ( ) checkpoint region: no activations of c and d are saved
                      └ RNG state is saved here, and restored when the region is recomputed

torch recomputes a region in the thread that runs backward, here a stage's thread. A recomputation needs the segment of
the region: the same stage parameters, imported tensors and random numbers. Each segment has its own backward, so a
region must lie in one segment: only before its first operation may a module move the micro-batch to another stage.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.microbatch_run import MicrobatchRun, active_run
from parallelize.backends.balanced.segment import Segment

__all__ = ["checkpoint_reentrant", "intercept_checkpoints", "recompute_modules"]

_Context = contextlib.AbstractContextManager[Any]
_ContextFn = Callable[[], tuple[_Context, _Context]]
_Transfer = Callable[[MicrobatchRun], _Context]


@contextlib.contextmanager
def intercept_checkpoints(transfer: _Transfer) -> Iterator[None]:
    """Patch torch to recompute a region in the segment that computed it, under the function mode `transfer(run)`."""
    module: Any = torch_checkpoint
    # Every form of checkpoint calls the first of these functions that torch has, with these arguments:
    #   (fn, args, kwargs, *, preserve_rng_state, context_fn, ...)       newer releases
    #   (fn, preserve_rng_state, context_fn, ..., *args, **kwargs)       2.11 to 2.13
    newer, older = "_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator"
    name = newer if hasattr(module, newer) else older
    original = getattr(module, name, None)
    if original is None:  # the self-test of the interception will fail
        yield
        return

    def generator(fn: Any, *args: Any, **kwargs: Any) -> Any:
        run = active_run()
        if run is None:
            return original(fn, *args, **kwargs)
        # preserve_rng_state=False: torch would restore the global generators, but segments have their own.
        if name == newer:
            changed = {"preserve_rng_state": False, "context_fn": _contexts(run, transfer, kwargs["context_fn"])}
            opened = original(fn, *args, **{**kwargs, **changed})
        else:
            _, context_fn, *more = args
            opened = original(fn, False, _contexts(run, transfer, context_fn), *more, **kwargs)  # noqa: FBT003  # positional arguments follow
        if not run.is_recomputing:
            # torch 2.11 leaves a region that raises when the traceback is freed, which may be after the next forward. A
            # weak reference: if the user's forward catches the exception, torch leaves it there.
            run.open_regions.callback(_close, weakref.ref(opened))
        return opened

    setattr(module, name, generator)
    try:
        yield
    finally:
        if getattr(module, name) is generator:
            setattr(module, name, original)


def _close(region: weakref.ref[Generator[None, None, None]]) -> None:
    found = region()
    if found is not None:
        found.close()


def _contexts(run: MicrobatchRun, transfer: _Transfer, context_fn: _ContextFn) -> _ContextFn:
    """Return a `context_fn` whose contexts also make the region's segment current; the user's are entered inside."""

    def contexts() -> tuple[_Context, _Context]:
        first_pass, recomputing = context_fn()
        region = _Region(run, transfer, recomputing)
        return _first_pass(run, region, first_pass), region

    return contexts


def checkpoint_reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: FBT001  # torch's order
    """Run `checkpoint(use_reentrant=True)` as non-reentrant, since its nested backward would bypass the segments."""
    if torch.is_grad_enabled():
        torch_checkpoint.check_backward_validity(args)  # warns if no input requires grad
    requires_grad = any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
    with contextlib.nullcontext() if requires_grad else torch.no_grad():
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextlib.contextmanager
def recompute_modules(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Checkpoint `modules` while micro-batches run: only the modules' inputs are saved for backward."""
    instance_forwards = [(module, module.__dict__.get("forward")) for module in modules]
    for module in modules:
        # Not setattr, which the module's class may override.
        module.__dict__["forward"] = functools.partial(_checkpointed, module.forward)
    try:
        yield
    finally:
        for module, forward in instance_forwards:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run = active_run()
    if run is None or run.is_in_region or not torch.is_grad_enabled():
        return forward(*args, **kwargs)  # inside a checkpoint, nothing is saved anyway
    return torch_checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextlib.contextmanager
def _first_pass(run: MicrobatchRun, region: _Region, user_context: _Context) -> Iterator[None]:
    with run.single_segment(region.on_segment), user_context:
        yield


class _Region(contextlib.AbstractContextManager[None]):
    """Context in which torch recomputes a checkpoint region: makes the region's segment current again.

    References to the run and the segment are weak: both refer to the autograd graph, which refers to this object, and
    the cycle would keep a forward without a backward in memory.
    """

    def __init__(self, run: MicrobatchRun, transfer: _Transfer, user_context: _Context) -> None:
        self._run = weakref.ref(run)
        self._transfer = transfer
        self._user_context = user_context
        self._entered = contextlib.ExitStack()

    def on_segment(self, segment: Segment) -> None:
        """Store the region's segment, and a copy of the segment's RNG states."""
        self._segment = weakref.ref(segment)
        self._generators = segment.generators.fork()

    def __enter__(self) -> None:
        run, segment = self._run(), self._segment()
        if run is None or segment is None:  # the forward is freed: this is not the backward of its outputs
            raise refusals.captured_tensor()
        self._entered.enter_context(run.recomputing(segment, self._generators, self._transfer(run)))
        self._entered.enter_context(self._user_context)

    def __exit__(self, *exc: object) -> None:
        self._entered.close()
