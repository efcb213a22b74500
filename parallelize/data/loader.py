"""ShardedLoader: what `shard_loader` returns; each `iter()` is this process's part of a pass."""

from __future__ import annotations

import contextlib
import inspect
import logging
import reprlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NoReturn, TypeVar

import torch
import wrapt
from torch.optim.swa_utils import update_bn

from parallelize.agreement.rank_consistency import ConsistencyCheck, run_checks
from parallelize.data.options import LoaderOptions, Position
from parallelize.data.prefetch import move_batches
from parallelize.data.results import gathered, mean_over_samples
from parallelize.data.same_data import (
    DataSummary,
    different_data_error,
    hold_different_data,
    summary_of,
)
from parallelize.data.source import Pass, Source
from parallelize.data.units import Tail
from parallelize.errors import ConfigError
from parallelize.gradients.batch_weights import weighing_loop
from parallelize.hang_detection.waiting import WaitKind, waiting_for
from parallelize.run.context import active_or, is_main
from parallelize.run.loader_weights import LoaderLoop
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.forward import route_of, routed_models

T = TypeVar("T")

_log = logging.getLogger("parallelize")


class ShardedLoader(wrapt.ObjectProxy[Any], Generic[T]):
    """A loader, made by `shard_loader`, that yields this process's part of each pass.

    All other attributes, and the class that `isinstance` checks, are those of the user's loader:
    this is a proxy of it, and attributes that are set are set on the user's.
    """

    def __init__(self, source: Source, options: LoaderOptions, name: str) -> None:
        super().__init__(source.loader)
        self._self_source, self._self_options, self._self_name = source, options, name
        self._self_run = source.run
        self._self_next = Position()  # where the next `iter()` begins
        self._self_pass: Pass | None = None  # the latest iterator's

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            f"it is one process's shard of a {self.__class__.__name__}: pass that loader to the "
            "function, and call shard_loader inside"
        )

    def __reduce__(self) -> NoReturn:
        self.__reduce_ex__(2)

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        self.__reduce_ex__(2)

    def __repr__(self) -> str:
        source = self._self_source
        data_ranks = source.data_ranks
        summary = source.batch_summary()
        rank = f"rank {data_ranks.rank} of {data_ranks.size}"
        if summary:
            rank += f", {summary}"
        name = f"{self.__class__.__name__} at {self._self_name}"
        return f"<ShardedLoader of the {name}: {rank}>"

    def __len__(self) -> int:
        """Count all batches of the active iterator, or of the next one if none is active.

        Raises:
            TypeError: the number is unknown, as that of a stream.
        """
        active, source = self._self_pass, self._self_source
        if active is not None and active.is_open:
            steps = source.steps(active.split)
        else:
            source.follow()
            steps = source.steps(source.split(self._self_next, self._tail(), source.length()))
        if steps is None:
            raise TypeError(f"the number of batches of this {self.__class__.__name__} is unknown")
        return steps

    def __iter__(self) -> Iterator[T]:
        """Start the next pass: the order is drawn with the first batch, or by workers now.

        Raises:
            ConfigError: no process would get a batch.
        """
        position, source = self._self_next, self._self_source
        source.follow()
        this_pass = source.start_pass(position, self._tail())
        split, size = this_pass.split, self._self_run.world.world_size
        if size > 1:
            _warn_of_update_bn(sys._getframe(1))
        if size > 1 and split.total and not split.start and not split.steps(0):
            raise ConfigError(
                f"no process gets a batch: {split.total} samples, {split.group} in a step of all",
                why="drop_last=True or tail='drop' leaves out an incomplete step",
                fix=f"use a batch size of at most {split.total // source.data_ranks.size}, or keep "
                "the last batch",
            )
        self._note_evaluation()
        self._self_next = Position(position.epoch + 1)
        self._self_run.loaders.passes += 1
        if self._self_pass is None or not self._self_pass.is_open:
            self._self_pass = this_pass
        return self._iterate(this_pass, self._batches(this_pass))

    def _tail(self) -> Tail:
        """Return the tail of the next pass: the option, else by whether gradients are enabled.

        Without gradients each sample comes once. Where all ranks run each forward together, as
        under fsdp, they still have to make equally many steps.
        """
        run, source = self._self_run, self._self_source
        if self._self_options.tail is not None:
            return self._self_options.tail
        if torch.is_grad_enabled():
            return source.default_tail()
        if run.world.world_size == 1:
            return "exact"
        return source.evaluation_tail(steps_together=_make_steps_together())

    def _note_evaluation(self) -> None:
        """Note, and say once, that a loader is read without gradients on several processes."""
        run = self._self_run
        is_by_option = self._self_options.tail is not None
        if torch.is_grad_enabled() or is_by_option or run.world.world_size == 1:
            return
        if not run.loaders.has_evaluated and run.world.is_main:
            text = (
                "without gradients, each sample comes once; loader.mean(values) is the mean over "
                "all of them"
            )
            if _make_steps_together():
                text = (
                    "ranks forward together, with padding: loader.mean(values) and "
                    "loader.gather(x) leave repeats out"
                )
            _log.info("%s: %s", self._self_name, text)
        run.loaders.has_evaluated = True

    def _iterate(self, this_pass: Pass, batches: Iterator[Any]) -> Iterator[T]:
        """Yield the batches of a pass, and note how far it is before each is used.

        Args:
            this_pass: the pass.
            batches: its batches, on this process's device.
        """
        run = self._self_run
        # A loader that a module makes at its import is used in a run that begins later.
        weights, loop = active_or(run).loader_weights, LoaderLoop()
        has_others = run.world.world_size > 1
        with contextlib.ExitStack() as stack:
            if has_others:  # of other tails, too: a loss may use batches of two loaders
                stack.enter_context(weighing_loop(weights, loop))
            stack.callback(this_pass.leave)
            for batch in batches:
                if this_pass.steps == 0:
                    self._warn_of_another_order(this_pass)
                if this_pass.steps == 0 and has_others:
                    self._compare_data()
                    self._compare_order(this_pass)
                if has_others:
                    weights.take_batch(loop, this_pass.weight(this_pass.steps))
                    loaders = active_or(run).loaders
                    loaders.shared_samples = self._shared_samples(this_pass)
                # An iterator inside of a loop over the same loader becomes the current one only
                # with its second batch: `next(iter(loader))` is only a look.
                if this_pass.steps or self._self_pass is None or not self._self_pass.is_open:
                    self._self_pass = this_pass
                if run.config.logical is not None:
                    parts = this_pass.parts(this_pass.steps)
                    run.loaders.note_parts(self._self_name, parts)
                this_pass.steps, this_pass.is_open = this_pass.steps + 1, True
                yield batch
            this_pass.is_exhausted = True
            self._self_pass = this_pass
            loop.end_epoch()

    def _shared_samples(self, this_pass: Pass) -> int:
        """Return the number of samples of this process in a batch that all processes share.

        0: each process has a batch of its own, or the order is not known, so that neither is the
        number.
        """
        if self._self_options.batch != "global" or this_pass.order is None:
            return 0
        return this_pass.count(this_pass.steps)

    def _batches(self, this_pass: Pass) -> Iterator[Any]:
        """Return the batches of a pass, on this process's device.

        Workers of an indexed loader start now, and draw the order for the batches that they fetch.
        """
        source, device, options = self._self_source, self._self_run.device, self._self_options
        unwatched = active_or(self._self_run).loaders.unwatched
        with unwatched:
            batches = unwatched.batches(source.batches(this_pass))
        if options.to_device and device != torch.device("cpu"):
            are_fresh = getattr(source.loader, "num_workers", 0) > 0
            batches = move_batches(batches, device, prefetch=options.prefetch, are_fresh=are_fresh)
        if options.progress and self._self_run.world.is_main:
            label = options.progress
            if label is True:
                label = f"epoch {this_pass.position.epoch}"
            from tqdm.auto import tqdm  # imported late: in a notebook without ipywidgets it warns

            total = source.steps(this_pass.split)
            bar = tqdm(batches, total=total, desc=label, unit=" batches", dynamic_ncols=True)
            batches = iter(bar)
        return batches

    def _compare_data(self) -> None:
        """Compare the dataset with that of the rank that came first, which may be any.

        It is done once for a line and a type of dataset.

        Raises:
            SyncError: this rank holds other data.
        """
        source, run = self._self_source, self._self_run
        values = run.watchdog.values_of_rank_0
        if values is None or not source.is_compared:
            return
        line, dataset = self._self_name.partition(" ")[0], source.loader.dataset
        topic = f"{line} {type(dataset).__qualname__}"
        if topic in run.loaders.compared_data:
            return
        run.loaders.compared_data.add(topic)
        rank, summary = run.world.rank, summary_of(source.loader)
        first = values.first_told(topic, summary.to_text())
        # Those of other ranks are empty, and differ from nothing.
        summaries = [DataSummary()] * run.world.world_size
        summaries[first.rank] = DataSummary.from_text(first.text)
        summaries[rank] = summary
        if hold_different_data(summaries):
            raise different_data_error(self._self_name, summaries)

    def _warn_of_another_order(self, this_pass: Pass) -> None:
        """Warn if a resumed pass has another order than the one that was interrupted."""
        saved = this_pass.position.order
        if not saved:
            return
        order = this_pass.fingerprint()
        if not order or order == saved:
            return
        # The hash of a stream is of the units that a step needs, and ends with their number: it
        # says nothing if the steps have another size now.
        if order.partition("/")[2] != saved.partition("/")[2]:
            return
        warnings.warn(
            f"the resumed epoch {this_pass.position.epoch} of {self._self_name} has another order "
            "or other samples than when its state was saved, so that samples may be repeated or "
            "skipped: seed generators and random splits, sort lists of files, and give a sampler "
            "that draws from a generator of its own a method set_epoch(epoch)",
            stacklevel=user_stacklevel(),
        )

    def _compare_order(self, this_pass: Pass) -> None:
        """Compare the order with those of the other ranks, at the model's first step.

        What code of the user has drawn, or a stream, is compared now: it may differ between ranks
        in more ways, and a loop without a model has no step.

        Raises:
            SyncError: this rank iterates another epoch, or in another order.
        """
        source, loaders = self._self_source, self._self_run.loaders
        position, order = this_pass.position, this_pass.fingerprint()
        steps = source.steps(this_pass.split)
        text = f"iterates epoch {position.epoch}"
        if position.start:
            text += f" from {position.start}"
        if steps is not None and this_pass.split.tail != "exact":
            text += f", {steps} batches"
        check = ConsistencyCheck(
            self._self_name,
            f"{text}, order {order or 'unknown'}",
            fix="use the same data and the same samplers on all processes, and train with a tail "
            "other than 'exact'; what draws random numbers of its own needs the same seed on all "
            "processes, and what shards itself divides='processes'",
        )
        # A loader that was made before the block of a script belongs to no run, and its passes to
        # that of the block.
        run = active_or(self._self_run)
        run.state.pending_checks.add(check)
        this_pass.checks = check, run.loaders.begin(source.batch_summary())
        is_drawn_by_torch = isinstance(this_pass.order, (range, torch.Tensor))
        if order and not is_drawn_by_torch:
            loaders.compared += 1
            run_checks(run.state.pending_checks, f"data/{position.epoch}/{loaders.compared}")

    def __enter__(self) -> ShardedLoader[T]:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut down persistent workers. The loader can be iterated again."""
        self._self_source.close()

    @property
    def epoch(self) -> int:
        """The epoch of the active iterator, or the next epoch if none is active; counted from 0.

        So `for epoch in range(loader.epoch, epochs)` goes on with an epoch that was interrupted.
        """
        epoch, _ = self._epoch_and_start()
        return epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next `iter()`, also on samplers and datasets with a `set_epoch`.

        The order of a shuffled loader depends on it only with `seed=`: as in one process, it is
        drawn from the random generators.

        Args:
            epoch: its number, from 0.
        """
        self._self_next, self._self_pass = Position(epoch), None
        self._self_source.set_epoch_of_data(epoch)
        self._self_source.set_counted_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as plain values.

        It is equal on all processes that have made equally many steps. In an epoch it has the
        states of the random generators at its beginning, from which the same order is drawn again.
        """
        position = self._position_to_save()
        return {
            "epoch": position.epoch,
            "start": position.start,
            "order": position.order,
            "states": position.states,
            "generators": self._self_source.draws.held_states(),
            "epoch_of_data": self._self_source.epoch_of_data(),
            **self._identity(position.start),
        }

    def _identity(self, start: int) -> dict[str, Any]:
        """Return what a state at a position must match.

        Args:
            start: number of units of its epoch before the position.
        """
        source = self._self_source
        if start:
            return source.identity | source.identity_within
        return source.identity

    def _position_to_save(self) -> Position:
        """Return the position after the latest batch.

        That of a pass without a batch is its beginning, which needs no states: the next pass draws
        from the generators as they are.
        """
        latest = self._self_pass
        if latest is None or latest.is_exhausted:
            return self._self_next
        epoch, start = self._epoch_and_start()
        if not start:
            return Position(epoch)
        return Position(epoch, start, latest.fingerprint(), latest.text_of_states())

    def _epoch_and_start(self) -> tuple[int, int]:
        """Return those of the position after the latest batch, without its hash and states."""
        latest = self._self_pass
        if latest is None or latest.is_exhausted:
            return self._self_next.epoch, self._self_next.start
        return latest.position.epoch, latest.split.start_after(latest.steps)

    def rank_state(self) -> dict[str, Any] | None:
        """Return a state of this process's dataset, from which a resumed epoch goes on, if any."""
        _, start = self._epoch_and_start()
        if not start:
            return None
        state: dict[str, Any] | None = self._self_source.recorded_state
        return state

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Let the epoch of the loaded position go on from a state of `rank_state`."""
        self._self_source.saved_state = state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next `iter()` yields the rest of the epoch, then epochs follow.

        Args:
            state: the result of `state_dict`. Loaders over map-style datasets and iterables of
                batches resume with another batch size and another number of processes, too.

        Raises:
            ConfigError: the state was saved with another seed. Loaders over iterable datasets, and
                those that shard themselves, also require the same number of processes and, within
                an epoch, the same batches.
        """
        self.check_position(state)
        source = self._self_source
        order, states = state.get("order", ""), state.get("states", "")
        self._self_next = Position(state["epoch"], state["start"], order, states)
        self._self_pass = None
        source.draws.set_held(state.get("generators", ""))
        source.set_counted_epoch(state["epoch"])
        if state.get("epoch_of_data") is not None:  # a sampler's length may depend on it
            source.set_epoch_of_data(state["epoch_of_data"])

    def check_position(self, state: Any) -> None:
        """Raise a ConfigError if `load_state_dict` cannot resume from a state; change nothing."""
        if not isinstance(state, Mapping):
            raise _no_position(f"a {type(state).__name__}")
        for name, default in (("epoch", None), ("start", None), ("epoch_of_data", 0)):
            number = state.get(name, default)
            if name == "epoch_of_data" and number is None:
                continue
            if type(number) is not int or not 0 <= number < 2**62:
                raise _no_position(f"{name}={reprlib.repr(number)}")
        for name in ("order", "states", "generators"):
            if type(state.get(name, "")) is not str:
                raise _no_position(f"{name}={reprlib.repr(state[name])}")
        source = self._self_source
        for name in ("states", "generators"):
            try:
                source.draws.check(state.get(name, ""))
            except Exception as error:  # each library raises its own
                raise _no_position(f"{name}={reprlib.repr(state[name])}") from error
        if source.is_beyond(state["start"]):
            raise _no_position(f"start={state['start']} of {source.length()} samples")
        for name, expected in self._identity(state["start"]).items():
            saved = state.get(name)
            if isinstance(saved, torch.Tensor) or saved != expected:
                raise ConfigError(
                    f"a state saved with {name}={reprlib.repr(saved)} is loaded with "
                    f"{name}={expected!r}",
                    why="the rest of the epoch would have other samples, or another order",
                    fix=f"restore the loader with {name}={reprlib.repr(saved)}, or start an epoch "
                    "with set_epoch()",
                )

    def check_rank_state(self, state: Any) -> None:
        """Raise a ConfigError if `load_rank_state` cannot take a state; change nothing."""
        is_state = isinstance(state, Mapping) and "state" in state
        for name, value_type in (("epoch", int), ("batches", int), ("next", str)):
            is_state = is_state and type(state.get(name)) is value_type
        if not is_state:
            raise _no_position(f"the state of a dataset {reprlib.repr(state)}")

    def gather(self, results: Any) -> Any:
        """Gather results of samples in dataset order; every process has to call it.

        Args:
            results: a tensor, or containers of tensors, with one row for each sample that this
                process was given since `iter()`, in the same order; for example torch.cat of the
                outputs of all batches.

        Returns:
            The same containers on every process, with one row for each sample that any process was
            given, sorted by index, without repeats.

        Raises:
            ConfigError: rows are missing, or the loader has no indices.
            SyncError: the processes have iterated different epochs or orders.
        """
        with waiting_for("loader.gather", wait_kind=WaitKind.CALL):
            return gathered(self._iterated("gather"), results)

    def mean(self, value: Any) -> float:
        """Average a value over the samples of all processes; every process has to call it.

        Args:
            value: the mean over the samples that this process was given since `iter()`, or a list
                or tensor with the mean of each of its batches; or a tensor with a value for each of
                its samples, of which repeats are left out. The mean of such values has the same
                bits at any number of processes, if the values have.

        Raises:
            ConfigError: some samples came twice, values are missing, or the loader has no indices.
            SyncError: the processes have iterated different epochs or orders.
        """
        with waiting_for("loader.mean", wait_kind=WaitKind.CALL):
            return mean_over_samples(self._iterated("mean"), value)

    def _iterated(self, method: str) -> Pass:
        latest, is_indexed = self._self_pass, self._self_source.is_indexed
        if latest is None or (is_indexed and not latest.has_begun):
            raise ConfigError(
                f"{method} on a loader that was not iterated",
                why="results belong to the samples that were iterated",
                fix="iterate the loader first",
            )
        return latest


def _make_steps_together() -> bool:
    """Whether all processes have to run each forward of a model in an open block, as under fsdp."""
    for model in routed_models():
        route = route_of(model)
        if route is not None and not route.owner.engine.is_replica:
            return True
    return False


def _no_position(what: str) -> ConfigError:
    return ConfigError(
        f"a loader cannot go on from {what}",
        why="it is not a position in this data, as state_dict() returns it",
        fix="load another checkpoint, or leave the loader out and start an epoch with set_epoch()",
    )


def _warn_of_update_bn(frame: Any) -> None:
    """Warn if torch's update_bn iterates, also through a progress bar: it runs no collectives."""
    code = inspect.unwrap(update_bn).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is not None and is_main():
        warnings.warn(
            "update_bn of a sharded loader gives each rank the batch norm statistics of its part "
            "of the data, and rank 0's are kept. For those of all data, pass the DataLoader "
            "itself: update_bn(loader, model, device())",
            stacklevel=user_stacklevel(),
        )
