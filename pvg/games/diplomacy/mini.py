"""A map of eight provinces with armies only, small enough that every reply of the other side can be tried.

a---b---c
|  / \\  |
| /   \\ |
d---e---f
 \\ / \\ /
  g---h
"""

from __future__ import annotations

from functools import cache

from pvg.games.diplomacy.board import Board, build_board

_BORDERS = ("ab", "bc", "ad", "bd", "bf", "cf", "de", "ef", "dg", "eg", "eh", "fh", "gh")


@cache
def mini_board() -> Board:
    """Two powers, no supply centres. The start is one example; the task places its own units."""
    return build_board(
        "mini",
        {name: (name.upper(), "land") for name in "abcdefgh"},
        land=[(border[0], border[1]) for border in _BORDERS],
        water=[],
        powers={"White": (), "Black": ()},
        start={"White": ("A d", "A e", "A g"), "Black": ("A b", "A f")},
    )
