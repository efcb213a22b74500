"""The states of generators on GPUs come back from a call, to a caller that uses a GPU and to one that uses none."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SCRIPT = """
import sys

import torch

from parallelize import device, distributed

how, count, *begins = sys.argv[1:]
options = {"gpus": (0,) * int(count), "seed": 3 if how == "seed" else None, "update_modules": how != "not updated"}
options["process_group_backend"] = "gloo"


def draw():
    if how == "raises" and torch.rand(1, device=device()) is not None:
        raise ZeroDivisionError
    return torch.rand(2, device=device()).tolist()


def call(function):
    try:
        return function()
    except ZeroDivisionError:
        return "raised"


if __name__ == "__main__":
    torch.manual_seed(5)
    if begins:
        torch.rand(2, device="cuda")
    function = draw if how == "plain" else distributed(**options)(draw)
    drawn = [call(function), call(function)]
    is_initialized = torch.cuda.is_initialized()
    drawn.append(torch.rand(2, device="cuda").tolist())
    torch.manual_seed(6)
    drawn.append(call(function))
    print(drawn)
    print(is_initialized)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the script, in a file."""
    path = tmp_path_factory.mktemp("random_states") / "script.py"
    path.write_text(SCRIPT)
    return path


@functools.cache
def drawn(script: Path, how: str, count: int, *begins: str) -> tuple[list[object], bool]:
    """Return what a script draws, and whether its calls have initialized CUDA there."""
    command = [sys.executable, "-W", "ignore", str(script), how, str(count), *begins]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, values, is_initialized = done.stdout.splitlines()
    return eval(values), eval(is_initialized)


@pytest.mark.parametrize("begins", [(), ("begins",)], ids=["caller without CUDA", "caller with CUDA"])
@pytest.mark.parametrize("count", [1, 2])
def test_calls_draw_the_numbers_of_one_process(script: Path, count: int, begins: tuple[str, ...]) -> None:
    """A second call draws the next numbers, then the caller; a seed of the caller's counts for the next call."""
    plain, _ = drawn(script, "plain", 1, *begins)
    first, second, after, seeded = plain
    assert len({str(each) for each in plain}) == 4
    values, is_initialized = drawn(script, "call", count, *begins)
    assert values == [first, second, after, seeded]
    assert is_initialized == (count == 1 or bool(begins))


@pytest.mark.parametrize("begins", [(), ("begins",)], ids=["caller without CUDA", "caller with CUDA"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_callers_generators_are_left_alone(script: Path, count: int, begins: tuple[str, ...]) -> None:
    """With `seed=`, without `update_modules`, and by a call that raises."""
    (first, *_), _ = drawn(script, "plain", 1, *begins)
    for how in ("seed", "not updated", "raises"):
        (one, two, after, _), _ = drawn(script, how, count, *begins)
        assert one == two
        assert after == first
