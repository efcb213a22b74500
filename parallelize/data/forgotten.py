"""Warns of a forgotten shard_loader: a DataLoader of which each rank reads all in training.

    iter(loader)            its batches are to come from all of a map-style dataset
         |
    next, backward, next    a loop of training: a backward pass between two calls of next
         |
    summary in the store    once a line and dataset; no rank waits for another one here
         |
    main rank reads those   after later backward passes, which the ranks make together,
    of all ranks            and at the end of the block
         |
    all are equal           a warning

A rank that has loaded its own part has another summary, and one that evaluates alone has no
others to be compared with: there is no warning. Batches that are read without gradients are no
training.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from parallelize.data.copied_loader import copy_of, is_exactly
from parallelize.data.same_data import summary_of
from parallelize.data.units import order_fingerprint, to_python
from parallelize.run.context import Runtime
from parallelize.run.default_group import default_store
from parallelize.run.group_abort import is_interrupted
from parallelize.run.user_line import UserLine, user_line
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed
from parallelize.torch_patches.loaders import watching_loaders

# Datasets that are compared for one line: a function `fit(loader)` is called with several loaders,
# and a program may make a dataset in each epoch.
_MAX_JUDGED = 3


@dataclass
class _Loop:
    """A loop over a DataLoader.

    Args:
        loader: a copy of it, because a loop does not keep the loader itself alive.
        line: of the loop.
        iterator: of the loader; its callback forgets the loop.
        passes: number of backward passes when its latest batch was drawn for training; None: the
            batch was drawn without gradients, or there is none.
    """

    loader: DataLoader[Any]
    line: UserLine
    iterator: ref[Any]
    passes: int | None = None


@dataclass
class _Question:
    """Whether the ranks hold the same data: a question of the main rank.

    Args:
        line: of the loop.
        name: names the loader and the number of its samples.
        keys: of the store, one for each rank, which get the summaries.
        passes: number of backward passes since it was asked.
    """

    line: UserLine
    name: str
    keys: list[str]
    passes: int = 0


@contextlib.contextmanager
def telling_forgotten_loaders(run: Runtime) -> Iterator[None]:
    """Warn of DataLoaders that are read in training in the context, and that are not sharded.

    Args:
        run: of all blocks that are in the context, or are entered in it.
    """
    # The ranks that hold one tensor parallel model have to read the same data.
    if run.data_ranks.size == 1 or not dist.is_initialized():
        yield
        return
    watcher = _Watcher(run)
    with (
        subscribed(Order.BEGIN, watcher.around_backward),
        watching_loaders(watcher, watcher.unwatched),
    ):
        yield
    watcher.answer_all()


class _Watcher:
    """Watches the DataLoaders of a block for loops of training."""

    def __init__(self, run: Runtime) -> None:
        self._world, self._warnings = run.world, run.loader_warnings
        self.unwatched = run.loaders.unwatched
        # By the id of the iterator: a WeakKeyDictionary takes longer than a batch should.
        self._loops: dict[int, _Loop] = {}
        self._questions: list[_Question] = []

    def on_iter(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Note the beginning of a loop."""
        # With persistent workers the same iterator comes again in each epoch, and begins anew.
        self._loops.pop(id(iterator), None)
        if not _reads_alike_on_all_ranks(loader):
            return
        line = user_line()
        if line is not None and not self._is_judged(line, loader):
            forget = functools.partial(self._forget, id(iterator))
            self._loops[id(iterator)] = _Loop(copy_of(loader), line, ref(iterator, forget))

    def _forget(self, iterator_id: int, _iterator: object) -> None:
        self._loops.pop(iterator_id, None)

    def _is_judged(self, line: UserLine, loader: DataLoader[Any]) -> bool:
        judged = self._warnings.judged_datasets.get(line, set())
        return id(loader.dataset) in judged or len(judged) == _MAX_JUDGED

    def before_batch(self, iterator: Any) -> None:
        """Note the next batch of a loop; judge the loop if there was a backward pass since."""
        loop = self._loops.get(id(iterator))
        # A generator of the user's calls iter() where it is made, and is then sharded.
        if loop is None or self.unwatched.depth:
            return
        passes = self._warnings.passes
        if loop.passes is not None and loop.passes < passes:
            del self._loops[id(iterator)]
            self._judge(loop, loop.passes)
        elif torch.is_grad_enabled():
            loop.passes = passes
        else:
            loop.passes = None

    def around_backward(self, backward_pass: Pass, run_pass: Run) -> None:
        """Count a backward pass, and answer questions after it."""
        self._warnings.passes += 1
        run_pass(backward_pass)
        for question in tuple(self._questions):
            question.passes += 1
            # After 1, 2, 4, 8, ... passes: a look into the store takes longer than a batch should.
            if question.passes & (question.passes - 1) == 0:
                self._answer(question)

    def answer_all(self) -> None:
        """Answer the questions at the end of the block, where all ranks have met."""
        for question in tuple(self._questions):
            self._answer(question)

    def _judge(self, loop: _Loop, passes: int) -> None:
        """Put this rank's summary into the store, once for each line and dataset."""
        # After Ctrl-C, requests to the store fail.
        if is_interrupted() or self._is_judged(loop.line, loop.loader):
            return
        judged = self._warnings.judged_datasets.setdefault(loop.line, set())
        judged.add(id(loop.loader.dataset))
        # The warning about equal inputs was about this step of the loop, on all ranks.
        if self._warnings.same_inputs_at > passes:
            self._warnings.told_lines.add(loop.line)
            return
        store, world = default_store(), self._world
        folder = f"parallelize/loaders/{loop.line}"
        # The store of a group of the user's outlives the run: how often has this rank been here?
        number = store.add(f"{folder}/{world.rank}", 1)
        keys = [f"{folder}/{number}/{rank}" for rank in range(world.world_size)]
        store.set(keys[world.rank], _summary_text(loop.loader))
        # The other ranks do not know what the main rank has told, so it goes on to count with them.
        if world.is_main and loop.line not in self._warnings.told_lines:
            samples = len(_sampler_of(loop.loader))
            name = f"{samples} samples of the {type(loop.loader).__name__}"
            self._questions.append(_Question(loop.line, name, keys))

    def _answer(self, question: _Question) -> None:
        """Warn if the summaries of all ranks are in the store, and are equal."""
        if is_interrupted():
            return
        store = default_store()
        if not store.check(question.keys):
            return
        self._questions.remove(question)
        summaries = {store.get(key) for key in question.keys}
        is_same = len(summaries) == 1 and b"" not in summaries
        if not is_same or question.line in self._warnings.told_lines:
            return
        self._warnings.told_lines.add(question.line)
        self._warnings.names_loader = True
        question.line.warn(
            f"each of {self._world.world_size} ranks reads all {question.name} at {question.line}: "
            "use shard_loader(loader). If that is intended, call warnings.filterwarnings('ignore', "
            "'each of .* ranks reads all')"
        )


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of indices, which torch's BatchSampler groups."""
    batches: Any = loader.batch_sampler
    return loader.sampler if batches is None else getattr(batches, "sampler", None)


