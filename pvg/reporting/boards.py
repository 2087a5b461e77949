"""Diplomacy in a report: plans of the planning tasks and games of self-play, drawn on a board.

A board is a scheme, not a map: a tile for each province, roughly where geography has it, and a line for each border.
Colours come from templates/board.css, which only pages with a board contain. templates/board.html.j2 writes the signs:

    round unit    an army             solid arrow     a move          ring        the unit holds
    hull          a fleet             dashed line     a support       cross       the order failed
    red outline   a dislodged unit    dotted line     a convoy        dot         a supply centre
"""

from __future__ import annotations

import cmath
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from pydantic import TypeAdapter

from pvg.games.diplomacy_board import NOBODY, Board, Position, Unit, mini_board, place, standard_board
from pvg.games.diplomacy_movement import Order, parse_orders, write
from pvg.games.diplomacy_phases import Legality, PhaseOutcome, Result, step
from pvg.records import Role, Rollout
from pvg.reporting.solutions import scored_rollouts
from pvg.reporting.table import Column, PageSection, Table, TemplateMacros, elements
from pvg.rollout.interaction import GameRecord, PhaseRecord
from pvg.store.run_directory import RunDirectory
from pvg.store.state import JsonLinesReader

Point = tuple[float, float]

# Centres of the tiles, in steps of the grid.
PLACES: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
STEPS = {"standard": (70, 58), "mini": (112, 82)}  # pixels of a step
MARGIN = (42, 36)  # pixels around the outermost centres
LOWER = 7  # pixels from the centre of a tile to its unit, so that the name fits above
RADIUS = 15  # pixels of free space around a unit
OWN, ENEMY = "side-own", "side-enemy"  # classes of colours
MOST_PHASES = 40  # phases of a game that are drawn; a board takes about 20 kB
KINDS = ((False, True), (True, True), (False, False), (True, False))  # of plans: sound, accepted by the verifier

markup = TemplateMacros("board.html.j2")


@dataclass(frozen=True, slots=True)
class DrawnPlan:
    """A plan of the power `own`. `reply`: power -> the orders that refute it, empty if there are none. `target`: the
    province that the plan must hold. `text`: the plan or its claims."""

    board: Board
    position: Position
    own: int
    orders: Sequence[Order]
    reply: Mapping[int, Sequence[Order]]
    target: int
    text: str


def board_svg(
    board: Board,
    position: Position,
    outcome: PhaseOutcome | None,
    title: str,
    styles: Sequence[str] = (),
    target: int = -1,
) -> Markup:
    """The position, with the orders of an `outcome` of `step`.

    `styles`: the class of each power's colour. `target`: a province to mark.
    """
    styles = styles or [f"power-{power}" for power in range(len(board.powers))]
    centres = _centres(board)
    results = outcome.results if outcome else ()
    lost = {found.unit for found in outcome.dislodged} if outcome else set()
    touching = [(p, q) for p, near in enumerate(board.touching) for q in near if p < q]
    owners = dict(zip(board.centres, position.owners, strict=True))
    colours = {province: "" if owner == NOBODY else styles[owner] for province, owner in owners.items()}
    standing = [(unit, 0, "dislodged" if unit in lost else "") for unit in position.unit_list()]
    standing += [(found.unit, RADIUS, "dislodged") for found in position.dislodged_list()]
    built = [(r.power, r.order) for r in results if r.success and r.order.act == "build"]
    standing += [(Unit(power, order.unit == "F", order.place), 0, "built") for power, order in built]
    return markup.board(
        title=title,
        says="; ".join(line for _, line in orders_text(board, outcome)),
        look=board.name,
        size=[max(centre[axis] for centre in centres) + MARGIN[axis] for axis in (0, 1)],
        borders=[(centres[p], centres[q]) for p, q in touching],
        tiles=[
            (centres[p], name, board.titles[p], board.kinds[p], colours.get(p), p == target)
            for p, name in enumerate(board.provinces)
        ],
        units=[
            (_at(board, centres, u.place, aside), u.fleet, board.powers[u.power][0], f"{styles[u.power]} {look}")
            for u, aside, look in standing
        ],
        strokes=[_stroke(board, position, centres, r, styles[r.power]) for r in results],
    )


