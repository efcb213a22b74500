"""One progress bar for all processes of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from parallelize.data.source import Reading

__all__ = ["with_bar"]

T = TypeVar("T")


def with_bar(batches: Iterator[T], reading: Reading[T], *, steps: int | None, label: str) -> Iterator[T]:
    """The batches, with a bar that counts the samples of all processes; for rank 0 only.

    Args:
        batches: of this process.
        reading: where they come from; it knows the samples of all processes.
        steps: how many batches there will be; None: unknown.
        label: written before the bar.
    """
    from tqdm.auto import tqdm  # here: in a notebook without ipywidgets it warns as soon as it is imported

    samples = reading.all_samples()
    unit, total = (" batches", steps) if samples is None else (" samples", samples)
    with tqdm(total=total, desc=label, unit=unit, dynamic_ncols=True) as bar:
        for step, batch in enumerate(batches):
            yield batch
            bar.update(1 if samples is None else reading.samples(step))
