"""Comparison of tensors across ranks: a 64-bit fingerprint of each tensor, and one all-reduce of their extrema."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from parallelize.errors import SyncError
from parallelize.hang_detection.judge import existing_keys
from parallelize.runtime import context
from parallelize.runtime.process_group import default_store

__all__ = ["Meeting", "differences", "fingerprint", "flat_fingerprint", "largest_difference", "require_same_model"]

_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64  # of the splitmix64 generator, as int64
_MAX_JOINED = 2**22  # elements
_FIRST_POLL_S, _MAX_POLL_S = 0.0002, 0.05
_FIRST_LOOK_S, _MAX_LOOK_S = 0.25, 8.0  # pauses between looks at the posts of all ranks

# Meetings so far by topic, per process group: later groups have other counts.
_meetings: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 0-dim int64 tensor that depends on all elements of a tensor and their positions; 0 for zeros."""
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce()
        used = values.values().flatten(1).any(1) if values.values().dim() > 1 else values.values() != 0
        return fingerprint(values.values()[used]) + fingerprint(values.indices()[:, used])
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_floating_point() and values.element_size() > 1:
        values = values + 0.0  # -0.0 becomes 0.0, in a copy
    bits = values.contiguous().view(_AS_INTEGER[values.element_size()])
    if values.element_size() == 8:
        bits = bits ^ (bits >> 29)  # the sum of an even number of sign bits would be 0
    rows = bits.reshape(len(bits) if bits.dim() else 1, -1) if bits.numel() else bits.new_zeros(1, 1)
    total: torch.Tensor = _weighted_sum(rows, 1) + _FACTORS[1] * _weighted_sum(rows, 0)
    return total


def _weighted_sum(rows: torch.Tensor, dim: int) -> torch.Tensor:
    sums = rows.sum(dim, dtype=torch.int64)
    weights = torch.arange(1, len(sums) + 1, device=sums.device) * _FACTORS[0]
    return (sums * ((weights ^ (weights >> 31)) * _FACTORS[1] | 1)).sum()


def differences(tensors: Sequence[torch.Tensor | None]) -> Iterator[tuple[int, int]]:
    """Compare tensors bitwise across ranks; a collective of 16 bytes per tensor.

    Args:
        tensors: equally many on every rank; None stands for zeros.

    Yields:
        (index, rank): each tensor that differs, with the first rank where it differs from rank 0's. Every rank must
        take equally many, as each is a collective.
    """
    if not tensors:
        return
    device = context.current().device
    zero = torch.zeros((), dtype=torch.int64)
    local = torch.stack([(zero if each is None else fingerprint(each)).to(device) for each in tensors])
    extrema = torch.stack([local, ~local])  # the maximum of ~x is that of the smallest x
    dist.all_reduce(extrema, dist.ReduceOp.MAX)
    # Read in one piece: finding the indices on the device would wait for it twice.
    differ = (extrema[0] != ~extrema[1]).tolist()
    for index in itertools.compress(range(len(tensors)), differ):
        rows = [torch.empty_like(local[index]) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, local[index].clone())
        found = torch.stack(rows)
        yield index, int((found != found[0]).nonzero()[0])


