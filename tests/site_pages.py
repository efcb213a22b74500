"""The documentation as a site: MkDocs runs this file as a hook, see `.github/site/mkdocs.yml`.

README, the guides and the changelog stay where they are in the repository. The hooks give them to MkDocs, with
every other file of the repository to which one of them links. Glossary:

    page     a Markdown file that the side bar lists
    source   another file of the repository, or a folder, to which a page links
    address  where MkDocs finds a page or a source: `guides/data.md` becomes the file guides/data.html

tox's environment `docs` has MkDocs and no torch. The environment of the tests has torch and no MkDocs. So this file
imports MkDocs inside of the hooks only, and never the package.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reference

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = [
    "GUIDES",
    "ROOT",
    "SITE",
    "address_of",
    "first_sentence",
    "link_names",
    "llms_text",
    "page_of",
    "pages",
    "source_page",
    "sources",
    "unread_markup",
]

ROOT = Path(__file__).parents[1]
SITE = ROOT / ".github/site"
GUIDES = ROOT / "examples/guides"

# Pages that are neither a guide nor a page of the API reference.
_ADDRESSES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security.md",
}

# Sources that the site has as they are. It shows all others as a page.
_DATA = {".csv", ".gif", ".jpg", ".json", ".png", ".svg"}
_LANGUAGES = {
    ".cpp": "cpp",
    ".h": "cpp",
    ".py": "python",
    ".sbatch": "bash",
    ".sh": "bash",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
}

# A fenced block, or a code span.
_FENCED = r"^[ ]*```.*?^[ ]*```[ ]*$"
_BLOCK = re.compile(f"({_FENCED})", re.DOTALL | re.MULTILINE)
_CODE = re.compile(f"{_FENCED}|``.+?``|`[^`]+`", re.DOTALL | re.MULTILINE)

# The target and the anchor of a link that is relative: `](data.md#order)`, `src="overview.svg"`.
_MARKDOWN_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?")
_HTML_LINK = re.compile(r"""(?<=[ ]src=["']|href=["']|cset=["'])(?!\w+:|#)([^"'#]+)(#[^"']*)?""")

# What begins an item of a list, up to its text.
_LIST_MARKER = re.compile(r" *(?:[-*+]|\d+[.)]) +(?=\S)")

_log = logging.getLogger("mkdocs.hooks.site_pages")


def pages() -> list[Path]:
    """Return the pages, without those of the API reference, which are in MkDocs' own folder."""
    return [*(ROOT / name for name in _ADDRESSES), *sorted(GUIDES.glob("*.md"))]


def address_of(path: Path) -> str:
    """Return the address of a file or folder of the repository; a folder and its README.md have the same."""
    name = path.relative_to(ROOT).as_posix()
    if name in _ADDRESSES:
        return _ADDRESSES[name]
    if path.parent == GUIDES and path.suffix == ".md":
        return f"guides/{path.name}"
    if path.parent == reference.PAGES:
        return f"api/{path.name}"
    if path.name == "README.md":
        return address_of(path.parent)
    return f"source/{name}" if path.suffix in _DATA else f"source/{name}.md"


def _is_source(path: Path) -> bool:
    return address_of(path).startswith("source/")


# Markdown -----------------------------------------------------------------------------------------


def page_of(text: str, *, path: Path, repository: str = "") -> str:
    """Return a Markdown file of the repository as MkDocs has to read it.

    Args:
        text: the text of the file.
        path: the file.
        repository: the public address of the repository, to which links to sources lead; "": it has none, and they
            lead to pages of the site.
    """

    def link_in_markdown(link: re.Match[str]) -> str:
        return _site_link(link, path, repository)

    def link_in_html(link: re.Match[str]) -> str:
        # MkDocs knows the links of Markdown only, so this one has to name the built file.
        return re.sub(r"\.md(?=$|#)", ".html", _site_link(link, path, repository))

    def change_links(prose: str) -> str:
        return _HTML_LINK.sub(link_in_html, _MARKDOWN_LINK.sub(link_in_markdown, prose))

    return _indent_lists(_map_prose(text, change_links))


def _site_link(link: re.Match[str], path: Path, repository: str) -> str:
    target = _target(link, path)
    if target is None:
        return link[0]  # MkDocs reports that the file is missing
    anchor = link[2] or ""
    if not _is_source(target):
        return _relative(address_of(target), path) + anchor
    if repository and target.suffix not in _DATA:
        return f"{repository}/blob/main/{target.relative_to(ROOT).as_posix()}{anchor}"
    return _relative(address_of(target), path)  # anchors of GitHub, such as #L10, are not those of the site


def _target(link: re.Match[str], path: Path) -> Path | None:
    """Return the file or folder of the repository to which a link leads, if there is one."""
    target = Path(os.path.normpath(path.parent / link[1]))
    return target if target.is_relative_to(ROOT) and target.exists() else None


def _relative(address: str, path: Path) -> str:
    return os.path.relpath(address, Path(address_of(path)).parent)


def _map_prose(text: str, change: Callable[[str], str]) -> str:
    """Return a Markdown text whose prose is changed, and whose code is not."""
    changed = []
    end = 0
    for code in _CODE.finditer(text):
        changed += [change(text[end : code.start()]), code[0]]
        end = code.end()
    changed.append(change(text[end:]))
    return "".join(changed)


def _indent_lists(text: str) -> str:
    """Indent lists as Python-Markdown needs it, where GitHub needs less.

    What belongs to an item of a list is indented by four for each level, and a list that follows a paragraph begins
    after an empty line:

        Steps:               Steps:

        1. Install it:       1. Install it:

           ```console            ```console
           pip install .         pip install .
           ```                   ```
    """
    lines: list[str] = []
    items: list[int] = []  # of each list around the line: the column in which the text of its item begins
    is_in_block = False
    for line in text.split("\n"):
        column = len(line) - len(line.lstrip(" "))
        marker = _LIST_MARKER.match(line)
        if line.strip() and not is_in_block:
            is_item_before = bool(items)
            while items and column < items[-1]:
                items.pop()
            if marker and not is_item_before and lines and lines[-1].strip():
                lines.append("")
        parent = items[-1] if items else 0
        lines.append("    " * len(items) + line[min(column, parent) :] if line.strip() else "")
        if line.lstrip(" ").startswith("```"):
            is_in_block = not is_in_block
        elif marker and not is_in_block:
            items.append(len(marker[0]))
    return "\n".join(lines)


def link_names(text: str, names: Iterable[str]) -> str:
    """Link code spans that show a public name to the reference, once in each section.

    Args:
        text: a Markdown text.
        names: the full names, such as `parallelize.shard_loader`.
    """
    full_names = {name.rpartition(".")[2]: name for name in names}
    linked_in_section: set[str] = set()
    parts = []
    end = 0
    for code in _CODE.finditer(text):
        prose = text[end : code.start()]
        end = code.end()
        if re.search(r"^#", prose, re.MULTILINE):
            linked_in_section.clear()
        name = _name_in(code[0])
        if name in full_names and name not in linked_in_section and not _is_in_link(text[: code.start()]):
            linked_in_section.add(name)
            parts += [prose, f"[{code[0]}][{full_names[name]}]"]
        else:
            parts += [prose, code[0]]
    return "".join([*parts, text[end:]])


def _name_in(code: str) -> str | None:
    """Return the name of `FSDPBackend`, `@distributed` or `rank()`.

    A word such as `rank` or `device` may mean something else, so that it is no name without parentheses.
    """
    span = re.fullmatch(r"`(@?)(\w+)(\([^`]*\))?`", code)
    if span is None:
        return None
    at, name, parentheses = span.groups()
    is_word = name.isalpha() and name.islower()
    return None if is_word and name != "distributed" and not at and not parentheses else name


def _is_in_link(before: str) -> bool:
    """Whether a code span after this text is in a heading or in the text of a link."""
    paragraph = before.rpartition("\n\n")[2]
    return before.rpartition("\n")[2].startswith("#") or paragraph.rfind("[") > paragraph.rfind("]")


def unread_markup(html: str) -> list[str]:
    """Return what MkDocs shows as text although GitHub shows a list or a block of code."""
    prose = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
    return re.findall(r"^[ ]*(?:```|[-*] |\d+\. ).*", prose, re.MULTILINE)


# Sources ------------------------------------------------------------------------------------------


def sources(starts: Iterable[Path]) -> list[Path]:
    """Return the sources to which some pages link, and those to which these sources link."""
    reached: set[Path] = set()
    waiting = list(starts)
    while waiting:
        for path in _links_of(waiting.pop()):
            if path not in reached and _is_source(path):
                reached.add(path)
                waiting.append(path)
    # A link may lead to a folder or to its README.md: this is one page.
    folders = {path for path in reached if path.is_dir()}
    return sorted(path for path in reached if path.name != "README.md" or path.parent not in folders)


def _links_of(path: Path) -> Iterator[Path]:
    """Yield the files and folders to which the page of a file or folder links."""
    if path.is_dir():
        yield from _files_of(path)
        path /= "README.md"
    if path.name == "README.md" and path.parent != ROOT:
        yield path.parent
    if path.suffix == ".md" and path.exists():
        text = _CODE.sub("", path.read_text())
        for link in [*_MARKDOWN_LINK.finditer(text), *_HTML_LINK.finditer(text)]:
            target = _target(link, path)
            if target is not None:
                yield target


def _files_of(folder: Path) -> list[Path]:
    """Return what a folder has in the repository, without its README.md and without files that a program has left."""
    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "__", "README.md"))]
    return [path for path in paths if path.is_dir() or path.suffix in _DATA or _is_text(path)]


