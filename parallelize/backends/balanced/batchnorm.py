"""Batch norm of micro-batches, with running statistics of the full batch.

Each micro-batch is normalized by its own moments (mean, variance), since later micro-batches have not run yet. During a
call, the module has scratch buffers and a momentum of 1, and so stores these moments in place of running statistics.
After the forward they are merged into those of the full batch, which update the running statistics once. Micro-batch i
has n_i of the N values per channel:

    mean = sum(n_i mean_i) / N         variance = (sum((n_i - 1) var_i) + sum(n_i (mean_i - mean)^2)) / (N - 1)

For the first batch norm of a model, these are the exact moments of the full batch. For later ones they differ
slightly, since the inputs have been normalized per micro-batch.

Source: Chan, Golub & LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallelize.backends.balanced.device_transfer import to_device

__all__ = ["BatchNorms", "Moments"]

_STATE = ("running_mean", "running_var", "num_batches_tracked", "momentum")


class _CallMoments(NamedTuple):
    size: int  # number of values per channel
    mean: torch.Tensor  # shape (C,)
    variance: torch.Tensor  # shape (C,), unbiased


Moments = dict[int, list[_CallMoments]]
"""Moments that one micro-batch's calls of batch norm have computed, by the id of the module."""


class BatchNorms:
    """The batch norms of a model that track running statistics."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(each): each for each in model.modules() if isinstance(each, _BatchNorm)}
        # A module that several stages call may run in several threads.
        self._locks = {key: threading.RLock() for key in self._modules}
        # Of a module during a call: the number of values per channel, and the module's state before.
        self._before: dict[int, tuple[int, dict[str, Any]]] = {}

    def __contains__(self, module: object) -> bool:
        return id(module) in self._modules

    def __len__(self) -> int:
        return len(self._modules)

    @property
    def is_training(self) -> bool:
        """Whether any of the modules normalizes by the moments of a batch and updates its statistics."""
        return any(each.training for each in self._modules.values())

    def before(self, module: nn.Module, args: tuple[Any, ...], device: torch.device) -> None:
        """Give a batch norm that is about to run scratch buffers on a device, if it is in training."""
        norm = self._modules.get(id(module))
        if norm is None or not norm.training or norm.running_mean is None or norm.running_var is None:
            return
        x = args[0]
        self._locks[id(module)].acquire()
        self._before[id(module)] = x.numel() // x.shape[1], {name: getattr(norm, name) for name in _STATE}
        norm.running_mean = torch.zeros_like(norm.running_mean, device=device)
        norm.running_var = torch.zeros_like(norm.running_var, device=device)
        norm.num_batches_tracked = None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
        norm.momentum = 1.0

    def after(self, module: nn.Module, moments: Moments | None) -> None:
        """Restore a batch norm that has run; add its moments to those of the micro-batch, if there is one."""
        if id(module) not in self._before:
            return
        norm, count = self._modules[id(module)], self._before[id(module)][0]
        if moments is not None and norm.running_mean is not None and norm.running_var is not None:
            moments.setdefault(id(module), []).append(_CallMoments(count, norm.running_mean, norm.running_var))
        self._restore(id(module))
        self._locks[id(module)].release()

    def restore(self) -> None:
        """Restore the batch norms in which a call has been interrupted by what is no Exception, such as Ctrl-C."""
        for key in tuple(self._before):
            self._restore(key)
            self._locks[key] = threading.RLock()

    def update(self, of_each: Sequence[Moments]) -> None:
        """Update the running statistics from the moments of all micro-batches."""
        with torch.no_grad():
            for key in dict.fromkeys(key for each in of_each for key in each):
                _update(self._modules[key], [each[key] for each in of_each if key in each])

    def _restore(self, key: int) -> None:
        for name, value in self._before.pop(key)[1].items():
            setattr(self._modules[key], name, value)


def _update(norm: _BatchNorm, of_each: list[list[_CallMoments]]) -> None:
    assert norm.running_mean is not None  # only those that track statistics have moments
    assert norm.running_var is not None
    # One update per call, since a model may call a module several times in one forward.
    for call in range(max(map(len, of_each))):
        device = norm.running_mean.device
        mean, variance = _merge([to_device(each[call], device) for each in of_each if call < len(each)])
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        factor = 1.0 / float(norm.num_batches_tracked or 1) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(mean, factor)
        norm.running_var.lerp_(variance, factor)


def _merge(parts: Sequence[_CallMoments]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the unbiased variance of all parts."""
    total = sum(part.size for part in parts)
    mean = sum((part.mean * part.size for part in parts[1:]), parts[0].mean * parts[0].size) / total
    squares = torch.zeros_like(mean)
    for part in parts:
        squares += part.variance * (part.size - 1) + (part.mean - mean) ** 2 * part.size
    return mean, squares / (total - 1)
