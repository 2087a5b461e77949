"""Orders as values, and their notation: `A par-bur`, `par S mar-bur`, `eng C lon-bre`, `par H`, `stp/nc B`, `par D`.

Reading is tolerant: case and spaces do not matter, the unit's letter may be missing, and the longer forms of other
programs are read too (`F spa(nc) supports A mar -> bur`, `A LON - BRE VIA`). A bullet or a number before the order and
a dot after it are left out. Whether an order is legal is another question (pvg.games.diplomacy.legal).
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from pvg.games.diplomacy.board import Board

Act = Literal["hold", "move", "support", "convoy", "disband", "build", "waive"]

LONGEST_ORDER = 200  # characters; a longer text is not an order


class Order(NamedTuple):
    """An order to one unit. Places are numbers of the board; -1 stands for none.

    `place`: where the unit is, or is built. `target`: the destination of a move, of the supported move (-1: support to
    hold) or of the convoyed army; a support may name the coast. `origin`: the place of the supported or convoyed unit.
    `via`: the move goes by convoy. `unit`: "A", "F", or "" if the text has no letter. A retreat is a move.
    """

    act: Act
    place: int = -1
    target: int = -1
    origin: int = -1
    via: bool = False
    unit: str = ""


class ParsedOrders(NamedTuple):
    """The orders of a text, and the parts that are not orders."""

    orders: tuple[Order, ...]
    unread: tuple[str, ...]


_TOKENS = re.compile(r"[a-z]+|[^a-z\s]")
_SEPARATORS = re.compile(r"[\n;,]")
_BULLET = re.compile(r"\s*(?:[-*\u2022]|[0-9]{1,2}[.)])\s+")
_FENCE = re.compile(r"(?:`{3,}|~{3,})\w*")  # around a block of code
# Other dashes, a minus sign and arrows.
_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\u2192\u27a1\u21d2", "-"))
_ARROWS = frozenset({"-", "->", "to"})
_UNITS = {"a": "A", "army": "A", "f": "F", "fleet": "F"}
_ACTS: dict[str, Act] = {
    **dict.fromkeys(("h", "hold", "holds"), "hold"),
    **dict.fromkeys(("s", "support", "supports"), "support"),
    **dict.fromkeys(("c", "convoy", "convoys"), "convoy"),
    **dict.fromkeys(("-", "->", "to", "r", "retreat", "retreats", "m", "move", "moves"), "move"),
    **dict.fromkeys(("d", "disband", "disbands", "remove"), "disband"),
    **dict.fromkeys(("b", "build", "builds"), "build"),
}
_LETTERS = {"hold": "H", "disband": "D", "build": "B"}


def parse(board: Board, text: str) -> Order | None:
    """The order that the text says, None if it says none. Reads any text, in linear time."""
    if len(text) > LONGEST_ORDER:
        return None
    if bullet := _BULLET.match(text):
        text = text[bullet.end() :]
    tokens = _joined(_TOKENS.findall(text.rstrip().removesuffix(".").lower().translate(_DASHES)))
    if tokens == ["waive"]:
        return Order("waive")
    return _Reader(board, tokens).order(letter=True) or _Reader(board, tokens).order(letter=False)


def parse_orders(board: Board, text: str) -> ParsedOrders:
    """The orders of a text that separates them by line ends, semicolons or commas. A code fence is left out."""
    orders, unread = [], []
    for part in _SEPARATORS.split(text):
        if order := parse(board, part):
            orders.append(order)
        elif part.strip() and not _FENCE.fullmatch(part.strip()):
            unread.append(part.strip())
    return ParsedOrders(tuple(orders), tuple(unread))


def write(board: Board, order: Order) -> str:
    """The order in the short notation. `parse` reads it back as the same order."""
    if order.act == "waive":
        return "waive"
    names, unit = board.places, f"{order.unit} {board.places[order.place]}".strip()
    if order.act == "move":
        return f"{unit}-{names[order.target]}{' via' if order.via else ''}"
    if order.act == "support":
        return f"{unit} S {names[order.origin]}{f'-{names[order.target]}' if order.target >= 0 else ''}"
    if order.act == "convoy":
        return f"{unit} C {names[order.origin]}-{names[order.target]}"
    return f"{unit} {_LETTERS[order.act]}"


def _joined(tokens: list[str]) -> list[str]:
    """The tokens with the parts of an arrow and of a coast put together: "spa", "(", "nc", ")" becomes "spa/nc"."""
    joined: list[str] = []
    at = 0
    while at < len(tokens):
        token, following = tokens[at], tokens[at + 1 : at + 3]
        if token in "/(" and joined and following and len(following[0]) == 2:
            joined[-1] += f"/{following[0]}"
            at += 3 if token == "(" and following[1:] == [")"] else 2
        elif token == "-" and following[:1] == [">"]:
            joined.append("->")
            at += 2
        else:
            joined.append(token)
            at += 1
    return joined


class _Reader:
    """Reads the tokens of one order from left to right."""

    def __init__(self, board: Board, tokens: list[str]) -> None:
        self.names, self.tokens, self.at = board.names, tokens, 0

    def order(self, letter: bool) -> Order | None:
        """The order. With `letter` it begins with a unit's letter; on the mini map `a` and `f` are also provinces."""
        unit = _UNITS.get(self.next(), "") if letter else ""
        if letter and not unit:
            return None
        place = self.place()
        act = _ACTS.get(self.next())
        if place is None or act is None:
            return None
        order = self.rest(act, place, unit)
        return order if self.at >= len(self.tokens) else None

    def rest(self, act: Act, place: int, unit: str) -> Order | None:
        if act == "move":
            if self.peek() in _ARROWS:  # "moves to"
                self.at += 1
            target = self.place()
            return None if target is None else Order("move", place, target, via=self.via(), unit=unit)
        if act in ("support", "convoy"):
            return self.help(act, place, unit)
        return Order(act, place, unit=unit)

    def help(self, act: Act, place: int, unit: str) -> Order | None:
        self.skip_letter()
        origin = self.place()
        if origin is None:
            return None
        if self.peek() in _ARROWS:
            self.at += 1
            target = self.place()
            if target is None:
                return None
            self.via()
            return Order(act, place, target, origin, unit=unit)
        if act == "convoy":
            return None
        if _ACTS.get(self.peek()) == "hold":
            self.at += 1
        return Order(act, place, -1, origin, unit=unit)

    def skip_letter(self) -> None:
        """Skip the letter of a helped unit. If it is also a province, it is a letter only before a province."""
        ahead = self.peek() in self.names and self.peek(1) not in self.names
        if self.peek() in _UNITS and not ahead:
            self.at += 1

    def place(self) -> int | None:
        return self.names.get(self.next())

    def via(self) -> bool:
        found = self.peek() == "via" or (self.peek() == "by" and self.peek(1) == "convoy")
        if found:
            self.at += 2 if self.peek(1) == "convoy" else 1
        return found

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ""