def flat_fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the fingerprint of many tensors at once: small ones of a dtype are joined, as kernels cost most."""
    device = context.current().device
    total = torch.zeros((), dtype=torch.int64, device=device)
    joined: dict[Any, list[torch.Tensor]] = {}
    size = 0
    for number, each in enumerate(tensors, start=1):
        values = each.detach()
        if values.layout is not torch.strided or values.is_complex() or values.numel() > _MAX_JOINED:
            total = total + number * fingerprint(values).to(device)
            continue
        joined.setdefault((values.dtype, values.device), []).append(values.reshape(-1))
        size += values.numel()
        if size > _MAX_JOINED:
            total, size = total + _of_joined(joined, number, device), 0
    return total + _of_joined(joined, len(tensors) + 1, device)


def _of_joined(joined: dict[Any, list[torch.Tensor]], number: int, device: torch.device) -> torch.Tensor:
    found = [fingerprint(torch.cat(each)).to(device) for each in joined.values()]
    joined.clear()
    return number * torch.stack(found).sum() if found else torch.zeros((), dtype=torch.int64, device=device)


def largest_difference(tensor: torch.Tensor) -> float:
    """Return how far a tensor is apart across the ranks; a collective of twice its size."""
    values = tensor.detach().to(context.current().device, torch.float64 if tensor.dtype.itemsize > 4 else torch.float32)
    extrema = torch.stack([values, -values])
    dist.all_reduce(extrema, dist.ReduceOp.MAX)
    return float(extrema.sum(0).max()) if extrema.numel() else 0.0


def require_same_model(model: nn.Module) -> None:
    """Check that a model has the same structure on all ranks; a collective that compares a hash.

    Raises:
        SyncError: a parameter or buffer differs in name, shape, dtype or `requires_grad`.
    """
    parts = [
        f"{name} ({_kind(each)}, {tuple(each.shape)}, {each.dtype})"
        for name, each in (*model.named_parameters(), *model.named_buffers())
    ]
    rank = next((rank for _, rank in differences([_digest(repr(parts))])), None)
    if rank is None:
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, parts)
    for first, other in itertools.zip_longest(found[0], found[rank], fillvalue="nothing more"):
        if first != other:
            raise SyncError(
                f"{type(model).__name__} on rank {rank} has {other} where rank 0 has {first}",
                why="parallel training needs the same model on every rank",
                fix="build the model from the same arguments on every rank; freeze the same parameters",
            )


def _kind(each: torch.Tensor) -> str:
    return "buffer" if not isinstance(each, nn.Parameter) else "trained" if each.requires_grad else "frozen"


def _digest(text: str) -> torch.Tensor:
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(hashed, "big", signed=True))


class Meeting:
    """A comparison that all ranks have to come to: without it, its collective could meet another one.

    Args:
        topic: what is compared; ranks with equal topics meet.
    """

    def __init__(self, topic: str) -> None:
        group: Any = dist.group.WORLD
        self._topic, self._store, self._world_size = topic, default_store(), dist.get_world_size()
        self._counts = _meetings.setdefault(group, Counter())
        self._number = self._counts.total()
        self._counter = f"parallelize/comparison/{topic}"

    def wait(self) -> str:
        """Wait until all ranks have come; return "", or which rank never comes, and what it does instead."""
        self._store.set(_key_of(dist.get_rank()), f"{self._number} {self._topic}")
        expected = self._world_size * (self._counts[self._topic] + 1)
        if self._store.add(self._counter, 1) < expected:
            absent = self._poll(expected)
            if absent:
                self._store.add(self._counter, -1)
                return absent
        self._counts[self._topic] += 1
        return ""

    def _poll(self, expected: int) -> str:
        """Poll for the number of ranks that have come: a blocking wait would hold the store's lock."""
        run, pause_s = context.current(), _FIRST_POLL_S
        look_s, look_at = _FIRST_LOOK_S, time.monotonic() + _FIRST_LOOK_S
        end = time.monotonic() + run.config.timeout.total_seconds()
        with run.watchdog.waiting_in_store(self._missing_ranks) as failure:
            while self._store.add(self._counter, 0) < expected:
                absent = failure()
                if not absent and time.monotonic() >= look_at:
                    absent, look_s = self._other_topic(), min(2 * look_s, _MAX_LOOK_S)
                    look_at = time.monotonic() + look_s
                if not absent and time.monotonic() > end:
                    absent = f"ranks {self._missing_ranks()} have not come within timeout={run.config.timeout}"
                if absent:
                    return absent
                time.sleep(pause_s)
                pause_s = min(1.2 * pause_s, _MAX_POLL_S)
        return ""

    def _missing_ranks(self) -> list[int]:
        return [rank for rank, (number, _) in enumerate(self._posts()) if number < self._number]

    def _other_topic(self) -> str:
        for rank, (number, topic) in enumerate(self._posts()):
            if number == self._number and topic != self._topic:
                return f"rank {rank} is at {topic}"
        return ""

    def _posts(self) -> list[tuple[int, str]]:
        """Return the number and topic of the latest meeting of each rank."""
        keys = [_key_of(rank) for rank in range(self._world_size)]
        posted = existing_keys(self._store, keys)
        texts = dict(zip(posted, self._store.multi_get(posted), strict=True))
        posts = (texts.get(key, b"-1 ").decode().partition(" ") for key in keys)
        return [(int(number), topic) for number, _, topic in posts]


def _key_of(rank: int) -> str:
    return f"parallelize/comparison of rank {rank}"
