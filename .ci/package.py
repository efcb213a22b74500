"""Build the files of a release into dist/, and check them as their users would: `tox run -e package`.

`--tag v1.2.3` adds what only a release must have: a tag and a changelog that name the version, and the project's links.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from email.message import Message
from pathlib import Path

__all__ = [
    "changes_of",
    "faults_of_a_release",
    "files_left_out",
    "main",
    "metadata_of",
]

ROOT = Path(__file__).parents[1]
REQUIRED_LINKS = ("Repository", "Documentation", "Changelog")
# Tests that need no other package than those of the extra `test`, and few seconds: that the tests of the sdist run, not
# that all of them pass, which CI has shown.
TESTS_OF_THE_SDIST = ("tests/unit/config", "tests/packaging")
# What git tracks and a source distribution does not need.
NOT_IN_THE_SDIST = re.compile(r"\.git(attributes|modules)$")


def main(arguments: list[str] | None = None) -> None:
    """Build and check; end with a message that lists all faults if a release must not be made of this."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="the tag of the release, such as v1.2.3")
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="where to put the files; emptied first")
    options = parser.parse_args(arguments)

    say("build the wheel and the source distribution")
    wheel, sdist = build(options.folder)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)

    say("compare the source distribution with the repository")
    left_out = files_left_out(sdist)
    if left_out:
        sys.exit(f"The source distribution lacks files of the repository:\n{listed(left_out)}")

    if options.tag is not None:
        say(f"compare the tag {options.tag} with the package")
        faults = faults_of_a_release(options.tag, metadata_of(wheel), (ROOT / "CHANGELOG.md").read_text())
        if faults:
            sys.exit(f"Version {options.tag} must not be released:\n{listed(faults)}")

    with tempfile.TemporaryDirectory() as folder:
        try_out(wheel, sdist, Path(folder))
    say(f"{wheel.name} and {sdist.name} are in {options.folder}")


def build(folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the source distribution; the wheel is built from the latter."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return wheel, sdist


def files_left_out(sdist: Path) -> list[str]:
    """Return the files that git tracks and the source distribution lacks."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    with tarfile.open(sdist) as archive:
        # Each name begins with a folder, such as parallelize-1.2.3.
        packed = {name.partition("/")[2] for name in archive.getnames()}
    needed = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}
    return sorted(name for name in needed - packed if not NOT_IN_THE_SDIST.search(name))


def metadata_of(wheel: Path) -> Message:
    """Return a wheel's metadata, which the package index shows."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def changes_of(version: str, changelog: str) -> str | None:
    """Return the text of a version in the changelog, or None if no heading names it with a date."""
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}$"
    match = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", changelog, flags=re.MULTILINE | re.DOTALL)
    return match[1].strip() if match else None


def faults_of_a_release(tag: str, metadata: Message, changelog: str) -> list[str]:
    """Return why a tag must not be released, each reason with its fix."""
    faults = []
    version = metadata["Version"]
    if tag != f"v{version}":
        faults.append(f"parallelize/version.py says {version}: the tag has to be v{version}, or the version {tag[1:]}")
    if not changes_of(version, changelog):
        faults.append(f"CHANGELOG.md has no changes below a line `## [{version}] - YYYY-MM-DD`: write them")
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", changelog, flags=re.MULTILINE | re.DOTALL)
    if unreleased and unreleased[1].strip():
        faults.append(f"CHANGELOG.md has changes below `## [Unreleased]`: move them below `## [{version}] - ...`")
    names = {entry.partition(",")[0] for entry in metadata.get_all("Project-URL", [])}
    missing = [name for name in REQUIRED_LINKS if name not in names]
    if missing:
        faults.append(
            f"the package has no links to {', '.join(missing)}: build it with GITHUB_REPOSITORY=owner/name, "
            "as workflows of GitHub do (.ci/metadata.py)"
        )
    return faults


def try_out(wheel: Path, sdist: Path, folder: Path) -> None:
    """Install the wheel into a new environment, run README's program there, and then tests of the sdist."""
    say("install the wheel into a new environment")
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel)

    say("run a program, as a user does")
    program = folder / "program"
    program.mkdir()
    shutil.copy(ROOT / "examples" / "00_quickstart.py", program / "train.py")
    run(environment / "bin" / "parallelize", "--version", cwd=program)
    run(python, "train.py", cwd=program)
    run(environment / "bin" / "parallelize", "doctor", cwd=program)

    say("run tests of the source distribution")
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[test]")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    pytest = (python, "-m", "pytest", "-q")
    run(*pytest, "--collect-only", "-m", "", cwd=source, quiet=True)
    run(*pytest, *TESTS_OF_THE_SDIST, cwd=source)


def run(*command: str | Path, cwd: Path | None = None, quiet: bool = False) -> None:
    """Run a command; a failure ends this program with its output and exit code."""
    # Python would find the checkout before the installed package.
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("PARALLELIZE_", "PYTHON"))}
    pipe = subprocess.PIPE if quiet else None
    done = subprocess.run(
        command, cwd=cwd, env=environ, check=False, text=True, stdout=pipe, stderr=subprocess.STDOUT if quiet else None
    )
    if done.returncode:
        print(done.stdout or "", end="")
        print(f"failed: {' '.join(map(str, command))}")
        sys.exit(done.returncode)


def listed(lines: Iterable[str]) -> str:
    """Return a list for a message."""
    return "\n".join(f"- {line}" for line in lines)


def say(text: str) -> None:
    """Print what comes next, before the output of the commands."""
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    main()
