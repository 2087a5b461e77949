"""Rules in which the package `diplomacy` differs from pvg's engine, each as a change of pvg's adjudicator.

A difference between the two in a game counts as explained by a rule if the adjudicator with that change gives the
package's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.movement import Movement, _Phase, connected
from pvg.games.diplomacy.orders import Order
from pvg.games.diplomacy.position import Position

RULES = {
    "victim-helps-a-convoyed-attack": "The package counts a support by the victim's own power for an attack whose "
    "order says VIA. By the rules a power does not help to dislodge its own unit.",
    "victim-helps-to-disrupt-a-convoy": "The package counts a support by the power of a convoying fleet against that "
    "fleet when it decides whether the convoy is disrupted, although the fleet is not dislodged.",
    "intent-without-exchange": "In the package an army goes to an adjacent province by convoy whenever a fleet of its "
    "power convoys it. Here it does only to change places with the unit there (DATC 6.G.11), or with 'via'.",
    "via-without-convoy-goes-by-land": "In the package an army with VIA goes by land if nobody convoys it. Here the "
    "move fails (DATC 6.G.8).",
}


class VariantPhase(_Phase):
    """The adjudicator with some of RULES changed."""

    __slots__ = ("rules", "vias")

    def __init__(self, board: Board, position: Position, orders: Mapping[int, Order], rules: frozenset[str]) -> None:
        self.rules = rules
        self.vias = {province for province, order in orders.items() if order.via}
        changed = dict(orders)
        if "via-without-convoy-goes-by-land" in rules:
            for province in self.vias:
                if board.army_reach[province] >> orders[province].target & 1 and not _route(board, orders, province):
                    changed[province] = orders[province]._replace(via=False)
        super().__init__(board, position, changed)

    def _board_convoys(self, crossing: list[int]) -> None:
        if "intent-without-exchange" in self.rules:
            for army in crossing:
                own = [
                    fleet
                    for fleet, journey in self.carriers.items()
                    if journey == (army, self.goal[army]) and self.power[fleet] == self.power[army]
                ]
                if own and _route(self.board, self.orders, army):
                    self.convoyed[army] = 0
        super()._board_convoys([army for army in crossing if army not in self.convoyed])

    def help(self, unit: int, defender: int) -> int:
        counts = "victim-helps-a-convoyed-attack" in self.rules and unit in self.vias
        return super().help(unit, -1 if counts else defender)

    def afloat(self, fleet: int) -> bool:
        if "victim-helps-to-disrupt-a-convoy" in self.rules:
            hold = 1 + super().help(fleet, -1)
            for attacker in self.comers[fleet]:
                strength = 1 + super().help(attacker, -1)
                others = [rival for rival in self.comers[fleet] if rival != attacker]
                if strength > hold and not any(self.prevents(rival, fleet, strength) for rival in others):
                    return False
        return super().afloat(fleet)


def _route(board: Board, orders: Mapping[int, Order], army: int) -> bool:
    target = orders[army].target
    fleets = sum(1 << f for f, o in orders.items() if o.act == "convoy" and (o.origin, o.target) == (army, target))
    return connected(board, fleets, army, target)


def variants(board: Board, position: Position, orders: Mapping[int, Order]) -> Iterator[tuple[list[str], Movement]]:
    """The results with one rule changed, then with two, and with three."""
    for count in range(1, 4):
        for rules in combinations(RULES, count):
            yield list(rules), VariantPhase(board, position, orders, frozenset(rules)).result()
