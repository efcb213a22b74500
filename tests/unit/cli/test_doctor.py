"""The doctor on this very machine, sound and made to be ill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from parallelize.cli.checks import apex, cluster, limits, memory, network, overrides, ports, smoke
from parallelize.cli.findings import Check

DOCTOR = [sys.executable, "-m", "parallelize", "doctor"]
SOUND = {name: text for name, text in os.environ.items() if not name.startswith(("PARALLELIZE_", "SLURM_"))}
# What a machine of a test may lack without being ill: a cluster's controller, room, files.
OF_THE_MACHINE = {
    "few-files",
    "few-processes",
    "few-processes-in-container",
    "little-shared-memory",
    "slurm-controller-down",
    "temporary-folder-full",
}


def found(check: Check[Any], environ: Mapping[str, str]) -> set[str]:
    return {finding.id for finding in check.run(environ).findings}


def test_a_sound_machine(tmp_path: Path) -> None:
    """A line for each check, aligned; two ranks reduce at some speed; exit code 0."""
    done = subprocess.run(DOCTOR, cwd=tmp_path, env=SOUND, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok       versions       parallelize ")
    (last,) = (line for line in lines if line.startswith("ok       all_reduce     two ranks over "))
    assert float(last.partition(" at ")[2].partition(" MB/s")[0]) > 1
    assert lines[-1] == "all is well" or lines[-1].endswith(("warning", "warnings"))
    assert done.stderr == ""


ILL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from parallelize.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


def test_an_ill_machine(tmp_path: Path) -> None:
    """Few files, an interface that there is not, half a launcher, a stray override: all found at once."""
    wrong = {
        "GLOO_SOCKET_IFNAME": "nowhere0",
        "PARALLELIZE_SEED": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "many",
    }
    done = subprocess.run(
        [sys.executable, "-c", ILL],
        cwd=tmp_path,
        env={**SOUND, **wrong},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    names = {finding["id"] for check in said["checks"] for finding in check["findings"]}
    expected = {"few-files", "gloo-interface-unknown", "launcher-variables", "override-set", "smoke-failed"}
    assert names - OF_THE_MACHINE == expected - OF_THE_MACHINE
    assert "few-files" in names
    assert said["status"] == "fault"


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """Interrupted while two ranks start, it ends at once with the shell's code, and everything it started with it."""
    with subprocess.Popen(
        DOCTOR,
        cwd=tmp_path,
        env=SOUND,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        family = wait_for_children(psutil.Process(process.pid))
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def wait_for_children(process: psutil.Process) -> list[psutil.Process]:
    """Every process that came of one, once there are some."""
    end = time.monotonic() + 40
    while time.monotonic() < end:
        children = process.children(recursive=True)
        # A fork server, the tracker beside it and a worker: smaller families are commands that were asked something.
        if len(children) >= 3:
            return children
        time.sleep(0.01)
    raise AssertionError("it never started a worker")


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--help"], "usage: parallelize doctor"), (["--jsn"], "parallelize doctor --jsn")]
)
def test_its_arguments(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    """--help says what it does; an argument that there is not is refused with what there is."""
    from parallelize.cli.main import main

    code = main(["doctor", *arguments])
    out, err = capfd.readouterr()
    assert says in out + err
    assert code == (0 if says.startswith("usage") else 2)


def test_overrides_are_read_as_a_call_reads_them() -> None:
    """A variable with a typing error or without a meaning is a fault; one that a call obeys is a warning."""
    assert found(overrides.CHECK, {"PARALLELIZE_GPU": "2"}) == {"override-refused"}
    assert found(overrides.CHECK, {"PARALLELIZE_PROCESSES": "none"}) == {"override-refused"}
    assert found(overrides.CHECK, {"PARALLELIZE_PROCESSES": "2"}) == {"override-set"}
    assert found(overrides.CHECK, {"PARALLELIZE_PROCESSES": " ", "CUDA_LAUNCH_BLOCKING": "1"}) == {"debugging-variable"}


def test_ports_are_tried() -> None:
    """A port that another program listens at is found, and one that is free is not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        assert found(ports.CHECK, taken) == {"master-port-taken"}
        assert found(ports.CHECK, {**taken, "MASTER_ADDR": "192.0.2.77"}) == set()  # another machine's port
    assert found(ports.CHECK, taken) == set()
    assert found(ports.CHECK, {"MASTER_PORT": "-1"}) == {"master-port-invalid"}


def test_names_of_hosts_are_looked_up() -> None:
    """A MASTER_ADDR that leads nowhere is found; one that leads somewhere is not; interfaces are this machine's."""
    assert found(network.CHECK, {"MASTER_ADDR": "nowhere.invalid"}) == {"master-unreachable"}
    assert found(network.CHECK, {"MASTER_ADDR": "127.0.0.1"}) == set()
    assert network.gather({}).interfaces["lo"] == "127.0.0.1"
    assert found(network.CHECK, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^nowhere"}) == set()


def test_the_temporary_folder_is_the_one_that_python_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose name is too long for the fork server's socket is found."""
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert "temporary-folder-long" in found(memory.CHECK, {})


def test_the_longest_folder_works(monkeypatch: pytest.MonkeyPatch, run_script: Any, tmp_path: Path) -> None:
    """Two ranks start where the folder's name is as long as the doctor allows, and not where it is much longer."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        longest = base / ("x" * (memory._LONGEST_TMP - len(str(base)) - 1))
        longest.mkdir()
        too_long = base / ("x" * 100)
        too_long.mkdir()
        code = """
            import os, sys
            from parallelize.cli.checks.smoke import gather
            sys.exit(gather(os.environ).error is not None)
        """
        assert run_script(code, env={"TMPDIR": str(longest)}, check=False).returncode == 0
        assert run_script(code, env={"TMPDIR": str(too_long)}, check=False).returncode == 1
    finally:
        shutil.rmtree(base)  # torch leaves a folder of its compiler's there


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        ({"apex/__init__.py": "class RNN: pass"}, "apex-unrelated"),
        ({"apex/__init__.py": "", "apex/optimizers/__init__.py": ""}, "apex-without-amp"),
        ({"apex/__init__.py": "raise RuntimeError('built for another torch')"}, "apex-broken"),
        ({"apex/__init__.py": "from apex import amp", "apex/amp.py": ""}, None),
    ],
)
def test_which_apex(
    files: dict[str, str], finding: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyPI's, NVIDIA's of today, one that cannot be imported, and one that can be used."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert found(apex.CHECK, {}) == ({finding} if finding else set())
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "apex"]:
            del sys.modules[name]


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH on which nothing is found but what a test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_slurm(commands: Path) -> None:
    """In a job or with some commands the others are missed; the controller is asked; a lone process is warned."""
    assert found(cluster.CHECK, {}) == set()
    assert found(cluster.CHECK, JOB) == {"slurm-commands-missing", "slurm-one-of-several-nodes"}
    for name in ("sbatch", "srun", "squeue", "scontrol", "scancel"):
        command = commands / name
        command.write_text("#!/bin/sh\necho 'Slurmctld(primary) at head is UP'\n")
        command.chmod(0o755)
    assert found(cluster.CHECK, {}) == set()
    (commands / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    assert found(cluster.CHECK, {}) == {"slurm-controller-down"}
    assert found(cluster.CHECK, {"WORLD_SIZE": "2", "RANK": "5"}) == {"slurm-controller-down", "launcher-variables"}


def test_limits_are_this_process_own() -> None:
    """The numbers are those of the system."""
    import resource

    assert limits.gather({}).files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_wrong_sums_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction whose sums are not what they have to be is a fault: here of a message that was never sent."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_: None)
    monkeypatch.setattr("torch.distributed.barrier", lambda *_: None)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    times, is_right = smoke.exchange(1024, 3)
    assert (len(times), is_right) == (3, False)
