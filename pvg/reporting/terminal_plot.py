"""Small plots for the terminal: curves of dots (braille, two by four in a cell), with an axis that marks the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from pvg.reporting.figures import Style, styled

ROWS = 5
# The bits of a braille character by column and row of its dots.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
QUIET = "bright_black"


@dataclass(frozen=True, slots=True)
class Curve:
    """Values by step (None: not measured), drawn in `colour`."""

    label: str
    values: Sequence[float | None]
    colour: str


def plot(curves: Sequence[Curve], breaks: Sequence[int], style: Style, width: int) -> list[Text]:
    """Lines of text `width` cells wide: the curves' names, the plot, and an axis with a mark where a round begins.

    Shares are drawn from 0 to 1, all else over the range of the values. `breaks` are the steps at which a round after
    the first begins. Empty when no curve has a value.
    """
    values = [value for curve in curves for value in curve.values if value is not None]
    if not values:
        return []
    low, high = (0.0, 1.0) if style == "share" else (min(values), max(values))
    if high <= low:
        high = low + 1.0
    marks = [styled(style, high), styled(style, low)]
    margin = max(len(mark) for mark in marks) + 1
    columns = max(4, width - margin - 1)
    count = max(len(curve.values) for curve in curves)
    cells = _cells(curves, count, columns, low, high)
    lines = [Text.assemble(*(piece for curve in curves for piece in ((f"━ {curve.label}  ", curve.colour),)))]
    for row in range(ROWS):
        mark = marks[0] if row == 0 else marks[1] if row == ROWS - 1 else ""
        line = Text(f"{mark:>{margin - 1}} ", style=QUIET, end="")
        for bits, colour in cells[row]:
            line.append(chr(0x2800 + bits) if bits else " ", style=colour or QUIET)
        lines.append(line)
    axis = ["─"] * columns
    for step in breaks:
        axis[min(columns - 1, step * columns // count)] = "┴"
    lines.append(Text(" " * margin + "".join(axis), style=QUIET))
    return lines


def _cells(curves: Sequence[Curve], count: int, columns: int, low: float, high: float) -> list[list[tuple[int, str]]]:
    """By row and column the dots of a cell and its colour; where curves meet, the last one's."""
    cells = [[(0, "")] * columns for _ in range(ROWS)]
    wide, tall = 2 * columns, 4 * ROWS
    for curve in curves:
        before: tuple[int, int] | None = None
        for x, value in _sampled(curve.values, count, wide):
            share = min(1.0, max(0.0, (value - low) / (high - low)))
            y = min(tall - 1, int((1 - share) * tall))
            # A jump from the column before is filled, so that a steep curve stays one.
            start = before[1] if before is not None and before[0] == x - 1 else y
            for dot in range(min(start, y), max(start, y) + 1):
                if dot != start or start == y:
                    bits, _ = cells[dot // 4][x // 2]
                    cells[dot // 4][x // 2] = (bits | DOTS[x % 2][dot % 4], curve.colour)
            before = x, y
    return cells


def _sampled(values: Sequence[float | None], count: int, wide: int) -> list[tuple[int, float]]:
    """One value for each column of dots that has any: the mean of its steps, or of the one step that spans it."""
    found = []
    for x in range(wide):
        start = x * count // wide
        end = max(start + 1, (x + 1) * count // wide)
        here = [value for value in values[start:end] if value is not None]
        if here:
            found.append((x, sum(here) / len(here)))
    return found
