"""The questions to a machine with a GPU, asked of the pretended device: each has an answer, and is not in vain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="tests/gpu/day.sh asks a real device"),
]

SCRIPT = Path(__file__).parent / "five_minutes.py"
ROOT = SCRIPT.parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "name",
    [
        "new_groups_of_a_bound_default",
        "broadcast_of_a_transposed_tensor",
        "memory_of_one_more_communicator",
        "workspaces_of_cublas",
        "copies_overlap_compute",
        "average_ranks_waits",
        "average_sum_waits",
        "average_tokens_waits",
        "deterministic_products_warn",
        "two_ranks_train_as_one",
    ],
)
def test_a_question_has_the_expected_answer(name: str) -> None:
    """The pretended device answers as a real one is expected to."""
    done = run("--answer", name)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["is_expected"], done.stdout


def test_a_question_that_is_not_answered_is_shown_first_and_counted() -> None:
    """One that takes too long is killed, and the others are asked all the same."""
    names = ["workspaces_of_cublas", "memory_of_one_more_communicator"]
    done = run(*names, "--seconds-each", "0.1")
    lines = done.stdout.splitlines()
    assert done.returncode == 2
    assert [line.partition(":")[0] for line in lines] == [f"UNEXPECTED   {name}" for name in names]
    assert "none within 1 s" in lines[0]
