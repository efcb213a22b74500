"""pyproject.toml, tox.ini, .ci/run and the CI workflow agree with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_python_that_is_declared_is_tested(pyproject: dict[str, Any]) -> None:
    """The classifiers name the versions of the CI workflow's matrix; the oldest is the one required."""
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(pyproject["project"]["classifiers"]))
    matrix = re.search(r"python: \[(.+)\]", WORKFLOW.read_text())
    assert matrix is not None
    assert re.findall(r'"(.+?)"', matrix[1]) == declared
    assert pyproject["project"]["requires-python"] == f">={declared[0]}"


def test_extras_install_something(pyproject: dict[str, Any]) -> None:
    """No extra is empty, and every extra that a message tells to install exists."""
    extras = pyproject["project"]["optional-dependencies"]
    assert [name for name, packages in extras.items() if not packages] == []
    sources = "\n".join(path.read_text() for path in (ROOT / "parallelize").rglob("*.py"))
    named = set(re.findall(r"parallelize\[(\w+)\]'", sources))
    assert named
    assert named <= extras.keys()


def test_ci_runs_every_test(pyproject: dict[str, Any]) -> None:
    """.ci/run and .ci/nightly run README's test command, and each kind of test that it leaves out."""
    addopts = pyproject["tool"]["pytest"]["ini_options"]["addopts"]
    left_out = re.findall(r"not (\w+)", addopts[addopts.index("-m") + 1])
    assert {"slow", "soak"} <= set(left_out)
    commands = (ROOT / ".ci/run").read_text().splitlines()
    assert '"$tox" run' in commands
    commands += (ROOT / ".ci/nightly").read_text().splitlines()
    for marker in left_out:
        assert [each for each in commands if re.match(rf'"\$tox" run -e tests -- -m "?{marker}\b', each)], marker


def test_ci_installs_packages_of_the_system_in_ci_only() -> None:
    """On a person's machine, .ci/run leaves the system's packages alone."""
    script = (ROOT / ".ci/run").read_text()
    condition, _, _ = script.partition("apt-get update")
    assert re.search(r'^if \[ -n "\$\{CI:-\}" \] && .*; then$', condition, flags=re.MULTILINE)
