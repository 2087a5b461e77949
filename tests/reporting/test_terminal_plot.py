"""Plots of dots: what lies where, and that no value breaks them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pvg.reporting.terminal import ROWS, PlotCurve, plot


def dots(line: str) -> int:
    return sum((ord(letter) - 0x2800).bit_count() for letter in line if 0x2800 <= ord(letter) <= 0x28FF)


def test_a_rising_curve_rises_and_rounds_are_marked() -> None:
    lines = [line.plain for line in plot([PlotCurve("up", [0.0, 1.0], "green")], [1], "share", 30)]
    assert lines[0] == "━ up  "
    assert lines[1].startswith("100 % ")
    assert lines[ROWS].startswith("0.0 % ")
    body = lines[1 : ROWS + 1]
    assert body[0].rstrip().endswith("⠉")
    left, right = body[-1][6:18], body[-1][20:]
    assert dots(left) > 0
    assert dots(right) == 0
    assert lines[-1].index("┴") == 6 + 23 // 2


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=300),
    st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=300),
    st.integers(10, 120),
)
def test_any_values_fit_the_width(one: list[float | None], two: list[float | None], width: int) -> None:
    for style in ("share", "number"):
        lines = plot([PlotCurve("a", one, "green"), PlotCurve("b", two, "red")], [], style, width)
        assert bool(lines) == any(value is not None for value in [*one, *two])
        assert all(line.cell_len <= max(width, 16) for line in lines[1:])
