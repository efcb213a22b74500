"""What a release is made of: metadata, the source distribution, the workflow that publishes, and its checks."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import parallelize

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
VERSION = parallelize.__version__

# Modules whose distribution has another name, and what an example needs without an import of its own.
DISTRIBUTIONS = {
    "lightning_fabric": "pytorch-lightning",
    "pytorch_lightning": "pytorch-lightning",
    "sklearn": "scikit-learn",
}
NEEDED_BY_TEXT = {"torch.utils.tensorboard": "tensorboard", ".safetensors": "safetensors"}
IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import |import ([\w.]+(?:, [\w.]+)*)(?: as \w+)?\s*$)", re.MULTILINE)


def load_package_script() -> Any:
    """Return .ci/package.py as a module; it is no part of the package."""
    spec = importlib.util.spec_from_file_location("package_script", ROOT / ".ci/package.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


package_script = load_package_script()


def workflow(name: str) -> dict[Any, Any]:
    """Return a workflow; YAML reads its key `on` as True."""
    return yaml.safe_load((WORKFLOWS / name).read_text())


def test_every_action_is_pinned() -> None:
    """An action that somebody else changes does not get into a workflow; a comment says its version."""
    for path in WORKFLOWS.glob("*.yml"):
        for line in re.findall(r"uses: (.+)", path.read_text()):
            assert line.startswith("./") or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line), line


def test_a_tag_is_published_if_all_checks_pass() -> None:
    """The tag starts the workflow, and the job that publishes waits for CI and for the checks of the package."""
    release = workflow("release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}
    jobs = release["jobs"]
    assert jobs["publish"]["needs"] == ["ci", "package"]
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in workflow("ci.yml")[True]
    commands = [step.get("run", "") for step in jobs["package"]["steps"]]
    assert 'tox run -e package -- --tag "$GITHUB_REF_NAME"' in commands
    assert jobs["publish"]["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")


def test_only_the_job_that_publishes_may_publish() -> None:
    """It alone gets a token of the index, and it runs no code of the repository."""
    release = workflow("release.yml")
    assert release["permissions"] == {}
    for name, job in release["jobs"].items():
        if name == "publish":
            assert job["permissions"] == {"id-token": "write"}
            assert job["environment"] == "pypi"
            assert [step for step in job["steps"] if "run" in step or "checkout" in step["uses"]] == []
        else:
            assert job["permissions"] == {"contents": "read"}


def test_the_site_is_published_with_a_version() -> None:
    """The site is built with the addresses that mkdocs.yml asks for, and one job alone may publish it."""
    docs = workflow("docs.yml")
    assert docs["permissions"] == {}
    assert docs[True]["push"] == {"tags": ["v*"]}
    build_job, publish = docs["jobs"]["build"], docs["jobs"]["publish"]
    assert build_job["permissions"] == {"contents": "read"}
    (build_step,) = [step for step in build_job["steps"] if step.get("run") == "tox run -e docs"]
    asked_for = re.findall(r"!ENV \[(\w+),", (ROOT / ".github/site/mkdocs.yml").read_text())
    assert sorted(build_step["env"]) == sorted(asked_for)
    assert publish["permissions"] == {"pages": "write", "id-token": "write"}
    (publish_step,) = publish["steps"]
    assert publish_step["uses"].startswith("actions/deploy-pages@")


def imports_of_examples() -> Iterator[tuple[Path, str]]:
    """Yield the imports of programs, notebooks, and code in guides, each with its file."""
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix not in {".py", ".ipynb", ".md"}:
            continue
        text = path.read_text()
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        for source, modules in IMPORT.findall(text):
            for module in [source, *modules.split(", ")]:
                yield path, module.partition(".")[0]
        for part, distribution in NEEDED_BY_TEXT.items():
            if part in text:
                yield path, distribution


def test_examples_need_their_extra_only() -> None:
    """`pip install 'parallelize[examples]'` installs all that the examples import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["examples"]]
    installed = {Requirement(requirement).name for requirement in requirements}
    missing = set()
    found = set()
    for path, module in imports_of_examples():
        # Programs import modules beside them, as 10_slurm does.
        is_neighbour = (path.parent / f"{module}.py").exists()
        if not module or module == "parallelize" or module in sys.stdlib_module_names or is_neighbour:
            continue
        distribution = DISTRIBUTIONS.get(module, module)
        found.add(distribution)
        if distribution not in installed:
            missing.add((str(path.relative_to(ROOT)), distribution))
    assert missing == set()
    # The pattern finds what is there.
    assert {"scikit-learn", "tensorboard", "torch"} <= found