def orders_text(board: Board, outcome: PhaseOutcome | None) -> list[tuple[int, str]]:
    """Power and text of each order, such as "A par-bur (bounced)"."""
    results = outcome.results if outcome else ()
    return [(r.power, write(board, r.order) + ("" if r.success else f" ({r.why or 'failed'})")) for r in results]


def _centres(board: Board) -> list[Point]:
    """The centre of each province's tile in pixels."""
    placed = [part.split() for part in PLACES[board.name].split(",")]
    wide, high = STEPS[board.name]
    at = {name: (float(x) * wide, float(y) * high) for name, x, y in placed}
    left, top = (min(point[axis] for point in at.values()) - MARGIN[axis] for axis in (0, 1))
    return [(at[name][0] - left, at[name][1] - top) for name in board.provinces]


def _at(board: Board, centres: Sequence[Point], place: int, aside: float = 0) -> Point:
    x, y = centres[board.province_of[place]]
    return x + aside, y + LOWER + aside / 2


def _stroke(board: Board, position: Position, centres: Sequence[Point], result: Result, style: str) -> Markup:
    """The sign of an order."""
    order = result.order
    if order.act in ("build", "waive"):
        return Markup()
    start = end = complex(*_at(board, centres, order.place, RADIUS if position.stage == "R" else 0))
    if order.act == "move":
        end = complex(*_at(board, centres, order.target))
    elif order.act in ("support", "convoy"):
        ends = (order.origin, order.origin if order.target < 0 else order.target)
        end = sum(complex(*_at(board, centres, place)) for place in ends) / 2
    towards = (end - start) / (abs(end - start) or 1.0)
    first, last = start + RADIUS * towards, end - (RADIUS if order.act == "move" else 4) * towards
    # A move is on its right side, so that moves in opposite directions are apart.
    points = [point + (4j * towards if order.act == "move" else 0) for point in (first, last)]
    angle = math.degrees(cmath.phase(towards))
    look = f"{style}{'' if result.success else ' failed'}"
    return markup.stroke(order.act, look, *((point.real, point.imag) for point in points), angle)


# --- games ----------------------------------------------------------------------------------------------------------


def games_section(run: RunDirectory, each: int) -> PageSection:
    """At most `each` games of the newest round that has recorded games.

    Raises DamagedFileError for a damaged metrics.jsonl.
    """
    body = [piece for game in newest_games(run)[:each] for piece in _game(game)]
    lead = "Games of the newest round, phase by phase. Open a phase to see its orders."
    return PageSection("games", "Games", body, lead, style="board.css")


def newest_games(run: RunDirectory) -> list[GameRecord]:
    """The recorded games of the newest round. A game that a resumed run recorded again counts once."""
    if not run.metrics.is_file():
        return []
    read = TypeAdapter(GameRecord).validate_python
    records = [read(plain) for plain in JsonLinesReader(run.metrics) if plain.get("kind") == "game"]
    newest = max((record.round for record in records), default=0)
    return list({(r.start, *r.players.items()): r for r in records if r.round == newest}.values())


def _game(game: GameRecord) -> Iterator[object]:
    seats = list(game.phases[-1].values)
    players = ", ".join(f"{seat}: {game.players.get(seat, 'policy')}" for seat in seats)
    yield elements.subheading(
        f"Round {game.round}: {game.game}", f"Start {game.start}. {players}. Ended: {game.ended}."
    )
    yield _values(game.phases[:MOST_PHASES], seats)
    drawn = game.game == "diplomacy"
    if drawn:
        yield markup.legend([(seat, f"power-{number}") for number, seat in enumerate(seats)])
    for phase in game.phases[:MOST_PHASES]:
        if phase.decisions:
            illegal = sum(bool(decision.note) for decision in phase.decisions)
            summary = f"{phase.phase}: {len(phase.decisions)} decisions, {illegal} with illegal parts"
            columns = [Column("seat"), Column("decision"), Column("illegal", style="quiet")]
            table = Table(columns, [(each.seat, each.text, each.note) for each in phase.decisions])
            yield elements.details(summary, [*([_phase_board(phase)] if drawn and phase.state else []), table])


