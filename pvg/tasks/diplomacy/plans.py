"""Plans: orders of one power and claims that no reply of the others refutes. Reads plans and judges their claims.

    A gas-bur
    A mar S gas-bur
    bur 2>1

A claim `bur 2>1` says three things. The orders give the unit that holds or enters bur the strength 2: 1 for itself and
1 for each support. The others bring at most the strength 1 there, whatever they order. After every reply a unit of this
power stands in bur. A unit that holds keeps its province on a tie, so `bur 1=1` is a claim for such a unit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.legal import complete, fault
from pvg.games.diplomacy.orders import Order, parse, write
from pvg.games.diplomacy.position import Position
from pvg.tasks.diplomacy.contests import Contest, own_strength
from pvg.tasks.diplomacy.replies import reply_space

# A longer text is no plan. It bounds the time of reading one.
MOST_LINES, LONGEST_LINE = 60, 80
PIECE = re.compile(r"[^\n;]+")
CLAIM = re.compile(r"([a-z][a-z /().]*?)\s*:?\s*([0-9]{1,2})\s*([>=])\s*([0-9]{1,2})\.?", re.IGNORECASE)


class Claim(NamedTuple):
    """`province` own>other, or own=other for a `tie`. `step`: which line of the plan it is, counted from 0."""

    province: int
    own: int
    tie: bool
    other: int
    step: int


@dataclass(frozen=True, slots=True)
class ClaimedPlan:
    """`orders`: province of the unit -> its order; a unit without an order holds."""

    orders: Mapping[int, Order]
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """`false`: the first claim that is false, None if no reply refutes a claim; `reason` says why it is. `tried`: the
    number of replies that were tried. `sampled`: these were not all that can matter, so the plan is not proven."""

    false: Claim | None
    reason: str
    tried: int
    sampled: bool


def pieces(text: str) -> list[tuple[int, int]]:
    """Start and end of each line, or part between semicolons, that is not blank and is a step of a plan."""
    found = []
    for match in PIECE.finditer(text):
        part = match.group()
        if part.strip():
            start = match.start() + len(part) - len(part.lstrip())
            found.append((start, start + len(part.strip())))
    return found


def read_claim(board: Board, text: str, step: int) -> Claim | None:
    """The claim that the text says; None if it says none, or is longer than LONGEST_LINE."""
    match = CLAIM.fullmatch(text) if len(text) <= LONGEST_LINE else None
    at = board.find(match[1]) if match else None
    if match is None or at is None:
        return None
    return Claim(board.province_of[at], int(match[2]), match[3] == "=", int(match[4]), step)


def write_claim(board: Board, claim: Claim) -> str:
    return f"{board.provinces[claim.province]} {claim.own}{'=' if claim.tie else '>'}{claim.other}"


def read_plan(board: Board, position: Position, power: int, text: str, target: int) -> ClaimedPlan | str:
    """The plan in a text, or why it is none: legal orders, at most one for each unit, then claims, at most one for each
    province, the last one for the province `target`."""
    places = pieces(text)
    if not places:
        return "no orders and no claims"
    if len(places) > MOST_LINES or any(end - start > LONGEST_LINE for start, end in places):
        return "too long"
    orders: dict[int, Order] = {}
    claims: list[Claim] = []
    for step, (start, end) in enumerate(places):
        line = text[start:end]
        claim = read_claim(board, line, step)
        reason = ""
        if claim is not None:
            reason = "a second claim for a province" if claim.province in {c.province for c in claims} else ""
            claims.append(claim)
        elif claims:
            reason = "no claim after a claim"
        else:
            reason = _read_order(board, position, power, line, orders)
        if reason:
            return f"{reason} (step {step + 1})"
    if not claims or claims[-1].province != target:
        return f"no claim for {board.provinces[target]} at the end"
    return ClaimedPlan(orders, tuple(claims))


def _read_order(board: Board, position: Position, power: int, line: str, orders: dict[int, Order]) -> str:
    """Adds the order in a line to `orders`; otherwise why not."""
    order = parse(board, line)
    if order is None:
        return "neither an order nor a claim"
    if reason := fault(board, position, power, order):
        return f"illegal order: {reason}"
    order = complete(board, position, order)
    if board.province_of[order.place] in orders:
        return "a second order for a unit"
    orders[board.province_of[order.place]] = order
    return ""


def write_plan(board: Board, plan: ClaimedPlan) -> str:
    """The plan in the notation that `read_plan` reads, one order or claim per line."""
    return "\n".join([*(write(board, o) for o in plan.orders.values()), *(write_claim(board, c) for c in plan.claims)])


def judge(
    board: Board, position: Position, power: int, plan: ClaimedPlan, most: int, generator: np.random.Generator
) -> Judgement:
    """Judges the claims of a plan of `power`. Tries all replies that can matter if these are at most `most`, otherwise
    `most` replies that `generator` draws."""
    own = {board.province_of[unit.place]: unit for unit in position.units_of(power)}
    first, reason, reply = len(plan.claims), "", None
    for number, claim in enumerate(plan.claims):
        if reason := _own_fault(board, claim, *own_strength(board, plan.orders, own, claim.province)):
            first = number
            break
    space = reply_space(board, position, power, plan.orders, [claim.province for claim in plan.claims])
    replies = list(itertools.islice(space.every(), most + 1))
    sampled = len(replies) > most
    tried = 0
    for orders in space.sample(most, generator) if sampled else replies:
        if not first:
            break
        tried += 1
        contest = Contest(board, space.position, {**plan.orders, **orders})
        for number, claim in enumerate(plan.claims[:first]):
            if contest.against(claim.province, power) > claim.other or contest.stands(claim.province) != power:
                first, reply = number, orders
                break
    if first == len(plan.claims):
        return Judgement(None, "", tried, sampled)
    if reply is not None:
        written = "; ".join(write(board, order) for order in reply.values())
        reason = f"refuted by {written}" if written else "refuted even if the others hold"
    return Judgement(plan.claims[first], reason, tried, sampled)


def _own_fault(board: Board, claim: Claim, strength: int, moves: bool) -> str:
    """Why a claim is false whatever the others order; "" if it is not."""
    if strength != claim.own:
        return f"the orders give {board.provinces[claim.province]} the strength {strength}"
    if claim.tie and moves:
        return "a tie does not let a unit in"
    holds = claim.own == claim.other if claim.tie else claim.own > claim.other
    return "" if holds else f"{claim.own} is not {'equal to' if claim.tie else 'more than'} {claim.other}"
