"""No option value is executed as a command in a job script; only the lines of `setup` are."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallelize import ConfigError
from parallelize.launchers.slurm.job_script import JobScript

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
    alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12
)


def run(script: JobScript, folder: Path) -> list[list[str]]:
    """Run a script as Slurm does, with stubs for its commands; return the recorded command lines."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("srun", "module"):
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o700)
    (folder / "job.sh").write_text(str(script))
    (folder / "record").write_bytes(b"")
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(folder / "record"), "HOME": str(folder)}
    subprocess.run(["bash", "job.sh"], cwd=folder, env=environ, check=True, capture_output=True, timeout=240)
    words = iter((folder / "record").read_bytes().decode(errors="surrogateescape").split("\0")[:-1])
    return [list(itertools.islice(words, int(number))) for number in words]


def script(value: str, folder: Path, flag: str = "a") -> JobScript:
    return JobScript(
        options={"job-name": flag},
        modules=[value],
        env={"VALUE": value},
        setup=[],
        step=["python", value],
        srun=[value],
        folder=folder / "jobs",
    )


@settings(max_examples=40)
@given(text)
@example("a\ntouch run")
@example("\n")
def test_values_reach_the_commands_as_they_are(tmp_path_factory, value):
    """Modules, variables, options and arguments stay one word each; nothing in them is executed."""
    folder = tmp_path_factory.mktemp("job")
    commands = run(script(value, folder), folder)
    assert ["module", "load", value] in commands
    (srun,) = [each for each in commands if each[0] == "srun"]
    assert srun[1] == value
    assert srun[4:6] == ["python", value]
    assert not (folder / "run").exists()


@given(text)
def test_directives_stay_on_their_line(value):
    """An option's value is one comment line for bash, or is refused."""
    if set(value) & {"\n", "\r"}:
        with pytest.raises(ConfigError, match="it would end its line"):
            str(script("a", Path("/jobs"), flag=value))
    else:
        lines = str(script("a", Path("/jobs"), flag=value)).split("\n")
        assert lines[1].startswith("#SBATCH --job-name=")
        assert not lines[2].startswith("#SBATCH")


def test_a_flag_has_no_value():
    """True is a flag, False leaves it out; nothing else precedes the job's folder."""
    options = {"exclusive": True, "requeue": False, "nodes": 2, "comment": "a b"}
    job = JobScript(options=options, modules=[], env={}, setup=[], step=["a"], srun=[], folder=Path("/jobs"))
    lines = str(job).split("\n")[1:6]
    assert lines == ["#SBATCH --exclusive", "#SBATCH --nodes=2", "#SBATCH --comment='a b'", "", "folder=/jobs"]


def test_names_of_options_are_names():
    """The name of an option cannot contain a line break either."""
    with pytest.raises(ConfigError, match="it would end its line"):
        str(
            JobScript(options={"a\ntouch run": 1}, modules=[], env={}, setup=[], step=[], srun=[], folder=Path("/jobs"))
        )


def test_setup_is_the_users_own_shell(tmp_path):
    """The check above can fail: a line of `setup` is executed."""
    shell = JobScript(
        options={}, modules=[], env={}, setup=["touch run"], step=["a"], srun=[], folder=tmp_path / "jobs"
    )
    run(shell, tmp_path)
    assert (tmp_path / "run").exists()
