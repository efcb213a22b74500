"""The recording in examples/21_recording shows what its programs print today."""

from __future__ import annotations

import getpass
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("pexpect")

FOLDER = Path(__file__).parents[2] / "examples" / "21_recording"
COMMITTED = FOLDER / "recording.svg"
SVG = "{http://www.w3.org/2000/svg}"
# A terminal shows this line only when the processes take a second to start.
STARTING = "parallelize: starting"


def rows_of_scenes(recording: Path) -> list[list[str]]:
    """Return the rows of text in each scene of a recording."""
    scenes = []
    for group in ET.parse(recording).iter(f"{SVG}g"):
        if group.get("class") == "scene":
            rows = ["".join(text.itertext()) for text in group.iter(f"{SVG}text")]
            scenes.append([row for row in rows if not row.startswith(STARTING)])
    return scenes


def without_numbers(rows: list[str]) -> list[str]:
    """Return the rows with each decimal number replaced, since processors round differently."""
    return [re.sub(r"\d+\.\d+", "<number>", row) for row in rows]


def numbers(rows: list[str]) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", "\n".join(rows))]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record again, and return the new recording."""
    path = tmp_path_factory.mktemp("recording") / "recording.svg"
    subprocess.run([sys.executable, FOLDER / "record.py", path], check=True, timeout=280)
    return path


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(0, id="training"),
        pytest.param(1, id="mistake"),
        pytest.param(
            2,
            id="pdb",
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 13), reason="pdb stops one line earlier, at breakpoint() itself"
            ),
        ),
    ],
)
def test_the_recording_shows_what_the_programs_print(fresh: Path, scene: int) -> None:
    """A scene that is recorded again has the same text, and numbers that are equal up to rounding."""
    committed_rows = rows_of_scenes(COMMITTED)[scene]
    fresh_rows = rows_of_scenes(fresh)[scene]
    assert without_numbers(fresh_rows) == without_numbers(committed_rows)
    assert numbers(fresh_rows) == pytest.approx(numbers(committed_rows), rel=0.02)


def test_the_recording_tells_nothing_of_the_machine(fresh: Path) -> None:
    """No host, no user and no folder of the machine is in the text of a new recording."""
    text = "\n".join(row for rows in rows_of_scenes(fresh) for row in rows)
    assert not {socket.gethostname(), getpass.getuser()} & set(re.findall(r"[\w.-]+", text))
    assert tempfile.gettempdir() not in text
    assert str(Path.home()) not in text


def test_the_recording_is_small_and_needs_no_script() -> None:
    """The committed file is small enough for a README, has a title, and runs no script."""
    assert COMMITTED.stat().st_size < 60_000
    root = ET.parse(COMMITTED).getroot()
    assert root.find(f"{SVG}title") is not None
    assert root.find(f"{SVG}desc") is not None
    assert root.find(f".//{SVG}script") is None
