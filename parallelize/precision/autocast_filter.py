"""Function mode that disables the held autocast for operations on the user's own tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import overrides

from parallelize.runtime.function_modes import function_modes, replace_function_modes

__all__ = ["AutocastFilter", "nesting_depth", "remove_filter", "set_loss_over", "without_filter"]


class AutocastFilter(overrides.TorchFunctionMode):
    """Between a forward and its backward, limits the held autocast to operations that may belong to the loss.

    An operation runs under autocast if one of its tensors requires grad while grad mode is on, or is in half precision,
    as outputs of a model are, even detached: with fp32 tensors they can be combined only under autocast. Any other
    operation, such as one on a batch or in an evaluation, runs in the dtypes of its arguments. A compiled function runs
    under autocast as a whole.

    Args:
        device_type: torch's device type, such as "cuda".
        dtype: the half-precision type.

    Attributes:
        is_loss_over: whether only operations on half-precision tensors run under autocast.
    """

    was_installed = False  # one of them, in this process

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self.is_loss_over = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A fast path, also for reading and setting `.grad` of every parameter; torch.compile traces it.
        if torch.is_grad_enabled() and not self.is_loss_over:
            for each in args:
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    return func(*args, **kwargs)
        if (
            torch.compiler.is_compiling()
            or not self._is_innermost()
            or any(map(self._leads_to_loss, (*args, *kwargs.values())))
        ):
            return func(*args, **kwargs)
        torch.set_autocast_enabled(self._device_type, False)  # noqa: FBT003  # torch's own signature
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(self._device_type, True)  # noqa: FBT003  # torch's own signature

    def _is_innermost(self) -> bool:
        return torch.is_autocast_enabled(self._device_type) and nesting_depth() == 1

    def _leads_to_loss(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.dtype is self._dtype or (
                value.requires_grad and torch.is_grad_enabled() and not self.is_loss_over
            )
        # A list of numbers, as torch.tensor() takes, may be long.
        return isinstance(value, (list, tuple)) and any(
            map(self._leads_to_loss, takewhile(lambda each: isinstance(each, torch.Tensor), value))
        )

    def install(self) -> None:
        """Push this mode below the user's modes, which exit by popping the top.

        The default device stays at the bottom, where torch.set_default_device looks for it.
        """
        AutocastFilter.was_installed = True
        modes = function_modes()
        index = 1 if modes and hasattr(modes[0], "old_device") else 0
        replace_function_modes([*modes[:index], self, *modes[index:]])


@contextlib.contextmanager
def without_filter() -> Iterator[None]:
    """Remove the filter of this thread inside the context, as for the forward of a model."""
    filters = remove_filter()
    try:
        yield
    finally:
        for each in filters:
            each.install()


def remove_filter() -> list[AutocastFilter]:
    """Remove the filter from this thread's function modes, and return it in a list; [] if none is installed."""
    modes: list[Any] = []
    filters: list[AutocastFilter] = []
    for each in function_modes():
        (filters if isinstance(each, AutocastFilter) else modes).append(each)
    if filters:
        replace_function_modes(modes)
    return filters


def set_loss_over(*, is_over: bool) -> None:
    """Set whether the loss of the most recent forward on this thread is over, as when the next batch is drawn.

    Outputs in half precision stay usable: only tensors that merely require grad are no longer under autocast.
    """
    for each in function_modes() if AutocastFilter.was_installed else ():  # reading them takes 1 us
        if isinstance(each, AutocastFilter):
            each.is_loss_over = is_over


def nesting_depth() -> int:
    """Return the number of autocast contexts that are entered on this thread."""
    nesting: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting - 1
