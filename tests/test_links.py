"""Every link of the repository's Markdown pages leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
CODE = re.compile(r"^(`{3,}|~{3,}).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:")  # https:, mailto:


def pages() -> list[Path]:
    """The Markdown pages that people read. Pages are made from templates, whose links are those of the pages."""
    places = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", ".github/**/*.md")
    found = [path for place in places for path in ROOT.glob(place)]
    return sorted(path for path in found if not path.name.endswith(".template.md"))


@cache
def anchors(page: Path) -> set[str]:
    """The names of the headings, as GitHub and the documentation site make them."""
    names: set[str] = set()
    for heading in HEADING.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        names.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words)))
    return names


def broken(page: Path, text: str) -> Iterator[str]:
    """What is wrong with the links in the `text` of `page`."""
    for target in LINK.findall(CODE.sub("", text)):
        if ELSEWHERE.match(target):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            yield f"{target}: there is no such file"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield f"{target}: {path.name} has no such heading"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_all_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page, page.read_text())) == []


def test_a_broken_link_is_found() -> None:
    page = ROOT / "docs" / "concepts.md"
    text = "[a](nowhere.md) [b](#one-round) [c](#two-rounds) `[d](code.md)` ![e](idea.svg) [f](https://example.org/#x)"
    assert list(broken(page, text)) == [
        "nowhere.md: there is no such file",
        "#two-rounds: concepts.md has no such heading",
    ]


def test_every_guide_is_in_the_navigation() -> None:
    """`make gpu` writes a report into docs/benchmarks, which is no guide."""
    named = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    paths = [path for path in (ROOT / "docs").rglob("*.md") if not path.name.endswith(".template.md")]
    guides = {
        path.relative_to(ROOT / "docs").as_posix() for path in paths if path.parents[1] != ROOT / "docs/benchmarks"
    }
    assert guides - named == set()


def test_the_site_has_a_page_or_a_copy_of_every_file_that_guides_link_to() -> None:
    """`make docs` refuses other links; docs/site.py names the files."""
    site = (ROOT / "docs" / "site.py").read_text()
    attached = set(re.findall(r'"([^"]+)"', re.findall(r"^ATTACHED = \((.*)\)$", site, flags=re.MULTILINE)[0]))
    outside = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in (ROOT / "docs").rglob("*.md")
        for target in LINK.findall(CODE.sub("", page.read_text()))
        if not ELSEWHERE.match(target) and not page.name.endswith(".template.md")
    }
    outside = {path for path in outside if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs")}
    pages = {*ROOT.glob("*.md"), *ROOT.glob("examples/*.py"), *ROOT.glob("examples/*.ipynb")}
    assert outside - pages == {ROOT / name for name in attached}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
