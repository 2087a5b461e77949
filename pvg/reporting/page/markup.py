"""HTML that cannot be broken by what it shows.

    tag("p", "1 < 2", class_="note")       # <p class="note">1 &lt; 2</p>

Invariant: only `Html` passes unchanged, and only this module, `document` (its own style sheet and script) and the joins
of pieces that are `Html` make it. Text of models, of configurations and of files is `str`, so it is escaped wherever it
is put.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

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
