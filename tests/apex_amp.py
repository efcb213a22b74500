"""A small `apex.amp` after its documentation, for the CPU: no Apex with `amp` can be installed with a current torch.

Like the original, `initialize` replaces forward by a closure, casts models except batch norm (O2) or with it (O3),
hooks their state dicts, and replaces step, zero_grad and attributes of the optimizers; masters are made at the first
backward; O1 patches functions of torch; `scale_loss` unscales the gradients, and after an inf replaces step once.

Source: https://nvidia.github.io/apex/amp.html, https://nvidia.github.io/apex/advanced.html
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["SCALE", "SmallApexAmp", "install"]

SCALE = 2.0**16


class _Stash:
    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # parameter, master or the parameter itself


class _Handle:
    """Apex's patches of torch functions (O1)."""

    def __init__(self) -> None:
        self._linear = F.linear
        vars(F)["linear"] = self._half_linear

    def _half_linear(self, x: torch.Tensor, *tensors: torch.Tensor | None) -> torch.Tensor:
        return self._linear(x.half(), *(None if each is None else each.half() for each in tensors))

    def _deactivate(self) -> None:
        vars(F)["linear"] = self._linear


class SmallApexAmp(types.ModuleType):
    """The functions of apex.amp that this package calls, with `calls` of initialize and load_state_dict."""

    def __init__(self) -> None:
        super().__init__("apex.amp")
        self.calls: list[dict[str, Any]] = []
        self.scale = 1.0
        self._amp_state = types.SimpleNamespace()

    def initialize(self, models: list[nn.Module], optimizers: list[Any], **options: Any) -> Any:
        self.calls.append(options)
        level = options["opt_level"]
        self.scale = SCALE if options["loss_scale"] == "dynamic" else options["loss_scale"]
        dtype = {"O0": torch.float32, "O2": torch.float16, "O3": torch.float16}.get(level)
        for model in models if dtype is not None else ():
            for part in model.modules():
                if level != "O2" or not isinstance(part, nn.BatchNorm1d):
                    for each in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                        each.data = each.data.to(dtype) if each.is_floating_point() else each.data
                part._register_state_dict_hook(_to_float)
            model.forward = _cast(model.forward, dtype)
        for optimizer in optimizers:
            assert not hasattr(optimizer, "_amp_stash")
            optimizer._amp_stash = _Stash()
            optimizer.step = functools.partial(self._step, optimizer, optimizer.step)
            optimizer.zero_grad = functools.partial(self._zero_grad, optimizer, level == "O2")
            optimizer._amp_lazy_init = functools.partial(self._pairs, optimizer, level == "O2")
        if level == "O1":
            self._amp_state.handle = _Handle()
        return models, optimizers

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizers: list[Any]) -> Iterator[torch.Tensor]:
        pairs = [pair for each in optimizers for pair in each._amp_lazy_init()]
        kept = [None if master is parameter else master.grad for parameter, master in pairs]
        before = [parameter.grad if parameter is master else None for parameter, master in pairs]
        for parameter, _ in pairs:
            parameter.grad = None
        yield loss.float() * self.scale
        found = [parameter.grad for parameter, _ in pairs]
        overflow = any(each is not None and not each.float().sum().isfinite() for each in found)
        for (_, master), new, *old in zip(pairs, found, kept, before, strict=True):
            accumulated = next((each for each in old if each is not None), None)
            if new is not None:
                gradient = new.to(master.dtype) / self.scale
                master.grad = gradient if accumulated is None else gradient + accumulated
            elif accumulated is not None:
                master.grad = accumulated
        if overflow:
            self.scale /= 2
            for optimizer in optimizers:
                optimizer.step = functools.partial(self._skip, optimizer, optimizer.step)

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scaler0": {"loss_scale": self.scale, "unskipped": 1}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(state)

    @staticmethod
    def _pairs(optimizer: Any, has_masters: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        stash = optimizer._amp_stash
        if stash.pairs is None:
            stash.pairs = []
            for group in optimizer.param_groups:
                for index, each in enumerate(group["params"]):
                    master = each
                    if has_masters and each.dtype is torch.float16:
                        master = group["params"][index] = each.detach().clone().float().requires_grad_()
                        if each in optimizer.state:
                            optimizer.state[master] = optimizer.state.pop(each)
                    stash.pairs.append((each, master))
        return stash.pairs

    @staticmethod
    @torch.no_grad()
    def _step(optimizer: Any, plain_step: Callable[[], Any]) -> None:
        plain_step()
        for each, master in optimizer._amp_lazy_init():
            if each is not master:
                each.copy_(master)
                master.grad = None

    @staticmethod
    def _skip(optimizer: Any, step: Callable[[], Any]) -> None:
        for each, master in optimizer._amp_lazy_init():
            if each is not master:
                master.grad = None
        optimizer.step = step

    @staticmethod
    def _zero_grad(optimizer: Any, has_masters: bool) -> None:
        for pair in SmallApexAmp._pairs(optimizer, has_masters):
            for each in pair:
                each.grad = None


def _cast(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    return lambda *args: forward(*(each.to(dtype) for each in args)).float()


def _to_float(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    state.update({key: each.float() for key, each in state.items() if each.dtype is torch.float16})


def install() -> SmallApexAmp:
    """Put the small Apex into sys.modules, and let the engine accept CPUs."""
    from parallelize.precision.apex import ApexPrecision

    apex: Any = types.ModuleType("apex")
    apex.amp = SmallApexAmp()
    sys.modules["apex"] = apex
    ApexPrecision.dtypes = {name: frozenset({torch.float16}) for name in ("cpu", "cuda")}
    return apex.amp
