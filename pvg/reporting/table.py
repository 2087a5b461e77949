"""HTML pages from templates, and one table for the terminal, for pages and for Markdown.

A cell is text, or a `TableCell` that says how the text looks. A style is one of the names in STYLES. No renderer reads
text as markup. A table without rows is false, and a page leaves it out.

A page is one file made from the templates of this package, a title, a header and sections.

All markup is in templates/*.html.j2. Jinja escapes every value except `Markup`, and templates alone make `Markup`. So
text of models, of configurations and of files stays text wherever a template puts it.

Invariant: a page loads no other file. Its content security policy forbids loading, and allows the page's own script by
its hash. A script that a model wrote could not run even if the escaping failed.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

import pvg
from pvg.errors import MissingRequirementError, UsageError, counted
from pvg.reporting.formats import compact, duration, phase_label
from pvg.store.atomic import write_output

# Control characters that HTML does not allow, and marks that change the direction of the following text.
UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LegendKey:
    """An entry of a legend: `style` is its colour's class, `dash` "", "dashed" or "dotted", `shape` "line" or "box"."""

    label: str
    style: str
    dash: str = ""
    shape: str = "line"


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of the page under a heading, with `lead` as the sentence below it. The page leaves out a section whose
    body is empty. `style`: a style sheet of templates/ that this section needs, besides page.css."""

    anchor: str
    title: str
    body: Sequence[object]
    lead: str = ""
    style: str = ""

    @property
    def shown(self) -> bool:
        return any(self.body)


CHARTS = ("uplot/uPlot.iife.min.js", "charts.js")


@dataclass(frozen=True, slots=True)
class PageKind:
    """What a page may do besides showing itself. `scripts`: files of templates/. `policy`: more directives of its
    content security policy. `sheets`: style sheets besides page.css. `links`: pairs of address and text in the bar."""

    scripts: Sequence[str] = (*CHARTS, "page.js")
    policy: str = ""
    sheets: Sequence[str] = ()
    links: Sequence[tuple[str, str]] = ()
    footer: str = "This file loads nothing from anywhere."


OFFLINE = PageKind()
LIVE_SCRIPT = "live.js"  # loads the page again and replaces what has changed


def showable(value: object) -> object:
    """The text of a value in a template: empty for None, U+FFFD for each character that a page cannot contain."""
    if value is None:
        return ""
    return value if hasattr(value, "__html__") else UNSHOWABLE.sub("\ufffd", str(value))


def number(value: float) -> str:
    """A coordinate: at most two decimals, no trailing zeros."""
    written = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if written in ("-0", "") else written


TEMPLATES = Environment(
    loader=PackageLoader("pvg.reporting"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=showable,
)
TEMPLATES.filters |= {each.__name__: each for each in (number, compact, counted, duration, phase_label)}


class TemplateMacros:
    """The macros of a template as functions that return Markup: `elements.badge("ok", "good")`."""

    def __init__(self, template: str) -> None:
        self._template = template

    def __getattr__(self, name: str) -> Callable[..., Markup]:
        return getattr(TEMPLATES.get_template(self._template).module, name)  # type: ignore[no-any-return]


elements = TemplateMacros("elements.html.j2")
chart = TemplateMacros("charts.html.j2")


def page(title: str, header: Sequence[object], sections: Sequence[PageSection], kind: PageKind = OFFLINE) -> str:
    """The whole page as one file."""
    shown = [section for section in sections if section.shown]
    own = sorted({section.style for section in shown if section.style})
    sheets = dict.fromkeys(["uplot/uPlot.min.css", "page.css", *own, *kind.sheets])
    values: dict[str, Any] = {
        "title": title,
        "header": header,
        "sections": shown,
        "style": Markup("".join(map(_shipped, sheets))),
        "script": Markup(_script(kind)),
        "policy": policy_of(kind),
        "links": kind.links,
        "live": LIVE_SCRIPT in kind.scripts,
        "footer": kind.footer,
        "version": pvg.__version__,
        "written": time.strftime("%Y-%m-%d %H:%M", time.localtime()),
    }
    return TEMPLATES.get_template("page.html.j2").render(values)


def _script(kind: PageKind) -> str:
    return "\n".join(map(_shipped, kind.scripts))


def policy_of(kind: PageKind) -> str:
    """The content security policy of such a page: its own script may run, and nothing is loaded from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(_script(kind).encode()).digest()).decode()
    own = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"{own}; {kind.policy}" if kind.policy else own


NO_FILE_THERE = frozenset({errno.EISDIR, errno.ENOENT, errno.ENOTDIR})  # mistakes of the user


def write_page(path: Path, text: str, remedy: str = "Make its folder writable.") -> None:
    """Replace `path` by the page, atomically. Raises UsageError for a path that no file can have, and
    MissingRequirementError where it cannot be written."""
    try:
        write_output(path, text.encode())
    except OSError as error:
        kind = UsageError if error.errno in NO_FILE_THERE else MissingRequirementError
        raise kind(f"The page {path} cannot be written: {error.strerror}.", remedy) from error


def _shipped(name: str) -> str:
    return TEMPLATES.loader.get_source(TEMPLATES, name)[0]  # type: ignore[union-attr]


