"""Every benchmark runs, and its printed tables are saved as data."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import picture  # noqa: E402 - benchmarks/ is not a package
from report import machine  # noqa: E402 - benchmarks/ is not a package
from suite import present  # noqa: E402 - see above

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.soak
@pytest.mark.parametrize("name", present(is_quick=True))
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    """`suite.py --quick` runs it in seconds, and saves its tables, machine and plot."""
    command = [sys.executable, str(BENCHMARKS / "suite.py"), "--quick", "--only", name, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    if "there are no pretended devices here" in done.stderr:
        pytest.skip(done.stderr.splitlines()[0])
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["is_quick"] is True
    assert all(len(row) == len(table["columns"]) for table in report["tables"] for row in table["rows"])
    values = [ratio["value"] for ratio in report["ratios"]]
    assert values
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert values[0] == 1.0 or name in {"auto", "faults"}  # the first row is the reference; in these it is a column
    assert str(tmp_path) not in json.dumps(report)
    plots = [ET.parse(path) for path in tmp_path.glob("*.svg")]
    assert len(plots) == (2 if name == "scaling" else 1)
    assert all(each.getroot().tag == f"{SVG}svg" for each in plots)
    assert f"{name} (" in done.stdout


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    """Results of --quick need another folder than the published ones, and unknown names are refused."""
    for arguments, message in ((["--quick"], "--folder"), (["--only", "nothing"], "invalid choice: 'nothing'")):
        command = [sys.executable, str(BENCHMARKS / "suite.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
        assert (done.returncode, message in done.stderr) == (2, True)


@pytest.mark.soak
def test_a_users_own_function_is_measured(tmp_path: Path) -> None:
    """It is passed as file and name; if it returns its seconds, the start of the processes is not counted."""
    script = tmp_path / "mine.py"
    script.write_text(
        "from parallelize import distributed, rank\n@distributed()\ndef train():\n    return 100 * (rank() + 1), 0.5\n"
    )
    command = [sys.executable, str(BENCHMARKS / "scaling/main.py"), f"{script}:train", "--counts", "1", "2"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--svg", "mine.svg"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert (
        "| 1 | 200.0 | 200.0 to 200.0 | 1.00x | 100 % |\n| 2 | 600.0 | 600.0 to 600.0 | 3.00x | 150 % |" in done.stdout
    )
    texts = [each.text for each in ET.parse(tmp_path / "mine.svg").iter(f"{SVG}text")]
    assert {"1", "2", "200", "600", "mine.py:train: samples a second"} <= set(texts)


def test_machine_facts_are_anonymous() -> None:
    """They contain cores and versions, but no host name, user name or home folder."""
    import getpass
    import platform

    facts = machine()
    assert facts["cores"] >= 1
    assert facts["torch"]
    assert facts["parallelize"]
    text = json.dumps(facts)
    assert str(Path.home()) not in text
    assert platform.node() == "" or f'"{platform.node()}"' not in text
    assert f'"{getpass.getuser()}"' not in text


def test_the_picture_shows_the_results() -> None:
    """README's picture is drawn from the published results, with a bar for each of their rows that it shows."""
    names = ("launch", "faults", "step_overhead")
    results = [json.loads((BENCHMARKS / "results" / f"{name}.json").read_text()) for name in names]
    drawn = picture.draw(picture.panels(*results), "machine")
    published = (BENCHMARKS / "results" / "overview.svg").read_text()
    bars = [each.attrib for each in ET.fromstring(drawn).iter(f"{SVG}rect")]
    assert bars == [each.attrib for each in ET.fromstring(published).iter(f"{SVG}rect")]
    calls, reports, steps = picture.panels(*results)
    assert len(calls.bars) == len(results[0]["tables"][0]["rows"])
    assert reports.bars["SIGKILL: parallelize"] < reports.bars["SIGKILL: torchrun"]
    assert steps.bars["by hand"] == 1.0
