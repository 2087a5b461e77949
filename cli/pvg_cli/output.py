"""Printing for people: consoles, TOML with colours, lists of names and of commands. Without a terminal pvg prints the
same text without escape codes."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from pvg.errors import visible
from pvg_cli import write_utf8

PIPE_WIDTH = 100  # columns, if the output is not a terminal and COLUMNS is not set
NARROWEST = 40  # columns; in a narrower output no table can be read
QUIET = "bright_black"


class PlainConsole(Console):
    """Prints the characters of a text as they are, control characters as escapes. Names, descriptions and solutions
    come from files, so their brackets are no markup of rich, and their escape codes must not reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control or text.isprintable() else visible(text), style, control)


def console(stream: TextIO) -> Console:
    """A console on stdout or stderr. It replaces characters that the stream cannot encode, instead of raising."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    columns = os.environ.get("COLUMNS", "")
    wanted = int(columns) if columns.isascii() and columns.isdigit() else 0
    width = None if stream.isatty() else max(NARROWEST, wanted) if wanted else PIPE_WIDTH
    return PlainConsole(file=stream, width=width, highlight=False, markup=False, emoji=False)


def stdout() -> Console:
    return console(sys.stdout)


def stderr() -> Console:
    return console(sys.stderr)


def print_paragraph(console: Console, text: str, indent: int, hanging: int = 0, strong: int = 0) -> None:
    """Print a text that is wrapped and indented. `hanging`: how much deeper its second and further lines begin;
    `strong`: how many of its first characters are bold."""
    first, later = " " * indent, " " * (indent + hanging)
    wrapper = textwrap.TextWrapper(console.width, first, later, break_long_words=False, break_on_hyphens=False)
    wrapped = Text(wrapper.fill(text))
    wrapped.stylize("bold", indent, indent + strong)
    console.print(wrapped, soft_wrap=True)


def print_toml(text: str) -> None:
    """Print TOML: with colours on a terminal, unchanged in a pipe, so that a user can save the output and load it."""
    if sys.stdout.isatty():
        stdout().print(Syntax(text.rstrip(), "toml", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        write_utf8(text.encode())


def names_table(about: Mapping[str, str], use: str, command: str) -> Group:
    """Names with what each is about, and a hint: the command to `use` one."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in about.items():
        table.add_row(*row)
    return Group(table, Text(), Text.assemble((f"{use}: ", QUIET), (command, "bold cyan")))


def next_commands(commands: Mapping[str, str]) -> list[Text]:
    """Each command with its purpose below it, because two paths make a command long."""
    return [
        Text.assemble("  ", (command, "bold cyan"), (f"\n      {purpose}", QUIET), overflow="fold")
        for command, purpose in commands.items()
    ]
