"""The random numbers from which a pass's order is drawn: those that one process would draw.

At the beginning of a pass, rank 0 tells the states of its random generators (see `from_rank_0`) and
draws the order from them, as one process does. The other ranks draw from the same states, and then
restore their own:

                                      rank 0              other ranks
    global generators                 move on             are as before
    those of the loader and sampler   move on             move on, from rank 0's states

What is drawn unit by unit while the user's loop runs (an endless sampler, an iterable dataset)
comes from states that all ranks have alike, whatever the loop draws: see `Drawing`. In one process
nothing is separated or restored, but for `seed=` and for a pass that was interrupted.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import itertools
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from random import SystemRandom
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from parallelize.agreement.plain_values import NotPlain, decoded, encoded
from parallelize.errors import ConfigError
from parallelize.hang_detection.from_rank_0 import ValuesOfRank0
from parallelize.run.context import Runtime, active_or
from parallelize.run.default_group import default_store
from parallelize.run.generators import GeneratorAccess, derive_seed, global_generators

States = dict[str, Any]
"""Name of a generator -> its state."""

_DEEPEST = 5
"""Samplers inside of samplers that are searched for generators."""

_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)

_CPU = torch.device("cpu")


class Draws:
    """The generators from which the orders of one loader are drawn.

    Args:
        run: runtime of this process.
        topic: name of the loader, under which rank 0 tells its states; the same on all ranks.
        holders: the loader, its samplers, or an iterable: what may hold generators of its own.
        seed: option of the loader. Every pass then draws from this seed and its number.
    """

    def __init__(self, run: Runtime, topic: str, holders: Iterable[Any], seed: int | None) -> None:
        self._run, self._topic, self._seed = run, topic, seed
        self._passes = 0
        # By rank 0, of the latest pass: for the next one it tells only what has changed.
        self._told: States = {}
        self._generators = Generators(holders)

    def held_states(self) -> str:
        """Return the states of the generators that the loader holds, as text; "": none."""
        states = self._generators.held_states()
        if not states:
            return ""
        return text_of_states(states)

    def set_held(self, text: str) -> None:
        """Set the generators that the loader holds to states of `held_states`."""
        if text:
            self._generators.set(states_from_text(text))

    def check(self, text: str) -> None:
        """Raise an error if a text does not hold states of the generators; change nothing."""
        if text:
            self._generators.check(states_from_text(text))

    def begin(self, number: int, saved: States | None) -> Drawing:
        """Begin to draw the order of a pass; on ranks other than 0 this waits for rank 0.

            a pass that was interrupted      from the states that were saved with it
            a loader with a seed             from the seed and the number of the pass
            one process                      from the generators as they are
            rank 0 of several                from the generators as they are, which it tells
            other ranks                      from what rank 0 has told

        Args:
            number: of the pass, which a loader with a seed draws from.
            saved: states at the beginning of an interrupted pass.

        Raises:
            ConfigError: there is no process group by which the ranks could agree.
            SyncError: rank 0 has not begun this pass within the timeout.
        """
        if saved is not None:
            return Drawing(self._generators, saved, restores=True)
        if self._seed is not None:
            seeded = self._generators.seeded(derive_seed(self._seed, number))
            return Drawing(self._generators, seeded, restores=True)
        states = self._generators.states()
        if self._run.world.world_size == 1:
            return Drawing(None, states, restores=False)
        self._passes += 1
        values = self._values()
        if self._run.world.is_main:
            values.tell(self._topic, self._passes, self._changed(states))
            self._told = states
            return Drawing(self._generators, states, restores=False)
        received = zlib.decompress(values.wait(self._topic, self._passes))
        self._told = self._told | decoded(received, device=_CPU)
        # Under `logical=` all ranks draw alike, so that their generators move on as rank 0's. So do
        # those of the ranks that hold one tensor parallel model with rank 0.
        is_as_rank_0 = active_or(self._run).data_ranks.rank == 0
        restores = self._run.config.logical is None and not is_as_rank_0
        return Drawing(self._generators, self._told, restores=restores)

    def _changed(self, states: States) -> bytes:
        """Return the states that differ from those that were told last."""
        changed = dict(states)
        for name, told in self._told.items():
            if _are_equal(states[name], told):
                del changed[name]
        # Half of the bytes of torch's state are zeros.
        return zlib.compress(encoded(changed), level=1)

    def _values(self) -> ValuesOfRank0:
        """Return the channel of rank 0's states: that of the active block, or of the group."""
        # A loader may be made before the block in which it is iterated.
        run = active_or(self._run)
        values = run.watchdog.values_of_rank_0
        if values is None and dist.is_initialized():
            world, store = self._run.world, dist.PrefixStore("parallelize/loaders", default_store())
            timeout_s = self._run.config.timeout.total_seconds()
            values = ValuesOfRank0(store, world.rank, world.world_size, timeout_s)
        if values is None:
            raise ConfigError(
                f"the {self._topic} is iterated before the ranks have a process group",
                why="all ranks read in the order of rank 0, whose random numbers they need",
                fix="iterate it in the decorated function or inside parallel_model, or use "
                "shard_loader(loader, seed=0)",
            )
        return values


