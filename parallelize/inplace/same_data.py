"""Warnings for ranks that train on the same data, or each on the whole dataset, from the first steps of a block."""

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
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from parallelize.hang_detection.stack_frames import user_stacklevel
from parallelize.inplace.forward_routing import count_routes
from parallelize.runtime.containers import leaves
from parallelize.runtime.context import Runtime, active
from parallelize.runtime.gradients import is_capturing
from parallelize.runtime.process_group import default_store
from parallelize.runtime.rank_comparison import fingerprint
from parallelize.runtime.replace_attribute import replace_attribute
from parallelize.runtime.rng_state import RNGState, global_generators

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

    A shuffled loader that is not sharded gives each rank other samples, and all samples in an epoch. The loader whose
    iterator was made last is compared, too: by its kind of sampler, and the length and first sample of its dataset.

    Args:
        run: runtime of this process.
        models: the models of the block.

    Attributes:
        hooks: context of the hooks on the parameters, and on the iteration of loaders.
        is_over: whether nothing is compared any more.
    """

    def __init__(self, run: Runtime, models: Sequence[nn.Module]) -> None:
        self._run, self._models = run, models
        self.hooks = contextlib.ExitStack()
        self._store = dist.PrefixStore(f"parallelize/same data/{next(_ids)}", default_store())
        self.is_over = False
        self._forward_count = 0
        self._inputs = ""
        self._loader: Any = None  # whose iterator was made last
        self._hashed_loader, self._dataset = None, ""
        iterate = DataLoader.__iter__

        def note_and_iterate(loader: Any) -> Any:
            self._loader = loader
            return iterate(loader)

        self.hooks.enter_context(replace_attribute(DataLoader, "__iter__", note_and_iterate))
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
            key = f"{number - 1}/{self._run.world.rank}"
            self._store.set(key, f"{self._inputs} {_gradient_hash(self._gradients)} {self._dataset}")
            self._gradients.clear()
        if number < _STEPS:
            self._inputs = _input_hash(inputs)
            if self._loader is not self._hashed_loader:
                self._hashed_loader, self._dataset = self._loader, _dataset_hash(self._loader, inputs)
        elif not self._run.world.is_main:
            self._stop()
        elif number > _STEPS:
            self._compare()

    def _stop(self) -> None:
        self.is_over = True
        self._loader = self._hashed_loader = None
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
        inputs, gradients, datasets = ([{each[part] for each in step} for step in steps] for part in range(3))
        if any(len(each) > 1 for each in inputs):
            found = set[str]().union(*datasets)
            if len(found) == 1 and found != {""}:
                samples = found.pop().partition("/")[0]
                self._warn(
                    f"ranks each read all {samples} samples of the dataset: wrap the loader in shard_loader, or, if an "
                    "epoch is to read them that often, call warnings.filterwarnings('ignore', '.*ranks each read')"
                )
            return
        computed = [each for each in gradients if each != {""}]
        if len(computed) > 1 and all(len(each) == 1 for each in computed):
            self._warn_of_same("local gradients")
            return
        changes = len({value for each in inputs for value in each if value}) == _STEPS
        if changes and (not computed or self._has_dropout()):
            self._warn_of_same("inputs")

    def _has_dropout(self) -> bool:
        """Whether dropout explains gradients that differ although all of the data is equal; targets may differ, too."""
        return any("Dropout" in type(each).__name__ for model in self._models for each in model.modules())

    def _warn_of_same(self, equal: str) -> None:
        self._warn(
            "ranks read the same data: wrap the loader in shard_loader, or, if the data is drawn from a generator, "
            f"seed that differently on each rank (in the first {_STEPS} forwards, the {equal} of "
            f"{' + '.join(type(each).__name__ for each in self._models)} were bitwise equal on all ranks)"
        )

    def _warn(self, text: str) -> None:
        flags = (active() or self._run).flags
        if _HAS_WARNED not in flags:
            flags.add(_HAS_WARNED)
            warnings.warn(f"{self._run.world.world_size} {text}", stacklevel=user_stacklevel())


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


def _dataset_hash(loader: Any, inputs: Any) -> str:
    """Return the length and a hash of the dataset that a loader reads in full on each rank, for a forward's inputs.

    "" if the loader is sharded, draws samples with replacement, or has not made the inputs. The first sample is read
    with equal random numbers on all ranks, which are restored.
    """
    sampler = getattr(loader, "sampler", None)
    is_full = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    size = loader.batch_size if is_full and type(loader.batch_sampler) is BatchSampler else None
    if size is None or not any(_is_strided(each) and each.dim() and len(each) == size for each in leaves(inputs)):
        return ""
    before = RNGState((), has_python=True)
    for each in global_generators(()).values():
        each.seed(0)
    try:
        first = _input_hash(loader.dataset[0])
        return f"{len(loader.dataset)}/{first}" if first else ""
    except Exception:  # noqa: BLE001 - a dataset of the user may raise anything
        return ""
    finally:
        before.restore()


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