def _reads_alike_on_all_ranks(loader: DataLoader[Any]) -> bool:
    """Return whether a loader certainly reads the same samples on each rank that has the same data.

    Samplers of other classes than torch's may divide the samples, as DistributedSampler does, and
    iterable datasets may divide themselves.
    """
    if isinstance(loader.dataset, IterableDataset):
        return False
    batches = loader.batch_sampler
    if batches is not None and not is_exactly(batches, BatchSampler):
        return False
    sampler = _sampler_of(loader)
    if is_exactly(sampler, RandomSampler):
        # What is drawn with replacement, or only in part, is no epoch of the dataset.
        return not sampler.replacement and len(sampler) == len(sampler.data_source)
    return is_exactly(sampler, SequentialSampler) or is_exactly(sampler, SubsetRandomSampler)


def _summary_text(loader: DataLoader[Any]) -> str:
    """Return a text that is equal on ranks that read the same samples; "" if not certain."""
    summary = summary_of(loader)
    if not summary.is_comparable:
        return ""
    # Of a SubsetRandomSampler, on whose order the ranks need not agree. Keys may be of any types.
    indices = to_python(getattr(_sampler_of(loader), "indices", ()))
    return f"{summary.to_text()} {order_fingerprint(sorted(map(str, indices)))}"