def _is_text(path: Path) -> bool:
    """Whether a file is no checkpoint or archive."""
    return b"\0" not in path.read_bytes()


def source_page(path: Path) -> str:
    """Return the page of a source: a program as a block of code, a folder as its README.md and a list of its files."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return _folder_page(path, name)
    text = path.read_text()
    if path.suffix == ".md":
        return page_of(text, path=path)
    if path.suffix == ".ipynb":
        return _notebook_page(json.loads(text), path)
    return f"# {name}\n\n{_fenced(text, _LANGUAGES.get(path.suffix, 'text'))}\n"


def _folder_page(folder: Path, name: str) -> str:
    readme = folder / "README.md"
    text = page_of(readme.read_text(), path=readme) if readme.exists() else f"# {name}\n"
    files = [f"- [{file.name}]({_relative(address_of(file), folder)})" for file in _files_of(folder)]
    return "\n".join([text, "## Files", "", *files, ""])


def _notebook_page(notebook: dict[str, Any], path: Path) -> str:
    cells = [f"# {path.relative_to(ROOT).as_posix()}"]
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cells.append(page_of(re.sub(r"^#", "##", text, flags=re.MULTILINE), path=path))
        else:
            cells.append(_fenced(text, "python"))
    return "\n\n".join(cells) + "\n"


def _fenced(text: str, language: str) -> str:
    fence = "~~~~" if "```" in text else "```"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


# llms.txt -----------------------------------------------------------------------------------------


def llms_text(title: str, summary: str, sections: list[dict[str, Any]], *, site: str = "") -> str:
    """Return the list of all pages for language models, as llmstxt.org describes it.

    Args:
        title: the name of the project.
        summary: what it does, in one sentence.
        sections: `nav` of mkdocs.yml: heading -> list of addresses, or of titles with addresses.
        site: the public address of the site; "": links are relative.
    """
    paths = {address_of(path): path for path in [*pages(), *reference.PAGES.glob("*.md")]}
    lines = [f"# {title}", "", f"> {summary}"]
    for section in sections:
        for heading, entries in section.items():
            lines += ["", f"## {heading}", ""]
            for address in _addresses(entries):
                if address not in paths:
                    continue  # MkDocs reports that the file is missing
                text = paths[address].read_text()
                # Guides are in the site as Markdown, too. Pages of the reference get their text from docstrings.
                link = address.replace(".md", ".html") if address.startswith("api/") else address
                lines.append(f"- [{_title(text)}]({site}{link}): {first_sentence(text)}")
    return "\n".join(lines) + "\n"


def _addresses(entries: list[Any]) -> list[str]:
    return [entry if isinstance(entry, str) else next(iter(entry.values())) for entry in entries]


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")


def first_sentence(text: str) -> str:
    """Return the first sentence of a page in plain text."""
    for paragraph in re.split(r"\n\s*\n", _BLOCK.sub("", text)):
        if re.match(r"\s*[\w`*\[@\"]", paragraph):
            plain = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.!?])\s(?=[A-Z`(@])", plain.replace("**", ""))[0].rstrip(":")
    return ""


# Hooks of MkDocs ----------------------------------------------------------------------------------


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Give MkDocs the pages and sources of the repository."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in pages():
        files.append(File.generated(config, address_of(path), abs_src_path=str(path)))
    for path in sources([*pages(), *reference.PAGES.glob("*.md")]):
        if path.suffix in _DATA:
            files.append(File.generated(config, address_of(path), abs_src_path=str(path)))
        elif not config.repo_url:
            page = source_page(path)
            inclusion = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, address_of(path), content=page, inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, link public names, and insert the help of commands."""
    if page.file.abs_src_path is None:  # a source
        page.meta["search"] = {"exclude": True}
        return markdown
    path = Path(page.file.abs_src_path)
    markdown = page_of(markdown, path=path, repository=(config.repo_url or "").rstrip("/"))
    if page.file.src_uri != "changelog.md":  # which has names of former versions
        markdown = link_names(markdown, reference.described_names())
    return re.sub(r"<!-- help (\w+) -->", lambda marker: _help_of(marker[1]), markdown)


def _help_of(command: str) -> str:
    """Return what `parallelize COMMAND --help` prints, which needs no torch."""
    words = [sys.executable, "-m", "parallelize", command, "--help"]
    shown = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "COLUMNS": "90"}, check=True, capture_output=True, text=True
    )
    return _fenced(shown.stdout, "text")


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Warn of text that would be a list or a block of code on GitHub."""
    for line in unread_markup(html):
        _log.warning("%s: MkDocs reads this line as text: %r", page.file.src_uri, line)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Write llms.txt, and the pages as Markdown, to which it links."""
    folder = Path(config.site_dir)
    site = f"{config.site_url.rstrip('/')}/" if config.site_url else ""
    text = llms_text(config.site_name, config.site_description or "", config.nav or [], site=site)
    (folder / "llms.txt").write_text(text)
    repository = (config.repo_url or "").rstrip("/")
    for path in pages():
        (folder / address_of(path)).write_text(page_of(path.read_text(), path=path, repository=repository))
