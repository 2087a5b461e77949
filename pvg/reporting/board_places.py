"""Where the provinces of the Diplomacy boards stand in a drawing.

The drawing is a scheme and not a map: a tile for each province, roughly where geography has it, and a line for each
border. The coordinates are our own. A test checks that no two tiles overlap and that no line crosses a third tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class BoardLayout:
    """Centres of tiles in steps of the grid, and the pixels of a step. `margin_x`, `margin_y`: pixels around the
    outermost centres."""

    places: Mapping[str, tuple[float, float]]
    step_x: float
    step_y: float
    margin_x: float = 42
    margin_y: float = 36

    @cached_property
    def centres(self) -> Mapping[str, tuple[float, float]]:
        """The centre of each province's tile in pixels."""
        left, top = (min(place[axis] for place in self.places.values()) for axis in (0, 1))
        return {
            name: (self.margin_x + (x - left) * self.step_x, self.margin_y + (y - top) * self.step_y)
            for name, (x, y) in self.places.items()
        }

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the drawing in pixels."""
        xs, ys = zip(*self.centres.values(), strict=True)
        return max(xs) + self.margin_x, max(ys) + self.margin_y


STANDARD_LAYOUT = BoardLayout(
    {
        # The north
        "nao": (1.5, 1.6),
        "nwg": (4.9, 0.5),
        "bar": (11.0, 0.3),
        "nwy": (7.2, 1.9),
        "swe": (8.5, 2.6),
        "fin": (10.0, 1.8),
        "stp": (11.9, 2.2),
        "bot": (9.7, 3.2),
        "ska": (7.0, 3.1),
        "nth": (5.6, 3.8),
        "bal": (8.9, 4.3),
        "lvn": (10.7, 4.2),
        "mos": (13.0, 4.0),
        # The British Isles
        "cly": (3.2, 1.9),
        "edi": (4.3, 2.5),
        "lvp": (3.1, 3.1),
        "yor": (4.3, 3.6),
        "wal": (3.0, 4.3),
        "lon": (4.2, 4.7),
        "iri": (1.8, 3.9),
        "eng": (3.3, 5.6),
        # The west
        "mao": (1.2, 7.3),
        "bre": (2.8, 6.9),
        "pic": (4.1, 6.6),
        "par": (4.2, 7.6),
        "gas": (3.1, 8.4),
        "bur": (5.4, 7.4),
        "mar": (4.7, 8.8),
        "spa": (2.4, 9.8),
        "por": (1.1, 9.6),
        # The middle
        "hel": (6.2, 4.7),
        "den": (7.4, 4.3),
        "hol": (5.9, 5.6),
        "bel": (4.9, 5.7),
        "kie": (7.0, 5.5),
        "ber": (8.1, 5.3),
        "pru": (9.4, 5.3),
        "ruh": (6.2, 6.5),
        "mun": (7.2, 6.7),
        "sil": (9.1, 6.2),
        "boh": (8.3, 7.0),
        "tyr": (7.4, 7.7),
        "vie": (9.3, 7.4),
        "war": (10.6, 5.6),
        "gal": (10.4, 6.7),
        "bud": (10.5, 7.8),
        "ukr": (12.0, 6.1),
        "rum": (11.7, 8.2),
        "sev": (13.6, 6.7),
        # The south
        "pie": (5.8, 8.7),
        "ven": (6.9, 8.7),
        "tus": (6.2, 9.7),
        "rom": (7.0, 10.4),
        "apu": (8.0, 10.1),
        "nap": (8.0, 11.1),
        "tri": (8.9, 8.3),
        "adr": (8.3, 9.2),
        "ser": (10.3, 8.9),
        "alb": (9.5, 9.9),
        "gre": (10.2, 10.8),
        "bul": (11.5, 9.4),
        "aeg": (11.4, 11.4),
        "con": (12.6, 9.9),
        "bla": (13.4, 8.6),
        "ank": (14.2, 9.7),
        "smy": (13.7, 10.9),
        "arm": (15.2, 8.9),
        "syr": (15.2, 10.7),
        "eas": (13.2, 12.1),
        "ion": (9.0, 12.1),
        "tys": (6.3, 11.4),
        "lyo": (4.4, 10.3),
        "wes": (3.2, 11.3),
        "tun": (5.2, 12.3),
        "naf": (2.4, 12.3),
    },
    step_x=70,
    step_y=58,
)

# As drawn in pvg/games/diplomacy/standard.py.
MINI_LAYOUT = BoardLayout(
    {
        "a": (0.0, 0.0),
        "b": (1.0, 0.0),
        "c": (2.0, 0.0),
        "d": (0.0, 1.0),
        "e": (1.0, 1.0),
        "f": (2.0, 1.0),
        "g": (0.5, 2.0),
        "h": (1.5, 2.0),
    },
    step_x=112,
    step_y=82,
)

# Name of a board -> its layout.
LAYOUTS = {"standard": STANDARD_LAYOUT, "mini": MINI_LAYOUT}
