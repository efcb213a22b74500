"""The commonest mistakes of programs for several ranks: the error says what was done, and what to write instead."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import (
    SyncError,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    checkpoints,
    distributed,
    is_main,
    load,
    main_first,
    parallel_model,
    rank,
    save,
    shard_loader,
)

pytestmark = pytest.mark.slow

DATA = TensorDataset(torch.ones(40, 4), torch.ones(40, 1))


class Trained:
    """A model that is trained by a loop of the test."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = shard_loader(DataLoader(DATA, batch_size=5, shuffle=True))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = (self.model(inputs) - targets).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def breaks(trained: Trained) -> None:
    with parallel_model(trained.model):  # block
        for _epoch in range(3):  # loop
            for batch in trained.loader:
                trained.step(*batch)
            if rank() == 1:
                break


def breaks_under_fsdp(trained: Trained) -> None:
    with parallel_model(trained.model, backend="fsdp"):  # block
        for batch in trained.loader:  # loop
            trained.step(*batch)
            if rank() == 1:
                break


def breaks_before_a_loader(trained: Trained) -> None:
    with parallel_model(trained.model):  # block
        for _epoch in range(3):  # loop
            for batch in trained.loader:
                trained.step(*batch)
            if rank() == 0:
                break


def breaks_before_a_collective(trained: Trained) -> None:
    with parallel_model(trained.model):  # block
        for number, batch in enumerate(trained.loader):  # loop
            trained.step(*batch)
            if rank() == 1 and number == 1:
                break
            all_reduce(1.0, "mean")


def returns(trained: Trained) -> None:
    with parallel_model(trained.model):  # block
        for batch in trained.loader:  # loop
            trained.step(*batch)
            if rank() == 1:
                return


def continues(trained: Trained) -> None:
    with parallel_model(trained.model):  # block
        for number, batch in enumerate(trained.loader):  # loop
            if rank() == 1 and number == 1:
                continue
            trained.step(*batch)


def catches(trained: Trained) -> None:
    with parallel_model(trained.model):  # block
        for number, batch in enumerate(trained.loader):  # loop
            try:
                if rank() == 1 and number == 1:
                    raise ValueError("a bad batch")
                trained.step(*batch)
            except ValueError:
                pass


def catches_around_the_loop(trained: Trained) -> None:
    with parallel_model(trained.model):  # block
        try:
            for number, batch in enumerate(trained.loader):  # loop
                if rank() == 1 and number == 1:
                    raise ValueError("a bad batch")
                trained.step(*batch)
        except ValueError:
            pass


def loops_while(trained: Trained) -> None:
    loss, steps = 9.0, 0
    with parallel_model(trained.model):  # block
        while loss > 0:  # loop
            trained.step(*DATA[:5])
            steps += 1
            loss = 5.0 - steps - rank()


def loops_unequally(trained: Trained) -> None:
    with parallel_model(trained.model):  # block
        for _step in range(3 - rank()):  # loop
            trained.step(*DATA[:5])


# Function in which a rank leaves its loop -> what the fix names.
LEFT: dict[Callable[[Trained], None], str] = {
    breaks: "decide `break` by",
    breaks_under_fsdp: "decide `break` by",
    breaks_before_a_loader: "decide `break` by",
    breaks_before_a_collective: "decide `break` by",
    returns: "decide `return` by",
    continues: "decide `continue` by",
    catches: "leave out a step if `except`",
    catches_around_the_loop: "leave out a step if `except`",
    loops_while: "decide `while` by",
    loops_unequally: "decide the number of steps by",
}


