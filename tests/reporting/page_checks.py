"""A page read as a browser would: is it whole, and does it load anything?"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

EMPTY = {"br", "hr", "meta", "input", "path", "rect", "line"}
LOADING = {"src", "srcset", "data", "action", "formaction", "poster", "background", "xlink:href", "ping", "manifest"}


class Page(HTMLParser):
    """Tags in order, texts, and what is wrong with the nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.wrong: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.wrong += [f"<{name}> is not closed" for name in self._open]

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        if name not in EMPTY or self._is_svg_parent(name):
            self._open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        if not self._open or self._open[-1] != name:
            self.wrong.append(f"</{name}> closes {self._open[-1:]}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        {"script": self.scripts, "style": self.styles}.get(inside, self.texts).append(data)

    @staticmethod
    def _is_svg_parent(name: str) -> bool:
        """Without `/>` a drawing holds a title."""
        return name in {"path", "rect", "line"}

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def charts(self) -> list[dict[str, Any]]:
        """What the page gives to uPlot."""
        return [json.loads(str(attributes["data-chart"])) for _, attributes in self.tags if "data-chart" in attributes]

    def anchors(self) -> set[str]:
        return {str(attributes["id"]) for name, attributes in self.tags if name == "section"}


def check(text: str) -> Page:
    """Whole, and strictly offline: nothing is loaded, nothing but the page's own script may run."""
    page = Page(text)
    assert page.wrong == []
    for name, attributes in page.tags:
        assert name not in {"link", "img", "iframe", "object", "embed", "base", "image", "use", "form"}
        assert not LOADING & attributes.keys(), (name, attributes)
        assert not [key for key in attributes if key.startswith("on")], (name, attributes)
        for key, value in attributes.items():
            if key == "href":  # a place of the page, or the page with all solutions beside it
                assert str(value).startswith("#") or str(value).endswith("rollouts.html")
            if key == "style":
                assert "url(" not in str(value)
    for code in [*page.styles, *page.scripts]:
        own = code.replace("/*! https://github.com/leeoniya/uPlot", "")  # its licence
        assert not re.search(r"https?:|url\(|@import|\bfetch\b|XMLHttpRequest|import\s*\(", own)
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policies = [a["content"] for n, a in page.tags if n == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == [f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"]
    return page
