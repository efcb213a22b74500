"""A stay of a micro-batch on a stage: the operations of one autograd graph."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallelize.backends.balanced.captured_tensors import closed, within
from parallelize.backends.balanced.microbatch_rng import Streams

__all__ = ["OUTSIDE", "Import", "Segment", "Stage", "is_differentiable", "reaches", "run_backward", "version"]

OUTSIDE = -1
"""The stage of the user's code: inputs come from it, outputs go to it."""

_keys = itertools.count()


@dataclass(frozen=True)
class Stage:
    """One place where segments run.

    Args:
        device: torch's.
        cores: CPU cores of a stage on the CPU; empty: any.
    """

    device: torch.device
    cores: frozenset[int] = frozenset()


class Import:
    """A tensor of another segment, and its copy here.

    Args:
        source: there.
        local: here.
    """

    __slots__ = ("_version", "local", "source")

    def __init__(self, source: torch.Tensor, local: torch.Tensor) -> None:
        self.source = source
        self.local = local
        self._version = version(local)

    @property
    def is_changed(self) -> bool:
        """Whether the copy has been changed in place."""
        return version(self.local) != self._version


class Segment:
    """A stay of a micro-batch on a stage.

    Args:
        stage: number of it.

    Attributes:
        key: what tensors made here carry.
        casts: by id of a shadow, the shadow in half precision.
        imports: by id of the tensor, what came from other segments.
        exports: tensors that went elsewhere, each with the leaf that took its place.
        streams: its random numbers.
    """

    __slots__ = ("__weakref__", "casts", "exports", "imports", "key", "stage", "streams")

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.key = next(_keys)
        self.casts: dict[int, torch.Tensor] = {}
        self.imports: dict[int, Import] = {}
        self.exports: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.streams = Streams(0)

    def export(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leaf that stands for a tensor elsewhere."""
        leaf = closed(tensor.detach().requires_grad_())
        self.exports.append((tensor, leaf))
        return leaf

    def backward(self) -> None:
        """From the gradients of what was exported to those of what was imported, and to the stage's shadows."""
        wanted = [(tensor, leaf.grad) for tensor, leaf in self.exports if leaf.grad is not None]
        if wanted:
            with within():
                run_backward(*zip(*wanted, strict=True))
        self.casts.clear()
        self.imports.clear()
        self.exports.clear()


def run_backward(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, inputs: Sequence[torch.Tensor] = ()
) -> None:
    """As torch.autograd.backward, past whoever has replaced it: loss scaling would scale this part of one again.

    Args:
        roots: where backward begins.
        gradients: of each root.
        inputs: whose gradients are computed and thrown away; empty: leaves get theirs.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots),
        tuple(gradients),
        keep_graph=False,
        create_graph=False,
        inputs=tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=not inputs,
    )


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether backward can begin at a tensor: a view of a parameter that no_grad has made says that it wants one."""
    is_hollow = tensor.grad_fn is None and tensor._base is not None and tensor._base.requires_grad
    return tensor.requires_grad and not is_hollow


def reaches(tensor: torch.Tensor, leaves: Collection[int]) -> bool:
    """Whether a tensor's history ends at one of some leaves, given by their ids."""
    seen: set[Any] = set()
    nodes: list[Any] = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)
    return False


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, where torch counts it."""
    return 0 if tensor.is_inference() else tensor._version
