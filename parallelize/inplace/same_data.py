"""Warning for ranks that all train on the same data, found by comparing the first steps of a block."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.hang_detection.stack_frames import user_stacklevel
from parallelize.inplace.forward_routing import count_routes
from parallelize.runtime.containers import leaves
from parallelize.runtime.context import Runtime, active
from parallelize.runtime.gradients import is_capturing
from parallelize.runtime.process_group import default_store
from parallelize.runtime.rank_comparison import fingerprint

__all__ = ["SameDataCheck", "same_data_check"]

_HAS_WARNED = "warned of equal data"  # in Runtime.flags
_STEPS = 3  # forwards that are compared
_MAX_FORWARDS = 20  # forwards in which rank 0 looks for the hashes of the others
_MAX_ELEMENTS = 2**20  # of an input tensor that are hashed


@contextlib.contextmanager
def same_data_check(run: Runtime, models: Sequence[nn.Module]) -> Iterator[SameDataCheck | None]:
    """Yield the check for a block that is about to start; None for one process, and for a block inside another.

    The models of an inner block may legally be called with equal inputs: a criterion with parameters, for example, with
    features gathered from all ranks.
    """
    if run.world.world_size == 1 or count_routes() > 0:
        yield None
        return
    check = SameDataCheck(run, models)
    with check.hooks:
        yield check


class SameDataCheck:
    """Compares the inputs and local gradients of a block's first forwards across ranks, without waiting for any rank.

        forwards 0, 1, 2    hash the inputs; hooks on the parameters hash the gradients before they are averaged
        forwards 1, 2, 3    post the hashes of the forward before to the process group's store
        forwards 4 to 19    rank 0 looks for the hashes of all ranks, and compares them: usually in forward 4, as all
                            ranks have begun forward 3 when its gradients are averaged

    All ranks do the same work if their gradients are bitwise equal. Inputs that are equal and change from step to
    step are the same data, too, if dropout may make the gradients differ; else these differ by their targets. The
    forwards of all models of the block have to agree.

    Args:
        run: runtime of this process.
        models: the models of the block.

    Attributes:
        hooks: context of the hooks on the parameters.
        is_over: whether nothing is compared any more.
    """

    def __init__(self, run: Runtime, models: Sequence[nn.Module]) -> None:
        self._run, self._models = run, models
        self.hooks = contextlib.ExitStack()
        self._store = dist.PrefixStore(f"parallelize/same data/{next(_ids)}", default_store())
        self.is_over = False
        self._forward_count = 0
        self._inputs = ""
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by parameter: fingerprints and magnitudes

    def before_forward(self, inputs: Any) -> None:
        """Hash the inputs of a forward with grad mode on, and post the hashes of the forward before.

        Args:
            inputs: the arguments of the forward.
        """
        if self.is_over or torch.compiler.is_compiling():  # called while torch.compile traces the user's function
            return
        number = self._forward_count
        if is_capturing() or number == _MAX_FORWARDS:
            self._stop()
            return
        self._forward_count += 1
        if number == 0 and not self._run.config.backend.shards_gradients:  # their hooks get averaged gradients
            self._add_hooks()
        if 0 < number <= _STEPS:
            key, value = f"{number - 1}/{self._run.world.rank}", f"{self._inputs} {_gradient_hash(self._gradients)}"
            self._store.set(key, value)
            self._gradients.clear()
        if number < _STEPS:
            self._inputs = _input_hash(inputs)
        elif not self._run.world.is_main:
            self._stop()
        elif number > _STEPS:
            self._compare()

    def _stop(self) -> None:
        self.is_over = True
        self.hooks.close()

    def _add_hooks(self) -> None:
        parameters: Any = [each for model in self._models for each in model.parameters() if each.requires_grad]
        # Inside torch.func.functional_call, the model has other tensors instead of parameters.
        for index, parameter in enumerate([each for each in parameters if each.is_leaf]):
            hook = functools.partial(self._on_gradient, index)
            self.hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not 0 < self._forward_count <= _STEPS or is_capturing():
            return
        if _is_strided(gradient) and gradient.is_floating_point():
            magnitude = torch.linalg.vector_norm(gradient.detach(), 1, dtype=torch.float64)
            self._gradients[index] = (fingerprint(gradient), magnitude)

    def _compare(self) -> None:
        """Warn if all ranks have posted hashes that tell of the same data."""
        keys = [f"{step}/{rank}" for step in range(_STEPS) for rank in range(self._run.world.world_size)]
        if not self._store.check(keys):
            return
        self._stop()
        posted = [each.decode().split(" ") for each in self._store.multi_get(keys)]
        size = self._run.world.world_size
        steps = [posted[first : first + size] for first in range(0, len(posted), size)]
        inputs, gradients = ([{each[part] for each in step} for step in steps] for part in (0, 1))
        if any(len(each) > 1 for each in inputs):
            return
        computed = [each for each in gradients if each != {""}]
        if len(computed) > 1 and all(len(each) == 1 for each in computed):
            self._warn("local gradients")
            return
        changes = len({value for each in inputs for value in each if value}) == _STEPS
        if changes and (not computed or self._has_dropout()):
            self._warn("inputs")

    def _has_dropout(self) -> bool:
        """Whether dropout explains gradients that differ although all of the data is equal; targets may differ, too."""
        return any("Dropout" in type(each).__name__ for model in self._models for each in model.modules())

    def _warn(self, equal: str) -> None:
        flags = (active() or self._run).flags
        if _HAS_WARNED in flags:
            return
        flags.add(_HAS_WARNED)
        warnings.warn(
            f"{self._run.world.world_size} ranks read the same data: wrap the loader in shard_loader, or, if the data "
            f"is drawn from a generator, seed that differently on each rank (in the first {_STEPS} forwards, the "
            f"{equal} of {' + '.join(type(each).__name__ for each in self._models)} were bitwise equal on all ranks)",
            stacklevel=user_stacklevel(),
        )


_ids = itertools.count()  # all ranks enter blocks in the same order


def _input_hash(inputs: Any) -> str:
    """Return a hash of a forward's inputs; "" if they have no tensors, or parts whose values cannot be read."""
    found, has_tensor = hashlib.blake2b(digest_size=8), False
    for leaf in leaves(inputs):
        if _is_strided(leaf):
            has_tensor = True
            try:
                text = f"{tuple(leaf.shape)} {leaf.dtype} {_checksum(leaf)}"
            except RuntimeError:  # e.g. a tensor inside torch.func.vmap
                return ""
        elif leaf is None or isinstance(leaf, (str, bytes, int, float)):
            text = repr(leaf)
        else:
            return ""
        found.update(text.encode())
    return found.hexdigest() if has_tensor else ""


def _is_strided(value: Any) -> bool:
    """Whether a value is a plain tensor: no subclass, and not sparse, as converting it could take gigabytes."""
    return type(value) is torch.Tensor and value.layout is torch.strided


def _checksum(tensor: torch.Tensor) -> int:
    values = tensor.detach().reshape(-1)
    return int(fingerprint(values[:: values.numel() // _MAX_ELEMENTS + 1]))


def _gradient_hash(gradients: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Return a hash of gradients; "" if all are zero, or if one is not finite."""
    if not gradients:
        return ""
    indices = sorted(gradients)
    device = gradients[indices[0]][0].device
    bits, magnitudes = (torch.stack([gradients[each][part].to(device) for each in indices]) for part in (0, 1))
    if not 0 < magnitudes.sum().item() < math.inf:
        return ""
    return hashlib.blake2b(repr((indices, bits.tolist())).encode(), digest_size=8).hexdigest()
