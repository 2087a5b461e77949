"""HTML that cannot be broken by what it shows.

    tag("p", "1 < 2", class_="note")       # <p class="note">1 &lt; 2</p>

Invariant: only `Html` passes unchanged, and only this module, `document` (its own style sheet and script) and the joins
of pieces that are `Html` make it. Text of models, of configurations and of files is `str`, so it is escaped wherever it
is put.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pvg.errors import MissingRequirementError
from pvg.store.atomic import write_output

# Controls that HTML cannot hold, and the marks that change the direction of the text that follows.
UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

VOID = frozenset({"br", "hr", "meta", "input", "path", "rect", "line"})  # without content


class Html(str):
    """Markup that is safe as it is."""

    __slots__ = ()


Piece = str | Html | None
Attribute = str | float | bool | None


def text(value: object) -> Html:
    """Any value as text; `Html` as it is. What cannot be shown becomes a replacement character."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(UNSHOWABLE.sub("\ufffd", str(value)), quote=True))


def join(pieces: Iterable[Piece], between: str = "") -> Html:
    return Html(text(between).join(text(piece) for piece in pieces if piece is not None))


def tag(name: str, /, *children: Piece, **attributes: Attribute) -> Html:
    """An element. `class_` is `class`, `data_name` is `data-name`; None and False leave an attribute out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID and not children:
        return Html(f"<{name}{written}>" if name in {"br", "hr", "meta", "input"} else f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def div(class_: str, /, *children: Piece, **attributes: Attribute) -> Html:
    return tag("div", *children, class_=class_, **attributes)


def span(class_: str, /, *children: Piece, **attributes: Attribute) -> Html:
    return tag("span", *children, class_=class_, **attributes)


def number(value: float) -> str:
    """A coordinate: at most two decimals, no trailing zeros."""
    written = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if written in ("-0", "") else written


def table(head: Iterable[Piece], rows: Iterable[Iterable[Piece]], class_: str = "") -> Html:
    """Cells that are `td` or `th` elements already stay as they are; the first of a row is its heading."""
    body = [tag("tr", *(_cell(cell, "th" if not place else "td") for place, cell in enumerate(row))) for row in rows]
    return div(
        "scroll",
        tag(
            "table",
            tag("thead", tag("tr", *(_cell(cell, "th") for cell in head))),
            tag("tbody", *body),
            class_=class_ or None,
        ),
    )


def _cell(cell: Piece, name: str) -> Html:
    if isinstance(cell, Html) and cell.startswith(("<td", "<th")):
        return cell
    return tag(name, cell)


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    shown = number(value) if isinstance(value, (int, float)) else text(value)
    return f' {name}="{shown}"'


# One file out of sections: head, style sheet, script, a list of contents and the switch for dark and light.
#
# Invariant: the page loads nothing. Its content security policy forbids it, and allows this one script by its hash,
# so that nothing a model wrote could run even if it came through the escaping.


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page under a heading. `lead`: a sentence below it. One without a body is left out."""

    anchor: str
    title: str
    body: Sequence[Html | None]
    lead: Html | str = ""


def document(title: str, header: Sequence[Html | None], sections: Sequence[Section], footer: Piece) -> str:
    """The whole page."""
    shown = [section for section in sections if any(piece is not None for piece in section.body)]
    style, script = _shipped("page.css"), _shipped("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Html(style)),
    )
    contents = tag("nav", *(tag("a", section.title, href=f"#{section.anchor}") for section in shown), class_="contents")
    switch = tag(
        "button", "theme", id="theme", type="button", title="light, dark, or as the system has it", hidden=True
    )
    body = tag(
        "body",
        div("bar-top", div("inside", contents, switch)),
        tag("main", tag("header", *header), *(_section(section) for section in shown)),
        tag("footer", footer),
        div("tip", hidden=True, role="status"),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def write_page(path: Path, page: str) -> None:
    """Replace `path` by the page, whole or not at all. Raises MissingRequirementError where it cannot be written."""
    remedy = "Write the page elsewhere with --html FILE, or leave it out with --no-html."
    try:
        write_output(path, page.encode())
    except MissingRequirementError as error:  # its own remedy is for a run, which can be resumed
        raise MissingRequirementError(error.message, remedy) from error
    except OSError as error:
        raise MissingRequirementError(f"The page {path} cannot be written: {error.strerror}.", remedy) from error


def grid(*charts: Html | None) -> Html | None:
    """Charts side by side, as many as fit."""
    there = [chart for chart in charts if chart is not None]
    return div("grid", *there) if there else None


def details(summary: str, *body: Html | None) -> Html | None:
    """What is there for those who ask."""
    there = [piece for piece in body if piece is not None]
    return tag("details", tag("summary", summary), *there) if there else None


def empty(why: str) -> Html:
    """Why a section that a reader would look for shows nothing."""
    return tag("p", why, class_="empty")


def facts(pairs: Sequence[tuple[str, Piece]]) -> Html:
    """Small facts in a row: name above value."""
    there = [(name, value) for name, value in pairs if value]
    return tag("dl", *(div("fact", tag("dt", name), tag("dd", value)) for name, value in there), class_="facts")


def badge(word: str, kind: str) -> Html:
    return span(f"badge {kind}", word)


def command(line: str, what: str) -> Html:
    return tag("li", tag("code", line), span("quiet", what))


def subheading(title: str, note: str = "") -> Html:
    return join([tag("h3", title), tag("p", note, class_="note") if note else None])


def _section(section: Section) -> Html:
    lead = tag("p", section.lead, class_="lead") if section.lead else None
    return tag("section", tag("h2", section.title), lead, *section.body, id=section.anchor)


def _shipped(name: str) -> str:
    return files("pvg.reporting").joinpath("templates", name).read_text(encoding="utf-8")
