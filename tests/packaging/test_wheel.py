"""The built wheel: installs and works outside of the repository."""

from __future__ import annotations

import email
import importlib.metadata
import os
import subprocess
import sys
import textwrap
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import parallelize

ROOT = Path(__file__).parents[2]
TRAIN = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import parallelize
    from parallelize import distributed, parallel_model, shard_loader, world_size

    x = torch.arange(8.0).reshape(8, 1)
    loader = DataLoader(TensorDataset(x, 2 * x), batch_size=2)

    @distributed(processes=2, seed=0)
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with parallel_model(model):
            for _ in range(200):
                for x, y in shard_loader(loader):
                    optimizer.zero_grad()
                    (model(x) - y).square().mean().backward()
                    optimizer.step()
        return world_size(), parallelize.__file__

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    size, place = train(model)
    print(size, round(model.weight.item(), 1), place)
"""


@dataclass(frozen=True)
class Built:
    """The built wheels, and an environment in which one is installed."""

    wheel: Path
    wheel_of_sdist: Path
    site: Path
    scripts: Path

    def run(self, *command: str, folder: Path) -> str:
        environ = {name: text for name, text in os.environ.items() if not name.startswith(("PARALLELIZE_", "PYTHON"))}
        program = [str(self.scripts / command[0]), *command[1:]]
        done = subprocess.run(
            program, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build a wheel from the tree and one from the sdist, and install the first into a new environment.

    The environment finds torch and the other packages that the wheel requires, with what they require, in this one's
    site-packages, through links. Packages of the tests are not found, and neither are those of the extras.
    """
    folder = tmp_path_factory.mktemp("built")
    for name, kinds in {"tree": ["--wheel"], "sdist": []}.items():
        command = [sys.executable, "-m", "build", *kinds, "--outdir", str(folder / name), str(ROOT)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    ((wheel,), (wheel_of_sdist,)) = ((folder / name).glob("*.whl") for name in ("tree", "sdist"))
    venv.create(folder / "env", with_pip=True)
    bin_folder, version = folder / "env" / "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "env" / "lib" / version / "site-packages"
    link_requirements(wheel, site)
    install = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*install, "--force-reinstall"], check=True, capture_output=True, timeout=120)
    return Built(wheel, wheel_of_sdist, site, bin_folder)


def link_requirements(wheel: Path, site: Path) -> None:
    """Link the installed files of all packages that a wheel requires, directly or through others, into `site`."""
    (name,) = (name for name in contents(wheel) if name.endswith(".dist-info/METADATA"))
    needed, seen = email.message_from_bytes(contents(wheel)[name]).get_all("Requires-Dist", []), set()
    while needed:
        requirement = Requirement(needed.pop())
        if requirement.name in seen or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        distribution = importlib.metadata.distribution(requirement.name)
        needed += distribution.requires or []
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel(built: Built, tmp_path: Path) -> None:
    """The wheel has no tests, is typed, equals the one from the sdist, and trains outside of the repository."""
    files = contents(built.wheel)
    package = {name for name in files if not name.startswith(f"parallelize-{parallelize.__version__}.dist-info/")}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "parallelize"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert package == {name for name in tracked.stdout.split() if (ROOT / name).exists()}
    assert "parallelize/py.typed" in package
    assert files == contents(built.wheel_of_sdist)

    metadata = email.message_from_bytes(files[f"parallelize-{parallelize.__version__}.dist-info/METADATA"])
    assert metadata["Version"] == parallelize.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Author"]

    assert built.run("parallelize", "--version", folder=tmp_path) == f"parallelize {parallelize.__version__}\n"
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    size, weight, place = built.run("python", str(script), folder=tmp_path).split()
    is_found = "import importlib.util; print(importlib.util.find_spec('pytest'))"
    assert built.run("python", "-c", is_found, folder=tmp_path) == "None\n"  # no package of the tests is
    assert (size, weight) == ("2", "2.0")
    assert Path(place).is_relative_to(built.site)
    built.run("parallelize", "doctor", folder=tmp_path)
