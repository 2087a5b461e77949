"""The plan game on the full map: orders for one power that put a unit into a province whatever the others order.

The solution has orders and claims (pvg.tasks.diplomacy_claims). It is correct if no reply refutes a claim. All replies
that can matter are tried if there are at most MOST_REPLIES, and the note begins with `proven`. Otherwise so many
replies are drawn, and the note begins with `sampled`: such a plan may still have a refutation.

Invariants: an id names its problem, by a digest of its position, power and province. No problem is drawn twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from pvg.config.task import DiplomacyPlanTask
from pvg.games.diplomacy import prompt_text
from pvg.games.diplomacy_board import Board, Position, place, standard_board
from pvg.games.diplomacy_movement import Order
from pvg.games.diplomacy_phases import Legality, deciders, step
from pvg.records import Grade, Problem, Split, Wording
from pvg.seeds import generator_for
from pvg.tasks.diplomacy_claims import (
    Claim,
    ClaimedPlan,
    Contest,
    Judgement,
    helped_by,
    judge,
    own_strength,
    pieces,
    read_claim,
    read_plan,
    reply_space,
    write_claim,
    write_plan,
)
from pvg.tasks.task import read_wording

# Positions for problems: games that scripted players played up to a movement phase.

LAST_PHASE = 12  # movement phases of a game: six years
GREEDY = 0.6  # share of the units that go to a centre if they can
SUPPORTING = 0.6  # share of the others that support one of the moves of their power, if they can
ALONE = 0.8  # share of the rest that hold or move, without supports and convoys


def played_positions(board: Board, seed: int, kind: str, every: int) -> Iterator[Position]:
    """Endless, in a fixed order. Of each game those before every `every`-th movement phase, without the start."""
    number = 0
    while True:
        generator = generator_for(seed, "diplomacy", board.name, kind, number)
        number += 1
        yield from list(_played(board, generator))[every - 1 :: every]


def _played(board: Board, generator: np.random.Generator) -> Iterator[Position]:
    """The positions before each movement phase of a game, without the start."""
    position, phases = board.start, 0
    while phases < LAST_PHASE and (powers := deciders(board, position)):
        orders = {power: drawn_orders(board, position, power, generator) for power in powers}
        position = step(board, position, orders).position
        if position.stage == "M" and deciders(board, position):
            phases += 1
            yield position


def drawn_orders(board: Board, position: Position, power: int, generator: np.random.Generator) -> list[Order]:
    """Orders of one power for any phase, drawn by the rules above."""
    legal = Legality(board, position).orders_of(power)
    shuffled = [list(legal)[number] for number in generator.permutation(len(legal)).tolist()]
    if position.stage != "M":
        return [_any(legal[at], generator) for at in shuffled]
    orders: dict[int, Order] = {}
    wanted = {centre for centre, owner in zip(board.centres, position.owners, strict=True) if owner != power}
    for at in shuffled:
        greedy = (o for o in legal[at] if o.act == "move" and board.province_of[o.target] in wanted)
        if generator.random() < GREEDY and (order := next(greedy, None)) is not None:
            wanted -= {board.province_of[order.target]}
            orders[at] = order
    moves = {(board.province_of[at], board.province_of[order.target]) for at, order in orders.items()}
    for at in shuffled:
        if at not in orders:
            helping = [o for o in legal[at] if o.act == "support" and helped_by(board, o) in moves]
            support = bool(helping) and generator.random() < SUPPORTING
            alone = generator.random() < ALONE
            own = [order for order in legal[at] if not alone or order.act in ("hold", "move")]
            orders[at] = _any(helping if support else own, generator)
    return list(orders.values())


def _any(orders: Sequence[Order], generator: np.random.Generator) -> Order:
    return orders[int(generator.integers(len(orders)))]


SEED = 0  # of the problems: equal in every run
MOST_REPLIES = 1000  # that the grader tries; of more, so many are drawn
MOST_TRIED = 400  # replies to a plan that a problem may need to prove or refute
EVERY = 3  # every third phase of a game gives a position
PER_POSITION = 2  # problems of one position, each of another power


class DiplomacyPlan:
    """The task of one section. The first call of `problems` for a split makes its problems and keeps them."""

    def __init__(self, section: DiplomacyPlanTask) -> None:
        self._section = section
        self._board = standard_board()
        self._kept: dict[Split, list[Problem]] = {}
        self._judged = lru_cache(maxsize=4096)(self._judge)

    def problems(self, split: Split) -> Iterator[Problem]:
        """The problems of `split`, whose positions come from other games than those of the other split."""
        if split not in self._kept:
            count = self._section.problems if split == "train" else self._section.test_problems
            taken = {problem.id for problem in self.problems("test")} if split == "train" else set[str]()
            self._kept[split] = self._drawn(split, count, taken)
        return iter(self._kept[split])

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Correct: no reply refutes a claim. Well-formed: legal orders, then claims, the last one for the province of
        the problem. The note names the first false claim as a step, with the reply that refutes it, or says `proven` or
        `sampled` with the number of replies."""
        plan, judgement = self._read_and_judged(problem, completion)
        if isinstance(plan, str) or judgement is None:
            return Grade(correct=False, well_formed=False, note=f"malformed: {plan}")
        answer = write_claim(self._board, plan.claims[-1])
        extent = "sampled" if judgement.sampled else "proven"
        if judgement.false is None:
            return Grade(True, True, answer, f"{extent}: {judgement.tried} replies refute no claim")
        note = f"false claim in step {judgement.false.step + 1}: {judgement.reason}"
        return Grade(False, True, answer, f"{note} (sampled)" if judgement.sampled else note)

    def steps(self, completion: str) -> list[tuple[int, int]]:
        """The claims; a text without one has no steps."""
        return [
            (start, end)
            for start, end in pieces(completion)
            if read_claim(self._board, completion[start:end], 0) is not None
        ]

    def cuts(self, completion: str) -> list[int]:
        """The ends of the orders and claims (pvg.tasks.task.LocatesFlaws)."""
        places = pieces(completion)
        claimed = places and read_claim(self._board, completion[slice(*places[-1])], 0) is not None
        return [end for _, end in places] if claimed else []

    def flaw(self, problem: Problem, completion: str) -> int | None:
        """The first claim that is false."""
        judgement = self._read_and_judged(problem, completion)[1]
        return judgement.false.step if judgement is not None and judgement.false is not None else None

    def written(self, problem: Problem, correct: bool) -> str:
        """A plan that no reply refutes, or the same orders with too strong a claim (pvg.tasks.task.WritesSolutions)."""
        orders, _, claim = problem.answer.rpartition("\n")
        return problem.answer if correct else f"{orders}\n{claim.partition(' ')[0]} 9>0"

    def _read_and_judged(self, problem: Problem, text: str) -> tuple[ClaimedPlan | str, Judgement | None]:
        position, power, target = problem.metadata["position"], problem.metadata["power"], problem.metadata["target"]
        return self._judged(problem.id, position, power, target, text)

    def _judge(
        self, id_: str, position: Position, power: int, target: int, text: str
    ) -> tuple[ClaimedPlan | str, Judgement | None]:
        plan = read_plan(self._board, position, power, text, target)
        if isinstance(plan, str):
            return plan, None
        generator = generator_for(SEED, "replies", id_, text)
        return plan, judge(self._board, position, power, plan, MOST_REPLIES, generator)

    def _drawn(self, split: Split, count: int, taken: set[str]) -> list[Problem]:
        found: list[Problem] = []
        positions = played_positions(self._board, SEED, split, EVERY)
        while len(found) < count:
            for problem in usable_problems(self._board, next(positions), SEED):
                if problem.id not in taken and len(found) < count:
                    taken.add(problem.id)
                    found.append(problem)
        return found


