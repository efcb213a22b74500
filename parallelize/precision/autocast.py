"""Autocast that a forward enters, that stays on while the loss is computed, and that backward exits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from parallelize.precision.autocast_filter import AutocastFilter, nesting_depth, remove_filter
from parallelize.runtime import torch_compile
from parallelize.torch_patches.private import self_test

__all__ = ["HeldAutocast"]

_version, _training = attrgetter("_version"), attrgetter("training")
_UNCHANGED = contextlib.nullcontext()


class _ThreadState(threading.local):
    """Autocast state of one thread.

    Attributes:
        context: the torch.autocast context that is held; None: no context is held.
        weights_state: version counters of the weights when autocast was last entered.
        exited_while_compiled: whether `exit` ran inside a compiled function, which enables autocast again on return.
    """

    context: torch.autocast | None = None
    weights_state: tuple[int, ...] = ()
    exited_while_compiled: bool = False


class HeldAutocast:
    """One autocast context per thread, held from a forward until its backward.

        forward ─ enter ──── loss ──── backward: exit      clipping, step    forward ─ enter ──── ...
                  [ autocast           ]                                               [ autocast

    Autocast caches half-precision copies of the weights until its outermost context ends. So the context is exited
    before each step, not only disabled: the next forward must not use copies from before the step. If the weights
    change while the context is held (a checkpoint is loaded between two forwards), the cache is cleared.

    Autocast contexts must be exited in reverse order. So `enter` does nothing inside an autocast context of the user,
    and inside one that the user has entered later, `exit` only clears the cache; the next `exit` outside of it exits.

    Autocast state is thread-local: each thread enters and exits a separate context.

    While the context is held, an `AutocastFilter` leaves operations on the user's own tensors without autocast.

    Args:
        device_type: torch's device type, such as "cuda".
        dtype: the half-precision type; None: do not change autocast.
    """

    def __init__(self, device_type: str, dtype: torch.dtype | None) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._filter = None if dtype is None else AutocastFilter(device_type, dtype)
        self._models: tuple[nn.Module, ...] = ()
        self._weights: tuple[torch.Tensor, ...] = ()
        self._thread = _ThreadState()

    def set_models(self, models: Sequence[nn.Module]) -> None:
        """Set the models whose weights autocast may cache."""
        self._models = tuple(models)
        weights = (weight for model in models for weight in model.parameters())
        self._weights = tuple(weight for weight in weights if not weight.is_inference())

    def enter(self) -> list[AutocastFilter]:
        """Enter autocast on this thread, unless a context is held already or the user has entered autocast.

        Returns:
            The filters to install after the forward; none is installed during the forward.
        """
        filters = remove_filter()
        if self._dtype is None or self._filter is None:
            return filters
        if self is not _tested:
            _require_held_autocast()
        if self._thread.exited_while_compiled:
            self._undo_dynamo_restore()
        # Version counters and training modes change when the weights change. Writing to `.data` changes no counter, but
        # code that swaps weights this way (EMA) calls eval() and train() too.
        state = sum(map(_version, self._weights)), *map(_training, self._models)
        if self._thread.context is not None:
            if state != self._thread.weights_state:
                torch.clear_autocast_cache()
        elif nesting_depth() == 0:
            torch.clear_autocast_cache()  # all threads share it: one that ended after a forward has left its casts
            self._thread.context = torch.autocast(self._device_type, self._dtype)
            self._thread.context.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
            filters = [self._filter]
        for each in filters:
            each.is_loss_over = False
        self._thread.weights_state = state
        return filters

    def exit(self) -> None:
        """Exit autocast on this thread, and drop its cached copies of weights."""
        if self._thread.exited_while_compiled:
            self._undo_dynamo_restore()
        if self._thread.context is None:
            return
        # No filter is installed during a forward, which stays under autocast if it calls backward or steps itself.
        if nesting_depth() > 1 or not remove_filter():
            torch.clear_autocast_cache()
            return
        context, self._thread.context = self._thread.context, None
        context.__exit__(None, None, None)
        self._thread.exited_while_compiled = torch_compile.is_inside_compiled()

    def disabled(self) -> contextlib.AbstractContextManager[object]:
        """Return a context without autocast, if the held autocast context is the innermost on this thread."""
        return torch.autocast(self._device_type, enabled=False) if self._is_innermost() else _UNCHANGED

    def forward_only(self) -> contextlib.AbstractContextManager[object]:
        """Return an autocast context for one forward that casts the current weights, not cached copies."""
        if self._is_innermost():
            return torch.autocast(self._device_type, self._dtype, cache_enabled=False)
        return self.ensure_enabled()

    def ensure_enabled(self) -> contextlib.AbstractContextManager[object]:
        """Return a context with autocast enabled, for use on any thread; no-op where the user disabled autocast."""
        if self._dtype is None:
            return _UNCHANGED
        if torch.is_autocast_enabled(self._device_type):
            if torch.get_autocast_dtype(self._device_type) is self._dtype:
                return _UNCHANGED
        elif nesting_depth() > 0:
            return _UNCHANGED
        return torch.autocast(self._device_type, self._dtype)

    def for_recomputation(self) -> contextlib.AbstractContextManager[object]:
        """Return an autocast context for a routed forward that runs inside backward (activation checkpointing).

        torch's checkpoint restores the autocast state from before the original forward, so from before `enter`.
        """
        return _UNCHANGED if self._dtype is None else torch.autocast(self._device_type, self._dtype)

    def _undo_dynamo_restore(self) -> None:
        """Disable autocast if a compiled function, on return, enabled it again after `exit`."""
        if not torch_compile.is_inside_compiled():
            self._thread.exited_while_compiled = False
            if nesting_depth() == 0:
                torch.set_autocast_enabled(self._device_type, False)  # noqa: FBT003  # torch's own signature

    def _is_innermost(self) -> bool:
        return self._thread.context is not None and nesting_depth() == 1


_tested = HeldAutocast("cpu", torch.bfloat16)


@self_test("amp=", instead="call torch.autocast in the loop")
def _require_held_autocast() -> bool:
    """Between `enter` and `exit`, operations on weights run under autocast, and those on the user's own tensors not."""
    weight, own = torch.ones(1, 1, dtype=torch.float32, requires_grad=True), torch.ones(1, 1, dtype=torch.float32)
    dtypes = []
    for each in _tested.enter():
        each.install()
        dtypes += [(weight @ weight).dtype, (own @ own).dtype]
    _tested.exit()
    dtypes += [(weight @ weight).dtype, (own @ own).dtype]
    return dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
