"""How long autocast lasts: from a routed forward, over the loss, until its backward starts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from parallelize.precision import torch_compile

__all__ = ["Window"]


class _Held(threading.local):
    """The region that a window holds on one thread, and the state of the weights it has last seen there.

    It was left `inside` a compiled function if so: that one, returning, switches autocast on again, without a region.
    """

    region: torch.autocast | None = None
    seen: tuple[int, ...] = ()
    left_inside: bool = False


class Window:
    """Autocast that the block holds on a thread.

        forward ─ opens ──── loss ──── backward: leaves    clipping, step    forward ─ opens ──── ...
                  [ autocast           ]                                               [ autocast

    It is left completely, never suspended: autocast keeps the half-precision copies of weights that it makes until its
    outermost region ends, so a region held over a step would go on with the weights of before the step. Where the
    weights change in spite of an open window (a checkpoint is loaded, between two forwards), the copies are dropped.

    Autocast's regions must end in the order they began. A window never opens inside a region of the user's, and does
    not end inside one that the user has begun since: it then waits for the next occasion.

    Autocast belongs to a thread: a thread opens and leaves what it holds itself.

    Args:
        device_type: torch's name for the kind of device.
        dtype: the half-precision type; None: autocast stays as it is.
    """

    def __init__(self, device_type: str, dtype: torch.dtype | None) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._models: tuple[nn.Module, ...] = ()
        self._weights: tuple[torch.Tensor, ...] = ()
        self._held = _Held()

    def watch(self, models: Sequence[nn.Module]) -> None:
        """Say whose weights autocast may copy."""
        self._models = tuple(models)
        weights = (weight for model in models for weight in model.parameters())
        self._weights = tuple(weight for weight in weights if not weight.is_inference())

    def open(self) -> None:
        """Enter autocast on this thread, unless it is inside one of the user's regions or the window is open."""
        if self._dtype is None:
            return
        self._settle()
        state = self._state_of_weights()
        if self._held.region is not None:
            if state != self._held.seen:
                torch.clear_autocast_cache()
        elif _depth() == 0:
            self._held.region = torch.autocast(self._device_type, self._dtype)
            self._held.region.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._held.seen = state

    def leave(self) -> None:
        """Leave autocast on this thread, and let its copies of weights go."""
        self._settle()
        if self._held.region is None:
            return
        if _depth() > 1:
            torch.clear_autocast_cache()
            return
        region, self._held.region = self._held.region, None
        region.__exit__(None, None, None)
        self._held.left_inside = torch_compile.is_inside()

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Autocast off while this lasts, if it is the window's; on again after."""
        with torch.autocast(self._device_type, enabled=False) if self._is_on_top() else contextlib.nullcontext():
            yield

    def around_forward(self) -> contextlib.AbstractContextManager[object]:
        """Autocast for one forward, from the weights as they are, and no longer than it."""
        if self._is_on_top():
            return torch.autocast(self._device_type, self._dtype, cache_enabled=False)
        return self.covering()

    def covering(self) -> contextlib.AbstractContextManager[object]:
        """Autocast on this thread, whichever it is: nothing to do where it is on, or where the user switched it off."""
        if self._dtype is None:
            return contextlib.nullcontext()
        if torch.is_autocast_enabled(self._device_type):
            if torch.get_autocast_dtype(self._device_type) is self._dtype:
                return contextlib.nullcontext()
        elif _depth() > 0:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, self._dtype)

    def inside_backward(self) -> contextlib.AbstractContextManager[object]:
        """Autocast for a forward that backward runs again (activation checkpointing of a whole routed model).

        The checkpoint has put autocast back to what it was before that forward, when the window had yet to open.
        """
        return contextlib.nullcontext() if self._dtype is None else torch.autocast(self._device_type, self._dtype)

    def _settle(self) -> None:
        """Switch off what a compiled function has switched on, returning, after the window was left in it."""
        if self._held.left_inside and not torch_compile.is_inside():
            self._held.left_inside = False
            if _depth() == 0:
                torch.set_autocast_enabled(self._device_type, False)  # noqa: FBT003  # torch's own signature

    def _is_on_top(self) -> bool:
        return self._held.region is not None and _depth() == 1

    def _state_of_weights(self) -> tuple[int, ...]:
        """Changes when weights do, by their counters, and with the mode.

        What is swapped in by `.data` no counter sees; but that is done to evaluate, between eval() and train().
        """
        return sum(weight._version for weight in self._weights), *(model.training for model in self._models)


def _depth() -> int:
    """How many autocast regions this thread is inside of."""
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1
