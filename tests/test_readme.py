"""README says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import readme


@pytest.mark.parametrize("path", [readme.README, readme.MIGRATION], ids=["README", "migration"])
def test_the_shown_diffs_and_tables_are_current(path: Path) -> None:
    """The diffs of examples and the tables of declared data are as `python tests/readme.py` writes them."""
    text = path.read_text()
    assert readme.written(text) == text
    assert "<!-- end -->" in text


def test_links_lead_somewhere() -> None:
    """Files and folders that README links to are there, and so are the tests that it calls proofs."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", readme.README.read_text())
    assert len(links) > 20
    assert [link for link in links if not (readme.ROOT / link).exists()] == []
    for proof in readme.proofs():
        path, _, name = proof.partition("::")
        assert f"def {name}(" in (readme.ROOT / path).read_text() if name else (readme.ROOT / path).exists()


def test_stale_readme_is_seen() -> None:
    """The comparison above fails on a block that was edited by hand."""
    stale = "<!-- support -->\n| a table of yesterday |\n<!-- end -->\n<!-- changed -->\n<!-- end -->"
    written = readme.written(stale)
    assert "yesterday" not in written
    assert "`ddp`" in written
    assert "+@distributed" in written


def test_every_migration_is_shown() -> None:
    """What changes from each peer stands in the README of its folder, as more than a title."""
    text = readme.MIGRATION.read_text()
    found = readme.migrations()
    assert sorted(found) == ["accelerate", "ddp", "lightning"]
    assert all(f"<!-- {name} -->\n{block}\n<!-- end -->" in text for name, block in found.items())
    assert all("+    with parallel_model(model):" in block for block in found.values())


def test_the_example_changes_four_places() -> None:
    """The import, the decorator and two wrapped objects are all that running in parallel adds or changes."""
    added = [line[1:].strip() for line in readme.changed().splitlines() if line.startswith("+") and line[1:].strip()]
    assert [line.split("(")[0] for line in added] == [
        "from parallelize import distributed, parallel_model, shard_loader",
        "@distributed",
        "with parallel_model",
        "for x, y in shard_loader",
    ]