def _values(phases: Sequence[PhaseRecord], seats: Sequence[str]) -> Table:
    """The value of each seat before each phase; of Diplomacy its supply centres."""
    table = Table([Column("value before"), *(Column(seat, "right") for seat in seats)])
    for phase in phases:
        table.add(phase.phase or "end", *(f"{phase.values[seat]:.4g}" for seat in seats))
    return table


def _phase_board(phase: PhaseRecord) -> Markup:
    board, position = standard_board(), Position.load(bytes.fromhex(phase.state))
    orders = {board.powers.index(d.seat): parse_orders(board, d.text).orders for d in phase.decisions}
    return board_svg(board, position, step(board, position, orders), phase.phase)


# --- plans ----------------------------------------------------------------------------------------------------------


def plans_section(run: RunDirectory, kind: str, thresholds: Mapping[int, float], each: int) -> PageSection:
    """At most `each` plans of each kind, of the newest round with scored plans.

    Raises DamagedFileError when a committed shard that is looked at is damaged.
    """
    rollouts = next(scored_rollouts(run), [])
    cards = list(_cards(rollouts, kind, thresholds.get(rollouts[0].round), each)) if rollouts else []
    sides = markup.legend([("own units", OWN), ("the other side and its reply", ENEMY)])
    lead = "Plans of the newest round, with the verifier's score. A thick frame marks the target."
    return PageSection("board", "On the board", [sides, markup.plans(cards)] if cards else [], lead, style="board.css")