# --- problems -----------------------------------------------------------------------------------------------------


def plan_problem(board: Board, position: Position, power: int, target: int, reference: str) -> Problem:
    """`reference`: a plan that is right. The metadata has `position`, `power` and `target`."""
    digest = hashlib.sha256(position.dump() + bytes([power, target])).hexdigest()[:16]
    metadata = {"position": position, "power": power, "target": target, "wording": plan_wording()}
    return Problem(f"diplomacy-plan-{digest}", question_text(board, position, power, target), reference, metadata)


def question_text(board: Board, position: Position, power: int, target: int) -> str:
    name = board.powers[power]
    return (
        f"{prompt_text(board, position, power)}\nPlan orders for {name} that put or keep a unit of {name} in "
        f"{board.provinces[target]}, whatever the others order."
    )


def usable_problems(board: Board, position: Position, seed: int) -> list[Problem]:
    """At most PER_POSITION problems of a position, of powers and provinces in drawn order."""
    generator = generator_for(seed, "diplomacy-plan", position.dump().hex())
    found: list[Problem] = []
    for power in generator.permutation(len(board.powers)).tolist():
        if len(found) == PER_POSITION:
            break
        attempts = attempts_of(board, position, power)
        for target in generator.permutation(sorted(attempts)).tolist():
            reference = _proven_attempt(board, position, power, target, attempts[target])
            if reference is not None:
                found.append(plan_problem(board, position, power, target, reference))
                break
    return found


