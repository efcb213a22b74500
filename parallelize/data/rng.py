"""Every generator of random numbers that data code draws from."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Chance", "OwnStream", "mixed", "seed_all"]


@dataclass(frozen=True)
class Chance:
    """The state of the global generators (torch's on the CPU, random's, numpy's if it is imported) and of others.

    Args:
        others: generators of samplers.
        states: theirs, in that order.
        of_torch: the state of torch's.
        of_python: that of random's.
        of_numpy: that of numpy's; None: numpy was not imported.
    """

    others: tuple[torch.Generator, ...]
    states: tuple[torch.Tensor, ...]
    of_torch: torch.Tensor
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls, others: Sequence[torch.Generator] = ()) -> Chance:
        """The state they are in."""
        numpy = _numpy()
        return cls(
            others=tuple(others),
            states=tuple(each.get_state() for each in others),
            of_torch=torch.get_rng_state(),
            of_python=random.getstate(),
            of_numpy=None if numpy is None else numpy.random.get_state(),
        )

    def restore(self) -> None:
        """Put all of them back into this state."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        if self.of_numpy is not None:
            _numpy().random.set_state(self.of_numpy)
        for generator, state in zip(self.others, self.states, strict=True):
            generator.set_state(state)


class OwnStream:
    """A stream of random numbers for code that draws from the global generators, which nobody else notices.

    Args:
        seed: of the stream.
        others: generators that belong to it, too.
    """

    def __init__(self, seed: int, others: Sequence[torch.Generator] = ()) -> None:
        self._seed, self._others = seed, others
        self._inside: Chance | None = None

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """A block that draws from the stream, and goes on where the last one ended."""
        outside = Chance.now(self._others)
        try:
            if self._inside is None:
                seed_all(self._others, self._seed)
            else:
                self._inside.restore()
            yield
            self._inside = Chance.now(self._others)
        finally:
            outside.restore()


def seed_all(others: Sequence[torch.Generator], seed: int) -> None:
    """Seed the global generators on the CPU, and others."""
    # Not torch.manual_seed, which seeds every accelerator, too.
    for generator in (torch.default_generator, *others):
        generator.manual_seed(seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def mixed(*parts: object) -> int:
    """A seed that is another one for any other parts."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _numpy() -> Any:
    return sys.modules.get("numpy")
