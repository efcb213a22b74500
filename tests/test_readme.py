"""README and the guides agree with the code and the files of the repository."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import figures
import pytest
import readme

sys.path.append(str(readme.ROOT / "benchmarks"))

import picture  # benchmarks/ is not a package
import suite

# Documents for users and contributors. CHANGELOG.md tells what was true when it was written.
DOCUMENTS = [
    path
    for pattern in ("README.md", "examples/**/*.md", ".github/**/*.md", "benchmarks/**/README.md")
    for path in sorted(readme.ROOT.glob(pattern))
]
RESULTS = {path.stem: path for path in sorted(figures.RESULTS.glob("*.json"))}


def name_of(path: Path) -> str:
    """Return a document's path from the root."""
    return str(path.relative_to(readme.ROOT))


@pytest.mark.parametrize("path", readme.PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_shown_diffs_and_tables_are_current(path: Path) -> None:
    """The generated diffs and tables are as `python tests/readme.py` writes them."""
    text = path.read_text()
    assert readme.written(text) == text


def test_each_table_is_shown_once() -> None:
    """Every generated block has one place."""
    text = "".join(path.read_text() for path in readme.PAGES)
    blocks = ("changed", "changes of Python", "changes of torch", "levels", "peers", "support")
    assert {name: text.count(f"<!-- {name} -->") for name in blocks} == dict.fromkeys(blocks, 1)


@pytest.mark.parametrize("path", [readme.README, *readme.GUIDES], ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    """The files and folders that a page links to exist."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_skill_is_the_cheat_sheet() -> None:
    """Agents read what people read, in fewer than 400 words."""
    assert readme.SKILL.read_text() == readme.skill()
    assert len(readme.skill().split()) < 400


def test_proofs_exist() -> None:
    """README links to every guide, and the tests that the peers table links to exist."""
    assert all(f"](examples/guides/{path.name})" in readme.README.read_text() for path in readme.GUIDES)
    for proof in readme.proofs():
        path, _, name = proof.partition("::")
        assert f"def {name}(" in (readme.ROOT / path).read_text() if name else (readme.ROOT / path).exists()


def test_a_stale_block_is_detected() -> None:
    """The comparison above fails on a block that was edited by hand."""
    stale = "<!-- support -->\n| a table of yesterday |\n<!-- end -->\n<!-- changed -->\n<!-- end -->"
    written = readme.written(stale)
    assert "yesterday" not in written
    assert "`ddp`" in written
    assert "+@distributed" in written


def test_every_migration_is_shown() -> None:
    """The migration README contains the diff for each library, and none of the diffs is empty."""
    text = readme.MIGRATION.read_text()
    diffs = readme.migrations()
    assert sorted(diffs) == ["accelerate", "ddp", "lightning"]
    assert all(f"<!-- {name} -->\n{block}\n<!-- end -->" in text for name, block in diffs.items())
    assert all("+    with parallel_model(model):" in block for block in diffs.values())


def test_the_example_changes_four_places() -> None:
    """Running in parallel changes only the import, the decorator and two wrapped objects."""
    added = [line[1:].strip() for line in readme.changed().splitlines() if line.startswith("+") and line[1:].strip()]
    assert [line.split("(")[0] for line in added] == [
        "from parallelize import distributed, parallel_model, shard_loader",
        "@distributed",
        "with parallel_model",
        "for x, y in shard_loader",
    ]


def test_readme_is_short() -> None:
    """It has at most 900 words beside markup and arrows; without code, tables and addresses, at most 700."""
    shown = re.sub(r"<!--.*?-->", "", readme.README.read_text())
    words = [word for word in shown.split() if re.search(r"\w", word)]
    assert len(words) <= 900
    text = re.sub(r"```.*?```|^\|.*?$|\]\([^)]*\)", "", readme.README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(text.split()) <= 700


# --- Figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_no_measurement_is_typed_by_hand(path: Path) -> None:
    """A number with a unit is generated from results, or `figures.LIMITS` says why it is no measurement."""
    assert figures.typed_by_hand(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It takes 0.09 s, 22x as long, and 3 to 8 % more.", ["0.09 s", "22x", "8 %"]),
        ("A step is 18 times as fast in 1.7 GiB and 5 seconds.", ["18 times", "1.7 GiB"]),
        ("It takes <!-- figures: launch/second call -->7.77 s<!-- end --> here, and 8.88 s there.", ["8.88 s"]),
        ("<!-- cost -->\n| 7.77 s |\n<!-- end -->\n```text\n9.99 s\n```\n`7.77 s`", []),
        ("8 x 1024 tokens, torch 2.13.0, 4 GPUs, a path-3 s3://x, 3 steps", []),
    ],
)
def test_numbers_with_units_are_found(text: str, expected: list[str]) -> None:
    """Generated parts, code and limits are left out, and so are numbers without a unit."""
    assert figures.typed_by_hand(text) == expected


@pytest.mark.parametrize("name", figures.NAMES)
def test_a_figure_is_the_same_everywhere(name: str) -> None:
    """All documents that show a figure show one text, that of the results."""
    shown = {text for path in DOCUMENTS for shown_name, text in figures.blocks(path.read_text()) if shown_name == name}
    assert shown <= {figures.text_of(name)}


def test_the_short_table_agrees_with_the_page() -> None:
    """README shows the table of costs, and each time in it is in a table of the guide to performance."""
    assert readme.README.read_text().count("<!-- cost -->") == 1
    times = re.findall(r"\d+\.\d+ (?:s|ms)\b", figures.costs())
    page = (readme.ROOT / "examples/guides/performance.md").read_text()
    assert len(times) == 8
    assert [time for time in times if f"| {time} |" not in page] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_markers_of_figures_are_placed_well(path: Path) -> None:
    """Each has an end and a known name; one at the start of a line is alone there, as Markdown needs it."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    assert text.count("<!-- figures:") == len(figures.blocks(text))
    lines = [line for line in text.splitlines() if line.lstrip().startswith(("<!-- figures:", "<!-- end"))]
    assert [line for line in lines if line.count("-->") != 1 or not line.endswith("-->")] == []
    assert path in readme.PAGES or "<!-- figures:" not in text


def test_an_unknown_figure_is_an_error() -> None:
    """The error lists the figures that there are."""
    with pytest.raises(KeyError, match=r"no figure 'launch/third call'.*launch/second call"):
        figures.written("<!-- figures: launch/third call --><!-- end -->")


def test_a_stale_figure_is_detected() -> None:
    """What was edited by hand between the markers is replaced, in a sentence and in lines of its own."""
    inline = "takes <!-- figures: launch/second call -->1 year<!-- end -->."
    assert figures.written(inline) == inline.replace("1 year", figures.text_of("launch/second call"))
    table = figures.written("<!-- figures: faults/table -->\nold\n<!-- end -->\n")
    assert table == f"<!-- figures: faults/table -->\n{figures.text_of('faults/table')}\n<!-- end -->\n"


@pytest.mark.parametrize("name", RESULTS)
def test_results_say_where_they_come_from(name: str) -> None:
    """A file has a machine with a date and a command that can be repeated, or says that it was measured by hand."""
    report = json.loads(RESULTS[name].read_text())
    assert report["is_quick"] is False
    assert report["benchmark"] in suite.BENCHMARKS
    assert all(len(row) == len(table["columns"]) for table in report["tables"] for row in table["rows"])
    if report["command"]:
        assert {"date", "cpu", "cores", "python", "torch"} <= report["machine"].keys()
    else:
        assert report["origin"].startswith("By hand, once:")


@pytest.mark.parametrize("path", sorted(figures.RESULTS.glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_are_drawn_from_results(path: Path) -> None:
    """A picture is the one that the file of results beside it gives, and README's is that of three of them."""
    report = json.loads(RESULTS[path.stem].read_text()) if path.stem != "overview" else None
    expected = picture.drawn() if report is None else suite.plot_of(report)
    assert path.read_text() == expected
    ET.fromstring(expected)


def test_readmes_picture_has_the_numbers_of_its_table() -> None:
    """The second call, the killed rank and the step of a GPT are the same in both."""
    shown = (figures.RESULTS / "overview.svg").read_text()
    assert f">{figures.text_of('launch/second call')}<" in shown
    assert f">{figures.text_of('faults/killed')}<" in shown
    steps = figures.table_of("step_overhead")
    ratio = steps.cell(("GPT of 6 layers", "2", "O0", "parallelize"), "ratio of CPU time")
    assert f">{figures.rounded(float(ratio))}<" in shown
