"""One table for the terminal, for pages and for Markdown.

    table = Table([Column("measure"), Column("mean", "right", style="strong")])
    table.add("fooled rate", "12.5 %")
    console.print(table.to_rich()); page_section.append(table); document.write(table.to_markdown())

A cell is text, or a `TableCell` that says how the text looks. A style is one of the names in STYLES. No renderer reads
text as markup. A table without rows is false, and writes nothing on a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from markupsafe import Markup

    from pvg.reporting.html import LegendKey

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

    `short` is its title on the terminal, if it needs another one there. `unit` follows the title on pages. `style`
    holds for all cells that have none. `on` says where the column is shown. `wrap`: long text may take several lines.
    `once`: the terminal and pages show a value that repeats only in its first row. `key` stands before the title on
    pages, `hint` appears over it.
    """

    title: str = ""
    align: Literal["left", "right"] = "left"
    style: str = ""
    short: str | None = None
    unit: str = ""
    on: Where = "everywhere"
    wrap: bool = True
    once: bool = False
    key: LegendKey | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell. `note` follows the text quietly, `below` stands on a line of its own, `hint` appears over the cell on
    pages. `key` is the swatch of a legend before the text, `bar` a share of the cell's width (0 to 1) that is filled
    with the colour of `style`."""

    text: str = ""
    style: str = ""
    note: str = ""
    below: str = ""
    hint: str = ""
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
    def has_numbers(self) -> bool:
        return any(column.align == "right" for column in self.columns)

    def shown(self, where: Literal["pages", "terminal"]) -> Iterator[list[tuple[Column, TableCell]]]:
        """Each row as pairs of column and cell, without the columns that are not shown there."""
        before: list[TableCell] = []
        for row in self._cells():
            repeated = [column.once and [cell] == before[place : place + 1] for place, (column, cell) in enumerate(row)]
            before = [cell for _, cell in row]
            pairs = [
                (column, TableCell() if again else cell) for (column, cell), again in zip(row, repeated, strict=True)
            ]
            yield [pair for pair in pairs if pair[0].on in ("everywhere", where)]

    def _cells(self) -> Iterator[list[tuple[Column, TableCell]]]:
        for row in self.rows:
            cells = [cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row]
            yield list(zip(self.columns, cells, strict=True))

    def look_of(self, column: Column, cell: TableCell) -> str | None:
        """The classes of a cell on a page."""
        style = cell.style or column.style
        found = ["wide-cell"] if cell.bar is not None else []
        if style in ("helpful", "sneaky", "verifier"):
            found.append(f"text-{style}")
        elif style in ("quiet", "better", "worse"):
            found.append(style)
        if column.align == "left" and self.has_numbers:
            found.append("left")
        return " ".join(found) or None

    def to_rich(self) -> RichTable:
        padding = (0, 1, 0, 0) if self.narrow else (0, 1)
        table = RichTable(
            box=SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False, header_style=QUIET, border_style=QUIET
        )
        if self.caption:
            table.caption, table.caption_justify, table.caption_style = self.caption, "left", QUIET
        for column in self.columns:
            if column.on != "pages":
                title = column.title if column.short is None else column.short
                style, wide = STYLES[column.style], {"overflow": "fold"} if column.wrap else {"no_wrap": True}
                table.add_column(Text(title), justify=column.align, style=style, **wide)
        for row in self.shown("terminal"):
            table.add_row(*(_rich_cell(cell) for _, cell in row))
        return table

    def __rich__(self) -> RichTable:
        return self.to_rich()

    def to_markdown(self) -> str:
        columns = [column for column in self.columns if column.on != "terminal"]
        titles = [_escaped(f"{column.title} {column.unit}".strip()) for column in columns]
        rules = ["---:" if column.align == "right" else "---" for column in columns]
        rows = [[_escaped(cell.plain) for column, cell in row if column.on != "terminal"] for row in self._cells()]
        return "\n".join(f"| {' | '.join(line)} |" for line in (titles, rules, *rows))

    def to_html(self) -> Markup:
        from pvg.reporting.html import TemplateMacros

        return TemplateMacros("table.html.j2").table(self)

    def __html__(self) -> str:
        return self.to_html()


def side_by_side(first: str, names: Sequence[str]) -> list[Column]:
    """Columns for values of several runs beside each other."""
    return [Column(first), *(Column(name, "right") for name in names)]


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


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
