"""The example backend and launcher in CONTRIBUTING work as plug-ins of another distribution."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import free_port

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / ".github" / "CONTRIBUTING.md"

# Trains with ddp and with the backend, chosen by name and as an object; rank 1 starts with different weights.
SCRIPT = """
import torch
from parallelize import distributed, no_sync, parallel_model, rank
from my_package.one_by_one import OneByOneBackend

def train(amp=None):
    torch.manual_seed(rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 + rank()))
    with parallel_model(model):
        for _ in range(3):
            optimizer.zero_grad()
            with no_sync(model):
                model(x[:4]).square().mean().backward()
            model(x[4:]).square().mean().backward()
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])

weights = {}
for name in ("ddp", "one_by_one"):
    weights[name] = distributed(processes=2, backend=name)(train).all_ranks()
weights["object"] = distributed(processes=2, backend=OneByOneBackend())(train).all_ranks()
for name, each in weights.items():
    torch.testing.assert_close(each[0], weights["ddp"][0], msg=name)
    assert torch.equal(each[0], each[1]), name
half = distributed(processes=2, backend="one_by_one", amp="bf16")(train).all_ranks()
assert torch.equal(*half) and not torch.equal(half[0], weights["ddp"][0])
try:
    distributed(processes=2, backend="one_by_one", amp="O2")
except ValueError as error:
    print("refused", "O2" in str(error))
"""


@pytest.fixture
def my_package(tmp_path: Path) -> Path:
    """A package with the code blocks of CONTRIBUTING, and the metadata of a distribution with its entry point."""
    text = GUIDE.read_text()
    (code,) = re.findall(r"<!-- backend -->\n```python\n(.*?)```", text, re.DOTALL)
    (entry_point,) = re.findall(r"```toml\n\[project.entry-points.\"([\w.]+)\"\]\n(.*?)\n```", text, re.DOTALL)
    (launcher,) = re.findall(r"<!-- launcher -->\n```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "one_by_one.py").write_text(code)
    (tmp_path / "my_package" / "by_ssh.py").write_text(launcher)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{entry_point[0]}]\n{entry_point[1].replace(chr(34), '')}\n")
    return tmp_path


@pytest.mark.soak
def test_the_guides_backend_trains_like_ddp(
    my_package: Path, run_script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Weights equal those of ddp, with accumulation, by name and as an object; an undeclared level is refused."""
    done = run_script(SCRIPT, env={"PYTHONPATH": str(my_package)})
    assert done.stdout == "refused True\n"


# "ssh" is a script that runs the command here.
CALLS = """
import sys
import torch.distributed as dist
from parallelize import distributed, rank
from my_package.by_ssh import SSHLauncher

def total(failing):
    if rank() == failing:
        raise KeyError("of the user")
    sent = [None] * dist.get_world_size()
    dist.all_gather_object(sent, rank())
    return sum(sent)

launcher = SSHLauncher(hosts=["127.0.0.1", "localhost"], folder=sys.argv[1], port=int(sys.argv[2]))
call = distributed(launcher=launcher, processes=2, num_nodes=2)(total)
print(call.all_ranks(None))
try:
    call(3)
except KeyError as error:
    print(error, error.__notes__[0].partition(" on ")[0])
try:
    call.options(num_nodes=3)(None)
except ValueError as error:
    print("num_nodes=2" in str(error))
"""


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_the_guides_launcher(
    my_package: Path, tmp_path: Path, run_script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """A call on two hosts returns all values, raises the worker's exception, and needs one node per host."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nshift 2\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    port = free_port()
    environ = {
        "PYTHONPATH": f"{my_package}:{os.environ.get('PYTHONPATH', '')}",
        "PATH": f"{ssh.parent}:{os.environ['PATH']}",
    }
    done = run_script(CALLS, env=environ, args=(str(tmp_path), str(port)), timeout_s=170)
    assert done.stdout.splitlines() == ["[6, 6, 6, 6]", "'of the user' rank 3 of 4", "True"]


def test_files_and_environments_in_the_guide_exist() -> None:
    """Files and tox environments that CONTRIBUTING names exist."""
    text = GUIDE.read_text()
    root = GUIDE.parents[1]
    for environment in re.findall(r"-e (\w+)", text):
        assert f"[testenv:{environment}]" in (root / "tox.ini").read_text() or environment == "tests", environment
    named = re.findall(r"\b((?:parallelize/|tests/|launchers/)?[\w/]+\.py)\b", text)
    assert len(named) > 10
    for name in set(named) - {"parallelize/backends/one_by_one.py", "parallelize/launchers/ssh.py"}:
        inside = list((root / "parallelize").rglob(Path(name).name))
        assert (root / name).exists() or inside, name