QUIET = "bright_black"
# Name -> the style on the terminal; templates/table.html.j2 and page.css say how each looks on a page.
STYLES = {
    "": "",
    "helpful": "green",
    "sneaky": "magenta",
    "verifier": "cyan",
    "quiet": QUIET,
    "strong": "bold",
    "code": "",
    "better": "green",
    "worse": "yellow",
    "badge good": "green",
    "badge warn": "yellow",
    "badge bad": "red",
}
BAR = 8  # cells of a bar on the terminal
Where = Literal["everywhere", "pages", "terminal"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    `short` is its title on the terminal, if it needs another one there. `style` holds for all cells that have none.
    `on` says where the column is shown. `wrap`: long text may take several lines. `once`: the column heads groups of
    rows. The terminal and pages show its value only in the first row of a group. `max_width` holds on the terminal, in
    characters. `key` is shown before the title on pages.
    """

    title: str = ""
    align: Literal["left", "right"] = "left"
    style: str = ""
    short: str | None = None
    on: Where = "everywhere"
    wrap: bool = True
    once: bool = False
    max_width: int | None = None
    key: LegendKey | None = None


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell. `note` follows the text in a weaker style, `below` is on a separate line. `key` is the swatch of a legend
    before the text, `bar` a share of the cell's width (0 to 1) that is filled with the colour of `style`."""

    text: str = ""
    style: str = ""
    note: str = ""
    below: str = ""
    key: LegendKey | None = None
    bar: float | None = None

    @property
    def plain(self) -> str:
        return " ".join(part for part in (self.text, self.note, self.below) if part)


Row = Sequence["TableCell | str"]


@dataclass(slots=True)
class Table:
    """Columns, and rows with a cell for each of them. `look` is a class of the page's style sheet, `narrow` puts
    columns closer together on the terminal, `caption` is a sentence below the table."""

    columns: Sequence[Column]
    rows: list[Row] = field(default_factory=list)
    look: str = ""
    narrow: bool = False
    caption: str = ""

    def add(self, *cells: TableCell | str) -> None:
        self.rows.append(cells)

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def has_numbers(self) -> bool:  # templates/table.html.j2 reads it
        return any(column.align == "right" for column in self.columns)

    def shown(self, where: Literal["pages", "terminal"]) -> Iterator[list[tuple[Column, TableCell]]]:
        """Each row as pairs of column and cell, without the columns that are not shown there."""
        before: Sequence[TableCell | None] = ()
        for row in self._cells():
            above = before or [None] * len(row)
            before = [cell for _, cell in row]
            yield [
                (column, TableCell() if column.once and cell == old else cell)
                for (column, cell), old in zip(row, above, strict=True)
                if column.on in ("everywhere", where)
            ]

    def _cells(self) -> Iterator[list[tuple[Column, TableCell]]]:
        for row in self.rows:
            cells = [cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row]
            yield list(zip(self.columns, cells, strict=True))

    def __rich__(self) -> RichTable:
        padding = (0, 1, 0, 0) if self.narrow else (0, 1)
        table = RichTable(
            box=SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False, header_style=QUIET, border_style=QUIET
        )
        if self.caption:
            table.caption, table.caption_justify, table.caption_style = self.caption, "left", QUIET
        for column in self.columns:
            if column.on != "pages":
                title = column.title if column.short is None else column.short
                style = "bold" if column.once else STYLES[column.style]
                table.add_column(
                    Text(title),
                    justify=column.align,
                    style=style,
                    overflow="fold" if column.wrap else "ellipsis",
                    no_wrap=not column.wrap,
                    max_width=column.max_width,
                )
        table.show_header = any(column.header for column in table.columns)
        last = self._ends_of_groups()
        for place, row in enumerate(self.shown("terminal")):
            table.add_row(*(_rich_cell(cell) for _, cell in row), end_section=place in last)
        return table

    def _ends_of_groups(self) -> set[int]:
        """The last row of each group, for a blank line below it. None if no group has several rows."""
        heads = [[cell for column, cell in row if column.once] for row in self._cells()]
        ends = {place for place, (head, after) in enumerate(pairwise(heads)) if head != after}
        return ends if len(ends) + 1 < len(heads) else set()

    def to_markdown(self) -> str:
        columns = [column for column in self.columns if column.on != "terminal"]
        titles = [escaped(column.title) for column in columns]
        rules = ["---:" if column.align == "right" else "---" for column in columns]
        rows = [[escaped(cell.plain) for column, cell in row if column.on != "terminal"] for row in self._cells()]
        return "\n".join(f"| {' | '.join(line)} |" for line in (titles, rules, *rows))

    def __html__(self) -> Markup:
        return TemplateMacros("table.html.j2").table(self)

    _repr_html_ = __html__  # in a notebook


def markdown_lines(header: Sequence[str], align: str, rows: Iterable[Row]) -> list[str]:
    """The lines of a Markdown table; `align` has an l or r per column."""
    sides: dict[str, Literal["left", "right"]] = {"l": "left", "r": "right"}
    columns = [Column(title, sides[side]) for title, side in zip(header, align, strict=True)]
    return Table(columns, list(rows)).to_markdown().split("\n")


def _rich_cell(cell: TableCell) -> Text:
    text = Text(style=STYLES.get(cell.style, ""))
    if cell.bar is not None:
        text.append(f"{'━' * round(BAR * cell.bar):<{BAR}}  " if cell.text else "━" * round(BAR * cell.bar))
    text.append(cell.text)
    if cell.note:
        text.append(f" {cell.note}", QUIET)
    if cell.below:
        text.append(f"\n{cell.below}", QUIET)
    return text


def escaped(text: str) -> str:
    """`text` for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