def line_with(function: Callable[..., None], mark: str) -> int:
    """Return the line of a function that ends with a comment."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}"))


@distributed(processes=2)
def train(function: Callable[[Trained], None]) -> None:
    function(Trained())


def error_of(call: Callable[[], Any]) -> SyncError:
    with pytest.raises(SyncError) as caught:
        call()
    text = str(caught.value)
    # The message comes once, and no frame of torch or of this package follows the user's line.
    notes = "\n".join(caught.value.__notes__)
    assert text.partition("\n")[0][:60] not in notes
    assert "site-packages" not in notes
    assert "direct cause" not in notes
    return caught.value


@pytest.mark.parametrize("function", LEFT, ids=lambda function: function.__name__)
def test_a_rank_that_has_left_its_loop(function: Callable[[Trained], None]) -> None:
    """It is named with the loop and with the block at whose end it is; the fix names what stands in the loop."""
    text = str(error_of(lambda: train(function)))
    block, loop = line_with(function, "block"), line_with(function, "loop")
    assert f"has left the loop of line {loop} and is at the end of the block of line {block}" in text
    assert LEFT[function] in text
    if "except" not in LEFT[function]:
        assert "a number that is equal on all ranks: `all_reduce(value, 'mean')`" in text


def enters_alone(_trained: Trained, _path: Path) -> None:
    with main_first():
        pass


def steps_alone(trained: Trained, path: Path) -> None:
    with checkpoints(path.with_suffix(""), model=trained.model, every=1):
        pass


def loads_alone(trained: Trained, path: Path) -> None:
    load(path, model=trained.model)


# What every rank calls -> a call of it.
DOORS: dict[str, Callable[[Trained, Path], Any]] = {
    "save": lambda trained, path: save(path, model=trained.model),
    "load": loads_alone,
    "checkpoints": steps_alone,
    "all_reduce": lambda *_: all_reduce(1.0, "mean"),
    "all_gather": lambda *_: all_gather(1.0),
    "broadcast": lambda *_: broadcast(1.0),
    "loader.mean": lambda trained, _: trained.loader.mean(1.0),
    "barrier": lambda *_: barrier(),
    "main_first": enters_alone,
}


@distributed(processes=2)
def call_under_is_main(call: Callable[[Trained, Path], Any], path: Path) -> None:
    trained = Trained()
    with parallel_model(trained.model):
        for batch in trained.loader:
            trained.step(*batch)
        save(path, model=trained.model)
        if is_main():
            call(trained, path)


@pytest.mark.parametrize("name", DOORS)
def test_a_call_of_every_rank_under_is_main(name: str, tmp_path: Path) -> None:
    """The other rank is at the end of the block."""
    text = str(error_of(lambda: call_under_is_main(DOORS[name], tmp_path / "a.pt")))
    assert f"`{name}` is called by every rank: call it without `if is_main()`" in text
    assert "is at the end of the block of line" in text


@distributed(processes=2)
def save_after_the_block(path: Path) -> None:
    trained = Trained()
    with parallel_model(trained.model):
        trained.step(*DATA[:5])
    if rank() == 0:
        save(path, model=trained.model)


@distributed(processes=2)
def reduce_in_the_loop() -> None:
    trained = Trained()
    with parallel_model(trained.model):
        for batch in trained.loader:
            loss = trained.step(*batch)
            if rank() != 0:
                pass
            else:
                all_reduce(loss, "mean")


@distributed(processes=2)
def meet_in_other_calls() -> None:
    if is_main():
        barrier("saved")
    all_reduce(1.0, "mean")


def test_the_test_of_the_rank_is_named_in_other_places(tmp_path: Path) -> None:
    """After a block, where the other rank has returned, in the branch `else`, and where ranks meet in other calls."""
    text = str(error_of(lambda: save_after_the_block(tmp_path / "a.pt")))
    assert "`save` is called by every rank: call it without `if rank() == 0`" in text
    text = str(error_of(reduce_in_the_loop))
    assert "`all_reduce` is called by every rank: call it without the `else` of `if rank() != 0`" in text
    text = str(error_of(meet_in_other_calls))
    assert re.search(r"rank 0 is at barrier\('saved'\) \(\S+, under `if is_main\(\)`\)", text)


def test_what_a_user_reads(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """On the screen, the message stands once, without a line of torch or of this package, and with whole words."""
    ran = run_script(
        """
        import torch
        from parallelize import distributed, parallel_model, rank

        @distributed(processes=2)
        def train(model):
            with parallel_model(model):
                for step in range(9):
                    model(torch.ones(2, 4)).sum().backward()
                    if rank() == 1:
                        break

        train(torch.nn.Linear(4, 1))
        """,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.count("has left the loop of line 8 and is at the end of the block of line 7") == 1
    assert "site-packages" not in ran.stderr
    assert "parallelize/" not in ran.stderr.replace("parallelize.errors", "")
    assert re.search(
        r"the others: rank \d: (stopped|the same error|lost the connection at script.py:\d+)$", ran.stderr.strip()
    )