def test_the_changelog_has_this_version() -> None:
    """The newest version in CHANGELOG.md is that of the package, with a date and its changes."""
    versions = re.findall(r"^## \[(.+?)\]", CHANGELOG, flags=re.MULTILINE)
    assert versions[:2] == ["Unreleased", VERSION]
    assert package_script.changes_of(VERSION, CHANGELOG)
    assert package_script.changes_of("9.9.9", CHANGELOG) is None


def metadata(version: str, *links: str) -> Message:
    message = Message()
    message["Version"] = version
    for link in links:
        message["Project-URL"] = f"{link}, https://example.org"
    return message


RELEASED = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-11-30\n\n- A change.\n"
ALL_LINKS = ("Repository", "Documentation", "Changelog")


@pytest.mark.parametrize(
    ("tag", "changelog", "links", "faults"),
    [
        ("v1.2.3", RELEASED, ALL_LINKS, []),
        ("v1.2.4", RELEASED, ALL_LINKS, ["parallelize/version.py says 1.2.3"]),
        ("v1.2.3", RELEASED.replace("- A change.\n", ""), ALL_LINKS, ["CHANGELOG.md has no changes below"]),
        ("v1.2.3", RELEASED.replace(" - 2026-11-30", ""), ALL_LINKS, ["CHANGELOG.md has no changes below"]),
        (
            "v1.2.3",
            RELEASED.replace("[Unreleased]\n", "[Unreleased]\n\n- Another.\n"),
            ALL_LINKS,
            ["CHANGELOG.md has changes below `## [Unreleased]`"],
        ),
        ("v1.2.3", RELEASED, ("Issues",), ["the package has no links to Repository, Documentation, Changelog"]),
        ("v9", RELEASED, (), ["parallelize/version.py says", "the package has no links to"]),
    ],
)
def test_what_is_not_ready_is_not_released(tag: str, changelog: str, links: tuple[str, ...], faults: list[str]) -> None:
    """All faults are named at once, each with what to do."""
    found = package_script.faults_of_a_release(tag, metadata("1.2.3", *links), changelog)
    assert len(found) == len(faults)
    for message, start in zip(found, faults, strict=True):
        assert message.startswith(start)


def build(kind: str, source: Path, folder: Path, **environ: str) -> Path:
    """Build a wheel or an sdist, as on a machine where GITHUB_REPOSITORY is what `environ` says."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("GITHUB_")}
    command = [sys.executable, "-m", "build", f"--{kind}", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env={**inherited, **environ})
    (built,) = folder.iterdir()
    return built


def unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


@pytest.fixture
def link_in_build() -> Iterator[None]:
    """A link from build/, which git ignores, to a folder of tests, as tests/fake_cuda makes one when it is compiled."""
    link = ROOT / "build" / "link_to_tests"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)  # of a run that was killed
    link.symlink_to(ROOT / "tests" / "fake_cuda")
    yield
    link.unlink()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("link_in_build")
def test_an_sdist_of_a_release(tmp_path: Path) -> None:
    """It has the repository's links, README without relative ones, all tracked files, and gives a wheel the same."""
    sdist = build("sdist", ROOT, tmp_path / "sdist", GITHUB_REPOSITORY="owner/name")
    assert package_script.files_left_out(sdist) == []

    source = unpacked(sdist, tmp_path / "source")
    of_sdist = email.message_from_bytes((source / "PKG-INFO").read_bytes())
    # A wheel that somebody builds of it has the same links, without the variable.
    of_wheel = package_script.metadata_of(build("wheel", source, tmp_path / "wheel"))
    assert of_wheel.items() == of_sdist.items()
    assert of_wheel.get_payload() == of_sdist.get_payload()

    assert package_script.faults_of_a_release(f"v{VERSION}", of_wheel, RELEASED.replace("1.2.3", VERSION)) == []
    assert "Repository, https://github.com/owner/name" in of_wheel.get_all("Project-URL", [])
    readme = of_wheel.get_payload()
    page = f"https://github.com/owner/name/blob/v{VERSION}"
    assert f"]({page}/LICENSE)" in readme
    assert f"]({page}/examples/guides/limits.md)" in readme
    for link in re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", readme):
        assert re.match(r"https?:|#", "".join(link)), link
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)
    assert images
    for image in images:
        # The page that shows a file is no image.
        assert image.startswith("https://"), image
        assert not image.startswith(page), image


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_package_of_a_checkout_has_no_links(tmp_path: Path) -> None:
    """Without a public address none is made up, and README is as it is in the repository."""
    wheel = build("wheel", ROOT, tmp_path)
    found = package_script.metadata_of(wheel)
    assert found.get_all("Project-URL") is None
    assert found.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text().strip()
    assert found["Metadata-Version"] == "2.4"
    (fault,) = package_script.faults_of_a_release(f"v{VERSION}", found, RELEASED.replace("1.2.3", VERSION))
    assert "GITHUB_REPOSITORY=owner/name" in fault