class Generators:
    """The global generators, and those that a loader and its samplers hold.

    They are named, "torch", "random" and "numpy.random", and "generator 0" and so on for those that
    are held, in the order in which they are found: it is the same on all ranks, and in a program
    that resumes.

    Args:
        holders: the loader, its samplers, or an iterable.
    """

    def __init__(self, holders: Iterable[Any]) -> None:
        self._globals = global_generators([_CPU])
        self._held: dict[str, GeneratorAccess] = {}
        for number, generator in enumerate(generators_in(holders)):
            self._held[f"generator {number}"] = access_of(generator)

    def states(self) -> States:
        """Return the states of all generators."""
        return self.global_states() | self.held_states()

    def global_states(self) -> States:
        """Return the states of the global generators."""
        return {name: access.get() for name, access in self._globals.items()}

    def held_states(self) -> States:
        """Return the states of the generators that the loader holds."""
        return {name: access.get() for name, access in self._held.items()}

    def set(self, states: States) -> None:
        """Set all generators of which there is a state."""
        for name, access in self._all():
            if name in states:
                access.set(states[name])

    def seeded(self, seed: int) -> States:
        """Return the states of all generators as if they were seeded; leaves them as they are.

        Args:
            seed: below 2**63; NumPy's global generator takes its last 32 bits.
        """
        before = self.states()
        for _, access in self._all():
            access.seed(seed)
        states = self.states()
        self.set(before)
        return states

    def check(self, states: States) -> None:
        """Raise an error if these are no states of the generators; change nothing."""
        for name, access in self._all():
            if name in states:
                access.check(states[name])

    def _all(self) -> Iterator[tuple[str, GeneratorAccess]]:
        yield from self._globals.items()
        yield from self._held.items()