def attempts_of(board: Board, position: Position, power: int) -> dict[int, list[dict[int, Order]]]:
    """For each province that a unit of the power holds or can enter without a convoy: plans that try it, each with
    another unit and another number of supports."""
    legal = {board.province_of[at]: orders for at, orders in Legality(board, position).orders_of(power).items()}
    found: dict[int, list[dict[int, Order]]] = {}
    for at, orders in legal.items():
        for order in orders:
            goal = board.province_of[order.target] if order.act == "move" else at
            if order.act not in ("hold", "move") or order.via or (goal != at and goal in legal):
                continue
            wanted = (at, goal if order.act == "move" else -1)
            helping = {
                other: next((o for o in listed if o.act == "support" and helped_by(board, o) == wanted), None)
                for other, listed in legal.items()
                if other != at
            }
            plan = {at: order}
            found.setdefault(goal, []).append(dict(plan))
            for other, support in helping.items():
                if support is not None:
                    plan[other] = support
                    found[goal].append(dict(plan))
    return found


def _proven_attempt(
    board: Board, position: Position, power: int, target: int, attempts: list[dict[int, Order]]
) -> str | None:
    """The first plan that no reply refutes, with its claim; None unless another one is refuted."""
    proven, refuted = "", False
    for orders in attempts:
        strengths = _worst(board, position, power, target, orders)
        if strengths is None:
            refuted = True
        elif not proven and strengths[1] >= 0:
            own, other = strengths
            claim = Claim(target, own, own == other, other, len(orders))
            proven = write_plan(board, ClaimedPlan(orders, (claim,)))
    return proven if proven and refuted else None


def _worst(
    board: Board, position: Position, power: int, target: int, orders: Mapping[int, Order]
) -> tuple[int, int] | None:
    """(own strength, the most that the others can bring) of a plan that no reply refutes; (0, -1) if there are more
    than MOST_TRIED replies; None for a plan that a reply refutes."""
    space = reply_space(board, position, power, orders, [target])
    most = 0
    for number, reply in enumerate(space.every()):
        if number == MOST_TRIED:
            return 0, -1
        contest = Contest(board, space.position, {**orders, **reply})
        if contest.stands(target) != power:
            return None
        most = max(most, contest.against(target, power))
    own = {board.province_of[unit.place]: unit for unit in position.units_of(power)}
    return own_strength(board, orders, own, target)[0], most


# --- the prompt ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def plan_wording() -> Wording:
    """The instructions, and an example with three units: Germany's army in Munich can enter Burgundy alone."""
    board = standard_board()
    position = place(board, {"France": ["A gas", "A mar"], "Germany": ["A mun"]}, owners={"France": ["mar"]})
    power, target = board.power("France"), board.find("bur")
    assert power is not None
    assert target is not None
    return read_wording("diplomacy_plan", question=question_text(board, position, power, target))
