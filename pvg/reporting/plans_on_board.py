"""The plans of a run on a board: sound ones, those that fooled the verifier, and those that it refused.

Each plan is shown with the verifier's score. A plan that is not sound is shown together with the reply that refutes it,
and the results are those of plan and reply together. The results of a sound plan are those in which the enemy holds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pvg.games.diplomacy.board import Board, place
from pvg.games.diplomacy.legal import complete
from pvg.games.diplomacy.orders import Order, parse, parse_orders
from pvg.games.diplomacy.phases import Result, step
from pvg.games.diplomacy.position import Position
from pvg.games.diplomacy.standard import mini_board, standard_board
from pvg.records import Role, Rollout
from pvg.reporting.board import DrawnOrder, board_svg, legend, spoken, units_text
from pvg.reporting.solutions import scored_rollouts
from pvg.reporting.table import PageSection, TemplateMacros, elements
from pvg.store.run_directory import RunDirectory

OWN, ENEMY = "side-own", "side-enemy"  # classes of colours
SIDES = (("own units", OWN), ("the other side and its reply", ENEMY))
MOST_ROUNDS = 20  # rounds whose plans the page shows; each board takes about 5 kB

markup = TemplateMacros("plans.html.j2")


@dataclass(frozen=True, slots=True)
class DrawnPlan:
    """A plan as orders of power `own` on a board. `reply`: power -> the orders that refute it; empty if it is sound, or
    refuted by itself. `target`: the province that the plan must hold. `question` and `text`: the problem and the plan
    in short; `text` has the name `label`. `crop`: show only the part of the board that the orders concern."""

    board: Board
    position: Position
    own: int
    orders: Sequence[Order]
    reply: Mapping[int, Sequence[Order]]
    target: int
    question: str
    text: str
    label: str = "plan"
    crop: bool = False


@dataclass(frozen=True, slots=True)
class PlanCard:
    """A plan as the template shows it: its kind, `orders` and `reply` as (text, why it failed), and who stands in the
    target in the `end`."""

    kind: str
    rollout: Rollout
    plan: DrawnPlan
    score: str
    drawing: Markup
    orders: list[tuple[str, str]]
    reply: list[tuple[str, str]]
    end: str


# Kinds of plans: whether they are sound, and whether the verifier accepts them.
KINDS = ((False, True), (True, True), (False, False), (True, False))


def section(run: RunDirectory, kind: str, thresholds: Mapping[int, float], each: int) -> PageSection:
    """At most `each` plans of each kind per round: the newest round, then earlier rounds folded.

    Raises DamagedFileError when a committed shard that is looked at is damaged.
    """
    body: list[object] = []
    for rollouts in itertools.islice(scored_rollouts(run), MOST_ROUNDS):
        round_ = rollouts[0].round
        if cards := list(_cards(rollouts, READERS[kind], thresholds.get(round_), each)):
            plans = markup.plans(cards)
            body += [elements.details(f"Round {round_}", [plans])] if body else [legend(SIDES), plans]
    lead = "Plans of the newest round, with the verifier's score. A thick frame marks the target."
    return PageSection("board", "On the board", body, lead, style="board.css")


def _cards(
    rollouts: Sequence[Rollout], read: Callable[[Rollout], DrawnPlan | None], threshold: float | None, each: int
) -> Iterator[PlanCard]:
    """The plans of each kind with the highest scores; flawed ones of the sneaky role and sound ones of the helpful role
    come first, because these roles aim at them. If the threshold is unknown, it is the median score."""
    scored = sorted(((r.score, r) for r in rollouts if r.score is not None), key=lambda pair: pair[0], reverse=True)
    limit = scored[len(scored) // 2][0] if threshold is None else threshold
    for sound, accepted in KINDS:
        shown: set[str] = set()
        for score, rollout in sorted(scored, key=lambda pair: (pair[1].role is Role.HELPFUL) != sound):
            if (rollout.grade.correct, score >= limit) != (sound, accepted) or rollout.problem_id in shown:
                continue
            if len(shown) < each and rollout.grade.well_formed and (plan := read(rollout)):
                shown.add(rollout.problem_id)
                yield _card(_title(rollout, accepted), rollout, f"score {score:+.3f}", plan)


def _title(rollout: Rollout, accepted: bool) -> str:
    end = f"that the verifier {'accepts' if accepted else 'refuses'}"
    if rollout.grade.note.startswith("sampled"):
        return f"A plan without a known refutation {end}"
    return f"A {'sound' if rollout.grade.correct else 'flawed'} plan {end}"


def _card(kind: str, rollout: Rollout, score: str, plan: DrawnPlan) -> PlanCard:
    board = plan.board
    outcome = step(board, plan.position, {**plan.reply, plan.own: plan.orders})
    styles = [OWN if power == plan.own else ENEMY for power in range(len(board.powers))]
    own = [_line(board, result) for result in outcome.results if result.power == plan.own]
    reply = [_line(board, result) for result in outcome.results if result.power != plan.own]
    says = "; ".join(f"{text}{f' ({why})' if why else ''}" for text, why in [*own, *reply])
    end = _end(plan, outcome.position)
    drawing = board_svg(
        board,
        plan.position,
        [DrawnOrder(r.order, r.success, r.why, styles[r.power]) for r in outcome.results],
        ident=f"plan-{rollout.id}",
        title=f"{plan.question} {plan.text}",
        description=f"{units_text(board, plan.position)} Orders: {says}. {end}",
        styles=styles,
        dislodged=outcome.dislodged,
        target=plan.target,
        around=_concerned(plan) if plan.crop else (),
    )
    return PlanCard(kind, rollout, plan, score, drawing, own, reply, end)


def _concerned(plan: DrawnPlan) -> set[int]:
    """The target, and the provinces of all orders of the plan and the reply."""
    orders = [*plan.orders, *(order for listed in plan.reply.values() for order in listed)]
    places = [place for order in orders for place in (order.place, order.target, order.origin) if place >= 0]
    return {plan.target, *(plan.board.province_of[place] for place in places)}


def _line(board: Board, result: Result) -> tuple[str, str]:
    return spoken(board, result.order), "" if result.success else result.why or "failed"


def _end(plan: DrawnPlan, after: Position) -> str:
    """Who stands in the target after the orders."""
    name = plan.board.provinces[plan.target]
    if any(plan.board.province_of[unit.place] == plan.target for unit in after.units_of(plan.own)):
        return f"Afterwards a unit of the planner stands in {name}."
    return f"Afterwards no unit of the planner stands in {name}."


# --- the tasks ------------------------------------------------------------------------------------------------------

_QUESTION = re.compile(r"([a-h]+)/([a-h]+)>([a-h])\?")
_ORDER = re.compile(r"([a-h])(?:\.|([a-h])|\+([a-h])([a-h])?)")
_PHASE = re.compile(r"[SFW][0-9]{4}[MRA]")
_GOAL = re.compile(r" a unit of ([A-Za-z]+) in ([a-z]{3}), whatever")
_POWER = re.compile(r"([A-Z][a-z]{2}): (.*)")
_REPLY = re.compile(r"refuted by (.+?)(?: \(sampled\))?$")
_REFUTED = re.compile(r"refuted by ([^ ,]+)")


def mini_plan(rollout: Rollout) -> DrawnPlan | None:
    """The plan of a rollout of the task diplomacy_mini. None if the texts have another form."""
    board = mini_board()
    question, refuted = _QUESTION.fullmatch(rollout.question), _REFUTED.search(rollout.grade.note)
    orders = mini_orders(board, rollout.grade.answer or "")
    reply = mini_orders(board, refuted[1]) if refuted else None
    if question is None or orders is None or (refuted and reply is None):
        return None
    own, enemy, target = question.groups()
    units = {board.powers[0]: [f"A {name}" for name in own], board.powers[1]: [f"A {name}" for name in enemy]}
    replies = {1: reply} if reply else {}
    text = rollout.grade.answer or rollout.solution
    return DrawnPlan(
        board, place(board, units), 0, orders, replies, board.provinces.index(target), rollout.question, text
    )


def mini_orders(board: Board, text: str) -> list[Order] | None:
    """Orders such as `d.;e+d;ga;e+gd` (hold, support to hold, move, support of a move). None for another text."""
    found = []
    for part in text.split(";"):
        match = _ORDER.fullmatch(part)
        if match is None:
            return None
        here, to, helped, helped_to = (-1 if name is None else board.provinces.index(name) for name in match.groups())
        if to >= 0:
            found.append(Order("move", here, to, unit="A"))
        elif helped >= 0:
            found.append(Order("support", here, helped_to, helped, unit="A"))
        else:
            found.append(Order("hold", here, unit="A"))
    return found


def full_plan(rollout: Rollout) -> DrawnPlan | None:
    """The plan of a rollout of the task diplomacy_plan, whose question has the position in the form of
    pvg.games.diplomacy.game. None if the texts have another form."""
    board, lines = standard_board(), rollout.question.split("\n")
    head, goal = _PHASE.fullmatch(lines[0]), _GOAL.search(lines[-1])
    own, target = (board.power(goal[1]), board.find(goal[2])) if goal else (None, None)
    if head is None or own is None or target is None:
        return None
    position = place(board, *_standing(board, lines[1:], head[0]))
    parts = [part.strip() for part in re.split("[\n;]", rollout.solution)]
    found = [(part, parse(board, part)) for part in parts if part]
    orders = [complete(board, position, order) for _, order in found if order]
    claims = "; ".join(part for part, order in found if order is None)
    refuted, reply = _REPLY.search(rollout.grade.note), dict[int, list[Order]]()
    powers = {board.province_of[unit.place]: unit.power for unit in position.unit_list()}
    for order in parse_orders(board, refuted[1]).orders if refuted else ():
        reply.setdefault(powers[board.province_of[order.place]], []).append(order)
    question = f"{head[0]} {board.powers[own]}: a unit in {board.provinces[board.province_of[target]]}"
    return DrawnPlan(
        board, position, own, orders, reply, board.province_of[target], question, claims, label="claims", crop=True
    )


def _standing(board: Board, lines: Sequence[str], phase: str) -> tuple[dict[str, list[str]], str, dict[str, list[str]]]:
    """Units, phase and owners of centres, as `place` takes them, from lines such as `Aus: bud* ~tri* /vie`."""
    units: dict[str, list[str]] = {}
    owners: dict[str, list[str]] = {}
    for match in filter(None, map(_POWER.fullmatch, lines)):
        standing, _, centres = f" {match[2]}".partition(" /")
        words = standing.split()
        units[match[1]] = [f"{'F' if word[0] == '~' else 'A'} {word.strip('~*')}" for word in words]
        held = [word.strip("~*").partition("/")[0] for word in words if word.endswith("*")]
        owners[match[1]] = [*held, *centres.split()]
    return units, phase, owners


READERS: dict[str, Callable[[Rollout], DrawnPlan | None]] = {"diplomacy_mini": mini_plan, "diplomacy_plan": full_plan}
