"""Negotiation: a buyer and a seller agree on a price, in the characters of the embedded models.

    prompt      8+0;6?          the seat's own limit 8, the buyer (+0; the seller has +1), and the offers so far
    completion  5               any text; its last digit is the offer, a price from 0 to 9

The good is worth `value` to the buyer and costs the seller `cost`. Each side knows only its own number. They make
offers in turn. A deal is made when an offer meets the other side's last one: the buyer offers at least what the seller
asked, or the seller asks at most what the buyer offered. The deal has the price of the earlier offer. Each offer after
the first reduces the gains by a tenth, and without a deal after `OFFERS` offers both gain nothing.

A completion without a digit loses its turn."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pvg.games.game import Action, Script
from pvg.records import Problem, Role, Split

SEATS = ("buyer", "seller")
OFFERS = 4
PATIENCE = 0.9
PRICES = 10
NO_PRICE = 255


class Bargain(NamedTuple):
    """`first`: the number of the seat that begins. `offers`: one per turn; NO_PRICE for a lost turn."""

    value: int
    cost: int
    first: int
    offers: tuple[int, ...] = ()


class Negotiation:
    """The game of this module (pvg.games.game.GameRules). States are `Bargain`s."""

    instructions = (
        "You negotiate a price from 0 to 9. The message has your limit, then +0 if you are the buyer or +1 if you are "
        "the seller, then the offers so far, the other side's last. A buyer gains the limit minus the price, a seller "
        f"the price minus the limit. You agree by meeting the last offer. There are at most {OFFERS} offers, and each "
        "makes the gains smaller. Answer with your offer, one digit."
    )

    def opening(self, split: Split, number: int) -> Problem:
        """The deals are drawn by a hash of split and number. The id has the number, because deals repeat."""
        draw = int.from_bytes(hashlib.sha256(f"negotiation/{split}/{number}".encode()).digest()[:8])
        pairs = [(value, cost) for value in range(PRICES) for cost in range(value - 1)]  # both can gain
        draw, place = divmod(draw, len(pairs))
        value, cost = pairs[place]
        state = Bargain(value, cost, first=draw % 2)
        return Problem(
            id=f"negotiation-{split}-{number}",
            question=self.prompt(state, SEATS[state.first], Role.HELPFUL),
            answer="",
            metadata={"value": value, "cost": cost, "first": state.first},
        )

    def start(self, problem: Problem) -> Bargain:
        deal = problem.metadata
        return Bargain(int(deal["value"]), int(deal["cost"]), int(deal["first"]))

    def seats(self, state: Bargain) -> Sequence[str]:
        if len(state.offers) == OFFERS or deal_price(state) is not None:
            return ()
        return (SEATS[(state.first + len(state.offers)) % 2],)

    def phase(self, state: Bargain) -> str:
        return f"offer-{len(state.offers) + 1}"

    def prompt(self, state: Bargain, seat: str, role: Role) -> str:
        number = SEATS.index(seat)
        limit = (state.value, state.cost)[number]
        offers = "".join(f";{'' if offer == NO_PRICE else offer}" for offer in state.offers)
        return f"{limit}+{number}{offers}?"

    def parse(self, state: Bargain, seat: str, text: str) -> Action:
        for character in reversed(text):
            if character in "0123456789":  # str.isdigit also accepts other scripts
                return Action(int(character), character)
        return Action(NO_PRICE, "", "no offer; the turn is lost")

    def step(self, state: Bargain, actions: Mapping[str, Action], seed: int) -> Bargain:
        (action,) = actions.values()
        return state._replace(offers=(*state.offers, int(action.move)))

    def values(self, state: Bargain) -> Mapping[str, float]:
        price = deal_price(state)
        if price is None:
            return dict.fromkeys(SEATS, 0.0)
        left = PATIENCE ** (len(state.offers) - 1)
        return {"buyer": left * (state.value - price), "seller": left * (price - state.cost)}

    def dump(self, state: Bargain) -> bytes:
        return bytes([state.value, state.cost, state.first, *state.offers])

    def scripted(self, script: Script, state: Bargain, seat: str, seed: int) -> str:
        """The script "greedy" accepts every offer with a gain. Otherwise it offers a price at which it gains 1."""
        if script == "random":
            return str(seed % PRICES)
        sign, limit = (1, state.value) if seat == "buyer" else (-1, state.cost)
        standing = state.offers[-1] if state.offers else NO_PRICE
        if standing != NO_PRICE and sign * (limit - standing) > 0:
            return str(standing)
        return str(min(max(limit - sign, 0), PRICES - 1))


def deal_price(state: Bargain) -> int | None:
    """The price of the deal; None without one. Only the last two offers can make it."""
    if len(state.offers) < 2 or NO_PRICE in state.offers[-2:]:
        return None
    standing, answer = state.offers[-2:]
    buyer_answered = (state.first + len(state.offers) - 1) % 2 == 0
    met = answer >= standing if buyer_answered else answer <= standing
    return standing if met else None
