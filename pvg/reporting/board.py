"""A Diplomacy position as a static SVG: a tile for each province, units, orders, and what became of them.

Everything is drawn by this module: no artwork of any edition of the game. Colours come from templates/board.css, which
only pages with a board contain. Signs:

    round unit       an army           solid arrow       a move               cross           the move failed
    hull             a fleet           dashed line       a support            two strokes     the support was cut
    ring             the unit holds    dotted line       a convoy             burst           the unit was dislodged
    dot in a tile    a supply centre in the colour of its owner
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from markupsafe import Markup

from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.orders import Order, write
from pvg.games.diplomacy.position import NOBODY, Dislodged, Position, Unit
from pvg.reporting.board_places import LAYOUTS, BoardLayout
from pvg.reporting.table import TemplateMacros, number

Point = tuple[float, float]
Curve = tuple[Point, Point, Point]  # a quadratic curve: start, control point, end

TILE = (52.0, 44.0)  # width and height of a tile in pixels
GAP = 2.0  # pixels between a line and the tile of a third province
LOWER = 7.0  # a unit stands this far below the centre of its tile, so that the name fits above it
RADIUS = 15.0  # of the free space around a unit
BENDS = tuple(sorted((4.0 * k for k in range(-20, 21)), key=abs))  # how far a line may be bent, best first
PART = (480.0, 280.0)  # least width and height of a part of a board
APART = 9.0  # bend of two moves in opposite directions
ASIDE = (14.0, 9.0)  # where a dislodged unit stands, from the place of the unit that dislodged it

markup = TemplateMacros("board.html.j2")


@dataclass(frozen=True, slots=True)
class DrawnOrder:
    """An order, whether it succeeded, the reason if it did not, and the class of its colour."""

    order: Order
    success: bool = True
    why: str = ""
    style: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """A province as the template draws it. `centre`: None without a supply centre, otherwise the class of its owner's
    colour, "" for a free centre."""

    x: float
    y: float
    name: str
    title: str
    kind: str
    centre: str | None
    target: bool


@dataclass(frozen=True, slots=True)
class UnitMark:
    """A unit as the template draws it: its classes, place and letter. `coast`: the coast on which a fleet stands."""

    x: float
    y: float
    letter: str
    fleet: bool
    look: str
    coast: str = ""


@dataclass(frozen=True, slots=True)
class Stroke:
    """A path as the template draws it. `halo`: with a border that sets it off from the lines below."""

    d: str
    look: str
    halo: bool = False


def board_svg(
    board: Board,
    position: Position,
    orders: Sequence[DrawnOrder] = (),
    *,
    ident: str,
    title: str,
    description: str,
    styles: Sequence[str] = (),
    dislodged: Sequence[Dislodged] = (),
    target: int = -1,
    around: Collection[int] = (),
) -> Markup:
    """The position with its orders.

    `ident` makes the ids of this drawing unique on its page. `title` and `description` are what a screen reader says.
    `styles`: the class of each power's colour; default "power-0", "power-1", and so on. `dislodged`: the units that
    these orders dislodged. `target`: a province to mark. `around`: show only the part of the board around
    these provinces. Raises KeyError for a board without a layout.
    """
    drawing = _Drawing(board, position, styles or [f"power-{power}" for power in range(len(board.powers))])
    return markup.board(
        ident=ident,
        title=title,
        description=description,
        look=f"{board.name} part" if around else board.name,
        window=drawing.window(around),
        borders=_path(drawing.borders()),
        tiles=drawing.tiles(target),
        strokes=drawing.strokes(orders),
        units=drawing.units(orders, {found.unit for found in dislodged}),
    )


def described(board: Board, drawn: DrawnOrder) -> str:
    """An order and its result as text: "A par-bur", "A par-bur (bounced)"."""
    if drawn.success:
        return write(board, drawn.order)
    return f"{write(board, drawn.order)} ({drawn.why or 'failed'})"


def spoken(board: Board, order: Order) -> str:
    """An order in words: "d holds", "e supports g to d"."""
    if order.act == "waive":
        return "no build"
    here, to = board.places[order.place], board.places[order.target] if order.target >= 0 else ""
    helped = board.places[order.origin] if order.origin >= 0 else ""
    if order.act == "move":
        return f"{here} moves to {to}{' by convoy' if order.via else ''}"
    if order.act == "convoy":
        return f"{here} convoys {helped} to {to}"
    if order.act == "support":
        return f"{here} supports {helped}{f' to {to}' if to else ''}"
    if order.act == "build":
        return f"builds {'a fleet' if order.unit == 'F' else 'an army'} in {here}"
    return f"{here} {'holds' if order.act == 'hold' else 'is disbanded'}"


def legend(sides: Sequence[tuple[str, str]]) -> Markup:
    """The signs of a drawing, and the colours: pairs of a name and the class of its colour."""
    return markup.legend(sides)


def units_text(board: Board, position: Position) -> str:
    """Whose units stand where: "France: A par, F bre. Germany: A mun."."""
    parts = []
    for power, name in enumerate(board.powers):
        names = [f"{'F' if unit.fleet else 'A'} {board.places[unit.place]}" for unit in position.units_of(power)]
        if names:
            parts.append(f"{name}: {', '.join(names)}.")
    return " ".join(parts)


class _Drawing:
    def __init__(self, board: Board, position: Position, styles: Sequence[str]) -> None:
        self.board, self.position, self.styles = board, position, styles
        self.layout = LAYOUTS[board.name]

    def window(self, around: Collection[int]) -> tuple[float, float, float, float]:
        """Left, top, width and height of what is shown: the whole board, or the part around these provinces."""
        size = self.layout.size
        if not around:
            return 0.0, 0.0, *size
        places = [self.layout.centres[self.board.provinces[province]] for province in around]
        edges = []
        for axis, (whole, least) in enumerate(zip(size, PART, strict=True)):
            low, high = (end(place[axis] for place in places) for end in (min, max))
            length = min(whole, max(least, high - low + 3 * TILE[axis]))
            edges.append((min(max(0.0, (low + high - length) / 2), whole - length), length))
        (left, width), (top, height) = edges
        return left, top, width, height

    def borders(self) -> list[Curve]:
        pairs = [(p, q) for p, near in enumerate(self.board.touching) for q in near if p < q]
        return [self._line(p, q) for p, q in pairs]

    def tiles(self, target: int) -> list[Tile]:
        owners = dict(zip(self.board.centres, self.position.owners, strict=True))
        found = []
        for province, name in enumerate(self.board.provinces):
            owner = owners.get(province)
            centre = None if owner is None else ("" if owner == NOBODY else self.styles[owner])
            kind = self.board.kinds[province]
            x, y = self.layout.centres[name]
            found.append(Tile(x, y, name, self.board.titles[province], kind, centre, province == target))
        return found

    def units(self, orders: Sequence[DrawnOrder], dislodged: set[Unit]) -> list[UnitMark]:
        """All units; those that are built have a dashed outline, those that are disbanded are crossed out by
        `strokes`."""
        lost = {found.unit for found in self.position.dislodged_list()}
        marks = [self._unit(unit, self._at(unit.place), unit in dislodged) for unit in self.position.unit_list()]
        marks += [self._unit(unit, self._aside(unit.place), True) for unit in lost]
        for drawn in orders:
            if drawn.order.act == "build" and drawn.success:
                x, y = self._at(drawn.order.place)
                fleet = drawn.order.unit == "F"
                coast = self._coast(drawn.order.place)
                marks.append(UnitMark(x, y, "F" if fleet else "A", fleet, f"built {drawn.style}", coast))
        return marks

    def strokes(self, orders: Sequence[DrawnOrder]) -> list[Stroke]:
        moves = {
            (self._province(drawn.order.place), self._province(drawn.order.target))
            for drawn in orders
            if drawn.order.act == "move"
        }
        found: list[Stroke] = []
        for drawn in sorted(orders, key=lambda drawn: drawn.order.act == "move"):  # moves above supports
            found += self._strokes(drawn, moves)
        return found

    def _strokes(self, drawn: DrawnOrder, moves: set[tuple[int, int]]) -> list[Stroke]:
        order, look = drawn.order, f"{drawn.style}{'' if drawn.success else ' failed'}"
        if order.act == "move":
            return self._move(drawn, look, moves)
        if order.act in ("support", "convoy"):
            return self._help(drawn, look, moves)
        if order.act == "hold" and drawn.success:  # the burst of a dislodged unit says enough
            return [Stroke(_ring(self._at(order.place), RADIUS), f"order {look}", halo=True)]
        if order.act == "disband":
            lost = any(found.unit.place == order.place for found in self.position.dislodged_list())
            return [Stroke(_cross(self._aside(order.place) if lost else self._at(order.place), 9), "failure")]
        return []

    def _move(self, drawn: DrawnOrder, look: str, moves: set[tuple[int, int]]) -> list[Stroke]:
        order = drawn.order
        curve = self._move_curve(self._province(order.place), self._province(order.target), moves)
        if self.position.stage == "R":
            curve = (self._aside(order.place), curve[1], curve[2])
        curve = _part(curve, _reach(curve, RADIUS), 1 - _reach(curve[::-1], RADIUS))
        strokes = [
            Stroke(_path([_part(curve, 0, 1 - _reach(curve[::-1], 6))]), f"order {look}", halo=True),
            Stroke(_head(curve), f"head {look}"),
        ]
        return strokes if drawn.success else [*strokes, Stroke(_cross(_point(curve, 0.55), 6), "failure")]

    def _help(self, drawn: DrawnOrder, look: str, moves: set[tuple[int, int]]) -> list[Stroke]:
        """A support or a convoy: a line to the middle of the helped move, or to the unit that is helped to hold."""
        order = drawn.order
        kind = "support" if order.act == "support" else "convoy"
        start, origin = self._at(order.place), self._province(order.origin)
        if order.target < 0:
            curve = _straight(start, self._at(origin))
            end = [Stroke(_ring(self._at(origin), RADIUS + 2), f"order {kind} {look}", halo=True)]
            curve = _part(curve, _reach(curve, RADIUS), 1 - _reach(curve[::-1], RADIUS + 2))
        else:
            helped = _point(self._move_curve(origin, self._province(order.target), moves), 0.5)
            curve = _straight(start, helped)
            end = [Stroke(_ring(helped, 2.5), f"head {look}")]
            curve = _part(curve, _reach(curve, RADIUS), 1)
        strokes = [Stroke(_path([curve]), f"order {kind} {look}", halo=True), *end]
        return strokes if drawn.success else [*strokes, Stroke(_cut(curve), "failure")]

    def _move_curve(self, start: int, end: int, moves: set[tuple[int, int]]) -> Curve:
        if (end, start) in moves and (start, end) in moves:
            return _bent(self._at(start), self._at(end), APART)
        return self._line(start, end)

    def _line(self, start: int, end: int) -> Curve:
        """The line between two provinces, the same for a border and for a move."""
        first, second = sorted((start, end))
        names = self.board.provinces
        curve = _bent(self._at(first), self._at(second), free_bend(self.board.name, names[first], names[second]))
        return curve if start == first else curve[::-1]

    def _unit(self, unit: Unit, at: Point, dislodged: bool) -> UnitMark:
        look = f"{self.styles[unit.power]}{' dislodged' if dislodged else ''}"
        return UnitMark(*at, self.board.powers[unit.power][0], unit.fleet, look, self._coast(unit.place))

    def _coast(self, place: int) -> str:
        return self.board.places[place].partition("/")[2]

    def _province(self, place: int) -> int:
        return self.board.province_of[place]

    def _at(self, place: int) -> Point:
        return unit_point(self.layout, self.board.provinces[self._province(place)])

    def _aside(self, place: int) -> Point:
        x, y = self._at(place)
        return x + ASIDE[0], y + ASIDE[1]


# --- geometry ---------------------------------------------------------------------------------------------------------


def unit_point(layout: BoardLayout, province: str) -> Point:
    """Where a unit stands, and where lines begin and end."""
    x, y = layout.centres[province]
    return x, y + LOWER


@cache
def free_bend(board: str, start: str, end: str) -> float:
    """The smallest bend with which the line between two provinces crosses no tile of others, or else the fewest."""
    layout = LAYOUTS[board]
    a, b = unit_point(layout, start), unit_point(layout, end)
    counts: dict[float, int] = {}
    for bend in BENDS:
        counts[bend] = len(crossed(layout, _bent(a, b, bend), {start, end}))
        if not counts[bend]:
            return bend
    return min(counts, key=counts.__getitem__)


def crossed(layout: BoardLayout, curve: Curve, ends: set[str]) -> set[str]:
    """The provinces other than `ends` whose tiles the curve crosses."""
    points = [_point(curve, step / 40) for step in range(41)]
    half_x, half_y = TILE[0] / 2 + GAP, TILE[1] / 2 + GAP
    return {
        name
        for name, (cx, cy) in layout.centres.items()
        if name not in ends and any(abs(x - cx) < half_x and abs(y - cy) < half_y for x, y in points)
    }


def _straight(a: Point, b: Point) -> Curve:
    return a, ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2), b


def _bent(a: Point, b: Point, bend: float) -> Curve:
    """The curve from a to b whose middle lies `bend` pixels beside the straight line."""
    length = math.dist(a, b)
    x, y = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2
    return a, (x - (b[1] - a[1]) / length * 2 * bend, y + (b[0] - a[0]) / length * 2 * bend), b


def _point(curve: Curve, t: float) -> Point:
    (x0, y0), (x1, y1), (x2, y2) = curve
    s = 1 - t
    return s * s * x0 + 2 * s * t * x1 + t * t * x2, s * s * y0 + 2 * s * t * y1 + t * t * y2


def _part(curve: Curve, start: float, end: float) -> Curve:
    """The part of a curve between two parameters (de Casteljau)."""
    (x0, y0), (x1, y1), (x2, y2) = curve
    a, b = start, end
    x = (1 - a) * (1 - b) * x0 + (a + b - 2 * a * b) * x1 + a * b * x2
    y = (1 - a) * (1 - b) * y0 + (a + b - 2 * a * b) * y1 + a * b * y2
    return _point(curve, a), (x, y), _point(curve, b)


def _reach(curve: Curve, distance: float) -> float:
    """The first parameter, at most 0.5, at which the curve is `distance` pixels from its start."""
    return next((step / 100 for step in range(51) if math.dist(curve[0], _point(curve, step / 100)) >= distance), 0.5)


def _path(curves: Sequence[Curve]) -> str:
    written = []
    for (x0, y0), (x1, y1), (x2, y2) in curves:
        bent = abs((x1 - x0) * (y2 - y0) - (y1 - y0) * (x2 - x0)) > 1e-6 * math.dist((x0, y0), (x2, y2)) ** 2
        middle = f"Q{number(x1)} {number(y1)} " if bent else "L"
        written.append(f"M{number(x0)} {number(y0)}{middle}{number(x2)} {number(y2)}")
    return "".join(written)


def _ring(at: Point, radius: float) -> str:
    x, y, r = at[0], at[1], number(radius)
    return (
        f"M{number(x - radius)} {number(y)}a{r} {r} 0 1 0 {number(2 * radius)} 0a{r} {r} 0 1 0 {number(-2 * radius)} 0"
    )


def _cross(at: Point, size: float) -> str:
    x, y = at
    ends = [(x - size, y - size, x + size, y + size), (x - size, y + size, x + size, y - size)]
    return "".join(f"M{number(a)} {number(b)}L{number(c)} {number(d)}" for a, b, c, d in ends)


def _head(curve: Curve) -> str:
    """The head of an arrow at the end of a curve."""
    _, (x1, y1), (x2, y2) = curve
    length = math.dist((x1, y1), (x2, y2)) or 1.0
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    corners = [(x2 - 9 * dx - side * 5 * dy, y2 - 9 * dy + side * 5 * dx) for side in (1, -1)]
    return f"M{number(x2)} {number(y2)}" + "".join(f"L{number(x)} {number(y)}" for x, y in corners) + "Z"


def _cut(curve: Curve) -> str:
    """Two strokes across the middle of a line."""
    (x0, y0), _, (x2, y2) = curve
    length = math.dist((x0, y0), (x2, y2)) or 1.0
    dx, dy = (x2 - x0) / length, (y2 - y0) / length
    strokes = []
    for along in (-2.5, 2.5):
        x, y = (x0 + x2) / 2 + along * dx, (y0 + y2) / 2 + along * dy
        strokes.append(f"M{number(x - 6 * dy)} {number(y + 6 * dx)}L{number(x + 6 * dy)} {number(y - 6 * dx)}")
    return "".join(strokes)
