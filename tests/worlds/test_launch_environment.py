"""Environment variables, process group and torch settings of a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallelize import distributed
from parallelize.cluster.world import World
from parallelize.errors import LaunchError

pytestmark = pytest.mark.slow

SIZES = ["WORLD_SIZE", "LOCAL_WORLD_SIZE"]
NAMES = ["RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", *SIZES, "MASTER_ADDR", "MASTER_PORT"]


@distributed(processes=2)
def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in NAMES}


def test_the_variables_of_a_worker_are_torchruns() -> None:
    """Workers have torchrun's variables, and each call has its own port."""
    found = environment.all_ranks()
    for number, variables in enumerate(found):
        port = variables.pop("MASTER_PORT")
        assert port is not None
        assert 0 < int(port) < 65536
        assert variables == {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }


def test_one_process_changes_no_variable() -> None:
    """With processes=1 the calling process keeps its environment."""
    assert environment.options(processes=1)() == {name: os.environ.get(name) for name in NAMES}


@distributed(processes=2)
def path() -> list[str]:
    return sys.path


def test_what_is_no_folder_stays_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the name for a hook of the import, which a namespace package has that is installed editable."""
    monkeypatch.setattr(sys, "path", [*sys.path, "__editable__.acme.finder.__path_hook__"])
    assert path()[-1] == "__editable__.acme.finder.__path_hook__"


def test_a_current_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes cannot start there."""
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    with pytest.raises(LaunchError, match="the current folder does not exist"):
        path()


def connect(world: World) -> None:
    store = dist.TCPStore(world.master_addr, world.master_port, world.world_size, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.world_size, timeout=timedelta(seconds=17)
    )


@distributed(processes=2)
def group_options() -> tuple[float, int]:
    value = torch.ones(1)
    dist.all_reduce(value)
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds(), int(value.item())


def test_init_connection() -> None:
    """init_connection= is called with the World and replaces our init_process_group."""
    assert group_options.options(init_connection=connect)() == (17, 2)


def test_the_timeout_reaches_the_process_group() -> None:
    """`timeout=` is the timeout of the process group."""
    assert group_options.options(timeout=23)() == (23, 2)


@distributed(processes=2)
def torch_settings() -> tuple[torch.dtype, bool, str, str]:
    dtype = torch.tensor(1.5, device="cpu").dtype
    flags = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    return dtype, *flags, torch.empty(1).device.type


def test_torch_settings_of_the_script_apply_in_workers() -> None:
    """Default dtype, device, determinism and matmul precision are those of the caller."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    torch.set_default_device("meta")
    try:
        expected = torch_settings.options(processes=1)()
        found = torch_settings.all_ranks()
    finally:
        torch.set_default_device(None)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert expected == (torch.float64, True, "high", "meta")
    assert found == [expected] * 2


FOREIGN = """
from parallelize import distributed

@distributed(processes=2)
def train():
    import tqdm
    return tqdm.__file__

if __name__ == "__main__":
    import tqdm
    assert train() == tqdm.__file__, train()
    assert train.options(launcher=__import__("parallelize.launchers.local.launcher", fromlist=["*"]).LocalLauncher(
        start_method="spawn"))() == tqdm.__file__
"""


def test_workers_do_not_import_from_the_current_directory_unless_the_caller_does(tmp_path: Path) -> None:
    """Modules in the current directory do not shadow packages: a script's sys.path starts with its own directory."""
    script, current = tmp_path / "scripts" / "script.py", tmp_path / "current"
    for name in ("tqdm.py", "parallelize/__init__.py", "socket.py", "signal.py"):
        (current / name).parent.mkdir(parents=True, exist_ok=True)
        (current / name).write_text("open(__file__ + '.imported', 'w')\nraise ImportError(__file__)\n")
    script.parent.mkdir()
    script.write_text(FOREIGN)
    subprocess.run([sys.executable, script], cwd=current, timeout=240, check=True)
    assert sorted(current.rglob("*.imported")) == []
