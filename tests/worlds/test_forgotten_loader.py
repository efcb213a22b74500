"""A DataLoader of which each rank reads all samples in training is told once, at the line of its loop."""

from __future__ import annotations

import itertools
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from parallelize import distributed, parallel_model, rank, shard_loader

SAMPLES = 24
Step = Callable[..., None]


def samples() -> torch.Tensor:
    return torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))


class Rows(Dataset[torch.Tensor]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Noisy(Rows):
    """Its augmentation draws from the global generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + torch.randn(3) + np.random.rand()


class Keyed(Rows):
    """Only its sampler knows its keys."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, int):
            raise TypeError("keys are strings")
        return self.rows[int(index)]


class Own(Dataset[torch.Tensor]):
    """Its generator of its own is of the rank."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(rank())

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3, generator=self.generator)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(samples()[rank() :: 2])


class ByRank(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(rank(), SAMPLES, 2))

    def __len__(self) -> int:
        return SAMPLES // 2


class Generated(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():  # told
            yield batch * 2


class Wrapped:
    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


def loader(dataset: Any = None, kind: type[DataLoader[Any]] = DataLoader, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 4, "shuffle": True, **options}
    return kind(Rows(samples()) if dataset is None else dataset, **options)


def whole_epoch(step: Step) -> None:
    for batch in loader():  # told
        step(batch)


def made_anew_in_each_epoch(step: Step) -> None:
    for _ in range(5):
        for batch in loader():  # told
            step(batch)


def twice(step: Step) -> None:
    batches = loader()
    for _ in range(2):
        for batch in batches:  # told
            step(batch)


def one_batch_an_epoch(step: Step) -> None:
    batches = loader(batch_size=SAMPLES)
    for _ in range(2):
        for batch in batches:  # told
            step(batch)


def enumerated(step: Step) -> None:
    for _, batch in enumerate(loader()):  # told
        step(batch)


def zipped(step: Step) -> None:
    for first, second in zip(loader(), loader(), strict=True):  # told
        step(first + second)


def sliced(step: Step) -> None:
    for batch in itertools.islice(loader(), 3):  # told
        step(batch)


def by_next(step: Step) -> None:
    batches = iter(loader())  # told
    for _ in range(3):
        step(next(batches))


def of_a_subclass(step: Step) -> None:
    for batch in loader(kind=Generated):
        step(batch)


def with_a_generator(step: Step) -> None:
    for batch in loader(generator=torch.Generator().manual_seed(rank())):  # told
        step(batch)


def with_workers(step: Step) -> None:
    for batch in loader(num_workers=1):  # told
        step(batch)


def with_persistent_workers(step: Step) -> None:
    batches = loader(num_workers=1, persistent_workers=True)
    for _ in range(2):
        for batch in batches:  # told
            step(batch)


def of_a_subset(step: Step) -> None:
    for batch in loader(shuffle=False, sampler=SubsetRandomSampler(range(12))):  # told
        step(batch)


def augmented(step: Step) -> None:
    for batch in loader(Noisy(samples())):  # told
        step(batch)


def evaluated_in_between(step: Step) -> None:
    for batch in loader():  # told
        step(batch)
        for _ in loader():
            pass


def evaluated_by_next(step: Step) -> None:
    held_out = iter(loader())
    for batch in loader():  # told
        step(batch)
        with torch.no_grad():
            next(held_out)


def after_other_data(step: Step) -> None:
    for batches in (loader(Rows(samples()[rank() :: 2])), loader(), loader()):
        for batch in batches:  # told
            step(batch)


def accumulated_over_equal_batches(step: Step) -> None:
    for number, batch in enumerate(loader(shuffle=False)):  # told
        step(batch, is_last=number % 3 == 2)


TOLD = [
    whole_epoch,
    made_anew_in_each_epoch,
    twice,
    one_batch_an_epoch,
    enumerated,
    zipped,
    sliced,
    by_next,
    of_a_subclass,
    with_a_generator,
    with_workers,
    with_persistent_workers,
    of_a_subset,
    augmented,
    evaluated_in_between,
    evaluated_by_next,
    after_other_data,
    accumulated_over_equal_batches,
]


def sharded(step: Step) -> None:
    for batch in shard_loader(loader()):
        step(batch)
    for batch in shard_loader(loader(num_workers=1)):
        step(batch)


def sharded_iterable(step: Step) -> None:
    for batch in shard_loader(Wrapped(loader(shuffle=False))):
        step(batch)
    for batch in shard_loader(each for each in loader(shuffle=False)):
        step(batch)


def distributed_sampler(step: Step) -> None:
    for batch in loader(shuffle=False, sampler=DistributedSampler(range(SAMPLES), 2, rank())):
        step(batch)


def sampler_of_the_user(step: Step) -> None:
    for batch in loader(shuffle=False, sampler=ByRank()):
        step(batch)


def divided_by_hand(step: Step) -> None:
    for batch in loader(Rows(samples()[rank() :: 2])):
        step(batch)
    for batch in loader(Subset(Rows(samples()), range(rank(), SAMPLES, 2))):
        step(batch)
    for batch in loader(shuffle=False, sampler=SubsetRandomSampler(range(rank(), SAMPLES, 2))):
        step(batch)
    for batch in loader(TensorDataset(samples()[rank() :: 2])):
        step(batch[0])


def drawn_by_each_rank(step: Step) -> None:
    for batch in loader(Own()):
        step(batch)


def divided_stream(step: Step) -> None:
    for batch in loader(Stream(), shuffle=False):
        step(batch)


def unreadable(step: Step) -> None:
    names = [str(number) for number in range(SAMPLES)]
    for batch in loader(Keyed(samples()), shuffle=False, sampler=SubsetRandomSampler(names)):
        step(batch)


def evaluation(step: Step) -> None:
    held_out = loader(num_workers=1, persistent_workers=True)
    for batch in shard_loader(loader()):
        for _ in held_out:
            break
        step(batch)
        for _ in held_out:
            pass
    with torch.no_grad():
        for _ in loader():
            pass
    if rank() == 0:
        for _ in loader():
            pass


SILENT = [
    sharded,
    sharded_iterable,
    distributed_sampler,
    sampler_of_the_user,
    divided_by_hand,
    drawn_by_each_rank,
    divided_stream,
    unreadable,
    evaluation,
]


def in_block(program: Callable[[Step], None], *, passes: int = 1, **options: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(batch: torch.Tensor, *, is_last: bool = True) -> None:
        for _ in range(passes):
            model(batch).square().mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    with parallel_model(model, **options):
        program(step)


def train(programs: list[Callable[[Step], None]], **options: Any) -> None:
    for program in programs:
        print(program.__name__, file=sys.stderr)
        in_block(program, **options)


def outputs(err: str, programs: list[Callable[[Step], None]]) -> dict[str, str]:
    """Return what the main rank has printed to stderr in each program."""
    parts = re.split(rf"^({'|'.join(program.__name__ for program in programs)})\n", err, flags=re.MULTILINE)
    assert parts[0] == ""
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def check_told(output: str, name: str) -> None:
    assert output.count("UserWarning") == 1, name
    found = re.match(
        r"(.*test_forgotten_loader.py):(\d+): UserWarning: each of 2 ranks reads all (12|24) samples of the "
        r"(DataLoader|Generated) at test_forgotten_loader.py:(\d+): use shard_loader\(loader\)\.",
        output,
    )
    assert found, name
    path, line, _, _, named = found.groups()
    assert line == named, name
    assert "# told" in linecache.getline(path, int(line)), name


@pytest.mark.parametrize("options", [{}, {"backend": "fsdp"}, {"passes": 4}], ids=["ddp", "fsdp", "accumulated"])
def test_loops_of_training_are_told_once_at_their_line(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """However the loader is iterated, and with evaluation in the loop."""
    programs = TOLD if not options else [twice, by_next, evaluated_in_between]
    distributed(processes=2)(train)(programs, **options)
    found = outputs(capsys.readouterr().err, programs)
    assert found.keys() == {program.__name__ for program in programs}
    for name, output in found.items():
        check_told(output, name)


def test_loaders_that_are_divided_or_only_evaluated_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is data that each rank has loaded or draws for itself, or that cannot be compared."""
    distributed(processes=2)(train)(SILENT)
    assert capsys.readouterr().err.splitlines() == [program.__name__ for program in SILENT]


def test_one_process_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    """It reads all samples once."""
    distributed(processes=1)(train)([twice])
    assert capsys.readouterr().err == "twice\n"


def two_lines(step: Step) -> None:
    for batch in loader():  # told
        step(batch)
    for batch in loader():  # told
        step(batch)


def test_each_line_of_a_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in a block within a block, and again in the next run."""
    train_again = distributed(processes=2)(lambda: in_block(lambda step: in_block(two_lines)))
    for _ in range(2):
        train_again()
        assert capsys.readouterr().err.count("each of 2 ranks reads all") == 2


def stopped(step: Step) -> None:
    for batch in loader():
        step(batch)
        raise KeyError("stop")


def test_an_exception_of_the_loop_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    """Torch's methods are back after it, and nothing is looked for."""

    @distributed(processes=2)
    def methods() -> list[str]:
        with pytest.raises(KeyError, match="stop"):
            in_block(stopped)
        found = DataLoader.__iter__, torch.utils.data.dataloader._BaseDataLoaderIter.__next__
        return [each.__module__ for each in found]

    assert set(methods()) == {"torch.utils.data.dataloader"}
