"""What torch keeps per thread and a forward depends on, carried from the caller's thread into ours."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["Ambient"]


class Ambient:
    """The state of the thread that makes this.

    Grad and inference mode, autocast, hooks on saved tensors, function modes (a default device is one), context
    variables, and the current stream of each device.

    Args:
        devices: those whose streams count.
    """

    def __init__(self, devices: frozenset[torch.device]) -> None:
        self._context = contextvars.copy_context()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        types = {"cpu", *(device.type for device in devices)}
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types]
        self._is_autocast_cached = torch.is_autocast_cache_enabled()
        self._saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003  # torch names it in no other way
        self._function_modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
        self._streams = [torch.accelerator.current_stream(device) for device in devices if device.type != "cpu"]

    def run(self, call: Callable[[], Any]) -> Any:
        """Call on this thread as the caller's would."""
        return self._context.copy().run(self._call, call)

    def use_streams(self) -> None:
        """Compute on the caller's streams."""
        for stream in self._streams:
            torch.accelerator.set_stream(stream)

    def _call(self, call: Callable[[], Any]) -> Any:
        with contextlib.ExitStack() as stack:
            self.use_streams()
            if self._is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._is_grad_enabled))
            for kind, enabled, dtype in self._autocast:
                if enabled:
                    cached = self._is_autocast_cached
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
            if self._saved_tensors_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensors_hooks))
            for mode in self._function_modes:
                stack.enter_context(_pushed(mode))
            return call()


@contextlib.contextmanager
def _pushed(mode: Any) -> Iterator[None]:
    # Past the mode's own __enter__, which keeps what it found on the object: that belongs to the caller's thread.
    torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        torch._C._pop_torch_function_stack()
