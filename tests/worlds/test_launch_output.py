"""stdout and stderr of the workers are shown live, complete, once, and with their rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelize import LaunchError, distributed, rank

pytestmark = pytest.mark.slow


@distributed(processes=2)
def talk() -> None:
    print(f"out of {rank()}")
    print(f"err of {rank()}", file=sys.stderr)
    sys.stdout.write(f"é without end {rank()}")


def test_only_rank_0_is_shown_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """The output of rank 0 is shown without a prefix."""
    talk()
    assert capsys.readouterr() == ("out of 0\né without end 0", "err of 0\n")


def test_all_ranks_are_shown_with_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    """With logs="all" each line starts with the rank."""
    talk.options(logs="all")()
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted(
        f"[rank {number}] {text} {number}" for number in range(2) for text in ("out of", "é without end")
    )
    assert sorted(err.splitlines()) == [f"[rank {number}] err of {number}" for number in range(2)]


def test_a_directory_gets_a_folder_per_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has a file per rank, replaces none of an earlier call, and rank 0 is shown as well."""
    for _ in range(2):
        talk.options(logs=str(tmp_path / "logs"))()
        assert capsys.readouterr().out == "out of 0\né without end 0"
    calls = sorted((tmp_path / "logs").iterdir())
    assert len(calls) == 2
    for folder in calls:
        assert {path.name: path.read_text() for path in folder.iterdir()} == {
            f"rank{number}.log": f"out of {number}\nerr of {number}\né without end {number}" for number in range(2)
        }


LIVE = """
import pathlib, sys, time
from parallelize import distributed

@distributed(processes=2)
def train(seen):
    sys.stdout.write("step 1 ")
    while not pathlib.Path(seen).exists():
        time.sleep(0.01)

train(sys.argv[1])
"""


def test_output_is_live(tmp_path: Path) -> None:
    """Text without a newline is shown while the worker still runs."""
    seen, script = tmp_path / "seen", tmp_path / "script.py"
    script.write_text(LIVE)
    with subprocess.Popen([sys.executable, script, seen], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(7) == "step 1 "
        seen.touch()
        assert process.wait(40) == 0


CLOSED = """
import pathlib, sys
from parallelize import distributed, rank

@distributed(processes=2)
def train():
    print("at work", file=sys.stderr)
    return rank()

pathlib.Path(sys.argv[1]).write_text(str([train.all_ranks(), train.all_ranks()]))
"""


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure(closed: str, tmp_path: Path) -> None:
    """Without open standard streams, as in a daemon, calls succeed: no socket or file gets their numbers."""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", CLOSED, str(tmp_path / "said")]
    subprocess.run(command, cwd=tmp_path, timeout=50, check=True, stderr=subprocess.PIPE)
    assert (tmp_path / "said").read_text() == "[[0, 1], [0, 1]]"


BAR = """
import warnings
from tqdm import tqdm
from parallelize import distributed, rank

@distributed(processes=2)
def train():
    warnings.warn("look out", stacklevel=1)
    for _ in tqdm(range(20), ncols=60, mininterval=0, disable=rank() != 0):
        pass

train()
"""


def test_bars_and_warnings(tmp_path: Path) -> None:
    """A progress bar stays on one line, and a warning of every rank is shown once."""
    done = subprocess.run([sys.executable, "-c", BAR], capture_output=True, cwd=tmp_path, timeout=50, check=True)
    err = done.stderr.decode()
    assert err.count("look out") == 1, err
    bar = err[err.index("\r") :]
    assert bar.count("\n") == 1
    assert bar.count("\r") > 5
    assert "20/20" in bar


DEBUG = r"breakpoint\(\) in a worker(.|\n)*PARALLELIZE_PROCESSES=1"
READ = r"input\(\), or a read from sys.stdin(.|\n)*before the call"


@pytest.mark.parametrize(
    ("ask", "message"),
    [(breakpoint, DEBUG), (input, READ), (lambda: list(sys.stdin), READ), (lambda: sys.stdin.buffer.read(1), READ)],
    ids=["breakpoint", "input", "lines", "bytes"],
)
def test_what_asks_the_user_in_a_worker_is_refused(ask: Callable[[], object], message: str) -> None:
    """Without a terminal: the error says how to debug in one process, or where to read standard input."""
    with pytest.raises(LaunchError, match=message):
        distributed(processes=2)(lambda: ask() and None)()


@distributed(processes=2)
def flood(lines: int) -> None:
    for _ in range(lines):
        os.write(1, b"x" * 1023 + b"\n")


def test_a_flood_of_output_is_shown_as_a_whole(capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    """Rank 0's, and that of all ranks in the files of a directory."""
    lines = 16 << 10
    flood.options(logs=str(tmp_path))(lines)
    assert capfdbinary.readouterr().out == (b"x" * 1023 + b"\n") * lines
    (written,) = tmp_path.glob("*/rank1.log")
    assert written.read_bytes() == (b"x" * 1023 + b"\n") * lines
