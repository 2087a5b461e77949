"""The movement phase: which moves, supports and convoys succeed when all orders are executed together.

The decisions depend on each other, sometimes in a circle. `_Phase.decide` follows L. Kruijf, "The Math of Adjudication"
(Diplomatic Pouch, spring 2009): it decides an order by recursion, with a guess where a circle closes. If no guess is
wrong or both are, a circle of moves succeeds, and a convoy that is part of the circle fails (Szykman's rule). Editions
of the game differ in when an army goes to an adjacent province by convoy. Here it does with "via", or if it changes
places with the unit there, a fleet of its own power convoys it, and the route is complete.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from pvg.games.diplomacy_board import NOBODY, Board, Position, numbers

# Orders as values, and their notation: `A par-bur`, `par S mar-bur`, `eng C lon-bre`, `par H`, `stp/nc B`, `par D`.

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
_UNIT, _ARROW, _VIA = "a|army|f|fleet", "->?|to", "via(?: convoy)?|by convoy"
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
    found = _order_pattern(board).fullmatch(" ".join(tokens))
    if found is None or (found["convoy"] and not found["goal"]):
        return None
    names, at = board.names, board.names[found["place"]]
    unit = found["unit"][0].upper() if found["unit"] else ""
    if found["target"]:
        return Order("move", at, names[found["target"]], via=found["via"] is not None, unit=unit)
    if found["origin"]:
        goal = names[found["goal"]] if found["goal"] else -1
        return Order("convoy" if found["convoy"] else "support", at, goal, names[found["origin"]], unit=unit)
    act: Act = "hold" if found["hold"] else "disband" if found["disband"] else "build"
    return Order(act, at, unit=unit)


@cache
def _order_pattern(board: Board) -> re.Pattern[str]:
    """Reads the tokens of an order, with a space between two. A letter of a unit may also be a province, as on the mini
    map: it is a letter if that makes an order."""
    place = "|".join(re.escape(name) for name in board.names)
    return re.compile(
        rf"(?:(?P<unit>{_UNIT}) )?(?P<place>{place}) "
        r"(?:(?P<hold>h|holds?)|(?P<disband>d|disbands?|remove)|(?P<build>b|builds?)|"
        rf"(?:{_ARROW}|r|retreats?|m|moves?)(?: (?:{_ARROW}))? (?P<target>{place})(?: (?P<via>{_VIA}))?|"
        rf"(?:s|supports?|(?P<convoy>c|convoys?)) (?:(?:{_UNIT}) )?(?P<origin>{place})"
        rf"(?: (?:{_ARROW}) (?P<goal>{place})(?: (?:{_VIA}))?| (?:h|holds?))?)"
    )


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


_OPEN, _GUESSED, _DECIDED = 0, 1, 2


class Movement(NamedTuple):
    """The board after a movement phase.

    `units`, `dislodged` and `contested` as in Position. For each of the units before, in their order: `success` (a move
    arrives; a support fits an order and is not cut; a convoy fits an order and its fleet is not dislodged; a hold is
    not dislodged) and `why` ("" or "bounced", "no convoy", "cut", "dislodged", "unmatched"). `routes`: province of each
    army that goes by convoy -> whether a complete chain of fleets carries it to its destination.
    """

    units: bytes
    dislodged: bytes
    contested: bytes
    success: tuple[bool, ...]
    why: tuple[str, ...]
    routes: Mapping[int, bool]


def adjudicate(board: Board, position: Position, orders: Mapping[int, Order]) -> Movement:
    """The result of a movement phase. `orders`: province of the unit -> its order, which must be legal; the other units
    hold. The result does not depend on the order of the mapping."""
    return _Phase(board, position, orders).result()


def occupant(units: bytes, board: Board, province: int) -> int:
    """The power of the unit in the province, -1 if there is none. `units` as in Position."""
    for at in range(0, len(units), 2):
        if board.province_of[units[at]] == province:
            return units[at + 1] >> 1
    return -1


def group_of(board: Board, fleets: int, start: int) -> int:
    """The fleets of a set of sea provinces that are connected with those of `start`, as a set of bits."""
    beside, group, start = board.seas_beside, 0, start & fleets
    while start:
        group |= start
        found = 0
        while start:
            lowest = start & -start
            found |= beside[lowest.bit_length() - 1]
            start ^= lowest
        start = found & fleets & ~group
    return group


def connected(board: Board, fleets: int, origin: int, target: int, through: int = -1) -> bool:
    """Whether the fleets, a set of sea provinces, contain a chain from one coastal province to another; with `through`,
    whether that fleet belongs to the group of fleets that connects them."""
    beside = board.seas_beside
    if through < 0:
        return bool(group_of(board, fleets, beside[origin]) & beside[target])
    group = group_of(board, fleets, 1 << through)
    return bool(group & beside[target]) and bool(group & beside[origin])


class _Phase:
    """The orders of one phase as tables by province, and their decisions.

    `goal`: where the unit moves, -1 if it stays. `comers`: province -> the units that move there. `helpers`: unit ->
    the supports that fit its order. `aim`: supporter -> destination of the move it helps, -1 for a hold. `convoyed`:
    armies that move by convoy -> the fleets, as a set of bits, that convoy them. `carriers`: fleet -> the journey that
    it convoys.
    """

    __slots__ = (
        *("board", "units", "orders", "power", "goal", "comers", "helpers", "aim", "convoyed", "carriers"),
        *("state", "answer", "circle"),
    )

    def __init__(self, board: Board, position: Position, orders: Mapping[int, Order]) -> None:
        count = len(board.provinces)
        self.board, self.orders = board, orders
        self.power, self.goal = [-1] * count, [-1] * count
        self.state, self.answer = [_OPEN] * count, [False] * count
        self.comers: dict[int, list[int]] = {}
        self.helpers: dict[int, list[int]] = {}
        self.aim: dict[int, int] = {}
        self.convoyed: dict[int, int] = {}
        self.carriers: dict[int, tuple[int, int]] = {}
        self.circle: list[int] = []
        self.units = self._read(position.units)

    def _read(self, units: bytes) -> list[tuple[int, int, int]]:
        """Fill the tables; the units as province, place and code. The units' order, and not that of the mapping, is the
        order of all further work."""
        province_of, power, order_of = self.board.province_of, self.power, self.orders.get
        listed = [(province_of[place], place, code) for place, code in zip(units[::2], units[1::2], strict=True)]
        supports: list[tuple[int, Order]] = []
        crossing: list[int] = []
        for province, _, code in listed:
            power[province] = code >> 1
            order = order_of(province)
            if order is None:
                continue
            act = order.act
            if act == "move":
                self._read_move(province, order, code & 1, crossing)
            elif act == "support":
                supports.append((province, order))
            elif act == "convoy":
                self.carriers[province] = (province_of[order.origin], province_of[order.target])
        self._match(supports)
        if self.carriers:
            self._board_convoys(crossing)
        return listed

    def _read_move(self, province: int, order: Order, fleet: int, crossing: list[int]) -> None:
        target, comers = self.board.province_of[order.target], self.comers
        self.goal[province] = target
        if target in comers:
            comers[target].append(province)
        else:
            comers[target] = [province]
        if fleet:
            return
        if order.via or not self.board.army_reach[province] >> target & 1:
            self.convoyed[province] = 0
        else:
            crossing.append(province)

    def _match(self, supports: list[tuple[int, Order]]) -> None:
        """Keep the supports that fit the order of the unit they help."""
        goal, province_of, helpers = self.goal, self.board.province_of, self.helpers
        for supporter, order in supports:
            helped, target = province_of[order.origin], order.target
            if target < 0:
                if self.power[helped] < 0 or goal[helped] >= 0:
                    continue
                self.aim[supporter] = -1
            else:
                if goal[helped] != province_of[target]:
                    continue
                if target >= len(goal) and self.orders[helped].target != target:
                    continue  # the support names the other coast
                self.aim[supporter] = goal[helped]
            helpers.setdefault(helped, []).append(supporter)

    def _board_convoys(self, crossing: list[int]) -> None:
        """Note the fleets of each convoyed army. `crossing`: armies that could go by land."""
        convoyed, goal = self.convoyed, self.goal
        offers: dict[tuple[int, int], int] = {}
        for fleet, journey in self.carriers.items():
            offers[journey] = offers.get(journey, 0) | 1 << fleet
        for army in crossing:
            if goal[goal[army]] != army:
                continue
            fleets = offers.get((army, goal[army]), 0)
            own = any(fleets >> f & 1 and self.power[f] == self.power[army] for f in self.carriers)
            if own and connected(self.board, fleets, army, goal[army]):
                convoyed[army] = fleets
        for army in convoyed:
            convoyed[army] = offers.get((army, goal[army]), 0)

    # The rules. Each asks `decide` for the orders on which it depends, and for no others.

    def arrives(self, mover: int) -> bool:
        """Whether a move succeeds."""
        goal, convoyed = self.goal, self.convoyed
        target = goal[mover]
        if mover in convoyed and not self.route(mover):
            return False
        defender, onward = self.power[target], goal[target]
        if defender < 0:
            strength = 1 + self.help(mover, -1)
        elif onward == mover and mover not in convoyed and target not in convoyed:
            strength = 1 + self.help(mover, defender)
            if defender == self.power[mover] or strength <= 1 + self.help(target, -1):
                return False
        elif onward >= 0 and self.decide(target):
            strength = 1 + self.help(mover, -1)
        else:
            if defender == self.power[mover]:
                return False
            strength = 1 + self.help(mover, defender)
            if strength <= 1 + (self.help(target, -1) if onward < 0 else 0):
                return False
        rivals = self.comers[target]
        return len(rivals) == 1 or not any(r != mover and self.prevents(r, target, strength) for r in rivals)

    def prevents(self, rival: int, target: int, strength: int) -> bool:
        """Whether a move to the target is strong enough to keep out an attack of this strength."""
        if 1 + len(self.helpers.get(rival, ())) < strength:
            return False
        if rival in self.convoyed:
            if not self.route(rival):
                return False
        elif self.goal[target] == rival and target not in self.convoyed and self.decide(target):
            return False  # the unit from the target beat it in a head-to-head battle
        return 1 + self.help(rival, -1) >= strength

    def help(self, unit: int, defender: int) -> int:
        """The number of supports that the unit has, without those of the defending power."""
        power, count = self.power, 0
        for supporter in self.helpers.get(unit, ()):
            if power[supporter] != defender and (supporter not in self.comers or self.decide(supporter)):
                count += 1
        return count

    def uncut(self, supporter: int) -> bool:
        """Whether a support is given."""
        aim, own = self.aim[supporter], self.power[supporter]
        for attacker in self.comers[supporter]:
            if self.power[attacker] == own:
                continue
            if attacker == aim:  # the attacked unit cuts a support against itself only by dislodging the supporter
                if self.decide(attacker):
                    return False
            elif attacker not in self.convoyed or self.route(attacker):
                return False
        return True

    def route(self, army: int) -> bool:
        """Whether a complete chain of convoying fleets remains."""
        fleets, target = self.convoyed[army], self.goal[army]
        if not connected(self.board, fleets, army, target):
            return False
        attacked = [fleet for fleet in numbers(fleets) if fleet in self.comers]
        safe = fleets & ~sum(1 << fleet for fleet in attacked)
        if not attacked or connected(self.board, safe, army, target):
            return True
        return connected(self.board, safe | sum(1 << f for f in attacked if self.decide(f)), army, target)

    # Deciding

    def decide(self, unit: int) -> bool:
        """Whether the order of the unit succeeds. In a circle this is a guess, and `circle` notes every use of it."""
        state, answer, circle = self.state, self.answer, self.circle
        if state[unit] == _DECIDED:
            return answer[unit]
        if state[unit] == _GUESSED:
            circle.append(unit)  # each time: an entry that an outer order made must not hide this one
            return answer[unit]
        before = len(circle)
        state[unit], answer[unit] = _GUESSED, False
        first = self.rule(unit)
        if len(circle) == before:
            if state[unit] != _DECIDED:
                state[unit], answer[unit] = _DECIDED, first
            return answer[unit]
        if circle[before] != unit:  # it depends on the guess of an order that waits for this one
            circle.append(unit)
            answer[unit] = first
            return first
        self.reopen(before)
        state[unit], answer[unit] = _GUESSED, True
        second = self.rule(unit)
        if first == second:
            self.reopen(before)
            state[unit], answer[unit] = _DECIDED, first
            return first
        self.settle(before)
        return self.decide(unit)

    def rule(self, unit: int) -> bool:
        """Whether the order of a unit that moves or is attacked succeeds."""
        if self.goal[unit] >= 0:
            return self.arrives(unit)
        if unit in self.aim:
            return self.uncut(unit)
        return not any(self.decide(attacker) for attacker in self.comers[unit])  # a convoying fleet, not dislodged

    def reopen(self, before: int) -> None:
        for unit in self.circle[before:]:
            self.state[unit] = _OPEN
        del self.circle[before:]

    def settle(self, before: int) -> None:
        """Close a circle that has two solutions or none: its convoys fail, or if it has none, its moves succeed."""
        units = set(self.circle[before:])
        self.reopen(before)
        convoys = units & self.carriers.keys()
        for unit in convoys or units:
            if convoys or self.goal[unit] >= 0:
                self.state[unit], self.answer[unit] = _DECIDED, not convoys

    # The result

    def result(self) -> Movement:
        goal, answer, orders = self.goal, self.answer, self.orders
        attackers = self.winners()
        moved, gone, why = [], [], []
        for province, place, code in self.units:
            if goal[province] >= 0 and answer[province]:
                moved.append(orders[province].target << 8 | code)
                why.append("")
            elif province in attackers:
                attacker = attackers[province]
                gone += [place, code, NOBODY if attacker in self.convoyed else attacker]
                why.append("dislodged")
            else:
                moved.append(place << 8 | code)
                why.append(self.failure(province) if province in orders else "")
        moved.sort()
        after = struct.pack(f">{len(moved)}H", *moved)
        success = tuple([not failure for failure in why])
        routes = {army: self.route(army) for army in self.convoyed}
        return Movement(after, bytes(gone), self.contested(attackers), success, tuple(why), routes)

    def winners(self) -> dict[int, int]:
        """Decide all moves: destination -> the unit that arrives there."""
        found = {}
        for target, rivals in self.comers.items():
            if self.power[target] < 0 and len(rivals) == 1 and rivals[0] not in self.convoyed:
                self.answer[rivals[0]] = True  # nobody contests it
                self.state[rivals[0]] = _DECIDED
        for target, rivals in self.comers.items():
            for unit in rivals:
                if self.answer[unit] if self.state[unit] == _DECIDED else self.decide(unit):
                    found[target] = unit
        return found

    def failure(self, unit: int) -> str:
        """Why the order of a unit that is not dislodged fails, "" if it succeeds."""
        act = self.orders[unit].act
        if act == "hold":
            return ""
        if act == "support":
            if unit not in self.aim:
                return "unmatched"
            return "" if unit not in self.comers or self.decide(unit) else "cut"
        if act == "move":
            return "bounced" if unit not in self.convoyed or self.route(unit) else "no convoy"
        army, _ = self.carriers[unit]
        return "" if self.convoyed.get(army, 0) >> unit & 1 else "unmatched"

    def contested(self, attackers: Mapping[int, int]) -> bytes:
        """The provinces without a unit where a unit bounced."""
        found = []
        for target, rivals in self.comers.items():
            if len(rivals) == 1 or target in attackers:
                continue
            stays = self.power[target] >= 0 and not (self.goal[target] >= 0 and self.answer[target])
            if not stays and any(self.prevents(rival, target, 1) for rival in rivals):
                found.append(target)
        return bytes(sorted(found))
