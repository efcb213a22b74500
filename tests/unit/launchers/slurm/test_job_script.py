"""No option value is executed as a command in a job script; only the lines of `setup` are."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallelize import ConfigError, SlurmLauncher, distributed

# Replaces srun and module: records the number of its words, and its words.
STUB = """#!/bin/bash
printf '%s\\0' $(($# + 1)) "$(basename "$0")" "$@" >> "$RECORD"
"""

HOSTILE = [
    "$(touch run)",
    "`touch run`",
    "'; touch run; '",
    '"; touch run; "',
    "a b",
    "*",
    "$HOME",
    "\\",
    "-n",
    "a\ntouch run",
]
text = st.sampled_from(HOSTILE) | st.text(
    alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12
)


def train() -> None:
    """Do nothing; in the job scripts of these tests."""


def write(launcher: SlurmLauncher, folder: Path) -> str:
    """Write a job script, and return its text."""
    distributed(launcher=launcher, processes=2)(train).sbatch_script(folder / "job.sh")
    return (folder / "job.sh").read_text()


def run(folder: Path) -> list[list[str]]:
    """Run a script as Slurm does, with stubs for its commands; return the recorded command lines."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("srun", "module"):
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o700)
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(folder / "record"), "HOME": str(folder)}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "8(x2),4", "SLURM_NTASKS": "2"}
    subprocess.run(
        ["bash", "job.sh"], cwd=folder, env={**environ, **slurm}, check=True, capture_output=True, timeout=240
    )
    words = iter((folder / "record").read_bytes().decode(errors="surrogateescape").split("\0")[:-1])
    return [list(itertools.islice(words, int(number))) for number in words]


@settings(max_examples=40)
@given(text)
@example("a\ntouch run")
@example("\n")
def test_values_reach_the_commands_as_they_are(tmp_path_factory, value):
    """Modules, variables and arguments stay one word each; nothing in them is executed."""
    folder = tmp_path_factory.mktemp("job")
    write(SlurmLauncher(modules=[value], env={"VALUE": value}, python=["python", value]), folder)
    commands = run(folder)
    assert ["module", "load", value] in commands
    (srun,) = [each for each in commands if each[0] == "srun"]
    # two ranks share the cores of the smallest node
    assert srun[1:4] == ["--kill-on-bad-exit=1", "--cpus-per-task=2", "bash"]
    assert srun[7:10] == ["python", value, "-m"]
    assert not (folder / "run").exists()


@settings(max_examples=40)
@given(text)
def test_directives_stay_on_their_line(tmp_path_factory, value):
    """An option's value is one comment line for bash, or is refused."""
    folder = tmp_path_factory.mktemp("job")
    launcher = SlurmLauncher(partition=value)
    if set(value) & {"\n", "\r"}:
        with pytest.raises(ConfigError, match="it would end its line"):
            write(launcher, folder)
    else:
        lines = write(launcher, folder).split("\n")
        assert lines[2].startswith("#SBATCH --partition=")
        assert lines[3] == "#SBATCH --nodes=1"


def test_a_flag_has_no_value(tmp_path):
    """True is a flag, False leaves it out, and 0 is a value: all memory of a node."""
    options = {"exclusive": True, "requeue": False, "comment": "a b"}
    lines = write(SlurmLauncher(mem=0, sbatch=options), tmp_path).split("\n")
    assert {"#SBATCH --exclusive", "#SBATCH --comment='a b'", "#SBATCH --mem=0"} < set(lines)
    assert "#SBATCH --requeue" not in lines


def test_names_of_options_are_names(tmp_path):
    """The name of an option cannot contain a line break either."""
    with pytest.raises(ConfigError, match="it would end its line"):
        write(SlurmLauncher(sbatch={"a\ntouch run": 1}), tmp_path)


def test_setup_is_the_users_own_shell(tmp_path):
    """The check above can fail: a line of `setup` is executed."""
    write(SlurmLauncher(setup=["touch run"]), tmp_path)
    run(tmp_path)
    assert (tmp_path / "run").exists()
