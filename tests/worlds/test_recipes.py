"""Each recipe runs as a user runs it, what it prints shows that it worked, and the guide shows lines of the files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
GUIDE = ROOT / "examples" / "guides" / "recipes.md"


def last_line(recipe: str, **environment: str) -> str:
    """Run a recipe and return the last line that it prints."""
    done = subprocess.run(
        [sys.executable, str(RECIPES / recipe)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout.strip().splitlines()[-1]


def numbers(line: str) -> list[float]:
    """Return the numbers of a line, in order."""
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e[-+]\d+)?", line)]


# The recipes that train the same on any number of processes, because they divide each batch.
SAME_ON_ONE_PROCESS = ["contrastive.py", "lora.py", "mixture_of_experts.py", "muon.py", "torch_compile.py"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", SAME_ON_ONE_PROCESS)
def test_one_process_trains_the_same(recipe: str) -> None:
    """One process and two print the same numbers, up to rounding."""
    alone = numbers(last_line(recipe, PARALLELIZE_PROCESSES="1"))
    together = numbers(last_line(recipe, PARALLELIZE_PROCESSES="2"))
    # Rounding may move a few samples to another class, or to another expert.
    assert together == pytest.approx(alone, rel=0.02, abs=0.005)


@pytest.mark.slow
def test_muon() -> None:
    """Nearly all points are on the spiral that the model names."""
    _, accuracy = numbers(last_line("muon.py"))
    assert accuracy >= 0.97


@pytest.mark.slow
def test_lora() -> None:
    """Adapters of the three layers bring the loss below a fifth of what it was."""
    adapters, loss_before, loss_after = numbers(last_line("lora.py"))
    assert adapters == 6
    assert loss_after < loss_before / 5


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_mixture_of_experts(backend: str) -> None:
    """Each of the four experts has samples, and together they explain most of the variance."""
    *samples_of_experts, unseen, explained = numbers(last_line("mixture_of_experts.py", PARALLELIZE_BACKEND=backend))
    assert len(samples_of_experts) == 4
    assert sum(samples_of_experts) == unseen == 1024
    assert min(samples_of_experts) >= 100
    assert explained >= 0.75


@pytest.mark.slow
def test_actor_and_critic() -> None:
    """At the end, poles hardly fall any more."""
    *_, falls_in_first_round, falls_in_last_round = numbers(last_line("actor_critic.py"))
    assert falls_in_first_round > 50
    assert falls_in_last_round < 5


@pytest.mark.slow
def test_torch_compile(tmp_path: Path) -> None:
    """The compiler has written code, and the compiled model has learned the function."""
    (error,) = numbers(last_line("torch_compile.py", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)))
    assert error < 0.1
    assert list(tmp_path.rglob("*.py"))


@pytest.mark.slow
def test_resume_on_fewer() -> None:
    """A run of two processes that goes on in one ends with the weights of an uninterrupted run."""
    difference, accuracy = numbers(last_line("resume_on_fewer.py"))
    assert difference < 1e-4
    assert accuracy >= 0.9


@pytest.mark.slow
def test_contrastive() -> None:
    """The loss compares the samples of both processes, and the model finds the right texts."""
    compared, found, _ = numbers(last_line("contrastive.py"))
    assert compared == 128
    assert found >= 0.85


def test_every_recipe_is_run() -> None:
    """Each file of examples/recipes has a test in this file, and is linked in the guide."""
    tests, guide = Path(__file__).read_text(), GUIDE.read_text()
    for recipe in RECIPES.iterdir():
        if recipe.is_file():
            assert f'last_line("{recipe.name}"' in tests
            assert f"](../recipes/{recipe.name})" in guide


def sections() -> dict[str, str]:
    """Return the text of each section of the guide that shows a recipe, by its title."""
    titles_and_texts = re.split(r"^## (.*)\n", GUIDE.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(titles_and_texts[::2], titles_and_texts[1::2], strict=True))


@pytest.mark.parametrize("title", sections())
def test_the_guide_shows_lines_of_the_recipe(title: str) -> None:
    """Between lines of three dots, the lines of a block stand in the program like this, one after another."""
    text = sections()[title]
    block = re.search(r"```py\n(.*?)```", text, re.DOTALL)
    program = re.search(r"^Program: \[.*?\]\((.*?)\)", text, re.MULTILINE)
    assert block
    assert program
    program_lines = without_comments((GUIDE.parent / program[1]).read_text())
    for part in re.split(r"^ *\.\.\.\n", block[1], flags=re.MULTILINE):
        assert without_comments(textwrap.dedent(part)).strip() in program_lines, part


def without_comments(text: str) -> str:
    """Return the text with neither indentation nor comments."""
    return "\n".join(line.split("  # ")[0].strip() for line in text.splitlines())
