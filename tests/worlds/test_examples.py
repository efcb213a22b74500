"""Every example does what it promises, run as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


# What the last line of each ends in, and the least that it has to reach.
LEAST = {
    "02_legacy.py": 0.85,
    "05_evaluation.py": 0.85,
    "06_accumulation.py": 0.85,
    "07_ddp2_nce.py": 0.85,
    "08_fsdp.py": 0.85,
    "09_balanced.py": 0.85,
}


def last_line(script: str) -> str:
    """What an example prints last."""
    command = [sys.executable, str(EXAMPLES / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def accuracy(script: str) -> float:
    """The accuracy at the end of an example's last line."""
    found = re.search(r"accuracy (?:on 360 unseen images )?(\d\.\d+)$", last_line(script))
    assert found
    return float(found[1])


@pytest.mark.parametrize("script", LEAST)
def test_it_learns(script: str) -> None:
    """The example trains to what its way of training can reach in a few seconds."""
    assert accuracy(script) >= LEAST[script]


def test_drawn_digits_look_like_digits() -> None:
    """The generator's mean picture is at most half as far from the mean digit as noise is."""
    noise, drawn = re.findall(r"\d\.\d+", last_line("04_gan.py"))
    assert float(drawn) < float(noise) / 2


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*_digits*.py")))
def test_digits_are_recognised(script: str) -> None:
    """On one device and in two processes alike, at least 97 of 100 unseen digits are."""
    assert accuracy(script) >= 0.97


def test_every_example_is_run() -> None:
    """No file of examples/ is without its test here."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"01_digits.py", "01_digits_single.py", "04_gan.py", *LEAST}
