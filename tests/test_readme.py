"""README and the guides agree with the code and the files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import readme


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
    """It has at most 900 words; without code, tables and addresses, at most 700."""
    assert len(readme.README.read_text().split()) <= 900
    text = re.sub(r"```.*?```|^\|.*?$|\]\([^)]*\)", "", readme.README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(text.split()) <= 700
