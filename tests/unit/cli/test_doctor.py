"""`parallelize doctor` on the machine of the tests, and with faults."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement
from ranks import without_leak_report

from parallelize.cli import doctor
from parallelize.cli.doctor import Finding
from parallelize.cli.main import main

DOCTOR = [sys.executable, "-m", "parallelize", "doctor"]
CLEAN = {name: text for name, text in os.environ.items() if not name.startswith(("PARALLELIZE_", "SLURM_"))}

# The second task of `srun --ntasks-per-node=4 --gpus-per-task=1` on a node, without what tells its GPU.
TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "4"}
HIDDEN = "GPU 1 of the job's 4 on this node is this task's, as its GPU 0: Slurm hides those of the other tasks"


def problems(
    check: Callable[[Mapping[str, str]], Iterator[Finding]], environ: Mapping[str, str]
) -> list[tuple[str, str]]:
    return [(each.status, each.what) for each in check(environ) if each.status != "ok"]


def test_a_machine_without_faults(tmp_path: Path) -> None:
    """A line for each finding, an all_reduce of two ranks with its speed, exit code 0."""
    done = subprocess.run(DOCTOR, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok       versions   parallelize ")
    assert f"ok       addresses  {socket.gethostname()}: " in done.stdout
    (last,) = (line for line in lines if line.startswith("ok       all_reduce two ranks over gloo: "))
    assert float(last.partition("gloo: ")[2].partition(" MB/s")[0]) > 1
    assert without_leak_report(done.stderr) == ""


@pytest.mark.slow
def test_a_machine_with_faults(tmp_path: Path) -> None:
    """An unknown interface, incomplete launcher variables and a network that does not work are all found at once."""
    faulty = {"GLOO_SOCKET_IFNAME": "nowhere0", "RANK": "0", "WORLD_SIZE": "many", "PARALLELIZE_GPU": "2"}
    done = subprocess.run(
        [*DOCTOR, "--json"],
        cwd=tmp_path,
        env={**CLEAN, **faulty},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    faults = [each for each in json.loads(done.stdout) if each["status"] == "fault"]
    assert {each["check"] for each in faults} == {"variables", "all_reduce"}
    assert all(each["why"] and each["fix"] for each in faults)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C while two ranks start ends the command with code 130, and all its processes."""
    with subprocess.Popen(
        DOCTOR, cwd=tmp_path, env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        processes = wait_for_children(psutil.Process(process.pid))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def wait_for_children(process: psutil.Process) -> list[psutil.Process]:
    """Return all descendants of a process, once a worker has started: a fork server has its tracker and a worker."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        children = process.children(recursive=True)
        if len(children) >= 4:
            return children
        time.sleep(0.01)
    raise AssertionError("no worker was started")


def test_a_hang_is_told_from_a_broken_access_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs with NCCL is tried again without P2P."""
    works: dict[str, bool] = {"gloo": True, "nccl": False, "without P2P": True}

    def exchange(backend: str, environ: Mapping[str, str]) -> tuple[bool, str]:
        return works["without P2P" if "NCCL_P2P_DISABLE" in environ else backend], "90 MB/s"

    monkeypatch.setattr(doctor, "_exchange", exchange)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    gloo, nccl = doctor.all_reduce({})
    assert (gloo.status, nccl.status) == ("ok", "fault")
    assert "P2P" in nccl.why
    works["without P2P"] = False
    assert "P2P" not in list(doctor.all_reduce({}))[1].why


def test_the_exchange_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a rank of a launcher, whose world its two ranks would join."""
    environs = list[Mapping[str, str]]()
    monkeypatch.setattr(doctor, "_exchange", lambda _, environ: (bool(environs.append(environ)) or True, "90 MB/s"))
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID SLURM_PROCID PMI_RANK"
    )
    assert [each.status for each in doctor.all_reduce({**dict.fromkeys(names.split(), "0"), "HOME": "/a"})] == ["ok"]
    assert environs == [{"HOME": "/a", "CUDA_VISIBLE_DEVICES": ""}]


def test_an_exchange_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command always ends."""
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.01)
    assert doctor._exchange("gloo", CLEAN) == (False, "no result within 0.01 s")


