"""`parallelize doctor` on the machine of the tests, and with faults."""

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
from ranks import without_leak_report

from parallelize.cli.checks import cluster, limits, memory, network, overrides, ports, smoke
from parallelize.cli.findings import Check

DOCTOR = [sys.executable, "-m", "parallelize", "doctor"]
CLEAN = {name: text for name, text in os.environ.items() if not name.startswith(("PARALLELIZE_", "SLURM_"))}
# Findings that depend on the machine of the tests.
MACHINE_DEPENDENT = {
    "few-files",
    "few-processes",
    "few-processes-in-container",
    "little-shared-memory",
    "slurm-controller-down",
    "temporary-folder-full",
}


def ids(check: Check[Any], environ: Mapping[str, str]) -> set[str]:
    return {finding.id for finding in check.run(environ).findings}


def test_a_machine_without_faults(tmp_path: Path) -> None:
    """One aligned line per check, an all_reduce of two ranks with its speed, exit code 0."""
    done = subprocess.run(DOCTOR, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok       versions       parallelize ")
    (last,) = (line for line in lines if line.startswith("ok       all_reduce     two ranks over "))
    assert float(last.partition(" at ")[2].partition(" MB/s")[0]) > 1
    assert lines[-1] == "no problems found" or lines[-1].endswith(("warning", "warnings"))
    assert without_leak_report(done.stderr) == ""


DOCTOR_WITH_FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from parallelize.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


@pytest.mark.slow
def test_a_machine_with_faults(tmp_path: Path) -> None:
    """Few files, an unknown interface, incomplete launcher variables and an override are all found at once."""
    faulty_variables = {
        "GLOO_SOCKET_IFNAME": "nowhere0",
        "PARALLELIZE_SEED": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "many",
    }
    done = subprocess.run(
        [sys.executable, "-c", DOCTOR_WITH_FEW_FILES],
        cwd=tmp_path,
        env={**CLEAN, **faulty_variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    names = {finding["id"] for check in report["checks"] for finding in check["findings"]}
    expected = {"few-files", "gloo-interface-unknown", "launcher-variables", "override-set", "smoke-failed"}
    assert names - MACHINE_DEPENDENT == expected - MACHINE_DEPENDENT
    assert "few-files" in names
    assert report["status"] == "fault"


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C while two ranks start ends the command with code 130, and all its processes."""
    with subprocess.Popen(
        DOCTOR,
        cwd=tmp_path,
        env=CLEAN,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        processes = wait_for_children(psutil.Process(process.pid))
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def wait_for_children(process: psutil.Process) -> list[psutil.Process]:
    """Return all descendants of a process, once a worker has started."""
    end = time.monotonic() + 40
    while time.monotonic() < end:
        children = process.children(recursive=True)
        # A fork server, its resource tracker and a worker; commands such as scontrol have fewer.
        if len(children) >= 3:
            return children
        time.sleep(0.01)
    raise AssertionError("no worker was started")


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--help"], "usage: parallelize doctor"), (["--jsn"], "parallelize doctor --jsn")]
)
def test_arguments(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """--help prints the usage; an unknown argument is refused."""
    from parallelize.cli.main import main

    code = main(["doctor", *arguments])
    out, err = capfd.readouterr()
    assert message in out + err
    assert code == (0 if message.startswith("usage") else 2)


def test_overrides_are_read_as_a_call_reads_them() -> None:
    """An unknown or invalid variable is a fault; a valid one is a warning."""
    assert ids(overrides.CHECK, {"PARALLELIZE_GPU": "2"}) == {"override-refused"}
    assert ids(overrides.CHECK, {"PARALLELIZE_PROCESSES": "none"}) == {"override-refused"}
    assert ids(overrides.CHECK, {"PARALLELIZE_PROCESSES": "2"}) == {"override-set"}
    assert ids(overrides.CHECK, {"PARALLELIZE_PROCESSES": " ", "CUDA_LAUNCH_BLOCKING": "1"}) == {"debugging-variable"}


def test_ports_in_use_are_found() -> None:
    """A port that another program listens on is found; a free one is not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        assert ids(ports.CHECK, taken) == {"master-port-taken"}
        assert ids(ports.CHECK, {**taken, "MASTER_ADDR": "192.0.2.77"}) == set()  # another machine's port
    assert ids(ports.CHECK, taken) == set()
    assert ids(ports.CHECK, {"MASTER_PORT": "-1"}) == {"master-port-invalid"}


def test_host_names_are_resolved() -> None:
    """A MASTER_ADDR that cannot be resolved is found; interfaces are those of this machine."""
    assert ids(network.CHECK, {"MASTER_ADDR": "nowhere.invalid"}) == {"master-unreachable"}
    assert ids(network.CHECK, {"MASTER_ADDR": "127.0.0.1"}) == set()
    assert network.gather({}).interfaces["lo"] == "127.0.0.1"
    assert ids(network.CHECK, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^nowhere"}) == set()


def test_a_long_temporary_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is too long for the fork server's socket is found."""
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert "temporary-folder-long" in ids(memory.CHECK, {})


@pytest.mark.slow
def test_the_longest_folder_works(monkeypatch: pytest.MonkeyPatch, run_script: Any, tmp_path: Path) -> None:
    """Two ranks start in a folder whose path is as long as the doctor allows, and not in a much longer one."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        longest = base / ("x" * (memory._MAX_TMP_NAME_BYTES - len(str(base)) - 1))
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
        shutil.rmtree(base)  # torch leaves a folder of its compiler there


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set PATH to a folder with only the commands that a test writes."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_slurm(commands: Path) -> None:
    """Missing commands are found in a job or if some exist; the controller is pinged; a lone process is warned."""
    assert ids(cluster.CHECK, {}) == set()
    assert ids(cluster.CHECK, JOB) == {"slurm-commands-missing", "slurm-one-of-several-nodes"}
    for name in ("sbatch", "srun", "squeue", "scontrol", "scancel"):
        command = commands / name
        command.write_text("#!/bin/sh\necho 'Slurmctld(primary) at head is UP'\n")
        command.chmod(0o755)
    assert ids(cluster.CHECK, {}) == set()
    (commands / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    assert ids(cluster.CHECK, {}) == {"slurm-controller-down"}
    assert ids(cluster.CHECK, {"WORLD_SIZE": "2", "RANK": "5"}) == {"slurm-controller-down", "launcher-variables"}


def test_limits_are_those_of_this_process() -> None:
    """The limit equals that of the resource module."""
    import resource

    assert limits.gather({}).files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_wrong_sums_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all_reduce with wrong sums is reported; here the all_reduce does nothing."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_: None)
    monkeypatch.setattr("torch.distributed.barrier", lambda *_: None)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    times, is_right = smoke.measure_all_reduce(1024, 3)
    assert (len(times), is_right) == (3, False)
