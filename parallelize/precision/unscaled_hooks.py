"""Tensor hooks of the user, called with unscaled gradients during a scaled backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from parallelize.precision.loss_scale import LossScale
from parallelize.torch_patches.private import replace_attribute, self_test

__all__ = ["UnscaledHooks"]

Hook = Callable[[torch.Tensor], torch.Tensor | None]


class UnscaledHooks:
    """Wraps tensor hooks, which then get unscaled gradients: a hook that clips at 1 does so at any loss scale.

    Recurrent networks clip in such hooks, and users inspect gradients in them. Under a GradScaler called by the user,
    tensor hooks get scaled gradients, and clip at 1 / scale.

    Hooks on modules and graph nodes, post-accumulate-grad hooks and custom autograd functions are not wrapped: they
    get scaled gradients.

    Attributes:
        scale: the scale of the running backward pass; None: no scaled backward pass is running.
    """

    def __init__(self) -> None:
        self.scale: LossScale | None = None

    def scaled_backward(self, scale: LossScale) -> contextlib.AbstractContextManager[None]:
        """Mark the duration of a backward pass with this scale: wrapped hooks called inside get unscaled gradients."""
        return replace_attribute(self, "scale", scale)

    @contextlib.contextmanager
    def patch_register_hook(self) -> Iterator[None]:
        """Wrap every hook that is registered inside the context."""
        original: Any = torch.Tensor.register_hook

        def register_hook(tensor: torch.Tensor, hook: Hook) -> Any:
            return original(tensor, self._wrapped(hook))

        with replace_attribute(torch.Tensor, "register_hook", register_hook):
            yield

    def wrap_existing(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wrap the hooks that were registered on parameters before the block."""
        _require_replaceable_hooks()
        for hooks in _backward_hooks_of(parameters):
            hooks.update({key: self._wrapped(hook) for key, hook in hooks.items()})

    def unwrap(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace the wrapped hooks of parameters with the original hooks."""
        for hooks in _backward_hooks_of(parameters):
            wrapped = {key: hook for key, hook in hooks.items() if isinstance(hook, _UnscaledHook)}
            hooks.update({key: hook.args[0] for key, hook in wrapped.items() if hook.func == self.call_unscaled})

    def _wrapped(self, hook: Hook) -> Hook:
        is_kept = isinstance(hook, _UnscaledHook) or _is_torch_hook(hook)
        return hook if is_kept else _UnscaledHook(self.call_unscaled, hook)

    def call_unscaled(self, hook: Hook, gradient: torch.Tensor) -> torch.Tensor | None:
        """Call a hook with the unscaled gradient, and scale the gradient that it returns."""
        if self.scale is None:
            return hook(gradient)
        scale, inverse = self.scale.on(gradient.device)
        # In fp32: an unscaled gradient may underflow in fp16.
        result = hook(gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * inverse)
        return None if result is None else (result * scale).to(gradient.dtype)


class _UnscaledHook(functools.partial[torch.Tensor | None]):
    """A hook of the user, called through `UnscaledHooks.call_unscaled`."""


@self_test("loss scaling (fp16)", instead="use amp='bf16', which needs none")
def _require_replaceable_hooks() -> bool:
    """A hook that replaces another one in `_backward_hooks_of` is called instead of it."""
    called: list[str] = []
    leaf: Any = torch.ones((), device="cpu", requires_grad=True)
    leaf.register_hook(lambda _: called.append("original"))
    for hooks in _backward_hooks_of([leaf]):
        hooks.update({key: lambda _: called.append("wrapped") for key in hooks})
    torch.autograd.grad(leaf * 2, leaf)
    return called == ["wrapped"]


def _backward_hooks_of(parameters: Iterable[torch.Tensor]) -> Iterator[dict[int, Any]]:
    for parameter in parameters:
        hooks: dict[int, Any] | None = getattr(parameter, "_backward_hooks", None)
        if hooks:
            yield hooks


def _is_torch_hook(hook: Any) -> bool:
    """Return whether a hook is torch's own, as fully_shard's on forward outputs, which ignore gradient values."""
    module = getattr(getattr(hook, "__func__", hook), "__module__", None) or ""
    return module.startswith("torch.")