def seeded_drawing(holders: Iterable[Any], seed: int) -> Drawing:
    """Return a drawing that begins from a seed and leaves the program's generators alone.

    Args:
        holders: what may hold generators of its own.
        seed: of all generators.
    """
    generators = Generators(holders)
    return Drawing(generators, generators.seeded(seed), restores=True)


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of torch, `random` or NumPy that has a state."""
    # That of the operating system has none.
    return isinstance(value, _GENERATORS) and not isinstance(value, SystemRandom)


def access_of(generator: Any) -> GeneratorAccess:
    """Return the functions of a value that `is_generator`."""
    checks = {name: access.check for name, access in global_generators([_CPU]).items()}
    if isinstance(generator, torch.Generator):
        return GeneratorAccess(
            generator.get_state, generator.set_state, generator.manual_seed, checks["torch"]
        )
    if isinstance(generator, random.Random):
        return GeneratorAccess(
            generator.getstate, generator.setstate, generator.seed, checks["random"]
        )
    if isinstance(generator, np.random.RandomState):
        return GeneratorAccess(
            functools.partial(generator.get_state, legacy=False),
            generator.set_state,
            lambda seed: generator.seed(seed % 2**32),
            checks["numpy.random"],
        )
    bits = generator.bit_generator

    def get() -> Any:
        return bits.state

    def set_state(state: Any) -> None:
        bits.state = state

    def seed(number: int) -> None:
        bits.state = type(bits)(number).state

    def check(state: Any) -> None:
        if isinstance(bits, np.random.MT19937):
            checks["numpy.random"](state)
        type(bits)(0).state = state

    return GeneratorAccess(get, set_state, seed, check)


class Drawing:
    """The drawing of one pass's order, in blocks: each goes on from where the last one has ended.

    On rank 0 the program's generators move on by what a block draws, as in one process, unless the
    program has drawn from them since the last block: then its numbers and the order's are apart
    from there on, because the other ranks do not see what the program draws.

    Args:
        generators: from which is drawn; None: in one process, whose generators just move on.
        states: from which it begins.
        restores: whether the program's global generators are not to be changed.

    Attributes:
        states: at the beginning of the pass.
    """

    def __init__(self, generators: Generators | None, states: States, *, restores: bool) -> None:
        self.states = states
        self._generators, self._restores = generators, restores
        self._next_states = states
        self._handed_over = states  # to the program, at the end of the last block

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Let the block draw.

        The first block also sets the generators that the loader holds. Later ones do not: nobody
        else draws from them, and `_next_states` has only the global ones.
        """
        if self._generators is None:
            yield
            return
        before = self._generators.global_states()
        self._generators.set(self._next_states)
        try:
            yield
        finally:
            self._next_states = self._generators.global_states()
            self._hand_over(before)

    def _hand_over(self, before: States) -> None:
        """Restore the generators that the program has drawn from since the last block, or all.

        Once apart, they stay apart: in `_handed_over` they keep the state from before.

        Args:
            before: states of the global generators before the block.
        """
        assert self._generators is not None
        restored, moved = {}, {}
        for name, state in before.items():
            if self._restores or not _are_equal(state, self._handed_over[name]):
                restored[name] = state
            else:
                moved[name] = self._next_states[name]
        self._generators.set(restored)
        self._handed_over = self._handed_over | moved

    def first_of(self, units: Iterable[Any]) -> Iterator[Any]:
        """Return units: the first is drawn now, in a block, and the others as each rank draws."""
        with self.block():
            iterator = _iterator(units)
            drawn = list(itertools.islice(iterator, 1))
        return itertools.chain(drawn, iterator)

    def stream(self, units: Iterable[Any], size: int, *, first: int | None = None) -> Iterator[Any]:
        """Yield units, which are drawn in blocks.

        Args:
            units: an iterable of them.
            size: number of units in a block.
            first: number of those in the first block; None: `size`.
        """
        size_of_first = first or size
        with self.block():
            iterator = _iterator(units)
            drawn = list(itertools.islice(iterator, size_of_first))
        yield from drawn
        if len(drawn) < size_of_first:
            return
        while True:
            with self.block():
                drawn = list(itertools.islice(iterator, size))
            yield from drawn
            if len(drawn) < size:
                return


def _are_equal(state: Any, other: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, np.ndarray):
        return np.array_equal(state, other)
    if isinstance(state, dict):
        return all(_are_equal(value, other[name]) for name, value in state.items())
    return bool(state == other)


def _iterator(units: Iterable[Any]) -> Iterator[Any]:
    """Return a generator of the units.

    itertools.islice and chain call iter() of what they get each time. An iterator of the user's may
    begin anew then; a generator does not.
    """
    for unit in units:  # noqa: UP028 - `yield from` would do the same as itertools
        yield unit


def text_of_states(states: States) -> str:
    """Return states as text, for files."""
    return base64.b64encode(encoded(states)).decode()


def states_from_text(text: str) -> States:
    """Return the states in a text of `text_of_states`.

    Raises:
        ValueError: the text does not come from that function.
    """
    try:
        states = decoded(base64.b64decode(text, validate=True), device=_CPU)
    except (binascii.Error, NotPlain, ValueError) as error:
        raise ValueError("no states of random generators") from error
    if not isinstance(states, dict):
        raise ValueError("no states of random generators")  # noqa: TRY004 - a value of a file
    return states


def samplers_in(sampler: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """Yield a sampler, then those that it holds.

    Args:
        sampler: a sampler, or anything that may hold one.
        depth: number of samplers inside of samplers that are looked into.
    """
    yield sampler
    if not depth:
        return
    for inner in (getattr(sampler, "sampler", None), *getattr(sampler, "__dict__", {}).values()):
        if isinstance(inner, Sampler):
            yield from samplers_in(inner, depth - 1)


def generators_in(holders: Iterable[Any]) -> Sequence[Any]:
    """Return the generators that objects, and samplers in them, hold, each once.

    They are those of torch on the CPU, of `random` and of NumPy.
    """
    values: list[Any] = []
    for holder in holders:
        for sampler in samplers_in(holder):
            values.append(getattr(sampler, "generator", None))
            values += getattr(sampler, "__dict__", {}).values()
    by_id: dict[int, Any] = {}
    for value in values:
        is_of_device = isinstance(value, torch.Generator) and value.device != _CPU
        if is_generator(value) and not is_of_device:
            by_id[id(value)] = value
    return list(by_id.values())
