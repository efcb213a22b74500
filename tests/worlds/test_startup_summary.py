"""Rank 0 says once, when a run begins to train, what only the inside of a run knows."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import Self

from parallelize import DDPBackend, distributed, parallel_model, shard_loader
from parallelize.runtime.startup_summary import size_text


class Heard(logging.Handler):
    """Keeps what the package logs while it is open."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.addFilter(lambda record: "parameters" in record.getMessage())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger("parallelize").addHandler(self)
        logging.getLogger("parallelize").setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("parallelize").removeHandler(self)


def trained_for_two_blocks(**options: object) -> tuple[list[str], int, int]:
    """What was logged; the bytes of gradients, and of AdamW's state but for its counters, that this process held."""
    model = nn.Sequential(nn.Linear(64, 301), nn.Linear(301, 10))
    model[0].bias.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=16)
    gradients = state = 0
    with Heard() as heard:
        for _ in range(2):
            with parallel_model(model, optimizers=optimizer, **options):
                with torch.no_grad():
                    model(torch.zeros(1, 64))  # an evaluation before is no beginning
                for (x,) in shard_loader(loader):
                    model(x).sum().backward()
                    gradients = sum(bytes_of(each.grad) for each in model.parameters() if each.grad is not None)
                    optimizer.step()
                    optimizer.zero_grad()
                state = sum(
                    bytes_of(each[name]) for each in optimizer.state.values() for name in each if name != "step"
                )
    return heard.lines, gradients, state


def bytes_of(tensor: torch.Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).nbytes


def test_the_line_says_what_was_then_measured() -> None:
    """Once in a run, on rank 0, before the first step: arithmetic, traffic, precision and memory as they turn out."""
    (lines, gradients, state), (silent, _, _) = distributed(processes=2)(trained_for_two_blocks).all_ranks()
    weights = 4 * (64 * 301 + 301 + 301 * 10 + 10)
    text = (
        "Sequential: 22,585 parameters, 22,284 of them trained; batches: 16 x 2 processes = 32 global; "
        f"{size_text(gradients)} of gradients all-reduced a step; fp32; each process holds "
        f"{size_text(weights)} of parameters + {size_text(gradients)} of gradients + "
        f"{size_text(state)} of the optimizer's state"
    )
    assert (lines, silent) == ([text], [])


def test_gradients_that_travel_in_half_are_counted_so() -> None:
    """The hook halves the bytes, not the memory."""
    with_hook = distributed(processes=2, backend=DDPBackend(comm_hook="bf16"), amp="bf16")(trained_for_two_blocks)
    (line,), gradients, _ = with_hook()
    assert f"; {size_text(gradients / 2)} of gradients all-reduced as bf16 a step; O1 in bf16 (native); " in line
    assert f"+ {size_text(gradients)} of gradients +" in line


def test_what_a_hook_of_ones_own_sends_is_not_guessed() -> None:
    """The bytes are those that it is given, with PowerSGD as with a DistributedDataParallel that the user has made."""
    for options in ({"backend": DDPBackend(comm_hook="powersgd")}, {"wrap": with_own_hook}):
        (line,), gradients, _ = distributed(processes=2, **options)(trained_for_two_blocks)()
        assert f"; {size_text(gradients)} of gradients handed to a comm hook a step; " in line


def with_own_hook(module: nn.Module, world: object) -> nn.parallel.DistributedDataParallel:
    ddp = nn.parallel.DistributedDataParallel(module)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return ddp


def test_parts_are_counted_as_parts() -> None:
    """Under fsdp each process holds its part, and sends all."""
    ranks = distributed(processes=2, backend="fsdp")(whole_and_part).all_ranks()
    (line,), part, whole = ranks[0]
    size = size_text(whole)
    assert f"; {size} of gradients reduce-scattered a step; {size} of parameters gathered a step;" in line
    assert f"holds {size_text(part)} of parameters + {size_text(part)} of gradients + the optimizer's state" in line


def whole_and_part() -> tuple[list[str], int, int]:
    model = nn.Linear(100, 30)
    whole = sum(each.nbytes for each in model.parameters())
    with Heard() as heard, parallel_model(model):
        model(torch.zeros(2, 100)).sum().backward()
        part = sum(bytes_of(each) for each in model.parameters())
    return heard.lines, part, whole


def test_one_process_says_nothing(caplog) -> None:
    """Where nothing is divided there is no arithmetic."""
    with caplog.at_level("INFO", logger="parallelize"):
        lines, _, _ = distributed(processes=1)(trained_for_two_blocks)()
    assert lines == []


@pytest.mark.parametrize("asked", ["INFO", "inside", ""])
def test_who_listens_to_the_log_hears_the_workers(run_script, asked: str) -> None:
    """A caller that asked logging for INFO sees rank 0's line on stderr, once a call; one that did not sees nothing.

    So does a function that asks for it itself.
    """
    script = """
        import logging, sys, torch
        from parallelize import distributed, parallel_model
        if sys.argv[1:] == ["INFO"]:
            logging.basicConfig(level="INFO", format="%(name)s: %(message)s")

        @distributed(processes=2)
        def train(*asked):
            if "inside" in asked:
                logging.basicConfig(level="INFO", format="%(name)s: %(message)s")
            logging.getLogger("another").info("heard, too")
            model = torch.nn.Linear(1, 1)
            with parallel_model(model):
                model(torch.ones(1)).backward()

        train(*sys.argv[1:])
        train(*sys.argv[1:])
    """
    heard = run_script(script, args=(asked,)).stderr
    line = r"^parallelize: Linear: 2 parameters; 8 bytes of gradients all-reduced a step;"
    assert len(re.findall(line, heard, re.MULTILINE)) == (2 if asked else 0)
    assert heard.count("another: heard, too\n") == (2 if asked else 0)
