"""Segment: a micro-batch's work on one stage between two transfers, with its own autograd graph.

A hook may capture a tensor z inside a segment. A loss on z would bypass the pipeline, so gradient hooks refuse it:

    segment      [ a ──> z ──> b ]     Leaf x replaces a parameter or a tensor of another segment. Only the
                   ^     ^             segment's own backward passes x's gradient on; that of loss(z) would be lost.
    leaf           x     │
    user's code       loss(z)

Both x and z have such a hook, because backward from loss(z) would free tensors that the segment's backward needs.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.microbatch_rng import Generators

__all__ = [
    "USER_STAGE",
    "Import",
    "Segment",
    "Stage",
    "guard_gradients",
    "is_differentiable",
    "reaches",
    "run_backward",
    "version",
]

USER_STAGE = -1
"""Number of the stage that stands for the user's code, which passes inputs and receives outputs."""

_segment_keys = itertools.count()
# Key of a thread-local flag: a segment's backward is running. Autograd copies the flag to its own device threads.
_TLS_KEY = "parallelize.balanced.backward"


@dataclass(frozen=True)
class Stage:
    """A device, or some cores of the CPU, on which segments run.

    Args:
        cores: CPU cores on which a CPU stage runs; empty: any cores.
    """

    device: torch.device
    cores: frozenset[int] = frozenset()

    def bind_thread(self) -> None:
        """Make the stage's device current in the calling thread; on the CPU, bind the thread to the stage's cores."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index or 0)
        elif self.cores and sys.platform == "linux":
            # If the thread moved to other cores, their caches would not contain the stage's weights.
            os.sched_setaffinity(0, self.cores)


class Import(NamedTuple):
    """A tensor of another segment, its copy in this segment, and the version counter of the new copy."""

    source: torch.Tensor
    copy: torch.Tensor
    initial_version: int

    @property
    def is_changed(self) -> bool:
        """Return whether the copy was changed in place."""
        return version(self.copy) != self.initial_version


class Segment:
    """Work of a micro-batch on one stage, with its own autograd graph.

    Attributes:
        key: number that marks the tensors that this segment produces.
        casts: id of a stage parameter -> the parameter in half precision.
        imports: id of a tensor of another segment -> the tensor and its copy in this segment.
        exports: tensors that other segments or the user need, each with the leaf that replaces the tensor there.
        generators: generators of the segment's random numbers.
    """

    __slots__ = ("__weakref__", "casts", "exports", "generators", "imports", "key", "stage")

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.key = next(_segment_keys)
        self.casts: dict[int, torch.Tensor] = {}
        self.imports: dict[int, Import] = {}
        self.exports: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.generators = Generators(0)

    def export(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new leaf that replaces a tensor outside of this segment and receives its gradient."""
        leaf = guard_gradients(tensor.detach().requires_grad_())
        self.exports.append((tensor, leaf))
        return leaf

    def backward(self) -> None:
        """Run backward from exported tensors, given the leaves' gradients, to imported tensors and stage parameters."""
        wanted = [(tensor, leaf.grad) for tensor, leaf in self.exports if leaf.grad is not None]
        if wanted:
            torch._C._stash_obj_in_tls(_TLS_KEY, True)  # noqa: FBT003  # the stored value
            try:
                run_backward(*zip(*wanted, strict=True))
            finally:
                torch._C._stash_obj_in_tls(_TLS_KEY, False)  # noqa: FBT003  # the stored value
        self.casts.clear()
        self.imports.clear()
        self.exports.clear()


def run_backward(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, inputs: Sequence[torch.Tensor] = ()
) -> None:
    """Run autograd's backward engine directly: `torch.autograd.backward` may be patched to apply loss scaling.

    With `inputs`, gradients of these are computed and discarded; without, gradients are accumulated in the leaves.
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
    """Return whether backward can begin at a tensor; not at a parameter's view that was made under no_grad."""
    is_no_grad_view = tensor.grad_fn is None and tensor._base is not None and tensor._base.requires_grad
    return tensor.requires_grad and not is_no_grad_view


def reaches(tensor: torch.Tensor, leaves: Collection[int]) -> bool:
    """Return whether a tensor's autograd graph contains a leaf whose id is in `leaves`."""
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
    """Return how often a tensor was modified in place; 0 for inference tensors, which do not count this."""
    return 0 if tensor.is_inference() else tensor._version


def guard_gradients(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor raise ConfigError if it gets a gradient outside of a segment's backward; return the tensor."""
    tensor.register_hook(_refuse_outside_backward)  # type: ignore[no-untyped-call]  # torch's
    return tensor


def _refuse_outside_backward(_gradient: torch.Tensor) -> None:
    if not (torch._C._is_key_in_tls(_TLS_KEY) and torch._C._get_obj_in_tls(_TLS_KEY)):
        raise refusals.captured_tensor()
