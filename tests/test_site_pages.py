"""The pages of the documentation's site come from files of the repository, and their links lead to each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import reference
import site_pages
from site_pages import GUIDES, ROOT, SITE

GUIDE = GUIDES / "data.md"
README = ROOT / "README.md"


def test_the_side_bar_lists_every_page_once() -> None:
    """A new guide needs a line in mkdocs.yml."""
    listed = re.findall(r"^ +- (?:.*: )?([\w/]+\.md)$", (SITE / "mkdocs.yml").read_text(), re.MULTILINE)
    files = [*site_pages.pages(), *reference.PAGES.glob("*.md")]
    assert sorted(listed) == sorted(site_pages.address_of(path) for path in files)


@pytest.mark.parametrize("page", sorted(reference.PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_links_of_the_reference_lead_to_files(page: Path) -> None:
    """Each page of a subject names its guides, by paths of the repository."""
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert links
    assert all((page.parent / link).exists() for link in links)


@pytest.mark.parametrize(
    ("path", "link", "of_site"),
    [
        (README, "](examples/guides/data.md#order)", "](guides/data.md#order)"),
        (README, "](CHANGELOG.md)", "](changelog.md)"),
        (README, "](examples/01_digits.py)", "](source/examples/01_digits.py.md)"),
        (README, "](examples/10_slurm)", "](source/examples/10_slurm.md)"),
        (README, '<a href="examples/guides/data.md#order">', '<a href="guides/data.html#order">'),
        (README, "](benchmarks/results/overview.svg)", "](source/benchmarks/results/overview.svg)"),
        (README, '<img src="benchmarks/results/overview.svg">', '<img src="source/benchmarks/results/overview.svg">'),
        (GUIDE, "](faq.md)", "](faq.md)"),
        (GUIDE, "](../../README.md)", "](../index.md)"),
        (GUIDE, "](../../tests/conftest.py#L1)", "](../source/tests/conftest.py.md)"),
        (GUIDE, "](../10_slurm/README.md)", "](../source/examples/10_slurm.md)"),
        (ROOT / "examples/10_slurm/README.md", "](multi.py)", "](10_slurm/multi.py.md)"),
        (reference.PAGES / "data.md", "](../../../../examples/guides/data.md)", "](../guides/data.md)"),
    ],
)
def test_a_link_in_the_repository_leads_to_a_page_of_the_site(path: Path, link: str, of_site: str) -> None:
    """To the page of a guide, or to that of a source; pictures stay files."""
    assert site_pages.page_of(link, path=path) == of_site


@pytest.mark.parametrize(
    "text",
    [
        "](https://pytorch.org)",
        "](#order)",
        "](missing.md)",
        "`](faq.md)`",
        "```python\nf[0](faq.md)\n```",
        "](../../..)",
    ],
)
def test_what_is_no_link_to_a_file_stays(text: str) -> None:
    """Also a link to a file that is missing, which MkDocs then reports."""
    assert site_pages.page_of(text, path=GUIDE) == text


def test_with_an_address_of_the_repository_sources_are_there() -> None:
    """Pages and pictures are still those of the site."""
    text = "](faq.md) ](../01_digits.py#L3) ](../../benchmarks/results/overview.svg)"
    assert site_pages.page_of(text, path=GUIDE, repository="https://example.org/p") == (
        "](faq.md) ](https://example.org/p/blob/main/examples/01_digits.py#L3) "
        "](../source/benchmarks/results/overview.svg)"
    )


@pytest.mark.parametrize(
    ("text", "of_site"),
    [
        ("Rules:\n- one\n  of two lines\n- two", "Rules:\n\n- one\n    of two lines\n- two"),
        ("- one\n  - two\n    - three\n- four", "- one\n    - two\n        - three\n- four"),
        (
            "1. one:\n\n   ```python\n   def f():\n       x\n   ```\n\nText",
            "1. one:\n\n    ```python\n    def f():\n        x\n    ```\n\nText",
        ),
        (
            "Text\n\n    code\n\n- one\n\n  Text\n\nText\n  more",
            "Text\n\n    code\n\n- one\n\n    Text\n\nText\n  more",
        ),
        ("```text\na\n- b\n  - c\n```", "```text\na\n- b\n  - c\n```"),
    ],
)
def test_lists_are_indented_for_mkdocs(text: str, of_site: str) -> None:
    """GitHub takes less indentation, and no empty line between a paragraph and its list; blocks of code stay."""
    assert site_pages.page_of(text, path=GUIDE) == of_site


def test_markup_that_is_shown_as_text_is_found() -> None:
    """A list in a list that is indented by two, and a block of code in a list."""
    html = "<p>One:\n  - two\n```python</p><pre>- code\n```</pre><li>\n<p>item - 1</p></li>"
    assert site_pages.unread_markup(html) == ["  - two", "```python</p><li>"]


def test_names_are_linked_once_in_each_section() -> None:
    """Neither in headings nor in other links, and words that mean something else only with parentheses."""
    text = (
        "# About `shard_loader`\n\n`shard_loader` and `shard_loader`, `@distributed(gpus=2)`, a `rank`, `rank()`\n"
        "[see `Amp`](precision.md)\n\n## Next\n\n`shard_loader`\n\n```python\nx = `Amp`\n```\n"
    )
    names = [f"parallelize.{name}" for name in ("Amp", "distributed", "rank", "shard_loader")]
    linked = site_pages.link_names(text, names)
    assert linked.count("[`shard_loader`][parallelize.shard_loader]") == 2
    assert "[`@distributed(gpus=2)`][parallelize.distributed], a `rank`, [`rank()`][parallelize.rank]" in linked
    assert re.sub(r"\[(`[^`]+`)\]\[[\w.]+\]", r"\1", linked) == text
    assert linked.count("][") == 4


def test_sources_are_those_to_which_pages_lead() -> None:
    """With the files of folders, and what their README.md names, each once."""
    found = site_pages.sources([README])
    names = {path.relative_to(ROOT).as_posix() for path in found}
    assert {"examples", "examples/01_digits.py", "examples/10_slurm", "examples/10_slurm/multi.py"} <= names
    assert not {"examples/10_slurm/README.md", "examples/guides/data.md", "README.md"} & names
    assert len({site_pages.address_of(path) for path in found}) == len(found)


def test_pages_of_sources() -> None:
    """A program is a block of code, a notebook its cells, and a folder has a list of its files."""
    program = site_pages.source_page(ROOT / "examples/00_quickstart.py")
    assert program.startswith("# examples/00_quickstart.py\n\n```python\n")
    assert "```python\n" in site_pages.source_page(ROOT / "examples/12_notebook.ipynb")
    assert "- [multi.py](10_slurm/multi.py.md)" in site_pages.source_page(ROOT / "examples/10_slurm")


def test_a_folder_lists_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that somebody has run leaves files in its folder, which no page can show."""
    monkeypatch.setattr(site_pages, "ROOT", tmp_path)
    folder = tmp_path / "example"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "train.py").write_text("x = 1\n")
    (folder / "model.pt").write_bytes(b"PK\0\1")
    assert site_pages.source_page(folder) == "# example\n\n## Files\n\n- [train.py](example/train.py.md)\n"


def test_llms_text_has_a_line_for_each_page() -> None:
    """With absolute links if the site has an address."""
    sections = [{"Start": [{"Overview": "index.md"}, "guides/data.md"]}, {"API": ["api/data.md"]}]
    lines = site_pages.llms_text("name", "It does.", sections).splitlines()
    assert lines[:3] == ["# name", "", "> It does."]
    links = [re.match(r"- \[.+\]\((.+?)\): .+\.?", line) for line in lines if line.startswith("-")]
    assert [link and link[1] for link in links] == ["index.md", "guides/data.md", "api/data.html"]
    assert "](https://a.b/guides/data.md)" in site_pages.llms_text("name", "", sections, site="https://a.b/")


def test_the_first_sentence_is_plain() -> None:
    """Without headings, code, links and stars."""
    text = "# Title\n\n<!-- mark -->\n```python\nx\n```\n\nRead **the [guide](a.md)** of `x`.\nMore.\n"
    assert site_pages.first_sentence(text) == "Read the guide of `x`."
