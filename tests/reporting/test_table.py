"""One table on the terminal, on a page and in Markdown: the same texts, and no text is markup."""

from __future__ import annotations

import io

import pytest
from page_checks import Page
from rich.console import Console

from pvg.reporting.table import TEMPLATES, Column, LegendKey, Table, TableCell

NASTY = "</td><script>alert(1)</script> [red]x[/red] a|b \x00\u202e"
TAGS = {"div", "table", "thead", "tbody", "tr", "th", "p", "span", "svg", "path", "strong", "code", "br"}


def printed(table: Table, width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(table)
    return file.getvalue()


def measures() -> Table:
    table = Table(
        [
            Column("measure", once=True),
            Column("arm"),
            Column("mean", "right", short="avg"),
            Column("games", "right", on="pages"),
            Column("trend", on="terminal"),
        ]
    )
    table.add(
        "fooled rate",
        TableCell("src", key=LegendKey("src", "run-0")),
        TableCell("12.5 %", "better", note="of 3"),
        "3",
        "up",
    )
    table.add("fooled rate", "cgc", TableCell("8 %", below="4 to 12 %"), "3", "down")
    return table


def test_the_terminal_shows_its_columns_and_a_repeated_value_once() -> None:
    text = printed(measures())
    assert text.count("fooled rate") == 1
    assert "avg" in text
    assert "games" not in text
    assert "12.5 % of 3" in text
    assert "4 to 12 %" in text
    assert "down" in text


def test_markdown_repeats_every_value_and_aligns_numbers() -> None:
    assert measures().to_markdown().splitlines() == [
        "| measure | arm | mean | games |",
        "| --- | --- | ---: | ---: |",
        "| fooled rate | src | 12.5 % of 3 | 3 |",
        "| fooled rate | cgc | 8 % 4 to 12 % | 3 |",
    ]


def test_a_page_has_the_first_cell_as_heading_and_styles_as_classes() -> None:
    page = Page(measures().__html__())
    assert page.wrong == []
    assert page.text == "measure arm mean games fooled rate src 12.5 % of 3 3 cgc 8 % 4 to 12 % 3"
    classes = [(name, attributes.get("class")) for name, attributes in page.tags]
    assert ("table", "figures") in classes
    assert ("td", "better") in classes
    assert any(name == "span" and str(look).startswith("swatch line") for name, look in classes)
    assert [name for name, _ in page.tags].count("th") == 4 + 2


def test_a_table_without_rows_writes_nothing() -> None:
    empty = Table([Column("a")])
    assert not empty
    assert empty.__html__() == ""


@pytest.mark.parametrize("style", ["", "code", "strong", "badge bad", "quiet", "helpful"])
def test_no_text_breaks_out_of_its_cell(style: str) -> None:
    table = Table([Column(NASTY, key=LegendKey(NASTY, "run-0"))], caption=NASTY, look="runs")
    table.add(TableCell(NASTY, style, note=NASTY, below=NASTY))
    page = Page(table.__html__())
    assert page.wrong == []
    assert {name for name, _ in page.tags} <= TAGS
    assert "\x00" not in table.__html__()
    assert "\u202e" not in table.__html__()
    assert "[red]x[/red]" in printed(table, 200)
    assert table.to_markdown().splitlines()[2].count(" | ") == 0


def test_no_template_turns_escaping_off() -> None:
    assert TEMPLATES.autoescape is True
    assert TEMPLATES.loader is not None
    names = [name for name in TEMPLATES.list_templates() if name.endswith(".j2")]
    assert len(names) >= 5
    for name in names:
        source = TEMPLATES.loader.get_source(TEMPLATES, name)[0]
        assert "autoescape" not in source
        assert "|safe" not in source.replace(" ", "")
        TEMPLATES.get_template(name)
