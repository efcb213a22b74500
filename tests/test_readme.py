"""README says what the code says."""

from __future__ import annotations

import readme


def test_the_shown_diff_and_tables_are_current() -> None:
    """The diff of the two examples and the tables of declared data are as `python tests/readme.py` writes them."""
    text = readme.README.read_text()
    assert readme.written(text) == text


def test_stale_readme_is_seen() -> None:
    """The comparison above fails on a block that was edited by hand."""
    stale = "<!-- support -->\n| a table of yesterday |\n<!-- end -->\n<!-- changed -->\n<!-- end -->"
    written = readme.written(stale)
    assert "yesterday" not in written
    assert "`ddp`" in written
    assert "+@distributed" in written


def test_the_example_changes_four_places() -> None:
    """The import, the decorator and two wrapped objects are all that running in parallel adds or changes."""
    added = [line[1:].strip() for line in readme.changed().splitlines() if line.startswith("+") and line[1:].strip()]
    assert [line.split("(")[0] for line in added] == [
        "from parallelize import distributed, parallel_model, shard_loader",
        "@distributed",
        "with parallel_model",
        "for x, y in shard_loader",
    ]
