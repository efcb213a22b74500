"""Every example does what it promises, run as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
MIGRATION = EXAMPLES / "13_migration"


# What the last line of each ends in, and the least that it has to reach.
LEAST = {
    "02_legacy.py": 0.85,
    "05_evaluation.py": 0.85,
    "06_accumulation.py": 0.85,
    "07_ddp2_nce.py": 0.85,
    "08_fsdp.py": 0.85,
    "09_balanced.py": 0.85,
}
# What these show, shorter tests show too.
REPEATING = {"05_evaluation.py", "06_accumulation.py", "07_ddp2_nce.py"}


def last_line(script: str, *, launcher: tuple[str, ...] = (), cwd: Path | None = None, **env: str) -> str:
    """What an example prints last."""
    command = [sys.executable, *launcher, str(EXAMPLES / script)]
    for _ in range(3):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=55, check=False, cwd=cwd, env={**os.environ, **env}
        )
        # Hand-written DDP under torchrun: Python's end races with threads that torch keeps, in about one of 20 runs.
        if not (launcher and "terminate called without an active exception" in done.stderr):
            break
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def accuracy(script: str) -> float:
    """The accuracy at the end of an example's last line."""
    found = re.search(r"accuracy (?:on 360 unseen images )?(\d\.\d+)$", last_line(script))
    assert found
    return float(found[1])


@pytest.mark.parametrize(
    "script", [pytest.param(each, marks=pytest.mark.soak) if each in REPEATING else each for each in LEAST]
)
def test_it_learns(script: str) -> None:
    """The example trains to what its way of training can reach in a few seconds."""
    assert accuracy(script) >= LEAST[script]


@pytest.mark.soak
def test_drawn_digits_look_like_digits() -> None:
    """The generator's mean picture is at most half as far from the mean digit as noise is."""
    noise, drawn = re.findall(r"\d\.\d+", last_line("04_gan.py"))
    assert float(drawn) < float(noise) / 2


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*_digits*.py")))
def test_digits_are_recognised(script: str) -> None:
    """On one device and in two processes alike, at least 97 of 100 unseen digits are."""
    assert accuracy(script) >= 0.97


@pytest.mark.soak
def test_a_gpt_learns_more_than_how_often_characters_are() -> None:
    """After a hundred steps in bf16 it tells unseen text at least 0.6 nats a character better."""
    by_frequency, by_model = map(float, re.findall(r"\d\.\d\d", last_line("03_gpt.py")))
    assert 3.0 < by_frequency < 3.5
    assert by_model < by_frequency - 0.6


def test_a_killed_run_ends_where_the_other_does() -> None:
    """Not a bit of the weights differs, and both have made all steps."""
    steps, steps_too, differ, right = re.findall(r"\d+(?:\.\d+)?", last_line("11_resume.py"))
    assert steps == steps_too == "138"
    assert (float(differ), float(right) > 0.85) == (0.0, True)


def test_the_notebook(tmp_path: Path) -> None:
    """Each cell runs; the function of a cell prints under the cell that calls it, and the model there is trained."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "12_notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # what is committed has no outputs of some machine
    nbclient.NotebookClient(notebook, timeout=50, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.get("outputs", ()) for cell in notebook.cells]
    printed = ["".join(each["text"] for each in some if each.get("name") == "stdout") for some in outputs]
    assert next(filter(None, printed)).startswith("train would run as\n  backend ")
    assert re.findall(r"^epoch (\d)", "\n".join(printed), re.MULTILINE) == [*"01234", *"01234"]
    first, last, right = map(float, re.findall(r"\d\.\d+", printed[-2].splitlines()[-1]))
    assert last < first / 2
    assert right >= 0.85


@pytest.mark.soak
@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_what_was_migrated_learns(name: str, tmp_path: Path) -> None:
    """On a machine without GPUs, by the two variables that the folder's README names."""
    line = last_line(
        f"13_migration/{name}/after.py", cwd=tmp_path, PARALLELIZE_PROCESSES="2", PARALLELIZE_NUM_NODES="1"
    )
    assert float(line.removeprefix("accuracy on 360 unseen images ")) >= 0.85


@pytest.mark.soak
def test_what_was_migrated_from_accelerate_learned_before(tmp_path: Path) -> None:
    """The script that the diff begins with is one that works."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    script = "13_migration/accelerate/before.py"
    line = last_line(script, launcher=launcher, cwd=tmp_path, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    assert float(line.removeprefix("accuracy on 360 unseen images ")) >= 0.85


@pytest.mark.soak
def test_what_was_migrated_from_ddp_trains_the_same_weights(tmp_path: Path) -> None:
    """Bit by bit, after 15 epochs in two processes."""
    weights = []
    for script, launcher, env in (
        ("before.py", ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"), {}),
        ("after.py", (), {"PARALLELIZE_PROCESSES": "2"}),
    ):
        line = last_line(f"13_migration/ddp/{script}", launcher=launcher, cwd=tmp_path, OMP_NUM_THREADS="1", **env)
        assert float(line.removeprefix("accuracy on 360 unseen images ")) >= 0.85
        weights.append(torch.load(tmp_path / "digits.pt"))
    before, after = weights
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_every_example_is_run() -> None:
    """No file of examples/ is without its test here, or in tests/slurm."""
    named = {"01_digits.py", "01_digits_single.py", "03_gpt.py", "04_gan.py", "11_resume.py", "12_notebook.ipynb"}
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {*named, *LEAST}
    assert {path.name for path in MIGRATION.iterdir() if path.is_dir()} == {"accelerate", "ddp", "lightning"}