@pytest.mark.parametrize(
    ("check", "environ", "expected"),
    [
        (doctor.addresses, {"MASTER_ADDR": "nowhere.invalid"}, [("fault", "MASTER_ADDR=nowhere.invalid")]),
        (doctor.addresses, {"MASTER_ADDR": "127.0.0.1"}, []),
        (doctor.variables, {"PARALLELIZE_PROCESSES": "2"}, [("warning", "PARALLELIZE_PROCESSES=2")]),
        (
            doctor.variables,
            {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"},
            [("warning", "srun did not start this process")],
        ),
        (doctor.gpus, {}, []),
        (
            doctor.gpus,
            {**TASK, "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"},
            [("warning", HIDDEN)],
        ),
        (doctor.gpus, {**TASK, "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "1"}, []),
        (doctor.gpus, {**TASK, "SLURM_STEP_GPUS": "0", "CUDA_VISIBLE_DEVICES": "0"}, []),
        (doctor.gpus, {**TASK, "SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, []),
        (doctor.gpus, {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2-4"}, []),
        (doctor.variables, {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2-4"}, [("fault", "SLURM_NNODES='2-4'")]),
    ],
)
def test_problems_are_found(check: Any, environ: dict[str, str], expected: list[tuple[str, str]]) -> None:
    """Each has its variable with the value."""
    assert problems(check, environ) == expected


def test_the_first_task_with_a_gpu_of_its_own_says_who_knows_more() -> None:
    """Its GPU has the number 0 in any case."""
    *_, last = doctor.gpus({**TASK, "SLURM_STEP_GPUS": "0", "CUDA_VISIBLE_DEVICES": "0"})
    assert "second task" in last.fix


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [(["doctor", "--help"], 0, "usage: parallelize doctor"), (["doctor", "--jsn"], 2, "--jsn"), ([], 2, "usage")],
)
def test_arguments(arguments: list[str], code: int, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """--help prints the usage; an unknown argument is refused."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == code
    assert message in "".join(capfd.readouterr())


def test_a_small_shared_memory_is_told_from_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its size in bytes, what needs the space, and its own remedy."""
    sizes = {"/dev/shm": shutil._ntuple_diskusage(67_108_864, 4096, 67_104_768)}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: sizes.get(path, sizes["/dev/shm"]))
    small = next(doctor.memory({}))
    assert small.status == "warning"
    assert "/dev/shm: 67,104,768 of 67,108,864 bytes free" in small.what
    assert "536,870,912" in small.why
    assert "DataLoader" in small.why
    assert "--shm-size" in small.fix
    assert "delete" not in small.fix
    sizes["/dev/shm"] = shutil._ntuple_diskusage(8 << 30, 8 << 30, 0)
    full = next(doctor.memory({}))
    assert "/dev/shm: 0 of 8,589,934,592 bytes free" in full.what
    assert "delete" in full.fix
    sizes["/dev/shm"] = shutil._ntuple_diskusage(8 << 30, 0, 8 << 30)
    assert next(doctor.memory({})).status == "ok"


def test_optional_libraries_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing is no problem: what needs it is said, and the command that installs it."""
    installed = {"ray": "2.40.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {each.what: each for each in doctor.libraries({})}
    assert {each.status for each in found.values()} == {"ok"}
    assert found["ray 2.40.0"].fix == ""
    assert ".safetensors" in found["safetensors is not installed"].why
    assert found["safetensors is not installed"].fix == "pip install 'parallelize[safetensors]'"


def test_each_extra_for_users_is_asked_for() -> None:
    """The check knows the extras of pyproject.toml, but those for developers, and `all`, which is made of others."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys() - {"all", "test", "integrations", "dev"}
    assert {extra.name for extra in doctor.EXTRAS} == extras
    # Examples are no feature of the library.
    (features,) = project["optional-dependencies"]["all"]
    assert Requirement(features).extras == extras - {"examples"}
