"""A call goes on from the caller's random states and gives rank 0's back; `seed=` makes it the same each time."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from ranks import free_port, outputs_of_ranks
from torch import nn

from parallelize import distributed, parallel_model, rank
from parallelize.cluster.world import Node
from parallelize.launchers.batch_launcher import BatchLauncher, NodeCall, outcomes_of

# Two Gaussian numbers are drawn at a time: the state of `random` and NumPy has the second.
Drawn = tuple[float, float, list[float]]
PROCESSES = pytest.mark.parametrize("processes", [1, 2])


def draw() -> Drawn:
    return random.gauss(0, 1), float(np.random.randn()), torch.rand(2).tolist()


def draw_and_fail() -> None:
    draw()
    raise ZeroDivisionError


def draw_in_another_function() -> tuple[Drawn, Drawn, Drawn]:
    return draw(), distributed(processes=2)(draw)(), draw()


def train() -> tuple[Drawn, list[float], Drawn]:
    """Draw numbers before, in and after a block that makes the ranks' numbers differ."""
    before, model = draw(), nn.Linear(2, 1)
    with parallel_model(model):
        mask = torch.nn.functional.dropout(torch.ones(16)).tolist()
    return before, mask, draw()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_states() -> tuple[object, ...]:
    python, numpy = random.getstate(), np.random.get_state()
    return python, numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()


def program(call: Callable[[], Any], caller: Callable[[], Any] = draw) -> list[Any]:
    """Return what two calls have drawn, and what the caller draws before, between and after them."""
    seed_all(5)
    return [caller(), call(), call(), caller(), call(), caller()]


@PROCESSES
@pytest.mark.parametrize("function", [draw, draw_in_another_function, train])
def test_calls_and_the_caller_draw_the_numbers_of_one_process(function: Callable[[], Any], processes: int) -> None:
    """A second call draws the next numbers, and the caller those after them, in a block and a nested call, too."""
    expected = program(function)
    assert expected[1] != expected[2]
    assert program(distributed(processes=processes)(function)) == expected


@PROCESSES
@pytest.mark.parametrize("function", [draw, train])
def test_with_a_seed_every_call_is_the_same_and_leaves_the_caller_alone(
    function: Callable[[], Any], processes: int
) -> None:
    """Rank 0 draws what a function draws that begins with the seed, also in a block."""
    seed_all(7)
    seeded = function()
    undisturbed = program(lambda: seeded)
    assert program(distributed(processes=processes, seed=7)(function)) == undisturbed
    assert distributed(processes=processes, seed=8)(function)() != seeded


@PROCESSES
def test_without_update_modules_the_caller_is_left_alone(processes: int) -> None:
    """Each call then begins with the same states."""
    call = distributed(processes=processes, update_modules=False)(draw)
    seed_all(5)
    before = rng_states()
    first, second = call(), call()
    assert rng_states() == before
    assert first == second == draw()


@PROCESSES
def test_a_call_that_raises_leaves_the_caller_alone(processes: int) -> None:
    """So the call can be repeated."""
    before = rng_states()
    with pytest.raises(ZeroDivisionError):
        distributed(processes=processes)(draw_and_fail)()
    assert rng_states() == before


def test_every_rank_begins_with_the_callers_states_or_the_seed() -> None:
    """Data is split, and models are initialized, alike on all ranks; `seed=` wins."""
    call = distributed(processes=2)(draw)
    for seed in (torch.seed, lambda: torch.manual_seed(7)):
        seed()
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        first, second = call.all_ranks()
        random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])
        assert first == second == draw()
    first, second = call.options(seed=7).all_ranks()
    assert first == second


def test_what_another_rank_draws_does_not_come_back() -> None:
    """Nor what it seeds."""

    @distributed(processes=2)
    def draw_more() -> None:
        if rank() == 1:
            seed_all(3)
            draw()

    before = rng_states()
    draw_more()
    assert rng_states() == before


@pytest.mark.slow
@pytest.mark.parametrize("options", ["processes=2", "processes=2, seed=7"])
def test_ranks_that_were_started_elsewhere_go_on(tmp_path: Path, options: str) -> None:
    """As under torchrun: a call runs in the process itself, which goes on, or is left alone with `seed=`."""
    script = tmp_path / "script.py"
    script.write_text(
        "from worlds.test_launch_seeds import distributed, draw, program\n"
        f"print(program(distributed({options})(draw)))\n",
    )
    seed_all(7)
    seeded = draw()
    expected = program((lambda: seeded) if "seed" in options else draw)
    assert [output.splitlines()[-1] for output in outputs_of_ranks(script, per_node=2)] == [str(expected)] * 2


@pytest.mark.slow
def test_every_node_goes_on(tmp_path: Path) -> None:
    """The callers on all nodes get the states of rank 0."""
    script = tmp_path / "script.py"
    script.write_text(
        "from worlds.test_launch_seeds import distributed, draw, program\n"
        "print(program(distributed(processes=1, num_nodes=2, timeout=60)(draw)))\n",
    )
    tests = Path(__file__).parents[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = []
    for number in range(2):
        variables = {**address, "NODE_RANK": str(number), "PYTHONPATH": f"{tests}:{tests.parent}"}
        running.append(
            subprocess.Popen(
                [sys.executable, str(script)], env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [output.splitlines()[-1] for output in outputs] == [str(program(draw))] * 2


def run_on_another_machine(call: NodeCall) -> bytes:
    return call.run(Node("127.0.0.1", free_port(), 0))


class OtherMachine(BatchLauncher):
    """Makes a call as an agent of `hosts=` or of Ray does, in a process of its own."""

    name: ClassVar[str] = "other machine"

    def launch(self, task: Any, *, node: Any, environ: Any) -> Any:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as machine:
            result = machine.submit(run_on_another_machine, NodeCall.of(task)).result()
            return outcomes_of([result])

    def submit(self, tasks: Any, *, at_most: Any, environ: Any) -> Any:
        raise NotImplementedError


@pytest.mark.slow
def test_a_call_on_another_machine_goes_on() -> None:
    """The states go there and come back with the pickled call."""
    call = distributed(processes=2, launcher=OtherMachine())(draw)
    assert program(call) == program(draw)
