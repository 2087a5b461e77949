"""One file out of sections: head, style sheet, script, a list of contents and the switch for dark and light.

Invariant: the page loads nothing. Its content security policy forbids it, and allows this one script by its hash, so
that nothing a model wrote could run even if it came through the escaping.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pvg.errors import MissingRequirementError
from pvg.reporting.page.markup import Html, Piece, div, join, span, tag
from pvg.store.atomic import write_output


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
    return files("pvg.reporting.page").joinpath(name).read_text(encoding="utf-8")