def _cards(rollouts: Sequence[Rollout], kind: str, threshold: float | None, each: int) -> Iterator[Markup]:
    """The plans of each kind with the highest scores. Flawed plans of the sneaky role and sound ones of the helpful
    role come first, because these roles aim at them. If the threshold is unknown, it is the median score."""
    scored = sorted(((r.score, r) for r in rollouts if r.score is not None), key=lambda pair: pair[0], reverse=True)
    limit = scored[len(scored) // 2][0] if threshold is None else threshold
    for sound, accepted in KINDS:
        shown: set[str] = set()
        for score, rollout in sorted(scored, key=lambda pair: (pair[1].role is Role.HELPFUL) != sound):
            if (rollout.grade.correct, score >= limit) != (sound, accepted) or rollout.problem_id in shown:
                continue
            if len(shown) < each and rollout.grade.well_formed and (plan := READERS[kind](rollout)):
                shown.add(rollout.problem_id)
                yield _card(rollout, score, plan, accepted)


def _card(rollout: Rollout, score: float, plan: DrawnPlan, accepted: bool) -> Markup:
    board = plan.board
    outcome = step(board, plan.position, {**plan.reply, plan.own: plan.orders})
    lines = orders_text(board, outcome)
    held = any(board.province_of[unit.place] == plan.target for unit in outcome.position.units_of(plan.own))
    verdict = "accepts" if accepted else "refuses"
    title = f"A {'sound' if rollout.grade.correct else 'flawed'} plan that the verifier {verdict}"
    styles = [OWN if power == plan.own else ENEMY for power in range(len(board.powers))]
    drawing = board_svg(board, plan.position, outcome, title, styles=styles, target=plan.target)
    sides = [[line for power, line in lines if (power == plan.own) is own] for own in (True, False)]
    goal = f"{board.powers[plan.own]}: a unit in {board.provinces[plan.target]}"
    return markup.plan(title, rollout, f"{score:+.3f}", plan.text, goal, drawing, sides, held)


_QUESTION = re.compile(r"([a-h]+)/([a-h]+)>([a-h])\?")
_PHASE = re.compile(r"[SFW][0-9]{4}[MRA]")
_GOAL = re.compile(r" a unit of ([A-Za-z]+) in ([a-z]{3}), whatever")
_POWER = re.compile(r"([A-Z][a-z]{2}): (.*)")
_REPLY = re.compile(r"refuted by (.+?)(?: \(sampled\))?$")
# The orders of the mini task, such as `d.;ga;e+d;e+gd`, in the notation of pvg.games.
_MINI = {
    r"([a-h])\.": r"A \1 H",
    r"([a-h])([a-h])": r"A \1-\2",
    r"([a-h])\+([a-h])": r"A \1 S \2",
    r"([a-h])\+([a-h])([a-h])": r"A \1 S \2-\3",
}


def mini_plan(rollout: Rollout) -> DrawnPlan | None:
    """The plan of a rollout of the task diplomacy_mini. None if the question has another form."""
    board, question = mini_board(), _QUESTION.fullmatch(rollout.question)
    if question is None:
        return None
    own, enemy, target = question.groups()
    units = {board.powers[0]: [f"A {name}" for name in own], board.powers[1]: [f"A {name}" for name in enemy]}
    answer, reply = rollout.grade.answer or "", _refuting(rollout).partition(",")[0]
    return _plan(place(board, units), board, 0, target, mini_text(answer), mini_text(reply), answer or rollout.solution)


def mini_text(orders: str) -> str:
    """Orders of the mini task in the notation of pvg.games; unknown ones are left out."""
    parts = [(re.fullmatch(form, part), to) for part in orders.split(";") for form, to in _MINI.items()]
    return ";".join(match.expand(to) for match, to in parts if match)


def full_plan(rollout: Rollout) -> DrawnPlan | None:
    """The plan of a rollout of the task diplomacy_plan, whose question has the position in the form of
    pvg.games.diplomacy. None if the texts have another form."""
    board, lines = standard_board(), rollout.question.split("\n")
    head, goal = _PHASE.fullmatch(lines[0]), _GOAL.search(lines[-1])
    own = board.power(goal[1]) if goal else None
    if head is None or goal is None or own is None or board.find(goal[2]) is None:
        return None
    units: dict[str, list[str]] = {}
    owners: dict[str, list[str]] = {}
    for power in filter(None, map(_POWER.fullmatch, lines[1:])):  # such as `Aus: bud* ~tri* /vie`
        standing, _, centres = f" {power[2]}".partition(" /")
        words = standing.split()
        units[power[1]] = [f"{'F' if word[0] == '~' else 'A'} {word.strip('~*')}" for word in words]
        held = [word.strip("~*").partition("/")[0] for word in words if word.endswith("*")]
        owners[power[1]] = [*held, *centres.split()]
    position, claims = place(board, units, head[0], owners), "; ".join(parse_orders(board, rollout.solution).unread)
    return _plan(position, board, own, goal[2], rollout.solution, _refuting(rollout), claims)


def _refuting(rollout: Rollout) -> str:
    """The reply that the grader's note names; empty without one."""
    found = _REPLY.search(rollout.grade.note)
    return found[1] if found else ""


def _plan(position: Position, board: Board, own: int, target: str, orders: str, reply: str, text: str) -> DrawnPlan:
    """`orders` and `reply` in the notation of pvg.games."""
    complete = Legality(board, position).complete
    powers = {board.province_of[unit.place]: unit.power for unit in position.unit_list()}
    replies: dict[int, list[Order]] = {}
    for order in parse_orders(board, reply).orders:
        replies.setdefault(powers[board.province_of[order.place]], []).append(order)
    plan = [complete(order) for order in parse_orders(board, orders).orders]
    return DrawnPlan(board, position, own, plan, replies, board.provinces.index(target), text)


READERS: dict[str, Callable[[Rollout], DrawnPlan | None]] = {"diplomacy_mini": mini_plan, "diplomacy_plan": full_plan}
